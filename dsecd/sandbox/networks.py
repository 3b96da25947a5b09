"""A sandbox's network through its life: given with the first rule that allows something, changed, taken back."""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from dsecd.agent import files
from dsecd.agent.frames import Type
from dsecd.errors import DsecError
from dsecd.net.segment import Card, Kind
from dsecd.wire import network as wire

if TYPE_CHECKING:
    from dsecd.sandbox.live import Live
    from dsecd.sandbox.manager import Manager

log = logging.getLogger("dsecd.sandbox")

RESOLV_CONF: Final = b"/etc/resolv.conf"
WRITE_S: Final = 10.0
GRANTED_S: Final = 20.0
KINDS: Final[Mapping[str, Kind]] = {"container": "veth", "microvm": "tap", "fullvm": "dhcp"}  # by backend


async def set_network(manager: Manager, ident: str, rules: Mapping[str, bool]) -> wire.SandboxNetwork:
    """These rules in place of all it had. They hold before this returns, and after a restart."""
    manager.rooms.network.check(rules)
    await manager.carry(_set(manager, manager.standing(ident), rules))
    return shown(manager, ident)


async def _set(manager: Manager, live: Live, rules: Mapping[str, bool]) -> None:
    """The kernel first: when the registry cannot be written, it gets the old ones again."""
    record = live.record
    async with live.lock:
        manager.standing(record.id)  # not over since
        before = record.spec.network_rules
        await follow(live, rules)
        record.spec.network_rules = dict(rules)
        try:
            await manager.store.put(record)
        except DsecError:
            record.spec.network_rules = before
            await follow(live, before)
            raise


def shown(manager: Manager, ident: str) -> wire.SandboxNetwork:
    """What a client sees of it."""
    record, network = manager.record(ident), manager.rooms.network
    return wire.SandboxNetwork(
        id=record.id,
        rules=record.spec.network_rules,
        attached=network.has(record.id),
        addresses=network.addresses(record.id),
        open=network.learnt(record.id),
    )


async def follow(live: Live, rules: Mapping[str, bool]) -> None:
    """Its rules from now on. Without a network: one, if they allow anything."""
    record, network = live.record, live.rooms.network
    if record.networked:
        await network.change(record.id, rules)
        return
    if not any(rules.values()):
        return
    if record.backend != "container":
        raise DsecError("unsupported", "a VM gets its card when it is made, if its network_rules allow something then")
    if record.state not in ("creating", "running"):
        raise DsecError("conflict", f"sandbox {record.id} is {record.state} and has no link yet: resume it first")
    live.stack.push_async_callback(network.detach, record.id)
    try:
        answered = await network.attach(record.id, record.slot, record.pid, rules)
    except BaseException:
        await network.detach(record.id)
        raise
    record.networked = True
    if not answered:
        await _write_resolv_conf(live)


async def card_for(live: Live, *, needed: bool = False) -> Card | None:
    """Of a virtual machine that is about to start; None: its rules allow nothing, so it has none. needed: it has one
    all the same, as its source does."""
    record, network = live.record, live.rooms.network
    if not needed and not any(record.spec.network_rules.values()):
        return None
    live.stack.push_async_callback(network.detach, record.id)
    card = await network.attach_tap(record.id, record.slot, KINDS[record.backend], record.spec.network_rules)
    record.networked = True
    return card


async def configure(live: Live) -> None:
    """What a guest with a card is told once it runs. Where no agent of ours is, DHCP tells it all."""
    record, network = live.record, live.rooms.network
    if record.networked and live.body is not None and live.body.link is not None:
        # Our agent may be up before the guest's network is; whoever made it will use both.
        if KINDS[record.backend] == "dhcp" and not await network.granted(record.id, GRANTED_S):
            log.warning("the guest has not asked for its address within %g s, going on", GRANTED_S,
                        extra={"sandbox_id": record.id})  # fmt: skip
        await _write_resolv_conf(live)


async def take_back(live: Live) -> None:
    """After a restart of the daemon."""
    record, network = live.record, live.rooms.network
    if record.networked:
        live.stack.push_async_callback(network.detach, record.id)
        await network.adopt(record.id, record.slot, KINDS[record.backend], record.pid, record.spec.network_rules)


async def _write_resolv_conf(live: Live) -> None:
    """The image has none, or one that leads nowhere: there is nothing that could be covered. Without it names are not
    found, which is no reason to end a sandbox."""
    try:
        async with asyncio.timeout(WRITE_S):
            path = await _target(live)
            with files.Exchange(live.link, RESOLV_CONF.decode()) as exchange:
                exchange.request(
                    Type.WRITE,
                    files.write_request(path, 0o644, None, None, parents=True, exclusive=False, append=False),
                )
                await exchange.put(live.rooms.network.resolv_conf)
                await files.finish_put(exchange)
    except (DsecError, TimeoutError) as exc:
        log.warning("/etc/resolv.conf could not be written: %s, going on", exc, extra={"sandbox_id": live.record.id})


async def _target(live: Live) -> bytes:
    """Where it leads, inside the sandbox, where the agent goes: to a resolver's file that is not there, mostly."""
    try:
        found = await files.file_stat(live.link, RESOLV_CONF, follow=False)
    except DsecError:
        return RESOLV_CONF
    return RESOLV_CONF if found.target is None else posixpath.normpath(posixpath.join(b"/etc", found.target))
