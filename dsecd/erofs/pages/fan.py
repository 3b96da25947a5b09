"""fanotify pre-content events (Linux 6.14 and later): the calls and structures that Python lacks.

Thin; OSError on failure. The numbers are here because the headers of Debian 12 do not have them. An event is 48
bytes: the metadata, and one record with the range that somebody is about to read. Until it is answered, he waits.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import resource
import struct
from pathlib import Path
from typing import Final, NamedTuple

FAN_CLOEXEC: Final = 0x1
FAN_NONBLOCK: Final = 0x2
FAN_CLASS_PRE_CONTENT: Final = 0x8
FAN_UNLIMITED_QUEUE: Final = 0x10
FAN_UNLIMITED_MARKS: Final = 0x20
FAN_MARK_ADD: Final = 0x1
FAN_MARK_REMOVE: Final = 0x2
FAN_PRE_ACCESS: Final = 0x0010_0000
FAN_ALLOW: Final = 1
FAN_DENY: Final = 2
NOFD: Final = -1  # of an event that says that the queue overflowed

_AT_FDCWD: Final = -100
_RANGE: Final = 6  # FAN_EVENT_INFO_TYPE_RANGE
_METADATA: Final = struct.Struct("=IBBHQii")
_INFO: Final = struct.Struct("=BBHIQQ")
_RESPONSE: Final = struct.Struct("=iI")
EVENT_SIZE: Final = _METADATA.size + _INFO.size

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]


class Event(NamedTuple):
    """Somebody (`pid`) is about to read `length` bytes at `offset` of the file that `fd` is open on."""

    fd: int
    pid: int
    offset: int
    length: int


def new_group() -> int:
    """A group whose events are answered before the content is read. Events' descriptors are writable."""
    flags = FAN_CLASS_PRE_CONTENT | FAN_CLOEXEC | FAN_NONBLOCK | FAN_UNLIMITED_QUEUE | FAN_UNLIMITED_MARKS
    fd: int = _libc.fanotify_init(flags, os.O_RDWR | os.O_LARGEFILE | os.O_CLOEXEC)
    if fd < 0:
        raise _error("fanotify_init")
    return fd


def mark(group: int, path: Path) -> None:
    """From here on, whoever opens the file and reads it waits for the group. EOPNOTSUPP: not on this file system."""
    if _libc.fanotify_mark(group, FAN_MARK_ADD, FAN_PRE_ACCESS, _AT_FDCWD, os.fsencode(path)) < 0:
        raise _error("fanotify_mark")


def unmark(group: int, path: Path) -> None:
    """Reads are free again. Not to be marked is no error."""
    failed = _libc.fanotify_mark(group, FAN_MARK_REMOVE, FAN_PRE_ACCESS, _AT_FDCWD, os.fsencode(path)) < 0
    if failed and ctypes.get_errno() != errno.ENOENT:
        raise _error("fanotify_mark")


def marked(group: int) -> frozenset[int]:
    """Inode numbers of marked files, from the kernel itself. All of ours are on one file system."""
    text = Path(f"/proc/self/fdinfo/{group}").read_text()
    return frozenset(int(found, 16) for found in re.findall(r"^fanotify ino:([0-9a-f]+) ", text, re.MULTILINE))


def parse(event: bytes | bytearray | memoryview) -> Event:
    _, _, _, _, _, fd, pid = _METADATA.unpack_from(event)
    kind, _, _, _, offset, count = _INFO.unpack_from(event, _METADATA.size)
    if kind != _RANGE:  # never seen with FAN_PRE_ACCESS; then the whole file is meant
        offset, count = 0, 0
    return Event(fd, pid, offset, count)


def answer(group: int, fd: int, error: int = 0) -> bool:
    """Let the reader go on, or fail its read with EIO, ENOSPC, EAGAIN. False: nobody waits (any more).

    The number counts, not the descriptor: a process may answer for one that read the event and died.
    """
    response = FAN_DENY | (error & 0xFF) << 24 if error else FAN_ALLOW
    try:
        os.write(group, _RESPONSE.pack(fd, response))
    except FileNotFoundError:
        return False
    return True


def out_of_the_way(fd: int) -> int:
    """Move a descriptor to the top of the table. Low numbers belong to events: that of an unanswered one must be free
    for the next server to take (`PageServer._reserve`)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(soft, 1 << 16) - 64)
    os.close(fd)
    return high


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
