"""Which CPUs a command may use, so that `nproc` inside shows what the sandbox was given.

A cgroup quota alone leaves `nproc` at the host's number, and a test suite then starts 192 workers on one CPU's worth of
time. Each command is bound to ceil(cpu) CPUs, those with the fewest running commands at that moment: sandboxes are
mostly idle, so binding them for life would pile bursts onto few CPUs.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import os
from typing import Any


class CpuChooser:
    """Counts running commands per CPU of this daemon's own affinity."""

    def __init__(self) -> None:
        self._running = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0)

    def choose(self, cores: float, until: asyncio.Future[Any]) -> bytes:
        """An affinity mask (little-endian) held until the future is done; b"" when all CPUs may be used."""
        wanted = max(1, math.ceil(cores))
        if wanted >= len(self._running):
            return b""
        chosen = heapq.nsmallest(wanted, self._running, key=self._running.__getitem__)
        for cpu in chosen:
            self._running[cpu] += 1

        def release(_future: asyncio.Future[Any]) -> None:
            for cpu in chosen:
                self._running[cpu] -= 1

        until.add_done_callback(release)
        mask = sum(1 << cpu for cpu in chosen)
        return mask.to_bytes(max(chosen) // 8 + 1, "little")
