"""Life-cycle events: a bounded recent history and whoever listens now."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from msgspec import Struct

HISTORY: Final = 10_000
BACKLOG: Final = 10_000


class Event(Struct):
    """seq rises by one within a daemon's life; at is UNIX time."""

    seq: int
    at: float
    sandbox_id: str
    event: str
    state: str
    text: str
    labels: dict[str, str]
    project: str


class Events:
    """Publish to many. A listener that falls 10,000 behind loses the oldest and sees the gap in seq."""

    def __init__(self) -> None:
        self._seq = 0
        self._history: deque[Event] = deque(maxlen=HISTORY)
        self._listeners: set[_Listener] = set()

    def publish(self, sandbox_id: str, event: str, state: str, text: str, labels: dict[str, str], project: str) -> None:
        self._seq += 1
        item = Event(self._seq, time.time(), sandbox_id, event, state, text, labels, project)
        self._history.append(item)
        for listener in self._listeners:
            listener.put(item)

    async def follow(self, since: int | None) -> AsyncIterator[Event]:
        """Events after `since` (None: from now on), for ever."""
        listener = _Listener()
        for item in self._history:
            if since is not None and item.seq > since:
                listener.put(item)
        self._listeners.add(listener)
        try:
            while True:
                yield await listener.take()
        finally:
            self._listeners.discard(listener)


class _Listener:
    def __init__(self) -> None:
        self._items: deque[Event] = deque(maxlen=BACKLOG)
        self._wake = asyncio.Event()

    def put(self, item: Event) -> None:
        self._items.append(item)
        self._wake.set()

    async def take(self) -> Event:
        while not self._items:
            self._wake.clear()
            await self._wake.wait()
        return self._items.popleft()
