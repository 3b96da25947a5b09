"""One timer for all deadlines: a heap of moments, checked again when they come.

Nothing is ever removed from the heap: a renewed deadline simply gets a later entry, and the owner's `due` says at the
moment itself whether it still holds. So a renewal in the last millisecond wins.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from dsecd.sandbox.record import now


class Deadlines:
    """`due(id)` returns the next moment for that id (None: there is none), acting on what has passed."""

    def __init__(self, due: Callable[[str], float | None]) -> None:
        self._due = due
        self._heap: list[tuple[float, str]] = []
        self._soonest: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, ident: str, moment: float | None) -> None:
        """Look at `ident` at `moment`, or earlier if that was asked for before."""
        if moment is None:
            return
        known = self._soonest.get(ident)
        if known is not None and known <= moment:
            return
        self._soonest[ident] = moment
        heapq.heappush(self._heap, (moment, ident))
        if self._heap[0] == (moment, ident):
            self._arm()

    def drop(self, ident: str) -> None:
        self._soonest.pop(ident, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._heap:
            delay = max(0.0, self._heap[0][0] - now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._fire)

    def _fire(self) -> None:
        while self._heap and self._heap[0][0] <= now():
            moment, ident = heapq.heappop(self._heap)
            if self._soonest.get(ident) != moment:
                continue  # a stale entry
            del self._soonest[ident]
            self.set(ident, self._due(ident))
        self._arm()
