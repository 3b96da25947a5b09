"""A store that has, beside a blob, the same blob squeezed: less for a slow line, and still readable in ranges.

    BLOB.z   header        magic, piece size, number of pieces, size of the blob; little-endian
             u32[number]   length of each piece as it is here
             pieces        256 KiB of the blob each, one zstd frame; as they are where that is no shorter

Whoever publishes a directory makes them there, next to the blobs, with

    python -m dsecd.erofs.stores.squeezed DIRECTORY

which also removes those whose blob is gone. A blob without one is read as it is. What comes out is checked against the
image's sums like anything else from a store; here it is only kept from growing larger than it may.

zstd and not zlib, which took 180 MB/s of one core to expand real images' bytes where zstd does 480, and is 8 % larger:
with many readers on few cores, expanding is most of what the page server does.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import struct
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import zstandard

from dsecd.erofs.model import SUM
from dsecd.erofs.stores import BlobStore, unreadable
from dsecd.errors import DsecError

SUFFIX: Final = ".z"
LEVEL: Final = 9  # 46 MB/s of one core; 15 saves 6 % more and takes ten times as long
MAX_PIECES: Final = 1 << 20
ABSENT_S: Final = 60.0  # how long a blob is believed to have none
_MAGIC: Final = b"dsecz2\0\0"
_HEAD: Final = struct.Struct("<8sIIQ")
_own: Final = threading.local()  # a (de)compressor is for one thread


class Index:
    """Where the pieces are. ValueError for what is no index of a blob."""

    def __init__(self, head: bytes) -> None:
        magic: bytes
        self.piece: int
        self.count: int
        self.size: int
        magic, self.piece, self.count, self.size = _HEAD.unpack(head)
        if magic != _MAGIC or self.piece != SUM or not 0 < self.count <= MAX_PIECES:
            raise ValueError("it is none")
        if self.count != -(-self.size // self.piece):
            raise ValueError(f"{self.count} pieces for {self.size} bytes")
        self._at = array("Q")

    def fill(self, lengths: bytes) -> None:
        found = array("I", lengths)
        if sys.byteorder == "big":
            found.byteswap()
        if any(not 0 < length <= self.raw(number) for number, length in enumerate(found)):
            raise ValueError("a piece is longer here than in the blob")
        start = _HEAD.size + 4 * self.count
        self._at = array("Q", itertools.accumulate(found, initial=start))

    def raw(self, number: int) -> int:
        return min(self.piece, self.size - number * self.piece)

    def span(self, number: int) -> tuple[int, int]:
        """(offset, length) in the squeezed blob."""
        return self._at[number], self._at[number + 1] - self._at[number]


class SqueezedStore:
    """Reads ranges of blobs through their squeezed twins where `inner` has them."""

    def __init__(self, inner: BlobStore) -> None:
        self.name = inner.name
        self.close = inner.close
        self._inner = inner
        self._indexes: dict[str, Index] = {}
        self._absent: dict[str, float] = {}

    def read(self, blob: str, offset: int, size: int, timeout_s: float) -> bytes:
        if not size:
            return b""
        until = time.monotonic() + timeout_s
        index = self._index(blob, until)
        if index is None or offset + size > index.size:
            return self._inner.read(blob, offset, size, _left(until))
        first, last = offset // index.piece, (offset + size - 1) // index.piece
        start, end = index.span(first)[0], sum(index.span(last))
        data = memoryview(self._inner.read(blob + SUFFIX, start, end - start, _left(until)))
        whole = bytearray()
        for number in range(first, last + 1):
            at, length = index.span(number)
            try:
                whole += _expanded(data[at - start : at - start + length], index.raw(number))
            except (zstandard.ZstdError, ValueError) as exc:
                self._indexes.pop(blob, None)  # the next try looks at it afresh
                raise unreadable(self.name, blob + SUFFIX, f"piece {number} cannot be expanded: {exc}") from exc
        skip = offset - first * index.piece
        return bytes(memoryview(whole)[skip : skip + size])

    def _index(self, blob: str, until: float) -> Index | None:
        """None: it has no twin that could be used. DsecError: nobody knows yet."""
        if (found := self._indexes.get(blob)) is not None:
            return found
        if time.monotonic() - self._absent.get(blob, -ABSENT_S) < ABSENT_S:
            return None
        try:
            found = Index(self._inner.read(blob + SUFFIX, 0, _HEAD.size, _left(until)))
            found.fill(self._inner.read(blob + SUFFIX, _HEAD.size, 4 * found.count, _left(until)))
        except DsecError as exc:
            if exc.detail.get("status") != 404 and exc.detail.get("errno") != errno.ENOENT:
                raise
        except ValueError:
            pass
        else:
            self._indexes[blob] = found
            return found
        self._absent[blob] = time.monotonic()
        return None


def _left(until: float) -> float:
    return max(0.05, until - time.monotonic())


def _expanded(data: memoryview, size: int) -> bytes | memoryview:
    """Never more than `size` bytes: what a frame says of its size is looked at first, and holds it to that."""
    if len(data) == size:
        return data
    says = zstandard.frame_content_size(data)
    if says != size:
        raise ValueError(f"it says it holds {says} bytes, not {size}")
    if not hasattr(_own, "expand"):
        _own.expand = zstandard.ZstdDecompressor(max_window_size=SUM).decompress
    found: bytes = _own.expand(data)
    if len(found) != size:
        raise ValueError(f"{len(found)} bytes instead of {size}")
    return found


# -- making them -------------------------------------------------------------------------------------------------------
def squeeze(blob: Path) -> Path:
    """Write the twin of a blob, durably and at once. One that is there stays, but for one of an older format."""
    target = blob.with_name(blob.name + SUFFIX)
    with contextlib.suppress(FileNotFoundError), target.open("rb") as there:
        if there.read(len(_MAGIC)) == _MAGIC:
            return target
    size = blob.stat().st_size
    count = -(-size // SUM)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with blob.open("rb") as source, new.open("xb") as out:
            out.seek(_HEAD.size + 4 * count)
            lengths = array("I")
            for piece in _squeezed(iter(lambda: source.read(SUM), b"")):
                lengths.append(len(piece))
                out.write(piece)
            if sys.byteorder == "big":
                lengths.byteswap()
            out.seek(0)
            out.write(_HEAD.pack(_MAGIC, SUM, count, size) + lengths.tobytes())
            out.flush()
            os.fsync(out.fileno())
        new.chmod(blob.stat().st_mode & 0o777)
        new.rename(target)
    finally:
        new.unlink(missing_ok=True)
    return target


def _squeezed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """In order, on all cores, a few at a time: zstd lets go of the interpreter's lock."""

    def one(piece: bytes) -> bytes:
        if not hasattr(_own, "squeeze"):
            _own.squeeze = zstandard.ZstdCompressor(level=LEVEL).compress
        found: bytes = _own.squeeze(piece)
        return found if len(found) < len(piece) else piece

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        while batch := list(itertools.islice(pieces, 32)):
            yield from pool.map(one, batch)


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print("usage: python -m dsecd.erofs.stores.squeezed DIRECTORY", file=sys.stderr)  # noqa: T201
        return 2
    top = Path(argv[0])
    for blob in sorted(top.glob("*.data")):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            squeeze(blob)
    for twin in top.glob("*.data" + SUFFIX):
        if not twin.with_suffix("").exists():
            twin.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
