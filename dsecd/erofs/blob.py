"""The data file of an image: the bytes of its regular files in 4 KiB blocks, appended in the order they arrive.

Files are cut into 1 MiB chunks. A chunk of zeros is a hole and takes nothing; a chunk that is there already is used
again. Files never share a block otherwise and no tail is packed into the metadata, so that every file can be mapped
straight from a pmem device (DAX).
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable
from typing import Final

from dsecd.erofs.model import BLOCK, CHUNK, SUM
from dsecd.erofs.tar import Extents, TarReader
from dsecd.erofs.tree import HOLE, Node

_ZEROS: Final = bytes(CHUNK)
_FLUSH_AT: Final = 1 << 20


class Sums:
    """sha256 of each 256 KiB (`SUM`) of the data file, as it grows, and the digest over them."""

    def __init__(self) -> None:
        self._sums: list[bytes] = []
        self._hash = hashlib.sha256()
        self._room = SUM

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view) >= self._room:
            self._hash.update(view[: self._room])
            view = view[self._room :]
            self._sums.append(self._hash.digest())
            self._hash, self._room = hashlib.sha256(), SUM
        self._hash.update(view)
        self._room -= len(view)

    def finish(self) -> tuple[bytes, str]:
        """(data.sums, data digest)"""
        if self._room != SUM:
            self._sums.append(self._hash.digest())
        sums = b"".join(self._sums)
        return sums, "sha256:" + hashlib.sha256(sums).hexdigest()


def altered_at(data: bytes, at: int, size: int, sums: bytes) -> int | None:
    """Where the first altered or missing piece begins; None: `data` is the `size` bytes at `at` (a multiple of SUM)."""
    view = memoryview(data)
    for start in range(0, size, SUM):
        number = (at + start) // SUM
        if hashlib.sha256(view[start : start + SUM]).digest() != sums[number * 32 : number * 32 + 32]:
            return at + start
    return None


class DataFile:
    """Appends chunks to a descriptor opened for reading and writing."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.sums = Sums()
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._flushed = 0
        self._known: dict[tuple[int, int], int] = {}

    @property
    def size(self) -> int:
        return self._flushed + self._buffered

    def append(self, chunk: bytes) -> int:
        """The block where these bytes begin: a new one, one that holds the same bytes already, or HOLE."""
        if chunk == _ZEROS[: len(chunk)]:
            return HOLE
        # A cheap key finds a candidate; only equal bytes make it a match. One candidate each keeps hostile input cheap.
        key = (len(chunk), hash(chunk[:192] + chunk[-192:]))
        known = self._known.get(key)
        if known is not None and self._holds(known, chunk):
            return known
        block = self.size // BLOCK
        self._known.setdefault(key, block)
        self._write(chunk)
        if len(chunk) % BLOCK:
            self._write(_ZEROS[: -len(chunk) % BLOCK])
        if self._buffered >= _FLUSH_AT:
            self.flush()
        return block

    def flush(self) -> None:
        data = memoryview(b"".join(self._buffer))
        self._buffer.clear()
        self._buffered = 0
        while data:
            n = os.pwrite(self._fd, data, self._flushed)
            self.sums.update(data[:n])
            self._flushed += n
            data = data[n:]

    def _write(self, data: bytes) -> None:
        self._buffer.append(data)
        self._buffered += len(data)

    def _holds(self, block: int, chunk: bytes) -> bool:
        if block * BLOCK + len(chunk) > self._flushed:
            self.flush()
        return os.pread(self._fd, len(chunk), block * BLOCK) == chunk


def store_file(data: DataFile, tar: TarReader, node: Node, size: int, extents: Extents | None) -> None:
    """Move the current member's data into the data file and note its chunks on the node."""
    node.size = size
    chunks = array("I")
    if extents is None:
        left = size
        while left:
            piece = tar.read(min(left, CHUNK))
            chunks.append(data.append(piece))
            left -= len(piece)
    else:
        chunks = array("I", [HOLE]) * -(-size // CHUNK)
        for index, piece in _sparse_chunks(tar, size, extents):
            chunks[index] = data.append(piece)
    node.chunks = chunks


def _sparse_chunks(tar: TarReader, size: int, extents: Extents) -> Iterable[tuple[int, bytes]]:
    """(index, bytes) of the chunks of a sparse file that have any data."""
    index, chunk = -1, bytearray()
    for start, length in extents:
        at, end = start, start + length
        while at < end:
            if at // CHUNK != index:
                if index >= 0:
                    yield index, bytes(chunk)
                index = at // CHUNK
                chunk = bytearray(min(CHUNK, size - index * CHUNK))
            offset = at % CHUNK
            n = min(end - at, CHUNK - offset)
            chunk[offset : offset + n] = tar.read(n)
            at += n
    if index >= 0:
        yield index, bytes(chunk)


def live_bytes(nodes: Iterable[Node]) -> int:
    """How much of the data file is still referred to; upper layers may have replaced the rest."""
    seen: dict[int, int] = {}
    for node in nodes:
        for index, block in enumerate(node.chunks or ()):
            if block != HOLE:
                seen[block] = _chunk_length(node, index)
    return sum(length + -length % BLOCK for length in seen.values())


def compact(old_fd: int, new: DataFile, nodes: Iterable[Node]) -> None:
    """Copy what is referred to, in the tree's order, and point the nodes at the copies."""
    for node in nodes:
        for index, block in enumerate(node.chunks or ()):
            if block != HOLE:
                assert node.chunks is not None
                chunk = os.pread(old_fd, _chunk_length(node, index), block * BLOCK)
                node.chunks[index] = new.append(chunk)


def _chunk_length(node: Node, index: int) -> int:
    return min(CHUNK, node.size - index * CHUNK)
