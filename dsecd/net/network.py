"""All networks of this host's sandboxes: who has one, by which rules, and what came of it.

Whoever calls `attach`, `attach_tap` or `adopt` owns that network and calls `detach`, also after a failure. A daemon
that stops lets go of all: rules, links and learnt addresses stay where they are, in the kernel; names are answered
again by the next. No cancel stops a move half-way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from dsecd.aio import uninterrupted
from dsecd.errors import DsecError
from dsecd.net import netns
from dsecd.net.addresses import Plan
from dsecd.net.box import Box
from dsecd.net.refusals import Refusal
from dsecd.net.router import pins
from dsecd.net.rules import Compiler, Grant
from dsecd.net.segment import SIZE, Card, Kind, Segment
from dsecd.net.upstream import Upstream
from dsecd.networkconfig import NetworkConfig

log = logging.getLogger("dsecd.net")

TEND_S: Final = 5.0


class Use(Struct, frozen=True):
    """Of one sandbox since it has a network; its questions for names count as sent."""

    out_bytes: int = 0
    out_packets: int = 0
    in_bytes: int = 0
    in_packets: int = 0
    refused: int = 0


class Network:
    """One per daemon. on_refused: told of each new thing that a sandbox was refused, as (its id, what)."""

    def __init__(self, config: NetworkConfig, directory: Path, first_slot: int) -> None:
        self.plan = Plan(config.subnet4, config.subnet6, config.internal)
        self.on_refused: Callable[[str, str], None] = lambda _ident, _what: None
        self._compiler = Compiler(config, self.plan)
        self._upstream = Upstream(list(config.resolvers))
        self._directory, self._first = directory, first_slot
        self._segments: dict[int, Segment] = {}  # by first slot
        self._slots: dict[str, int] = {}  # of those that have one

    @property
    def services(self) -> dict[str, Grant]:
        return self._compiler.services

    @property
    def resolv_conf(self) -> bytes:
        """What sandboxes with a network should see as /etc/resolv.conf."""
        return self.plan.resolv_conf

    def check(self, rules: Mapping[str, bool]) -> None:
        """`invalid` for the first rule that cannot be."""
        self._compiler.policy("", rules)

    def has(self, ident: str) -> bool:
        return ident in self._slots

    # -- one sandbox --------------------------------------------------------------------------------------------------
    async def attach(self, ident: str, slot: int, pid: int, rules: Mapping[str, bool]) -> bool:
        """Give a container its network: rules first, then the link. Whether its /etc/resolv.conf leads to us; it does
        not when there is no such file."""
        policy = self._compiler.policy(ident, rules)
        self._slots[ident] = slot
        return await uninterrupted(self._segment(slot).attach(ident, slot, pid, rules, policy))

    async def attach_tap(self, ident: str, slot: int, kind: Kind, rules: Mapping[str, bool]) -> Card:
        """Give a virtual machine its network before it starts. The tap stays when its VMM ends, until `detach`."""
        policy = self._compiler.policy(ident, rules)
        self._slots[ident] = slot
        return await uninterrupted(self._segment(slot).attach_tap(ident, slot, kind, rules, policy))

    def open_tap(self, name: str) -> int:
        """For a VMM that starts: a descriptor, the caller's to close. Blocks for a moment."""
        segment = self._segment(int(name.removeprefix("box")))
        try:
            return segment.router.inside(lambda: netns.open_tap(name))
        except OSError as exc:
            raise DsecError("network", f"the machine's link cannot be opened: {exc.strerror}") from exc

    async def granted(self, ident: str, timeout: float) -> bool:
        """Wait for a machine of the kind `dhcp` to know its address."""
        slot = self._slots[ident]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._segment(slot).granted(slot)
                return True
        return False

    @contextlib.asynccontextmanager
    async def lend_tap(self, name: str, pid: int, started: int, uid: int) -> AsyncIterator[None]:
        """For a VMM that opens a tap by its name where it lives: a new one is in that process's namespace inside, then
        in the router, and the VMM's namespace is empty again. When the block fails it is gone with the VMM."""
        slot = int(name.removeprefix("box"))
        segment = self._segment(slot)
        await uninterrupted(segment.give_tap(slot, pid, started, uid))
        yield
        await uninterrupted(segment.take_tap(slot, pid, started))

    async def change(self, ident: str, rules: Mapping[str, bool]) -> None:
        """Other rules, in one transaction. What they do not allow any more is cut."""
        policy = self._compiler.policy(ident, rules)
        slot = self._slots[ident]
        await uninterrupted(self._segment(slot).change(slot, rules, policy))

    async def become(self, config: NetworkConfig) -> None:
        """Other services, for whoever names them by now, too. `invalid`, with all as it was, for one that cannot be.
        Rules with a service that is no more are left out."""
        self._compiler = Compiler(config, self.plan)
        for ident, slot in list(self._slots.items()):
            rules = self._segment(slot).box(slot).rules
            kept = {key: allowed for key, allowed in rules.items() if self._known(ident, key, allowed)}
            try:
                await self.change(ident, kept)
            except DsecError as exc:
                log.error("its services could not be changed: %s", exc.message, extra={"sandbox_id": ident})

    async def detach(self, ident: str) -> None:
        """Nothing of it is left. Of one that has none: nothing."""
        slot = self._slots.pop(ident, None)
        if slot is not None:
            await uninterrupted(self._segment(slot).detach(slot))

    async def adopt(self, ident: str, slot: int, kind: Kind, pid: int, rules: Mapping[str, bool]) -> None:
        """Take back what an earlier daemon attached. Rules that the configuration no longer knows are left out."""
        kept = {key: allowed for key, allowed in rules.items() if self._known(ident, key, allowed)}
        policy = self._compiler.policy(ident, kept)
        self._slots[ident] = slot
        if not await uninterrupted(self._segment(slot).adopt(ident, slot, kind, kept, policy)):
            log.warning("its network was lost and is made again", extra={"sandbox_id": ident})
            if kind == "veth":
                await self.attach(ident, slot, pid, kept)
            else:
                await self.attach_tap(ident, slot, kind, kept)  # for when its VMM is started anew

    def _known(self, ident: str, key: str, allowed: bool) -> bool:
        try:
            self._compiler.policy(ident, {key: allowed})
        except DsecError as exc:
            log.warning("a rule is left out: %s", exc.message, extra={"sandbox_id": ident})
            return False
        return True

    async def sweep(self) -> None:
        """After all were adopted: what nobody owns goes, and routers that nobody uses."""
        for first in await asyncio.to_thread(pins, self._directory):
            self._segments.setdefault(first, self._made(first))
        for segment in self._segments.values():
            await segment.sweep()

    async def tend(self) -> None:
        """For ever: look whether the host's own part of each router is still there."""
        while True:
            await asyncio.sleep(TEND_S)
            for segment in list(self._segments.values()):
                try:
                    await segment.tend()
                except DsecError as exc:
                    log.error("a network cannot be looked after: %s", exc.message)

    async def close(self) -> None:
        """Let go of all."""
        for segment in self._segments.values():
            await segment.close()
        await self._upstream.close()

    # -- looking ------------------------------------------------------------------------------------------------------
    def use(self, ident: str) -> Use:
        slot = self._slots.get(ident)
        if slot is None:
            return Use()
        sent, got, refused = self._segment(slot).counters(slot)
        return Use(*sent, *got, refused[1])

    def refusals(self, ident: str) -> list[Refusal]:
        return self._box(ident).refusals.list() if self.has(ident) else []

    def learnt(self, ident: str) -> list[str]:
        """Addresses that are open because it asked for a name."""
        return self._box(ident).learnt() if self.has(ident) else []

    def addresses(self, ident: str) -> list[str]:
        """Its own."""
        if not self.has(ident):
            return []
        box = self._box(ident)
        pair = self.plan.of(box.slot)
        return [str(pair.far4), *([str(pair.far6)] if box.six else [])]

    # -- inside -------------------------------------------------------------------------------------------------------
    def _box(self, ident: str) -> Box:
        slot = self._slots[ident]
        return self._segment(slot).box(slot)

    def _segment(self, slot: int) -> Segment:
        first = slot - (slot - self._first) % SIZE
        if first not in self._segments:
            self._segments[first] = self._made(first)
        return self._segments[first]

    def _made(self, first: int) -> Segment:
        return Segment(self.plan, self._directory, first, self._upstream, lambda *words: self.on_refused(*words))
