"""The SDK's calls about a sandbox's files and trees: a part of `Sandbox`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, cast

from dsecd.trees import TreeReport, pack, unpack_stream
from dsecd.wire import files
from dsecd.wire.peer import Peer, Pending
from dsecd.wire.stream import CHUNK, Inflow

if TYPE_CHECKING:
    from dsecd.client import DSecClient

INLINE: Final = 1 << 20  # up to this a file travels in the request itself


class SandboxFileCalls:
    """Files, directories, and whole trees as tar streams."""

    if TYPE_CHECKING:
        _client: DSecClient

        @property
        def id(self) -> str: ...

    async def read_file(self, path: str | bytes, *, offset: int = 0, size: int = 0) -> bytes:
        """The bytes of a file; size 0: to its end."""
        params = files.Read(id=self.id, offset=offset, size=size, stream=True, **_path(path))

        async def send(peer: Peer) -> bytes:
            pending = peer.start("file.read", params, window=params.window)
            assert pending.inflow is not None
            chunks = [chunk async for chunk in pending.inflow]
            await pending.finish()
            return b"".join(chunks)

        return await self._client.carry("file.read", params, send)

    async def write_file(
        self, path: str | bytes, data: bytes | str, *, mode: int = 0o644, append: bool = False, exclusive: bool = False,
        uid: int | None = None, gid: int | None = None,
    ) -> int:  # fmt: skip
        """Replace a file (by rename); parent directories are made. Returns its size."""
        raw = data.encode() if isinstance(data, str) else data
        params = files.Write(id=self.id, mode=mode, append=append, exclusive=exclusive, uid=uid, gid=gid, **_path(path))
        if len(raw) <= INLINE:
            params.data = raw
            params.stream = False
        else:
            params.stream = True

        async def send(peer: Peer) -> files.Written:
            pending = peer.start("file.write", params)
            if params.stream:
                await pending.pour(_chunks(raw))
            return cast(files.Written, await pending.finish())

        return (await self._client.carry("file.write", params, send)).size

    async def list_dir(self, path: str | bytes) -> list[files.Entry]:
        found: files.Entries = await self._client.call("file.list", files.ListDir(id=self.id, **_path(path)))
        return found.entries

    async def stat(self, path: str | bytes, *, follow: bool = True) -> files.Stat:
        params = files.StatParams(id=self.id, follow=follow, **_path(path))
        return cast(files.Stat, await self._client.call("file.stat", params))

    async def mkdir(self, path: str | bytes, *, mode: int = 0o755, parents: bool = True) -> None:
        await self._client.call("file.mkdir", files.Mkdir(id=self.id, mode=mode, parents=parents, **_path(path)))

    async def remove(self, path: str | bytes, *, recursive: bool = False) -> None:
        await self._client.call("file.remove", files.Remove(id=self.id, recursive=recursive, **_path(path)))

    async def rename(self, path: str | bytes, to: str | bytes) -> None:
        target = _path(to)
        params = files.Rename(id=self.id, to=target.get("path", ""), to_raw=target.get("path_raw"), **_path(path))
        await self._client.call("file.rename", params)

    async def upload(
        self, local: str | os.PathLike[str], path: str | bytes, *, name: str | None = None, uid: int | None = 0,
        gid: int | None = None,
    ) -> TreeReport:  # fmt: skip
        """Copy a local file's or directory's content below `path`. Everything belongs to uid unless that is None.

        name: what the file or the directory itself is called below `path`.
        """
        params = files.Upload(id=self.id, uid=uid, gid=gid, **_path(path))

        async def send(peer: Peer) -> TreeReport:
            issues: list[str] = []
            done = await _unpacked(peer.start("tree.upload", params), pack(local, issues, name=name))
            return TreeReport(done.entries, [*issues, *done.issues])

        return await self._client.carry("tree.upload", params, send)

    async def upload_tar(
        self, stream: AsyncIterator[bytes], path: str | bytes, *, uid: int | None = None, gid: int | None = None
    ) -> TreeReport:
        """Unpack a tar stream below `path`. Entries belong to whom the tar says, or to uid."""
        params = files.Upload(id=self.id, uid=uid, gid=gid, **_path(path))
        done = await _unpacked(await self._client.begin("tree.upload", params), stream)
        return TreeReport(done.entries, done.issues)

    async def download(self, path: str | bytes, local: str | os.PathLike[str]) -> TreeReport:
        """Copy what is below `path` into a local directory. Nothing is ever written outside it."""
        pending, source = await self._download(path)
        issues = await unpack_stream(source, local)
        done: files.TreeDone = await pending.finish()
        return TreeReport(done.entries, [*done.issues, *issues])

    async def download_tar(self, path: str | bytes, write: Callable[[bytes], Awaitable[object]]) -> TreeReport:
        """What is below `path` as a tar, given to `write` piece by piece."""
        pending, source = await self._download(path)
        while chunk := await source.take():
            await write(chunk)
        done: files.TreeDone = await pending.finish()
        return TreeReport(done.entries, done.issues)

    async def _download(self, path: str | bytes) -> tuple[Pending, Inflow]:
        params = files.Download(id=self.id, **_path(path))
        pending = await self._client.begin("tree.download", params, window=params.window)
        assert pending.inflow is not None
        return pending, pending.inflow


async def _unpacked(pending: Pending, stream: AsyncIterator[bytes]) -> files.TreeDone:
    await pending.pour(stream)
    return cast(files.TreeDone, await pending.finish())


def _path(path: str | bytes) -> dict[str, Any]:
    if isinstance(path, str):
        return {"path": path}
    try:
        return {"path": path.decode()}
    except UnicodeDecodeError:
        return {"path_raw": path}


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(view), CHUNK):
        yield cast(bytes, view[start : start + CHUNK])
