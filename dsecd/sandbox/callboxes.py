"""Places of calls, made as sandboxes are and without a record.

Nobody has to find them again, and the next daemon sweeps what a killed one left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping

from dsecd.agent.link import AgentLink
from dsecd.aio import uninterrupted
from dsecd.cgroup.meter import CallMeter
from dsecd.container.bundle import Plan
from dsecd.devices.model import Grant
from dsecd.devices.pools import wanted
from dsecd.erofs.compose import compose
from dsecd.fncall.box import Where
from dsecd.sandbox.ids import new_id
from dsecd.sandbox.live import MIB, Rooms, enter_layer

DISK = 64 * MIB  # of a root that nothing is ever written to
PIDS = 8192
SPARE = 512 * MIB  # for what an agent and a zygote hold themselves
DEVICE_WAIT_S = 60.0


class CallPlace:
    """One of them (dsecd.fncall.box.Place)."""

    def __init__(
        self, stack: contextlib.AsyncExitStack, link: AgentLink, meter: CallMeter, env: Mapping[str, str]
    ) -> None:
        self._stack = stack
        self._ending: asyncio.Future[None] | None = None
        self.link = link
        self.meter = meter
        self.env = env

    async def end(self) -> None:
        """Once, however many ask for it; no cancel stops it."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._stack.aclose())
        await asyncio.shield(self._ending)


class CallPlaces:
    """dsecd.fncall.box.Places, from images and containers. memory_max: bytes of the largest call."""

    def __init__(self, tag: str, rooms: Rooms, memory_max: int, apparmor: str) -> None:
        self._tag = tag
        self._rooms = rooms
        self._memory = memory_max + SPARE
        self.apparmor = apparmor

    def check(self, where: Where) -> None:
        """That there is such an image, and that there are such devices."""
        compose(self._rooms.images, where.image)
        self._rooms.devices.check(wanted(where.devices))

    async def start(self, where: Where) -> CallPlace:
        """On failure nothing is left. Errors as of a sandbox."""
        stack = contextlib.AsyncExitStack()
        try:
            return await self._start(stack, where)
        except BaseException:
            await asyncio.shield(stack.aclose())
            raise

    async def _start(self, stack: contextlib.AsyncExitStack, where: Where) -> CallPlace:
        rooms, ident = self._rooms, new_id(self._tag)
        grant = Grant()
        if where.devices:  # first: what waits for a device holds nothing yet
            stack.callback(rooms.devices.release, ident)
            _, grant = await rooms.devices.lease(ident, wanted(where.devices), DEVICE_WAIT_S)
        digests = compose(rooms.images, where.image).digests
        lowers = [str(await enter_layer(rooms, stack, ident, digest)) for digest in digests]
        slot = rooms.slots.take()
        stack.callback(rooms.slots.free, slot)
        base = rooms.slots.base(slot)
        stack.push_async_callback(asyncio.to_thread, rooms.pool.destroy, ident)
        space = await uninterrupted(asyncio.to_thread(rooms.pool.create, ident, DISK, base))
        plan = Plan(
            id=ident,
            lowers=tuple(lowers),
            scratch=str(space.path),
            id_base=base,
            hostname="box",
            memory=self._memory,
            pids=PIDS,
            cpu=float(os.cpu_count() or 1),
            calls=True,
            devices=grant,
        )
        stack.push_async_callback(rooms.containers.end, ident)
        container = await rooms.containers.start(plan)
        stack.push_async_callback(container.release)
        meter = container.cgroup.call_meter(memory=self._memory, pids=PIDS)
        stack.callback(meter.close)
        return CallPlace(stack, container.link, meter, dict(grant.env))
