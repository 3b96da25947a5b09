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


async def pack(local: str | os.PathLike[str], issues: list[str]) -> AsyncIterator[bytes]:
    """A tar of a directory's content, or of one file, in pieces of about 1 MiB. Sockets are reported in `issues`."""
    pieces = _pack(Path(local), issues)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _pack(top: Path, issues: list[str]) -> Iterator[bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, name in _walk(top):
            info = _info(tar, path, name, issues)
            if info is None:
                continue
            if not info.isreg() or info.size == 0:
                tar.addfile(info)
            else:
                yield from _file(tar, buffer, path, info, issues)
            if buffer.tell() >= CHUNK:
                yield _drain(buffer)
    if buffer.tell():
        yield _drain(buffer)


def _walk(top: Path) -> Iterator[tuple[str, str]]:
    if not top.is_dir():
        yield os.fspath(top), top.name
        return
    for directory, names, leaves in os.walk(os.fspath(top)):
        below = os.path.relpath(directory, top)
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
    """tarfile's own `data` filter refuses what leaves the target, devices, and links that point out of it."""
    issues: list[str] = []
    top.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BufferedReader(pipe, CHUNK), mode="r|", errorlevel=1) as tar:
        tar.extraction_filter = tarfile.data_filter
        for member in tar:
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                issues.append(f"{member.name}: a special file")
                continue
            try:
                tar.extract(member, top, numeric_owner=True, filter="data")
            except (tarfile.FilterError, OSError, UnicodeError) as exc:
                issues.append(f"{member.name}: {exc}"[:512])
    return issues
