"""Files that a VMM maps as virtio-pmem devices: as long as a multiple of 2 MiB, and never cut while somebody maps them.

A file that has such a length already is used as it is. Any other gets a padded copy here, made once per digest, and
shared by all machines (and so are its pages). The source is left alone: the image store holds its files against the
length in their manifest. The copy is a reflink where the file system has them; else its bytes are copied in the kernel,
and its holes stay holes.

    <directory>/                0700
        <key>.pmem              0444, the bytes of its source and zeros to the next 2 MiB; mtime: the source's
        .making-*               work in progress; swept at `open`

What keeps a machine from SIGBUS, which is what a file that is cut under a mapping is to its VMM: nothing ever shortens
one of these. They are made under another name and appear by rename, are removed by unlink alone (whoever maps them
keeps the inode), and lie where no one but root has a way. For a file that is used as it is, the same is its owner's
rule: the image store commits by rename and removes by unlink. Caches that are filled on demand are cut, and so do not
belong here.

A copy is believed while its length and its mtime are those of its source; whatever else it is, it is made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import stat
import tempfile
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Final

from msgspec import Struct

from dsecd.errors import DsecError, Kind

ALIGN: Final = 2 << 20
_FICLONE: Final = 0x40049409
_STEP: Final = 64 << 20  # a copy looks up after so many bytes, to see whether it is still wanted
_KEY: Final = re.compile(r"[0-9a-f]{8,64}")
_NO_REFLINK: Final = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS})
_NO_COPY_RANGE: Final = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class PmemFile(Struct, frozen=True):
    """path: map it read-only. size: of the device, a multiple of 2 MiB. content: how much of it is the source's."""

    path: Path
    size: int
    content: int


def padded(size: int) -> int:
    """The next multiple of 2 MiB; of nothing, the least that a device can have."""
    return max(ALIGN, -(-size // ALIGN) * ALIGN)


class Backing:
    """The directory of padded copies. One daemon owns it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._making: dict[str, asyncio.Lock] = {}

    def open(self) -> None:
        """Make the directory; remove what an earlier daemon left half-made. Blocks."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stale in self.directory.glob(".making-*"):
            stale.unlink(missing_ok=True)

    async def get(self, source: Path, key: str) -> PmemFile:
        """The backing file for `source`. key: hex of the digest of its bytes, which names the copy.

        DsecError `image` when the source cannot be read, `disk_full` when there is no room for the copy.
        """
        if not _KEY.fullmatch(key):
            raise DsecError("internal", f"{key[:80]!r} is no key of a pmem file")
        async with self._making.setdefault(key, asyncio.Lock()):
            cancelled = threading.Event()
            call = asyncio.ensure_future(asyncio.to_thread(self._get, source, key, cancelled))
            try:
                return await asyncio.shield(call)
            except asyncio.CancelledError:
                cancelled.set()
                await asyncio.wait({call})  # at most one step of the copy: the half-made file goes with it
                _seen(call)
                raise

    def keep(self, keys: Collection[str]) -> int:
        """Remove the copies of all others, and say how many bytes that gives back once nobody maps them. Blocks."""
        freed = 0
        for path in self.directory.glob("*.pmem"):
            if path.stem not in keys:
                with contextlib.suppress(FileNotFoundError):
                    found = path.stat()
                    path.unlink()
                    freed += found.st_blocks * 512
        return freed

    def _get(self, source: Path, key: str, cancelled: threading.Event) -> PmemFile:
        try:
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise DsecError("image", f"the image's file {source} cannot be read: {e.strerror}") from e
        try:
            st = os.fstat(fd)
            result = PmemFile(self.directory / f"{key}.pmem", padded(st.st_size), st.st_size)
            if st.st_size == result.size:
                return PmemFile(source, st.st_size, st.st_size)
            if not _is_copy(result.path, result.size, st.st_mtime_ns):
                self._make(fd, st, result, cancelled)
            return result
        finally:
            os.close(fd)

    def _make(self, source: int, st: os.stat_result, result: PmemFile, cancelled: threading.Event) -> None:
        fd, name = tempfile.mkstemp(prefix=".making-", dir=self.directory)
        try:
            _copy(source, fd, st.st_size, cancelled)
            os.truncate(fd, result.size)
            if os.fstat(source).st_size != st.st_size:
                raise DsecError("image", "the image's file changed while it was made a device of: verify the image")
            os.fchmod(fd, 0o444)
            os.utime(fd, ns=(st.st_mtime_ns, st.st_mtime_ns))
            os.fdatasync(fd)  # the name must not survive a power cut without the bytes
            Path(name).rename(result.path)
        except OSError as e:
            Path(name).unlink(missing_ok=True)
            kind: Kind = "disk_full" if e.errno in (errno.ENOSPC, errno.EDQUOT) else "vmm"
            raise DsecError(kind, f"no pmem file could be made in {self.directory}: {e.strerror}") from e
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def _is_copy(path: Path, size: int, mtime_ns: int) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    sealed = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o222 and found.st_uid == os.geteuid()
    times = (mtime_ns, mtime_ns - mtime_ns % 10**9)  # the second: where a file system keeps whole seconds
    return sealed and found.st_size == size and found.st_mtime_ns in times


def _copy(source: int, target: int, size: int, cancelled: threading.Event) -> None:
    try:
        fcntl.ioctl(target, _FICLONE, source)
        return
    except OSError as e:
        if e.errno not in _NO_REFLINK:
            raise
    at = 0
    while (data := _next_data(source, at)) < size:
        at = min(size, os.lseek(source, data, os.SEEK_HOLE))
        while data < at:
            if cancelled.is_set():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            if not (done := _copy_some(source, target, data, min(_STEP, at - data))):
                return  # the source was cut: its size is looked at again
            data += done


def _next_data(fd: int, at: int) -> int:
    """Where data begins at or after `at`; beyond any file when there is none."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as e:
        if e.errno == errno.ENXIO:
            return 1 << 63
        raise


def _copy_some(source: int, target: int, at: int, size: int) -> int:
    try:
        return os.copy_file_range(source, target, size, at, at)
    except OSError as e:
        if e.errno not in _NO_COPY_RANGE:
            raise
    return os.pwrite(target, os.pread(source, min(size, 1 << 20), at), at)


def _seen(call: asyncio.Future[PmemFile]) -> None:
    """Nobody waits any more; an exception must not be called lost."""
    if not call.cancelled():
        call.exception()
