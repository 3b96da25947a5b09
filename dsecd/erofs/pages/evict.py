"""Keeps the cache within its bound: what was read longest ago goes, as holes.

An event that was allowed is a promise that the bytes will still be there when the reader gets to them, and the kernel
does not say when it has. So a chunk of a mounted file goes only when nobody has asked for it for `settle_s`, and only
while events of that file are seen at all: a file that was complete and unmarked is marked again first and watched for
that long. Files that nobody has open are free. Hence the bound is what the cache is brought back to, and what was read
in the last minute may lie beyond it.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Mapping
from threading import Condition, Lock
from typing import Final

from dsecd.erofs.model import SUM
from dsecd.erofs.pages.chunks import AHEAD, Chunk, Fetcher, File

log: Final = logging.getLogger(__name__)

LOW_WATER: Final = 0.95  # of the bound: how far down it goes once it goes


class Evictor:
    """`files` is the server's table, by digest; `mark` marks a file again."""

    def __init__(
        self,
        lock: Condition,
        files: Mapping[str, File],
        fetcher: Fetcher,
        *,
        bound: int,
        settle_s: float,
        mark: Callable[[File], None],
    ) -> None:
        self._lock = lock
        self._files = files
        self._fetcher = fetcher
        self._bound = bound
        self._settle_s = settle_s
        self._mark = mark
        self._turn = Lock()
        self._not_before = 0.0
        self.evicted = 0

    def used(self) -> int:
        return sum(file.cached.count for file in list(self._files.values())) * SUM

    def keep_bound(self) -> None:
        over = self.used() - self._bound
        now = time.monotonic()
        if over <= 0 or now < self._not_before:
            return
        if not self.make_room(over + int(self._bound * (1 - LOW_WATER))):
            self._not_before = now + min(1.0, self._settle_s)  # looking at all chunks costs

    def make_room(self, size: int) -> bool:
        """Free at least one chunk of the `size` bytes asked for. False: nothing may go now."""
        with self._turn:
            victims = self._choose(-(-size // SUM))
            for file, chunks in victims.items():
                self._evict(file, chunks)
            return bool(victims)

    def _choose(self, number: int) -> dict[File, list[int]]:
        now = time.monotonic()
        found: list[tuple[float, int, int]] = []
        with self._lock:
            files = list(self._files.values())
            for which, file in enumerate(files):
                if self._may_lose(file, now):
                    oldest = now - self._settle_s if file.watched else now
                    found += [
                        (used, which, chunk)
                        for chunk, used in enumerate(file.cached.used)
                        if used <= oldest and chunk in file.cached and chunk not in file.wanted
                    ]
            victims: dict[File, list[int]] = {}
            for _, which, chunk in heapq.nsmallest(number, found):
                file = files[which]
                victims.setdefault(file, []).append(chunk)
                file.cached.clear(chunk)
                # Whoever asks for it from here on waits until the hole is there, and then for the fetch.
                doomed = file.wanted[chunk] = Chunk(file, chunk, AHEAD)
                doomed.state = "evicting"
            return victims

    def _may_lose(self, file: File, now: float) -> bool:
        if not file.watched:
            return not file.cached.in_use()
        if not file.mounted or file.lost:
            return False
        if not file.marked:
            if file.latched:
                self._mark(file)
            return False
        return now - file.marked_at >= self._settle_s

    def _evict(self, file: File, chunks: list[int]) -> None:
        try:
            file.cached.punch(chunks)
            self.evicted += len(chunks) * SUM
        except OSError as exc:  # the bytes stay on disk, unknown, and are fetched again when wanted
            log.warning("cannot punch holes into %s: %s", file.cached.path, exc.strerror)
        with self._lock:
            for index in chunks:
                chunk = file.wanted.pop(index)
                readers = [read for read in chunk.readers if not read.done]
                for read in readers:
                    read.missing -= 1
                    self._fetcher.want(file, index, chunk.priority, read)
