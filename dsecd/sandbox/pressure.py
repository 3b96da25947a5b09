"""When the host runs short of memory, guests are asked for what they do not use; when it has enough, they get it back.

The balloon deflates by itself when a guest would otherwise run out of memory, so asking for too much costs time, not
processes. What a guest says of its use is only ever used to ask that guest for less.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from dsecd.agent.files import guest_stats
from dsecd.agent.frames import Tag
from dsecd.errors import DsecError
from dsecd.vmm.backend import Vm

LOOK_S: Final = 5.0
ASK_S: Final = 10.0
SHORT: Final = 0.10  # of the host's memory is available: ask
ENOUGH: Final = 0.20  # give back; the gap keeps it from going to and fro
LEAST: Final = 96 << 20  # what a guest is left with in any case
_ALIGN: Final = 2 << 20


def available(meminfo: Path = Path("/proc/meminfo")) -> float:
    """The part of the host's memory that could be had without swapping."""
    found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(found["MemAvailable"].split()[0]) / int(found["MemTotal"].split()[0])


def target(memory: int, total: int, free: int) -> int:
    """Bytes a guest of `memory` should keep that says it has `free` of `total`: what it uses, and a quarter of that."""
    used = memory - min(max(free, 0), total, memory)
    return min(memory, max(LEAST, -(-used * 5 // 4 // _ALIGN) * _ALIGN))


class Pressure:
    """One task. vms: the microVMs that run now."""

    def __init__(self, vms: Callable[[], Iterable[Vm]], look: Callable[[], float] = available) -> None:
        self._vms = vms
        self._look = look
        self.taken: dict[str, int] = {}  # by guest that was asked: bytes that it should do without

    async def run(self) -> None:
        while True:
            await self.once()
            await asyncio.sleep(LOOK_S)

    async def once(self) -> None:
        """Look at the host and act."""
        part = self._look()
        running = {vm.id: vm for vm in self._vms()}
        self.taken = {ident: size for ident, size in self.taken.items() if ident in running}
        if part < SHORT:
            for vm in running.values():
                with contextlib.suppress(DsecError, TimeoutError):
                    async with asyncio.timeout(ASK_S):
                        said = await guest_stats(vm.link)
                        total, free = said.integer(Tag.MEM_TOTAL, 0), said.integer(Tag.MEM_AVAILABLE, 0)
                        keep = target(vm.spec.memory, total, free)
                        await vm.balloon(keep)
                        self.taken[vm.id] = vm.spec.memory - keep
        elif part > ENOUGH:
            for ident in list(self.taken):
                with contextlib.suppress(DsecError, TimeoutError):
                    async with asyncio.timeout(ASK_S):
                        await running[ident].balloon(running[ident].spec.memory)
                        self.taken.pop(ident, None)
