"""Frames of the agent link: encode and decode, nothing else. docs/agent-protocol.md is the contract.

What comes from the other end was written inside a sandbox, so decoding checks every length and every tag and raises
`FrameError`; the link is closed on it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final

from dsecd.errors import DsecError

VERSION: Final = 1
MAX_PAYLOAD: Final = 2 << 20
MAX_DATA: Final = 256 << 10
HEADER: Final = struct.Struct("<IB3sI")
_FIELD: Final = struct.Struct("<BI")
_U64: Final = struct.Struct("<Q")
_OUTPUT: Final = struct.Struct("<BQ")
MAX_PARTS: Final = 512  # somebody who sends byte by byte must not cost an object for each
_ZERO3: Final = b"\0\0\0"


class FrameError(DsecError):
    """The other end broke the protocol; the link cannot be used any more."""

    def __init__(self, text: str) -> None:
        super().__init__("internal", text)


class Type(IntEnum):
    HELLO = 1
    PING = 2
    EXEC = 3
    STDIN = 4
    STDIN_EOF = 5
    FOLLOW = 6
    UNFOLLOW = 7
    KILL = 8
    RESIZE = 9
    FETCH = 10
    FORGET = 11
    LIST = 12
    READ = 20
    WRITE = 21
    STATPATH = 22
    LISTDIR = 23
    MKDIR = 24
    REMOVE = 25
    RENAME = 26
    TREE_PUT = 27
    TREE_GET = 28
    CONNECT = 29
    CLOSE = 30
    SHUTDOWN = 31
    HOLD = 32
    STATS = 33
    WAKE = 34
    KNOBS = 35
    KNOB_READ = 36
    UPPER = 37
    CALLS = 40
    CALL_FILE = 41
    CALL = 42
    CALL_STOP = 43
    READY = 64
    PONG = 65
    STARTED = 66
    OUTPUT = 67
    EXIT = 68
    RECORD = 69
    ERROR = 70
    CELL = 71
    PRODUCED = 72
    ENDED = 73
    DATA = 80
    EOF = 81
    CREDIT = 82
    STAT = 83
    ENTRY = 84
    DONE = 85
    CONNECTED = 86


_TYPES: Final = {int(t): t for t in Type}
FROM_AGENT: Final = frozenset(t for t in Type if t >= Type.READY)


class Tag(IntEnum):
    VERSION = 1
    SECCOMP = 2
    CAPS = 3
    APPARMOR = 4
    NEXT = 5
    HOSTNAME = 6
    ARG = 10
    ENV = 11
    CWD = 12
    USER = 13
    FLAGS = 14
    ROWS = 15
    COLS = 16
    TIMEOUT_MS = 17
    CAP = 18
    META = 19
    CPUS = 20
    NOFILE = 21
    STREAM = 30
    OFFSET = 31
    LIMIT = 32
    DATA = 33
    TOTAL = 34
    DIGEST = 35
    PID = 40
    EXIT = 41
    SIGNAL = 42
    WHY = 43
    RAN_US = 44
    STATE = 45
    CPU_US = 46
    PATH = 50
    PATH2 = 51
    MODE = 52
    UID = 53
    GID = 54
    SIZE = 55
    MTIME_NS = 56
    TYPE = 57
    COUNT = 58
    ISSUE = 59
    ERRNO = 60
    TEXT = 61
    PORT = 62
    NAME = 63
    STEP = 64
    OOM_KILLS = 70
    PIDS_HITS = 71
    MEM_CURRENT = 72
    MEM_PEAK = 73
    MEM_ANON = 74
    MEM_FILE = 75
    TASKS = 76
    DISK_USED = 77
    DISK_LIMIT = 78
    MEM_TOTAL = 79
    MEM_AVAILABLE = 80
    REALTIME_NS = 81
    SEED = 82
    NET = 83
    CPU_MS = 90
    FILE_MAX = 91
    SPACE = 92
    STACK = 93


INTEGERS: Final = frozenset(
    {Tag.VERSION, Tag.CAPS, Tag.NEXT, Tag.FLAGS, Tag.ROWS, Tag.COLS, Tag.TIMEOUT_MS, Tag.CAP, Tag.NOFILE, Tag.STREAM,
     Tag.OFFSET, Tag.LIMIT, Tag.TOTAL, Tag.PID, Tag.EXIT, Tag.SIGNAL, Tag.WHY, Tag.RAN_US, Tag.STATE, Tag.CPU_US,
     Tag.MODE, Tag.UID, Tag.GID, Tag.SIZE, Tag.MTIME_NS, Tag.TYPE, Tag.COUNT, Tag.ERRNO, Tag.PORT, Tag.STEP,
     Tag.OOM_KILLS, Tag.PIDS_HITS, Tag.MEM_CURRENT, Tag.MEM_PEAK, Tag.MEM_ANON, Tag.MEM_FILE, Tag.TASKS, Tag.DISK_USED,
     Tag.DISK_LIMIT, Tag.MEM_TOTAL, Tag.MEM_AVAILABLE, Tag.REALTIME_NS}
)  # fmt: skip

Field = tuple[Tag, "int | bytes"]


def frame(kind: Type, channel: int, payload: bytes | bytearray | memoryview = b"") -> bytes:
    """One frame, ready to be written. `payload` over 2 MiB is the caller's fault (ValueError)."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a frame carries at most {MAX_PAYLOAD} bytes, not {len(payload)}")
    return HEADER.pack(len(payload), kind, _ZERO3, channel) + payload


