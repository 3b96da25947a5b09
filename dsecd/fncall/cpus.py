"""CPUs of calls: each running call has one to itself, so that timings of calls side by side can be compared."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator


class CallCpus:
    """As many calls at once as given; 0: as many as there are CPUs. First come, first served."""

    def __init__(self, at_once: int = 0) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        self.count = at_once or len(cpus)
        self._free = deque(cpus[n % len(cpus)] for n in range(self.count))
        self._waiting: deque[asyncio.Future[int]] = deque()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[bytes]:
        """An affinity mask of one CPU (little-endian bytes)."""
        cpu = await self._take()
        try:
            yield (1 << cpu).to_bytes(cpu // 8 + 1, "little")
        finally:
            self._give(cpu)

    async def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._give(waiter.result())
            raise

    def _give(self, cpu: int) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(cpu)
                return
        self._free.append(cpu)
