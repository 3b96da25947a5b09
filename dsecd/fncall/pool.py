"""Pools of places: for each image two kinds (with a zygote, without), made ahead of demand, replaced when used up.

Where a place holds devices, which others may wait for, none is made ahead, and an idle one is soon given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from dsecd.errors import DsecError
from dsecd.fncall.box import Box, Places, Where
from dsecd.fncallconfig import FnCallConfig

log = logging.getLogger("dsecd.fncall")

STARTS_AT_ONCE: Final = 2  # of one pool
DEVICE_IDLE_S: Final = 2.0


class Pool:
    """Places of one kind. Whoever waits gets one in the order of asking."""

    def __init__(self, places: Places, where: Where, zygote: tuple[str, ...], config: FnCallConfig, most: int) -> None:
        self._places = places
        self.where = where
        self._ahead, self._least, self._idle_s = 1, config.boxes_min, config.idle_s
        if where.devices:
            self._ahead, self._least, self._idle_s = 0, 0, DEVICE_IDLE_S
        self._zygote = zygote
        self._config = config
        self._most = most
        self._idle: deque[Box] = deque()
        self._waiting: deque[asyncio.Future[Box]] = deque()
        self._busy: set[Box] = set()
        self._starting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts: set[asyncio.Task[None]] = set()  # of those, what makes a place or waits for devices
        self._closed = False
        self.used = time.monotonic()

    @property
    def size(self) -> int:
        return len(self._idle) + len(self._busy) + self._starting

    @property
    def is_quiet(self) -> bool:
        """Nothing runs there, nothing is made and nobody waits."""
        return not (self._busy or self._starting or self._waiting)

    def occupancy(self) -> tuple[int, int, int, int]:
        """Places that are idle, that run a call, that are being made; calls that wait for one."""
        return len(self._idle), len(self._busy), self._starting, len(self._waiting)

    @contextlib.asynccontextmanager
    async def box(self) -> AsyncIterator[Box]:
        """A place whose cell is ready, for one call."""
        one = await self._take()
        try:
            yield one
        finally:
            self._spawn(self._give_back(one))

    async def _take(self) -> Box:
        self.used = time.monotonic()
        while self._idle:
            one = self._idle.pop()  # the last one used: its pages and caches are warm
            self._busy.add(one)
            if not one.broken:
                self._refill()
                return one
            self._spawn(self._end(one))
        if self._closed:
            raise DsecError("shutting_down", "the daemon is stopping")
        waiter: asyncio.Future[Box] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._refill()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._spawn(self._give_back(waiter.result()))
            raise

    def _refill(self) -> None:
        """Ahead of demand: one more than is asked for, as long as there may be more."""
        wanted = max(len(self._waiting) + self._ahead - len(self._idle), self._least - self.size)
        while not self._closed and wanted > self._starting < STARTS_AT_ONCE and self.size < self._most:
            self._starting += 1
            start = self._spawn(self._start())
            self._starts.add(start)
            start.add_done_callback(self._starts.discard)

    async def _start(self) -> None:
        try:
            one = await Box.start(self._places, self.where, self._zygote)
        except (DsecError, OSError) as exc:
            self._starting -= 1
            error = exc if isinstance(exc, DsecError) else DsecError("internal", f"a place of calls: {exc}")
            if not self._closed and error.kind != "unsupported":
                log.warning("no place for calls on %s: %s", self.where.image, error.message)
            # Those that wait would wait for ever if nothing runs whose end could serve them.
            if not self._busy and self._starting == 0:
                while self._waiting:
                    waiter = self._waiting.popleft()
                    if not waiter.done():
                        waiter.set_exception(error)
            return
        self._starting -= 1
        # Making one takes both cores of a small host for 50 ms or more, so those of one age do not go at one time.
        one.worth = random.randint(-(-self._config.recycle_after // 2), self._config.recycle_after)
        self._busy.add(one)
        self._hand_out(one)

    def _hand_out(self, one: Box) -> None:
        """To who waits longest, else among the idle ones."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(one)
                self._refill()
                return
        self._busy.discard(one)
        if self._closed:
            self._spawn(self._end(one))
        else:
            self._idle.append(one)

    async def _give_back(self, one: Box) -> None:
        if one.calls < one.worth:
            try:
                await one.ready()
            except DsecError as exc:
                if not self._closed:
                    log.warning("a place of calls is replaced: %s", exc.message)
            else:
                self._hand_out(one)
                return
        await self._end(one)
        if self._waiting:
            self._refill()

    async def _end(self, one: Box) -> None:
        self._busy.discard(one)
        try:
            await one.end()
        except (DsecError, OSError) as exc:
            log.error("something of a place of calls is left: %s", exc)

    async def shrink(self) -> None:
        """After a while without calls: down to the least."""
        if time.monotonic() - self.used < self._idle_s:
            return
        while self.size > self._least and self._idle:
            await self._end(self._idle.popleft())

    async def close(self) -> None:
        """End all; what runs is killed."""
        self._closed = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(DsecError("shutting_down", "the daemon is stopping"))
        self._waiting.clear()
        for start in self._starts:
            start.cancel()
        for one in [*self._idle, *self._busy]:
            await self._end(one)
        self._idle.clear()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
