"""What the runs of an image read: which parts, and in which order they were first touched.

Kept beside the image (`images/<hex>/trace`), bounded, and merged over the first runs: those of later ones come in other
orders and would only make the file longer. A run is one mount, from watch to unwatch. Reads are seen only while the
file is marked, so a run on a complete cache adds nothing, and need not.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from dsecd.erofs.model import SUM

GRAIN: Final = 1 << 16  # what a touch is counted in; EROFS asks for this much at once
MAX_RUNS: Final = 8
MAX_CHUNKS: Final = 1 << 16


class Kept(Struct, frozen=True, kw_only=True):
    """The file. chunks: in order of first touch. touched: one bit for each 64 KiB."""

    runs: int = 0
    chunks: list[int] = []
    touched: bytes = b""
    events: int = 0
    hits: int = 0


class Figures(Struct, frozen=True, kw_only=True):
    """For `image show`: bytes that runs have touched, of how many; reads that found everything in the cache."""

    runs: int
    touched_bytes: int
    touched_percent: float
    hit_rate: float | None


def load(path: Path) -> Kept:
    """A trace that is not there, or cannot be read, is an empty one: it only costs speed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        return Kept()


def figures(path: Path, data_size: int) -> Figures:
    kept = load(path)
    touched = min(data_size, sum(byte.bit_count() for byte in kept.touched) * GRAIN)
    return Figures(
        runs=kept.runs,
        touched_bytes=touched,
        touched_percent=round(100 * touched / data_size, 2) if data_size else 0.0,
        hit_rate=round(kept.hits / kept.events, 4) if kept.events else None,
    )


class Trace:
    """One run on top of what was kept of earlier ones. Not for several threads without a lock."""

    def __init__(self, path: Path, chunks: int) -> None:
        self._path = path
        self._before = load(path)
        self._chunks = chunks
        self._seen = bytearray(chunks)
        self._order: list[int] = []
        self._grains = bytearray(-(-chunks * (SUM // GRAIN) // 8))
        kept = self._before.touched[: len(self._grains)]
        self._grains[: len(kept)] = kept
        self._events = self._hits = 0
        self._changed = False

    @property
    def ahead(self) -> list[int]:
        """What earlier runs read, in their order."""
        return [chunk for chunk in self._before.chunks if 0 <= chunk < self._chunks]

    def touch(self, offset: int, count: int, hit: bool) -> None:
        self._events += 1
        self._hits += hit
        self._changed = True
        for grain in range(offset // GRAIN, min(-(-(offset + count) // GRAIN), len(self._grains) * 8)):
            self._grains[grain >> 3] |= 1 << (grain & 7)
            chunk = grain * GRAIN // SUM
            if chunk < self._chunks and not self._seen[chunk]:
                self._seen[chunk] = 1
                if len(self._order) < MAX_CHUNKS:
                    self._order.append(chunk)

    def taken(self) -> Kept | None:
        """What `save` is to write, when there is anything new."""
        if not self._changed:
            return None
        self._changed = False
        before = self._before
        chunks = before.chunks
        if before.runs < MAX_RUNS:
            known = set(chunks)
            chunks = (chunks + [chunk for chunk in self._order if chunk not in known])[:MAX_CHUNKS]
        return Kept(
            runs=before.runs + 1, chunks=chunks, touched=bytes(self._grains), events=before.events + self._events,
            hits=before.hits + self._hits,
        )  # fmt: skip

    def save(self, kept: Kept) -> None:
        """Losing it costs speed only, so it is not synced; but nobody ever sees half of it. Needs no lock."""
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_bytes(msgspec.json.encode(kept))
            new.replace(self._path)
        except OSError:  # the image is being removed, or the disk is full
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
