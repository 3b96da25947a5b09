"""file.* and tree.*."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from dsecd.agent import files as ops
from dsecd.agent.frames import Fields, Tag, Type
from dsecd.errors import DsecError
from dsecd.sandbox.live import Live
from dsecd.sandbox.manager import Manager
from dsecd.wire import base
from dsecd.wire import files as wire
from dsecd.wire.call import Call

INFLOW: Final = 4 << 20


class FileApi:
    """Paths are resolved by the agent, inside; here they are only checked for shape."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def read(self, call: Call, params: wire.Read) -> wire.FileRead:
        live = await self._manager.answering(params.id)
        path = path_of(params.path, params.path_raw)
        with ops.Exchange(live.link, _shown(path)) as exchange, live.use():
            reader = await ops.read_open(exchange, path, params.offset, params.size)
            info = reader.info
            if params.stream:
                flow = call.outflow(params.window)
                async for chunk in reader:
                    await flow.write(chunk)
                return wire.FileRead(size=info.size, mode=info.mode, mtime_ns=info.mtime_ns)
            data = bytearray()
            async for chunk in reader:
                data += chunk
                if len(data) > base.MAX_INLINE:
                    raise DsecError("invalid", f"more than {base.MAX_INLINE} bytes: read it with stream, or in parts")
            return wire.FileRead(size=info.size, data=bytes(data), mode=info.mode, mtime_ns=info.mtime_ns)

    async def write(self, call: Call, params: wire.Write) -> wire.Written:
        live = await self._manager.answering(params.id)
        path = path_of(params.path, params.path_raw)
        with ops.Exchange(live.link, _shown(path)) as exchange, live.use():
            exchange.request(
                Type.WRITE,
                ops.write_request(
                    path, params.mode, params.uid, params.gid,
                    parents=params.parents, exclusive=params.exclusive, append=params.append,
                ),
            )  # fmt: skip
            with _once() if params.append or params.exclusive else contextlib.nullcontext():
                await _pour(call, exchange, params.data, params.stream)
                done = await ops.finish_put(exchange)
        return wire.Written(size=done.integer(Tag.SIZE))

    async def list(self, call: Call, params: wire.ListDir) -> wire.Entries:
        live = await self._manager.answering(params.id)
        found = await ops.list_dir(live.link, path_of(params.path, params.path_raw))
        return wire.Entries(entries=[_entry(item) for item in found])

    async def stat(self, call: Call, params: wire.StatParams) -> wire.Stat:
        live = await self._manager.answering(params.id)
        info = await ops.file_stat(live.link, path_of(params.path, params.path_raw), follow=params.follow)
        return wire.Stat(
            type=info.type, mode=info.mode, uid=info.uid, gid=info.gid, size=info.size, mtime_ns=info.mtime_ns,
            target=_text(info.target),
        )  # fmt: skip

    async def mkdir(self, call: Call, params: wire.Mkdir) -> base.Empty:
        live = await self._manager.answering(params.id)
        path = path_of(params.path, params.path_raw)
        with _once():
            await ops.make_dir(live.link, path, params.mode, parents=params.parents)
        return base.Empty()

    async def remove(self, call: Call, params: wire.Remove) -> base.Empty:
        live = await self._manager.answering(params.id)
        path = path_of(params.path, params.path_raw)
        with _once():
            await ops.remove(live.link, path, recursive=params.recursive)
        return base.Empty()

    async def rename(self, call: Call, params: wire.Rename) -> base.Empty:
        live = await self._manager.answering(params.id)
        path, to = path_of(params.path, params.path_raw), path_of(params.to, params.to_raw)
        with _once():
            await ops.rename(live.link, path, to)
        return base.Empty()

    async def upload(self, call: Call, params: wire.Upload) -> wire.TreeDone:
        live = await self._manager.answering(params.id)
        path = path_of(params.path, params.path_raw)
        with ops.Exchange(live.link, _shown(path)) as exchange, live.use():
            request = ops.write_request(
                path, 0o755, params.uid, params.gid, parents=True, exclusive=False, append=False
            )
            exchange.request(Type.TREE_PUT, [item for item in request if item[0] is not Tag.MODE])
            await _pour(call, exchange, b"", True)
            done = await ops.finish_put(exchange)
        return wire.TreeDone(entries=done.integer(Tag.COUNT), issues=ops.tree_issues(done))

    async def download(self, call: Call, params: wire.Download) -> wire.TreeDone:
        live: Live = await self._manager.answering(params.id)
        path = path_of(params.path, params.path_raw)
        flow = call.outflow(params.window)
        with ops.Exchange(live.link, _shown(path)) as exchange, live.use():
            exchange.request(Type.TREE_GET, [(Tag.PATH, path)], ops.WINDOW)
            while True:
                kind, payload = await exchange.recv()
                if kind is Type.DATA:
                    await flow.write(payload)
                    exchange.took(len(payload), ops.WINDOW)
                elif kind is Type.DONE:
                    done = Fields(payload)
                    return wire.TreeDone(entries=done.integer(Tag.COUNT), issues=ops.tree_issues(done))
                else:
                    raise DsecError("internal", f"the agent answered {kind.name} to a download")


@contextlib.contextmanager
def _once() -> Iterator[None]:
    """What the agent may have done when the client's connection, or the one to it in a pause, ended. Asked again it
    would be there twice, or find its own work in the way."""
    try:
        yield
    except DsecError as exc:
        if exc.retryable:
            raise DsecError("outcome_unknown", f"{exc.message}: all or a part of it may be there") from exc
        raise


async def _pour(call: Call, exchange: ops.Exchange, data: bytes, stream: bool) -> None:
    """Send the request's own data, or the client's stream, on to the agent."""
    if data:
        await exchange.put(data)
    if stream:
        async for chunk in call.inflow(INFLOW):
            await exchange.put(chunk)


def path_of(text: str, raw: bytes | None) -> bytes:
    """The path as bytes: absolute, no NUL, at most 4096 bytes; exactly one form given."""
    if (raw is None) == (not text):
        raise DsecError("invalid", "give either path or path_raw")
    path = text.encode() if raw is None else raw
    if b"\0" in path:
        raise DsecError("invalid", "the path has a NUL byte")
    if not path.startswith(b"/"):
        raise DsecError("invalid", f"path {_shown(path)!r} is not absolute")
    if len(path) > 4095:
        raise DsecError("invalid", f"the path is {len(path)} bytes; Linux takes at most 4095")
    if b".." in path.split(b"/"):
        raise DsecError("invalid", "the path has a `..` component")
    return path


def _shown(path: bytes) -> str:
    return path[:200].decode("utf-8", "replace")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _entry(item: ops.FileStat) -> wire.Entry:
    name = item.name.decode("utf-8", "replace")
    return wire.Entry(
        name=name, type=item.type, mode=item.mode, uid=item.uid, gid=item.gid, size=item.size,
        mtime_ns=item.mtime_ns, target=_text(item.target),
        name_raw=item.name if name.encode() != item.name else None,
    )  # fmt: skip
