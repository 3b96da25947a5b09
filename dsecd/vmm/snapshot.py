"""Saved machines on disk: copied sparse, with a digest for each file, checked before they are loaded."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dsecd.errors import DsecError
from dsecd.vmm.machine import Driver, Snapshot

_PIECE: Final = 4 << 20


def extents(fd: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of what is not a hole."""
    end = os.fstat(fd).st_size
    at = 0
    while at < end:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at - start


def digest(path: Path) -> str:
    """sha256 of the size and of every piece that is not all zeros, with its offset: a hole equals zeros. Blocks."""
    with path.open("rb") as file:
        return _walk(file.fileno(), None)


def copy(source: Path, target: Path) -> str:
    """Copy without the holes and the zeros, to disk; the digest of what was copied. Blocks."""
    with path_new(target) as out, source.open("rb") as file:
        os.ftruncate(out, os.fstat(file.fileno()).st_size)
        return _walk(file.fileno(), out)


def copy_back(source: Path, target: Path, prepare: Callable[[int], None] = lambda _: None) -> None:
    """The same for what is used next: no digest, nothing synced. prepare: of the empty target. Blocks."""
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        prepare(fd)
        with source.open("rb") as file:
            os.ftruncate(fd, os.fstat(file.fileno()).st_size)
            for start, size in extents(file.fileno()):
                sent, at = 0, start
                os.lseek(fd, start, os.SEEK_SET)
                while sent < size and (n := os.sendfile(fd, file.fileno(), at, size - sent)):
                    sent, at = sent + n, at + n
    finally:
        os.close(fd)


@contextlib.contextmanager
def path_new(path: Path) -> Iterator[int]:
    """A file that is not there yet. Its pages leave the page cache when it is on disk."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield fd
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _walk(fd: int, out: int | None) -> str:
    total = hashlib.sha256(b"%d" % os.fstat(fd).st_size)
    buffer = memoryview(bytearray(_PIECE))
    zeros = bytes(_PIECE)
    at = 0
    for start, size in extents(fd):
        # On a grid, so that the digest does not depend on where a file system happens to have holes.
        at = max(at, start - start % _PIECE)
        while at < start + size:
            count = os.preadv(fd, [buffer], at)
            piece = buffer[:count]
            if piece != zeros[:count]:
                total.update(b"%d:" % at)
                total.update(piece)
                if out is not None:
                    os.pwritev(out, [piece], at)
            at += _PIECE
    return total.hexdigest()


def cpu_model() -> str:
    """The host's CPU as /proc/cpuinfo names it; machines under TCG do not depend on it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def check(snapshot: Snapshot, directory: Path, driver: Driver, memory: int) -> None:
    """Refuse what this driver cannot load, or what is not what was saved: `vmm`. Blocks on the digests."""
    if snapshot.driver != driver.name or snapshot.version != driver.version or snapshot.accel != driver.accel:
        raise DsecError(
            "vmm",
            f"the snapshot is of {snapshot.driver} {snapshot.version} ({snapshot.accel}), this host has "
            f"{driver.name} {driver.version} ({driver.accel}): start the sandbox anew",
        )
    if snapshot.accel == "kvm" and snapshot.cpu != cpu_model():
        raise DsecError("vmm", f"the snapshot was made on a {snapshot.cpu}, this host has a {cpu_model()}")
    if snapshot.memory != memory:
        raise DsecError("vmm", f"the snapshot is of a machine of {snapshot.memory} bytes, not of {memory}")
    for name, expected in snapshot.files.items():
        try:
            found = digest(directory / name)
        except OSError as exc:
            raise DsecError("vmm", f"the snapshot's file {name} cannot be read: {exc.strerror}") from exc
        if found != expected:
            raise DsecError("vmm", f"the snapshot's file {name} is not what was saved (truncated or altered)")
