"""The data of one image in the kernel's own cache (cachefiles), behind the face of a cache file.

What is there is what the kernel finds there: it looks for holes of the blob's file and asks for those alone. So no map
is kept on disk; a map in memory says what need not be fetched again, begins empty, and is corrected whenever the kernel
asks (it may have thrown the file away and begun another under the same name). The kernel's file belongs to the kernel:
it is written through the descriptor of an OPEN request, and read by its path, which it has once it was unmounted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dsecd.erofs.model import SUM
from dsecd.erofs.pages.cachefile import CacheFile
from dsecd.erofs.pages.fscache import ALIGN, DATA, Buffer, complete, extents, hole
from dsecd.erofs.tar import bad

_mine: Final = threading.local()  # a buffer for each worker


class OndemandFile(CacheFile):
    """`bound` to an object of the kernel while it is mounted. find: where its file is, if it has a path."""

    def __init__(self, hexa: str, sums: bytes, size: int, find: Callable[[], Path | None]) -> None:
        if hashlib.sha256(sums).hexdigest() != hexa:
            raise bad(f"data {hexa[:12]}: its list of sums is altered")
        if len(sums) != 32 * -(-size // SUM) or size % ALIGN:
            raise bad(f"data {hexa[:12]}: {len(sums) // 32} sums for {size} bytes")
        self.hex = f"{DATA}{hexa}"
        self.path = Path(self.hex)  # in messages; it is nowhere
        self.sums = sums
        self.chunks = len(sums) // 32
        self.size = size
        self.ino = -id(self)  # none of another file's
        self.fd = -1
        self.count = 0
        self.dirty = False
        self.used = array("d", [time.monotonic()]) * self.chunks
        self.object = 0  # the kernel's number; 0: none
        self.looked = False  # at what the object holds
        self._find = find
        self._place: Path | None = None
        self._there = bytearray(self.chunks)
        self._turn = threading.Lock()  # over `fd` coming and going: its number must not be another's under a write

    # -- the kernel's object (the server's lock is held, except for what asks the kernel) ------------------------

    def bind(self, number: int, fd: int) -> None:
        """An OPEN: from here on data goes there. What was known of an earlier object is forgotten."""
        with self._turn:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd, self.object, self.looked = fd, number, False
        self._there = bytearray(self.chunks)
        self.count = 0

    def unbind(self, number: int) -> None:
        """A CLOSE, unless it is of an earlier object."""
        with self._turn:
            if self.object == number and self.fd >= 0:
                os.close(self.fd)
                self.fd, self.object = -1, 0
                self._there = bytearray(self.chunks)
                self.count = 0

    def look(self) -> list[int] | None:
        """Which chunks are wholly there. None: not known yet, the kernel is still setting it up. Asks the kernel."""
        with self._copy() as fd:
            try:
                found = list(extents(fd, self.size))
            except OSError as exc:
                if exc.errno != errno.ENOBUFS:
                    raise
                return None
        return [
            chunk
            for start, end in found
            for chunk in range(-(-start // SUM), self.chunks if end >= self.size else end // SUM)
        ]

    def gone(self, offset: int, length: int) -> list[int]:
        """Chunks of that range that were thought to be there, of which something is missing. Asks the kernel; all
        of them when it cannot say."""
        end = min(-(-(offset + length) // SUM), self.chunks)
        thought = [chunk for chunk in range(offset // SUM, end) if chunk in self]
        if not thought:
            return []
        try:
            with self._copy() as fd:
                return [chunk for chunk in thought if hole(fd, chunk * SUM, self.length(chunk))]
        except OSError:
            return thought

    def answer(self, message: int) -> None:
        with contextlib.suppress(OSError), self._copy() as fd:
            complete(fd, message)

    @contextlib.contextmanager
    def _copy(self) -> Iterator[int]:
        """A descriptor of our own: the other may be closed while we write, and its number be given away."""
        with self._turn:
            if self.fd < 0:
                raise OSError(errno.EBADF, "it is not mounted any more")
            fd = os.dup(self.fd)
        try:
            yield fd
        finally:
            os.close(fd)

    # -- a cache file --------------------------------------------------------------------------------------------

    def __contains__(self, chunk: int) -> bool:
        return self._there[chunk] == 1

    def set(self, chunk: int) -> None:
        self.count += 1 - self._there[chunk]
        self._there[chunk] = 1
        self.used[chunk] = time.monotonic()

    def clear(self, chunk: int) -> None:
        self.count -= self._there[chunk]
        self._there[chunk] = 0

    def open(self, size: int) -> None:
        raise NotImplementedError("the kernel opens it")

    def write(self, chunk: int, data: bytes | memoryview) -> None:
        if not hasattr(_mine, "buffer"):
            _mine.buffer = Buffer(SUM)
        try:
            with self._copy() as fd:
                _mine.buffer.write(fd, data, chunk * SUM)
        except OSError as exc:
            if exc.errno == errno.ENOBUFS:  # what cachefiles calls a full disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from exc
            raise

    def read(self, chunk: int) -> bytes:
        """OSError ENOENT while it has no path, which is so until it was unmounted once."""
        self._place = self._place or self._find()
        if self._place is None:
            raise FileNotFoundError(errno.ENOENT, "the kernel has not named its file yet")
        with self._place.open("rb", buffering=0) as f:
            return os.pread(f.fileno(), self.length(chunk), chunk * SUM)

    def save(self) -> None:
        """The kernel does."""

    def punch(self, chunks: list[int]) -> None:
        raise OSError(errno.EOPNOTSUPP, "only whole files are evicted")

    def in_use(self) -> bool:
        return self.object != 0

    def close(self) -> None:
        self.unbind(self.object)

    def remove(self) -> None:
        self.close()
