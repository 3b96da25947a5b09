"""Messages of `file.*` and `tree.*`.

Paths are absolute inside the sandbox. A name that is not UTF-8 travels in the `*_raw` twin as bytes.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dsecd.wire.base import Count, Id, Params, Result

FilePath = Annotated[str, Meta(max_length=4096)]
RawPath = Annotated[bytes, Meta(max_length=4096)]
Mode = Annotated[int, Meta(ge=0, le=0o7777)]
Uid = Annotated[int, Meta(ge=0, le=(1 << 32) - 2)]


class PathParams(Params):
    """One path: as text, or as bytes when it is not UTF-8."""

    id: Id
    path: FilePath = ""
    path_raw: RawPath | None = None


class Read(PathParams):
    """`file.read`: up to 8 MiB in the reply, or with `stream` any size as stream.data notifications under credit."""

    offset: Count = 0
    size: Count = 0
    stream: bool = False
    window: Annotated[int, Meta(ge=4096, le=8 << 20)] = 4 << 20


class FileRead(Result):
    """size: of the whole file; data only when it was not a stream."""

    size: int
    data: bytes = b""
    mode: int = 0
    mtime_ns: int = 0


class Write(PathParams):
    """`file.write`: replaces the file by rename; data in the request, or with `stream` as stream.data."""

    data: Annotated[bytes, Meta(max_length=8 << 20)] = b""
    stream: bool = False
    mode: Mode = 0o644
    uid: Uid | None = None
    gid: Uid | None = None
    exclusive: bool = False
    append: bool = False
    parents: bool = True


class Written(Result):
    size: int


class StatParams(PathParams):
    follow: bool = True


class Stat(Result):
    """type: file, dir, symlink, fifo, socket, char, block, other. mode: permission bits."""

    type: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: str | None = None


class Entry(Struct, omit_defaults=True):
    """One entry of a directory. name_raw is set when the name is not UTF-8."""

    name: str
    type: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: str | None = None
    name_raw: bytes | None = None


class ListDir(PathParams):
    """`file.list`: at most 100,000 entries."""


class Entries(Result):
    entries: list[Entry]


class Mkdir(PathParams):
    mode: Mode = 0o755
    parents: bool = True


class Remove(PathParams):
    recursive: bool = False


class Rename(PathParams):
    to: FilePath = ""
    to_raw: RawPath | None = None


class Upload(PathParams):
    """`tree.upload`: a tar stream (stream.data) unpacked below path."""

    uid: Uid | None = None
    gid: Uid | None = None


class Download(PathParams):
    """`tree.download`: stream.data is a tar of what is below path."""

    window: Annotated[int, Meta(ge=4096, le=8 << 20)] = 4 << 20


class TreeDone(Result):
    """issues: entries that could not be transferred, one sentence each (at most 1,000)."""

    entries: int
    issues: list[str] = []
