"""Can a guest map an EROFS image with DAX? Looked up in the image itself, which may be anybody's.

The kernel (fs/erofs/super.c, inode.c) turns DAX off without a word for a whole mount whose blocks are not pages, and
for each regular file that is neither flat nor in chunks: files with an inline tail, which is what mkfs.erofs
makes by default, and compressed ones. Their pages are then cached by every guest for itself.

Every length is held against the file's own; the walk reads each inode once and stops at bounds.
"""

from __future__ import annotations

import os
import stat
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from dsecd.errors import DsecError

PAGE: Final = 4096
MAX_INODES: Final = 4_000_000
MAX_DIRECTORY: Final = 256 << 20  # bytes of all directories together

_MAGIC: Final = 0xE0F5E1E2
_SUPERBLOCK: Final = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQ24x")
# Features that change what this reader must understand: zero padding, compression, chunks, devices, tail packing,
# fragments and long xattr prefixes are told by the inodes or change no layout; later ones change the inode itself.
_KNOWN_FEATURES: Final = 0x7F
_PLAIN, _COMPRESSED_FULL, _INLINE, _COMPRESSED, _CHUNKED = range(5)
_COMPACT: Final = struct.Struct("<HHHHIIIIHHI")
_EXTENDED: Final = struct.Struct("<HHHHQIIIIqII16x")
_DIRENT: Final = struct.Struct("<QHBx")
_DIRECTORY: Final = 2
_WINDOW: Final = 1 << 16


class Fitness(Struct, frozen=True):
    """files: regular files seen. Without `why`, all of them can be mapped; else what stands against it, one clause."""

    files: int
    unfit_files: int
    why: str = ""

    @property
    def fit(self) -> bool:
        return not self.why


def examine(image: Path) -> Fitness:
    """Blocks. DsecError `image` when it is no EROFS image, or a broken one."""
    try:
        fd = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise DsecError("image", f"the image's metadata cannot be read: {e.strerror}") from e
    try:
        return _Walk(fd).fitness()
    except OSError as e:
        raise DsecError("image", f"the image's metadata cannot be read: {e.strerror}") from e
    finally:
        os.close(fd)


def require(image: Path, name: str) -> None:
    """Refuse an image whose files would silently be cached by each guest. DsecError `image`, in one sentence."""
    found = examine(image)
    if not found.fit:
        raise DsecError(
            "image",
            f"image {name} is not fit for DAX: {found.why}; import it again with dsecctl, or choose virtio-blk",
            detail={"files": found.files, "unfit_files": found.unfit_files},
        )


class _Walk:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._window = (0, b"")
        self._directories = MAX_DIRECTORY
        fields = _SUPERBLOCK.unpack(self._bytes(1024, _SUPERBLOCK.size))
        if fields[0] != _MAGIC:
            raise _bad("it is not an EROFS image")
        self._block_bits: int = fields[3]
        self._root: int = fields[5]
        self._meta: int = fields[10]
        self._features: int = fields[14]

    def fitness(self) -> Fitness:
        if self._block_bits != PAGE.bit_length() - 1:
            return Fitness(0, 0, f"its blocks have 2^{self._block_bits} bytes, and a page has {PAGE}")
        if unknown := self._features & ~_KNOWN_FEATURES:
            return Fitness(0, 0, f"it needs features (0x{unknown:x}) that this check does not know")
        files, inline, compressed = 0, 0, 0
        for mode, layout in self._inodes():
            if layout > _CHUNKED:
                raise _bad("it has an inode of unknown layout")
            if stat.S_ISREG(mode):
                files += 1
                inline += layout == _INLINE
                compressed += layout in (_COMPRESSED, _COMPRESSED_FULL)
        reasons = []
        if inline:
            reasons.append(f"{inline} of its {files} files have their end inline (the default layout of mkfs.erofs)")
        if compressed:
            reasons.append(f"{compressed} of its {files} files are compressed")
        return Fitness(files, inline + compressed, " and ".join(reasons))

    def _inodes(self) -> Iterator[tuple[int, int]]:
        """(mode, layout) of every inode below the root, each once."""
        seen = bytearray(self._size // 256 + 1)  # a bit for each place where an inode can be
        queue = array("Q", [self._root])
        count = 1
        while queue:
            nid = queue.pop()
            mode, layout, size, block, behind = self._inode(nid)
            yield mode, layout
            if not stat.S_ISDIR(mode):
                continue
            if layout not in (_PLAIN, _INLINE):
                raise _bad("a directory of it is compressed or in chunks, which this check does not read")
            for child in self._children(size, layout, block, behind):
                if child >= self._size // 32:
                    raise _bad("it points outside itself")
                if not seen[child >> 3] & 1 << (child & 7):
                    seen[child >> 3] |= 1 << (child & 7)
                    queue.append(child)
                    count += 1
            if count > MAX_INODES:
                raise _bad(f"it has more than {MAX_INODES} inodes")

    def _inode(self, nid: int) -> tuple[int, int, int, int, int]:
        """(mode, layout, size, first block, where what is inline begins)"""
        at = (self._meta << self._block_bits) + nid * 32
        (form,) = struct.unpack("<H", self._bytes(at, 2))
        shape = _EXTENDED if form & 1 else _COMPACT
        _, xattrs, mode, _, size, *rest = shape.unpack(self._bytes(at, shape.size))
        behind = at + shape.size + (12 + (xattrs - 1) * 4 if xattrs else 0)
        return mode, form >> 1 & 7, size, rest[0] if form & 1 else rest[1], behind

    def _children(self, size: int, layout: int, block: int, behind: int) -> Iterator[int]:
        """nids of a directory's entries, also of . and .., which were seen before."""
        self._directories -= size
        if self._directories < 0:
            raise _bad("its directories are too large")
        inline = size % PAGE if layout == _INLINE else 0
        for at in range(0, size - inline, PAGE):
            yield from _entries(self._bytes(block * PAGE + at, min(PAGE, size - at)))
        if inline:
            yield from _entries(self._bytes(behind, inline))

    def _bytes(self, at: int, size: int) -> bytes:
        """Through a window, since inodes lie side by side."""
        start, window = self._window
        if not start <= at <= at + size <= start + len(window):
            if at < 0 or at + size > self._size:
                raise _bad("it points outside itself")
            start = at // _WINDOW * _WINDOW
            window = os.pread(self._fd, max(_WINDOW * 2, size), start)
            self._window = (start, window)
            if at + size > start + len(window):
                raise _bad("it was cut while it was read")
        return window[at - start : at - start + size]


def _entries(block: bytes) -> Iterator[int]:
    if len(block) < _DIRENT.size:
        raise _bad("a directory of it is broken")
    names_at = _DIRENT.unpack_from(block)[1]
    if names_at < _DIRENT.size or names_at % _DIRENT.size or names_at > len(block):
        raise _bad("a directory of it is broken")
    for at in range(0, names_at, _DIRENT.size):
        yield _DIRENT.unpack_from(block, at)[0]


def _bad(what: str) -> DsecError:
    return DsecError("image", f"the image's metadata is broken or altered: {what}")
