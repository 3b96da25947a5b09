"""Trees as tar streams at the client's end: pack a local tree, unpack what a sandbox sends.

What a sandbox sends is hostile: every entry is checked, nothing is written outside the target, special files are not
made.
"""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

CHUNK: Final = 1 << 20


@dataclass
class TreeReport:
    """entries: transferred. issues: one sentence for each that was not."""

    entries: int
    issues: list[str] = field(default_factory=list)


class _Source(Protocol):
    async def take(self) -> bytes: ...


async def pack(
    local: str | os.PathLike[str], issues: list[str], *, name: str | None = None, xattrs: bool = False
) -> AsyncIterator[bytes]:
    """A tar of a directory's content, or of one file, in pieces of about 1 MiB. Sockets are reported in `issues`.

    name: what the file or the directory itself is called in it ("." for the directory it will be unpacked into).
    xattrs: keep extended attributes, as far as they can be read.
    """
    pieces = _pack(Path(local), issues, name, xattrs)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _pack(top: Path, issues: list[str], top_name: str | None, xattrs: bool) -> Iterator[bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, name in _walk(top, top_name):
            info = _info(tar, path, name, issues)
            if info is None:
                continue
            if xattrs:
                info.pax_headers = {**info.pax_headers, **_xattrs(path)}
            if not info.isreg() or info.size == 0:
                tar.addfile(info)
            else:
                yield from _file(tar, buffer, path, info, issues)
            if buffer.tell() >= CHUNK:
                yield _drain(buffer)
    if buffer.tell():
        yield _drain(buffer)


def _walk(top: Path, top_name: str | None) -> Iterator[tuple[str, str]]:
    if not top.is_dir():
        yield os.fspath(top), top_name or top.name
        return
    if top_name is not None:
        yield f"{top}/.", top_name
    for directory, names, leaves in os.walk(os.fspath(top)):
        below = os.path.join(top_name or ".", os.path.relpath(directory, top))  # noqa: PTH118 - bytes-safe names
        for name in sorted(names) + sorted(leaves):
            yield os.path.join(directory, name), os.path.normpath(os.path.join(below, name))  # noqa: PTH118 - bytes-safe names


def _info(tar: tarfile.TarFile, path: str, name: str, issues: list[str]) -> tarfile.TarInfo | None:
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            issues.append(f"{name}: a socket")
            return None
        return tar.gettarinfo(path, arcname=name)
    except OSError as exc:
        issues.append(f"{name}: {exc.strerror}")
        return None


def _xattrs(path: str) -> dict[str, str]:
    """As pax records: tarfile writes the text as bytes again (surrogateescape)."""
    try:
        return {
            f"SCHILY.xattr.{name}": os.getxattr(path, name, follow_symlinks=False).decode("utf-8", "surrogateescape")
            for name in os.listxattr(path, follow_symlinks=False)
        }
    except OSError:  # not on this file system, or gone meanwhile
        return {}


def _file(
    tar: tarfile.TarFile, buffer: io.BytesIO, path: str, info: tarfile.TarInfo, issues: list[str]
) -> Iterator[bytes]:
    """Header and content of one file, cut or padded to the size in its header when it changes meanwhile."""
    try:
        file = open(path, "rb")  # noqa: SIM115, PTH123 - closed below; a failure must not hide one of the writes
    except OSError as exc:
        issues.append(f"{info.name}: {exc.strerror}")
        return
    with file:
        buffer.write(info.tobuf(tar.format, tar.encoding or "utf-8", "surrogateescape"))
        left = info.size
        while left:
            data = file.read(min(CHUNK, left)) or bytes(min(CHUNK, left))
            left -= len(data)
            buffer.write(data)
            if buffer.tell() >= CHUNK:
                yield _drain(buffer)
        buffer.write(bytes(-info.size % tarfile.BLOCKSIZE))


def _drain(buffer: io.BytesIO) -> bytes:
    data = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return data


class _Pipe(io.RawIOBase):
    """A blocking reader for tarfile in a thread, fed from the loop."""

    def __init__(self, source: _Source, loop: asyncio.AbstractEventLoop) -> None:
        self._source = source
        self._loop = loop
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: object) -> int:
        out = memoryview(target)  # type: ignore[arg-type]
        if not len(self._rest):
            chunk = asyncio.run_coroutine_threadsafe(self._source.take(), self._loop).result()
            self._rest = memoryview(chunk)
        size = min(len(out), len(self._rest))
        out[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


async def unpack_stream(source: _Source, local: str | os.PathLike[str]) -> list[str]:
    """Unpack a tar stream below `local`; returns what could not be written."""
    pipe = _Pipe(source, asyncio.get_running_loop())
    issues = await asyncio.to_thread(_unpack, pipe, Path(local))
    while await source.take():  # whatever follows the end-of-archive mark
        pass
    return issues


def _unpack(pipe: _Pipe, top: Path) -> list[str]:
    issues: list[str] = []
    with tarfile.open(fileobj=io.BufferedReader(pipe, CHUNK), mode="r|", errorlevel=1) as tar:
        top.mkdir(parents=True, exist_ok=True)  # not before the sandbox has sent something
        writer = _Writer(top)
        for member in tar:
            try:
                writer.write(tar, member)
            except (_Refused, OSError, RuntimeError, ValueError) as exc:  # RuntimeError: a loop of links
                reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
                issues.append(f"{member.name}: {reason}"[:512])
    return issues


class _Refused(Exception):
    """An entry that has no place here; the text says why."""


class _Writer:
    """Writes entries below `top` and nowhere else. Only we change the tree meanwhile, so a path once checked holds.

    As tarfile's `data` filter, which Debian 12's Python lacks: no devices, no links that point out of the tree, no
    setuid, nothing writable by others, everything belongs to the caller. An existing entry is replaced, never written
    through.
    """

    def __init__(self, top: Path) -> None:
        self._top = top.resolve()
        self._parents: set[Path] = {self._top}

    def write(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = _inner(member.name)
        if name == Path():
            return
        target = self._parent(name.parent) / name.name
        if member.isdir():
            self._directory(target, member.mode)
        elif member.isreg():
            self._file(tar, target, member)
        elif member.issym():
            self._symlink(target, member.linkname)
        elif member.islnk():
            source = _inner(member.linkname)
            source = self._parent(source.parent) / source.name
            if source != target:
                target.unlink(missing_ok=True)
                os.link(source, target, follow_symlinks=False)
        else:
            raise _Refused("a special file")

    def _parent(self, name: Path) -> Path:
        """The directory `name`, made if need be, with all links resolved and below the top."""
        path = (self._top / name).resolve()
        if path not in self._parents:
            if not path.is_relative_to(self._top):
                raise _Refused("it would be outside the target")
            path.mkdir(parents=True, exist_ok=True)
            self._parents.add(path)
        return path

    def _directory(self, target: Path, mode: int) -> None:
        if target.is_symlink() or not target.is_dir():
            target.unlink(missing_ok=True)
            target.mkdir()
        target.chmod(mode & 0o755 | 0o700)

    def _symlink(self, target: Path, leads_to: str) -> None:
        """`..` counts only in front: behind a name that becomes a link later, it could lead anywhere."""
        parts = Path(leads_to).parts
        ups = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
        depth = len(target.parent.relative_to(self._top).parts)
        if leads_to.startswith("/") or ups > depth or ".." in parts[ups:]:
            raise _Refused(f"a link out of the tree, to {leads_to}")
        target.unlink(missing_ok=True)
        target.symlink_to(leads_to)

    @staticmethod
    def _file(tar: tarfile.TarFile, target: Path, member: tarfile.TarInfo) -> None:
        content = tar.extractfile(member)
        assert content is not None
        target.unlink(missing_ok=True)
        with target.open("xb") as out:
            while chunk := content.read(CHUNK):
                out.write(chunk)
            os.fchmod(out.fileno(), member.mode & 0o755 | 0o600)
        os.utime(target, (member.mtime, member.mtime))


def _inner(name: str) -> Path:
    """A member's name as a path below the top: relative, without a way up."""
    path = Path(name.lstrip("/"))
    if ".." in path.parts:
        raise _Refused("the name has a `..` component")
    return path