def header(kind: Type, channel: int, size: int) -> bytes:
    """The header alone, for a payload that is written behind it without a copy."""
    return HEADER.pack(size, kind, _ZERO3, channel)


def fields(items: Iterable[Field]) -> bytes:
    """Encode a list of fields."""
    parts: list[bytes] = []
    for tag, value in items:
        raw = _U64.pack(value & 0xFFFF_FFFF_FFFF_FFFF) if isinstance(value, int) else value
        parts.append(_FIELD.pack(tag, len(raw)))
        parts.append(raw)
    return b"".join(parts)


def parse_fields(payload: bytes | memoryview) -> list[Field]:
    """Decode a list of fields; FrameError for a short one, an unknown tag or an integer that is not 8 bytes."""
    out: list[Field] = []
    view = memoryview(payload)
    at = 0
    while at < len(view):
        if at + _FIELD.size > len(view):
            raise FrameError("a field is cut short")
        number, size = _FIELD.unpack_from(view, at)
        at += _FIELD.size
        if at + size > len(view):
            raise FrameError("a field is longer than its frame")
        try:
            tag = Tag(number)
        except ValueError as exc:
            raise FrameError(f"unknown field tag {number}") from exc
        raw = view[at : at + size]
        at += size
        if tag in INTEGERS:
            if size != 8:
                raise FrameError(f"field {tag.name} is not an integer")
            out.append((tag, _U64.unpack(raw)[0]))
        else:
            out.append((tag, bytes(raw)))
    return out


def signed(value: int) -> int:
    """MTIME_NS travels as two's complement."""
    return value - (1 << 64) if value >> 63 else value


class Fields:
    """Typed access to parsed fields; a missing or repeated single field is a protocol error."""

    __slots__ = ("_items",)

    def __init__(self, payload: bytes | memoryview) -> None:
        self._items = parse_fields(payload)

    def integer(self, tag: Tag, default: int | None = None) -> int:
        value = self._one(tag, default)
        if not isinstance(value, int):
            raise FrameError(f"field {tag.name} is missing")
        return value

    def raw(self, tag: Tag, default: bytes | None = None) -> bytes:
        value = self._one(tag, default)
        if not isinstance(value, bytes):
            raise FrameError(f"field {tag.name} is missing")
        return value

    def text(self, tag: Tag, limit: int = 512) -> str:
        """Text for people, cut to `limit` bytes, never raises on bad UTF-8 (it comes from a sandbox)."""
        return self.raw(tag, b"")[:limit].decode("utf-8", "replace")

    def all(self, tag: Tag) -> Iterator[int | bytes]:
        return (value for t, value in self._items if t == tag)

    def pairs(self) -> list[Field]:
        return self._items

    def _one(self, tag: Tag, default: int | bytes | None) -> int | bytes | None:
        found = [value for t, value in self._items if t == tag]
        if len(found) > 1:
            raise FrameError(f"field {tag.name} is repeated")
        return found[0] if found else default


def parse_output(payload: memoryview) -> tuple[int, int, memoryview]:
    """OUTPUT: stream number, byte offset, data."""
    if len(payload) < _OUTPUT.size:
        raise FrameError("an OUTPUT frame is cut short")
    stream, offset = _OUTPUT.unpack_from(payload)
    if stream not in (1, 2, 3):
        raise FrameError(f"OUTPUT for stream {stream}")
    return stream, offset, payload[_OUTPUT.size :]


class Decoder:
    """Bytes in, frames out. Holds at most one unfinished frame; a long payload is copied once, when it is whole."""

    __slots__ = ("_missing", "_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self._size = 0  # of the parts
        self._missing = 0  # bytes without which there is nothing to look at

    def feed(self, data: bytes) -> list[tuple[Type, int, memoryview]]:
        """Frames completed by `data`, as (type, channel, payload)."""
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._missing and len(self._parts) < MAX_PARTS:
                return []
            data = b"".join(self._parts)
            self._parts, self._size = [], 0
        view = memoryview(data)
        out: list[tuple[Type, int, memoryview]] = []
        at, end = 0, len(view)
        self._missing = HEADER.size
        while end - at >= HEADER.size:
            size, number, filler, channel = HEADER.unpack_from(view, at)
            if size > MAX_PAYLOAD or filler != _ZERO3:
                raise FrameError("a frame header is not valid")
            kind = _TYPES.get(number)
            if kind is None:
                raise FrameError(f"unknown frame type {number}")
            start = at + HEADER.size
            if end - start < size:
                self._missing = HEADER.size + size
                break
            out.append((kind, channel, view[start : start + size]))
            at = start + size
        if at < end:
            self._parts, self._size = [view[at:]], end - at
        return out
