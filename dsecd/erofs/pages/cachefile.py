"""One sparse file of the cache, and which chunks of it are really there.

    cache/<hex>.data     the bytes, full length; never opened by anyone but the server and EROFS
    cache/<hex>.sums     sha256 of each chunk, as in the image
    cache/<hex>.saved    which chunks are there, as of the last save
    run/<hex>.map        which chunks are there, now; mapped, valid in this boot only

What a map says is there, is there. In this boot the order of writes is enough (data, then map): the page cache
outlives a killed server. Across a power cut only `.saved` counts, and it is written after an fdatasync of the data it
speaks of; before a hole is punched it is written without the chunk. So either may say less than is there, never more.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import struct
import time
from array import array
from pathlib import Path
from threading import Lock
from typing import Final

from dsecd.erofs.model import SUM
from dsecd.erofs.tar import bad

_HEAD: Final = struct.Struct("=8s40sQQ")  # magic, boot id, inode, size
_MAGIC: Final = b"dsecmap1"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
_PUNCH: Final = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class CacheFile:
    """Methods are safe in threads as far as the server's lock covers `present` and `used`; saves have their own."""

    def __init__(self, cache: Path, run: Path, hexa: str, sums: bytes) -> None:
        """Opens, or makes, the file. sums: checked against the digest here, whoever brought them."""
        if hashlib.sha256(sums).hexdigest() != hexa:
            raise bad(f"data {hexa[:12]}: its list of sums is altered")
        self.hex = hexa
        self.path = cache / f"{hexa}.data"
        self.sums = sums
        self.chunks = len(sums) // 32
        self._saved_path = cache / f"{hexa}.saved"
        self._map_path = run / f"{hexa}.map"
        self._saving = Lock()
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = 0
        self.ino = os.fstat(self.fd).st_ino
        self.count = 0
        self.dirty = False
        self.used = array("d")
        self._map: mmap.mmap | None = None
        self._saved = bytearray(self.chunks)

    def open(self, size: int) -> None:
        """Find out what is there. A file of another length or with another inode number holds nothing of ours."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if -(-size // SUM) != self.chunks:
            raise bad(f"data {self.hex[:12]}: {self.chunks} sums for {size} bytes")
        found = os.fstat(self.fd).st_size
        if found != size:
            if found:
                os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, size)
            self._saved_path.unlink(missing_ok=True)
            self._map_path.unlink(missing_ok=True)
        self.size = size
        self._saved = bytearray(self._read(self._saved_path, b"") or bytes(self.chunks))
        now = self._read(self._map_path, _BOOT)
        if now is None:
            self._write(self._map_path, _BOOT, bytes(self._saved), durable=False)
        with self._map_path.open("rb+") as f:
            self._map = mmap.mmap(f.fileno(), _HEAD.size + self.chunks) if self.chunks else None
        self.count = self._bytes().count(1)
        # When its chunks were last read is not kept; when the file was is good enough an order to begin with.
        self.used = array("d", [time.monotonic() - max(0.0, time.time() - self._last_saved())]) * self.chunks

    # -- what is there -------------------------------------------------------------------------------------------

    def __contains__(self, chunk: int) -> bool:
        return self._map is not None and self._map[_HEAD.size + chunk] == 1

    @property
    def complete(self) -> bool:
        return self.count == self.chunks

    @property
    def cached_bytes(self) -> int:
        return min(self.count * SUM, self.size)

    def sum(self, chunk: int) -> bytes:
        return self.sums[chunk * 32 : chunk * 32 + 32]

    def length(self, chunk: int) -> int:
        return min(SUM, self.size - chunk * SUM)

    def write(self, chunk: int, data: bytes | memoryview) -> None:
        """The bytes only; the caller sets the bit after. What could be written in part is taken back."""
        at, view = chunk * SUM, memoryview(data)
        try:
            while view:
                n = os.pwrite(self.fd, view, at)
                at, view = at + n, view[n:]
        except OSError:
            with contextlib.suppress(OSError):
                punch(self.fd, chunk * SUM, SUM)
            raise

    def read(self, chunk: int) -> bytes:
        return os.pread(self.fd, self.length(chunk), chunk * SUM)

    def set(self, chunk: int) -> None:
        assert self._map is not None
        if self._map[_HEAD.size + chunk] != 1:
            self._map[_HEAD.size + chunk] = 1
            self.count += 1
        self.used[chunk] = time.monotonic()
        self.dirty = True

    def clear(self, chunk: int) -> None:
        assert self._map is not None
        if self._map[_HEAD.size + chunk] == 1:
            self._map[_HEAD.size + chunk] = 0
            self.count -= 1

    # -- on disk -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Make what is there now survive a power cut."""
        with self._saving:
            if self.dirty:
                self.dirty = False
                now = self._bytes()
                os.fdatasync(self.fd)
                # Chunks cleared since the copy was made must not come back: `punch` waits for `_saving`.
                self._write(self._saved_path, b"", now, durable=True)
                self._saved = bytearray(now)

    def punch(self, chunks: list[int]) -> None:
        """Give the blocks back; the chunks have been cleared, and nobody reads them any more."""
        with self._saving:
            for chunk in chunks:
                self._saved[chunk] = 0
            self._write(self._saved_path, b"", bytes(self._saved), durable=True)
            for chunk in chunks:
                punch(self.fd, chunk * SUM, SUM)

    def in_use(self) -> bool:
        """Whether anybody but us has it open, a mount that only a dying process still sees included.

        A write lease is granted to the only one that has a file open. It is given back at once.
        """
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            return True
        fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        os.close(self.fd)

    def remove(self) -> None:
        """The file and all that was known of it. Maps first: they must not speak of a file to come."""
        for path in (self._map_path, self._saved_path, self.path, self.path.with_suffix(".sums")):
            path.unlink(missing_ok=True)
        self.close()

    def _bytes(self) -> bytes:
        return b"" if self._map is None else self._map[_HEAD.size :]

    def _last_saved(self) -> float:
        try:
            return self._saved_path.stat().st_mtime
        except FileNotFoundError:
            return time.time()

    def _read(self, path: Path, boot: bytes) -> bytes | None:
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(raw) != _HEAD.size + self.chunks or raw[: _HEAD.size] != self._head(boot):
            return None
        return raw[_HEAD.size :]

    def _write(self, path: Path, boot: bytes, content: bytes, *, durable: bool) -> None:
        new = path.with_name(path.name + ".new")
        with new.open("wb") as f:
            f.write(self._head(boot) + content)
            if durable:
                f.flush()
                os.fsync(f.fileno())
        new.rename(path)
        if durable:
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _head(self, boot: bytes) -> bytes:
        return _HEAD.pack(_MAGIC, boot, self.ino, self.size)


def punch(fd: int, offset: int, length: int) -> None:
    if _libc.fallocate(fd, _PUNCH, offset, length) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"fallocate: {os.strerror(number)}")
