"""Unanswered events, in memory that outlives the process.

The kernel knows an event that was read by the number of its descriptor, and lets any process with the group answer it.
So the next server must know the numbers. An event is read straight into its slot of a mapped file: there is no instant
between its leaving the kernel and its being on record. What that event does not say is which file it is about; this is
added a moment later, and for the moment before, `ino` is 0 ("any watched file").
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from dsecd.erofs.pages.fan import EVENT_SIZE, Event, parse

SLOTS: Final = 1024
_EVENT_ROOM: Final = 64  # one event fits, a second does not: a read gives one
_INO: Final = struct.Struct("=Q")
_SLOT: Final = 128


class Pending(NamedTuple):
    slot: int
    event: Event
    ino: int


class Journal:
    """Slots are free when the length at the head of their event is 0. Not for several threads without a lock."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, SLOTS * _SLOT)
            self._map = mmap.mmap(fd, SLOTS * _SLOT)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)
        self._free = [slot for slot in reversed(range(SLOTS)) if self._length(slot) == 0]

    def pending(self) -> Iterator[Pending]:
        """What a server that died had read and not answered."""
        for slot in range(SLOTS):
            if self._length(slot) == EVENT_SIZE:
                at = slot * _SLOT
                (ino,) = _INO.unpack_from(self._view, at + _EVENT_ROOM)
                yield Pending(slot, parse(self._view[at : at + EVENT_SIZE]), ino)

    def read(self, group: int) -> tuple[int, Event] | None:
        """The next event and its slot. None: no slot is free. BlockingIOError: no event is there."""
        if not self._free:
            return None
        slot = self._free[-1]
        at = slot * _SLOT
        _INO.pack_into(self._view, at + _EVENT_ROOM, 0)
        os.readv(group, [self._view[at : at + _EVENT_ROOM]])
        self._free.pop()
        return slot, parse(self._view[at : at + EVENT_SIZE])

    def name(self, slot: int, ino: int) -> None:
        _INO.pack_into(self._view, slot * _SLOT + _EVENT_ROOM, ino)

    def clear(self, slot: int) -> None:
        """After the answer, and before the number may be given to another event."""
        at = slot * _SLOT
        self._view[at : at + 4] = b"\0\0\0\0"
        self._free.append(slot)

    def clear_all(self) -> None:
        """The events are another group's."""
        self._view[:] = bytes(len(self._view))
        self._free = list(reversed(range(SLOTS)))

    def close(self) -> None:
        self._view.release()
        self._map.close()

    def _length(self, slot: int) -> int:
        return int.from_bytes(self._view[slot * _SLOT : slot * _SLOT + 4], "little")
