"""cachefiles in on-demand mode (Linux 5.19 to 7.1, where compiled): the requests and commands of /dev/cachefiles.

Thin; OSError on failure. Layouts and rules are those of the kernel's fs/cachefiles/{daemon,ondemand}.c of 6.12 and
include/uapi/linux/cachefiles.h. One read gives one request:

    OPEN   a mount wants a blob: its volume and name, and a descriptor to write it through; answered with `copen`
    READ   somebody waits for a range of it that is a hole; answered on that descriptor
    CLOSE  nobody uses it any more; not answered

The device can be open once on a host. While any copy of its descriptor lives readers wait; when the last one goes they
get EIO, and later ones ENOBUFS, never holes as zeros. A blob's descriptor ends with the process; whoever has the device
next is asked to OPEN again when somebody reads.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

DEVICE: Final = Path("/dev/cachefiles")
DEVICE_NAME: Final = "cachefiles"  # in systemd's FD store
DOMAIN: Final = "dsecd"  # images in one domain share the blobs that have one name
TAG: Final = "dsecd"  # of the cache, among the host's
VOLUME: Final = f"erofs,{DOMAIN}"  # how EROFS calls a domain
META, DATA = "m-", "d-"  # before the digest, in names of blobs
MESSAGE_MAX: Final = 1024  # the kernel's own bound
ALIGN: Final = 4096  # of what is written, where, and from where in memory: it is direct I/O
_READ_COMPLETE: Final = 0x4004_9801  # _IOW(0x98, 1, int)
# Free shares of the file system at which cachefiles begins to worry; below `bstop` (1 % is preset) it writes nothing.
# Each must lie between its neighbours at every moment; they begin as 7, 5 and 1.
_SPACE: Final = ("bcull 2%", "brun 3%", "fcull 2%", "frun 3%")

_HEAD: Final = struct.Struct("=IIII")  # message, operation, length of all, object
_OPEN: Final = struct.Struct("=IIII")  # length of the volume's name with its NUL, of the blob's, descriptor, flags
_READ: Final = struct.Struct("=QQ")
_OP_OPEN, _OP_CLOSE, _OP_READ = 0, 1, 2


class Open(NamedTuple):
    message: int
    object: int
    volume: str
    blob: str
    fd: int


class Read(NamedTuple):
    message: int
    object: int
    offset: int
    length: int


class Close(NamedTuple):
    message: int
    object: int


def parse(raw: bytes) -> Open | Read | Close:
    """One request as it was read. ValueError: it is none, or one of a kernel that speaks otherwise."""
    if len(raw) < _HEAD.size:
        raise ValueError(f"{len(raw)} bytes are no request")
    message, operation, length, number = _HEAD.unpack_from(raw)
    if length != len(raw):
        raise ValueError(f"a request of {length} bytes came as {len(raw)}")
    body = raw[_HEAD.size :]
    if operation == _OP_CLOSE:
        return Close(message, number)
    if operation == _OP_READ:
        if len(body) != _READ.size:
            raise ValueError(f"READ with {len(body)} bytes")
        offset, count = _READ.unpack(body)
        if not count or offset + count >= 1 << 63:
            raise ValueError(f"READ of {count} bytes at {offset}")
        return Read(message, number, offset, count)
    if operation == _OP_OPEN:
        return _parse_open(message, number, body)
    raise ValueError(f"unknown request {operation}")


def _parse_open(message: int, number: int, body: bytes) -> Open:
    if len(body) < _OPEN.size:
        raise ValueError(f"OPEN with {len(body)} bytes")
    volume_size, blob_size, fd, _ = _OPEN.unpack_from(body)
    names = body[_OPEN.size :]
    if volume_size + blob_size != len(names) or not volume_size or not blob_size:
        raise ValueError(f"OPEN with names of {volume_size} and {blob_size} bytes in {len(names)}")
    if fd >= 1 << 31:
        raise ValueError("OPEN without a descriptor")
    volume, blob = names[: volume_size - 1], names[volume_size:]
    # What is none of our names, whatever its bytes, is somebody else's blob and refused as such.
    return Open(message, number, volume.decode("ascii", "replace"), blob.decode("ascii", "replace"), fd)


class Device:
    """The opened device. `fd` may be copied; all copies are one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def bind(cls, directory: Path) -> Device:
        """Open it and make `directory` the cache. EBUSY: another process has it (or cachefilesd). ENOENT: no such
        device. EOPNOTSUPP: no on-demand mode, or the directory's file system will not do."""
        if any(c.isspace() for c in str(directory)):
            raise OSError(errno.EOPNOTSUPP, f"a cache directory may have no space in its name: {directory}")
        fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            device = cls(fd)
            for command in (*_SPACE, f"dir {directory}", f"tag {TAG}"):
                device.command(command)
            try:
                device.command("bind ondemand")
            except OSError as e:
                if e.errno == errno.EINVAL:
                    raise OSError(errno.EOPNOTSUPP, "cachefiles has no on-demand mode in this kernel") from e
                raise
        except BaseException:
            os.close(fd)
            raise
        return device

    def command(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def next(self) -> bytes:
        """The next request, or nothing."""
        return os.read(self.fd, MESSAGE_MAX)

    def opened(self, message: int, size: int) -> None:
        """Answer OPEN: the blob's size in bytes, or a negative errno."""
        self.command(f"copen {message},{size}")

    def restore(self) -> None:
        """Be given again what an earlier reader of the device took and did not answer."""
        self.command("restore")

    def close(self) -> None:
        os.close(self.fd)


def complete(fd: int, message: int) -> bool:
    """Answer READ on the blob's descriptor: the reader looks again, and gets EIO where there still is a hole.
    False: nobody waits (any more)."""
    try:
        fcntl.ioctl(fd, _READ_COMPLETE, message)
    except OSError:
        return False
    return True


def hole(fd: int, offset: int, length: int) -> bool:
    """Whether anything of that range is missing. OSError ENOBUFS: the kernel has not set up the blob yet."""
    return os.lseek(fd, offset, os.SEEK_HOLE) < offset + length if length else False


def extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges that are there, in order. ENOBUFS as above."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:  # nothing more
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at


def find(root: Path, blob: str) -> Path | None:
    """Where cachefiles keeps a blob: `D` is put before names that need no encoding, in one of 256 directories."""
    return next(root.glob(f"cache/*/*/D{blob}"), None)


class Buffer:
    """Page-aligned memory, for one thread at a time."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size)
        self._size = size

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """All of `data`, which may be longer than the buffer; filled up with zeros to ALIGN."""
        view = memoryview(data)
        while view:
            piece = view[: self._size]
            length = -(-len(piece) // ALIGN) * ALIGN
            self._map[: len(piece)] = bytes(piece)
            self._map[len(piece) : length] = bytes(length - len(piece))
            with memoryview(self._map) as whole, whole[:length] as aligned:
                done = os.pwrite(fd, aligned, offset)
            if done != length:
                raise OSError(errno.EIO, f"{done} of {length} bytes were written")
            offset, view = offset + len(piece), view[len(piece) :]

    def close(self) -> None:
        self._map.close()
