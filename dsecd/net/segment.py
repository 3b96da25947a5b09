"""One segment: a router, the sandboxes on it, and who answers them names.

A daemon has as many as it needs, since what nftables does to one sandbox takes time by all that is in its namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from dsecd import proc
from dsecd.errors import DsecError
from dsecd.net import filter as packet_filter
from dsecd.net import netns
from dsecd.net.addresses import Plan
from dsecd.net.box import Box
from dsecd.net.dhcp import Lease, Responder, listen
from dsecd.net.forwarder import Forwarder
from dsecd.net.netlink import Nftables, RefusalLog
from dsecd.net.router import Router, near6
from dsecd.net.rules import Policy
from dsecd.net.upstream import Upstream

log = logging.getLogger("dsecd.net")

# How a sandbox has its end of the link. veth: in its namespace; tap: a machine whose agent is told its addresses; dhcp:
# a tap, too, of a machine that asks for one.
Kind = Literal["veth", "tap", "dhcp"]

SIZE: Final = 128  # sandboxes of one: a change takes 3 ms with so many, and 60 with a thousand


class Card(Struct, frozen=True):
    """A virtual machine's network card: the tap behind it, and its addresses as the agent takes them."""

    tap: str
    mac: str
    words: str


class Segment:
    """first: its first slot. tell: as `Network.on_refused`. Moves of its sandboxes take turns."""

    def __init__(
        self, plan: Plan, directory: Path, first: int, upstream: Upstream, tell: Callable[[str, str], None]
    ) -> None:
        self.plan = plan
        self.router = Router(plan, directory, first)
        self._upstream, self._tell = upstream, tell
        self._lock = asyncio.Lock()
        self._boxes: dict[int, Box] = {}  # by slot
        self._strays: dict[int, list[str]] = {}  # slots that the router has and nobody claimed yet: their sets
        self._responders: dict[int, Responder] = {}  # by slot
        self._forwarder: Forwarder | None = None
        self._nftables: Nftables | None = None
        self._log: RefusalLog | None = None

    # -- one sandbox --------------------------------------------------------------------------------------------------
    async def attach(self, ident: str, slot: int, pid: int, rules: Mapping[str, bool], policy: Policy) -> bool:
        """See `Network.attach`."""
        async with self._lock:
            box = await self._begin(ident, slot, rules, policy)
            async with _namespaces(pid) as namespaces:
                await self._link(box, namespaces[0])
                return await asyncio.to_thread(self._cover, namespaces[1])

    async def attach_tap(self, ident: str, slot: int, kind: Kind, rules: Mapping[str, bool], policy: Policy) -> Card:
        async with self._lock:
            box = await self._begin(ident, slot, rules, policy, kind)
            pair, name = self.plan.of(slot), packet_filter.link_name(slot)
            await self.router.ip(f"tuntap add dev {name} mode tap\n{self._near(slot)}")
            if kind == "dhcp":
                await self._respond(slot)
        words = [pair.far4, pair.near4, *([pair.far6, pair.near6] if box.six else [])]
        return Card(name, _mac(slot).hex(":"), "/".join(map(str, words)))

    async def give_tap(self, slot: int, pid: int, started: int, uid: int) -> None:
        """A new tap into the network namespace of a VMM, for that user. `take_tap` brings it home."""
        name = packet_filter.link_name(slot)
        async with self._lock, _namespaces(pid, started) as (namespace, _):
            if name in await asyncio.to_thread(self.router.links):
                await self.router.ip(f"link del {name}\n")
            await self.router.ip_at(namespace, f"tuntap add dev {name} mode tap user {uid}\n")

    async def take_tap(self, slot: int, pid: int, started: int) -> None:
        """The VMM has opened it and keeps that end of it, wherever the device is."""
        name = packet_filter.link_name(slot)
        async with self._lock:
            async with _namespaces(pid, started) as (namespace, _):
                await self.router.ip_at(namespace, f"link set {name} netns /proc/self/fd/4\n")
            await self.router.ip(self._near(slot))

    async def change(self, slot: int, rules: Mapping[str, bool], policy: Policy) -> None:
        async with self._lock:
            await self._apply(self._boxes[slot], rules, policy)

    async def detach(self, slot: int) -> None:
        async with self._lock:
            box = self._boxes.get(slot)
            if box is not None:
                await self._remove(slot, box.sets)
                del self._boxes[slot]

    async def adopt(self, ident: str, slot: int, kind: Kind, rules: Mapping[str, bool], policy: Policy) -> bool:
        """Take back what an earlier daemon attached; False: there is nothing of it."""
        async with self._lock:
            await self._find()
            sets = self._strays.get(slot)
            if sets is None:
                return False
            box = self._new(ident, slot)
            box.sets, box.six = sets, await self._six(kind)
            if kind == "dhcp":
                await self._respond(slot)
            await self._apply(box, rules, policy)
            del self._strays[slot]
            return True

    async def sweep(self) -> None:
        """After all were adopted: what nobody owns goes, and the router with the last."""
        async with self._lock:
            await self._find()
            for slot, sets in self._strays.items():
                log.warning("removing a network nobody owns: slot %d", slot)
                await self._remove(slot, sets)
            self._strays = {}
        if not self._boxes:
            await self.close()

    async def close(self) -> None:
        """Let go; the router goes, too, when nobody uses it."""
        async with self._lock:
            await self._close()

    async def tend(self) -> None:
        async with self._lock:
            await self.router.mend()

    async def _close(self) -> None:
        for slot in list(self._responders):
            self._responders.pop(slot).close()
        if self._forwarder is not None:
            await self._forwarder.close()
        if self._log is not None:
            asyncio.get_running_loop().remove_reader(self._log.fileno())
            self._log.close()
        if self._nftables is not None:
            self._nftables.close()
        self._forwarder = self._log = self._nftables = None
        if self.router.is_open and not self._boxes and not self._strays:
            await self.router.remove()
        self.router.release()

    async def granted(self, slot: int) -> None:
        """Wait until its DHCP client has an address; of one without such a client: for ever."""
        await self._responders[slot].granted.wait()

    # -- looking ------------------------------------------------------------------------------------------------------
    def box(self, slot: int) -> Box:
        return self._boxes[slot]

    def counters(self, slot: int) -> list[tuple[int, int]]:
        """(bytes, packets) out, in, refused."""
        if self._nftables is None:
            return [(0, 0)] * 3
        return [self._nftables.counter(f"{word}{slot}") for word in ("out", "in", "no")]

    # -- inside -------------------------------------------------------------------------------------------------------
    async def _begin(
        self, ident: str, slot: int, rules: Mapping[str, bool], policy: Policy, kind: Kind = "veth"
    ) -> Box:
        """Its rules, before its link."""
        await self.router.open()
        await self._listen()
        box = self._new(ident, slot)
        box.six = await self._six(kind)
        await self._apply(box, rules, policy, packet_filter.open_box(slot, self.plan.of(slot)))
        return box

    def _new(self, ident: str, slot: int) -> Box:
        box = self._boxes[slot] = Box(ident, slot, lambda what: self._tell(ident, what))
        box.nftables = self._nftables
        return box

    async def _apply(self, box: Box, rules: Mapping[str, bool], policy: Policy, before: str = "") -> None:
        text, sets = packet_filter.rules(box.slot, policy, self.plan, box.sets, log=self._log is not None)
        await self.router.nft(before + text)
        box.become(rules, policy, sets)

    async def _six(self, kind: Kind) -> bool:
        """Whether it has IPv6; who asks for an address is given none of that."""
        return kind != "dhcp" and await self.router.six()

    async def _respond(self, slot: int) -> None:
        """Answer what the guest's DHCP client asks on its link. Without a link, none asks."""
        name = packet_filter.link_name(slot)
        if name not in await asyncio.to_thread(self.router.links):
            log.warning("the link %s is gone: its machine has no network until it is made anew", name)
            return
        try:
            sock = await asyncio.to_thread(self.router.inside, lambda: listen(name))
        except OSError as exc:
            raise DsecError("network", f"nobody can answer DHCP on the machine's link: {exc.strerror}") from exc
        pair = self.plan.of(slot)
        lease = Lease(_mac(slot), pair.far4, pair.near4, self.plan.resolver)
        self._responders[slot] = contextvars.Context().run(Responder, sock, lease)

    def _near(self, slot: int) -> str:
        """The router's end of a link, for `ip`. Its address is the same for ever: a guest that was saved knows it."""
        pair, name = self.plan.of(slot), packet_filter.link_name(slot)
        mac = _mac(slot, 1).hex(":")
        return f"addr add {pair.near4}/31 dev {name}\n{near6(pair, name)}link set {name} address {mac} up\n"

    async def _link(self, box: Box, namespace: int) -> None:
        pair, name = self.plan.of(box.slot), packet_filter.link_name(box.slot)
        veth = f"link add {name} type veth peer name eth0 netns /proc/self/fd/4\n"
        await self.router.ip(veth + self._near(box.slot), namespace)
        await self.router.ip_at(
            namespace,
            f"link set eth0 addrgenmode none\naddr add {pair.far4}/31 dev eth0\n"
            + (f"addr add {pair.far6}/127 dev eth0 nodad\n" if box.six else "")
            + f"link set eth0 up\nroute add default via {pair.near4}\n"
            + (f"route add default via {pair.near6}\n" if box.six else ""),
        )

    def _cover(self, mount_namespace: int) -> bool:
        try:
            netns.cover(mount_namespace, self.router.resolv_conf, "/etc/resolv.conf")
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise DsecError("network", f"/etc/resolv.conf cannot be covered: {exc.strerror}") from exc
        return True

    async def _remove(self, slot: int, sets: Iterable[str]) -> None:
        if (responder := self._responders.pop(slot, None)) is not None:
            responder.close()
        if not self.router.is_open:
            return
        name = packet_filter.link_name(slot)
        if name in await asyncio.to_thread(self.router.links):
            with contextlib.suppress(DsecError):  # it goes by itself with the sandbox's namespace
                await self.router.ip(f"link del {name}\n")
        with contextlib.suppress(DsecError):  # never opened
            await self.router.nft(packet_filter.close_box(slot, self.plan.of(slot), sets))

    async def _find(self) -> None:
        """Once, after a restart: the router and what is in it."""
        if self.router.is_open or not await self.router.find():
            return
        for one in await self.router.listing(f"counters table inet {packet_filter.TABLE}"):
            if (counter := one.get("counter")) and str(counter["name"]).startswith("out"):
                self._strays[int(counter["name"][3:])] = []
        for one in await self.router.listing(f"sets table inet {packet_filter.TABLE}"):
            name = str(one.get("set", {}).get("name", ""))
            slot = name[1:].partition("_")[0]
            if name[:1] in ("b", "n") and slot.isdecimal() and int(slot) in self._strays:
                self._strays[int(slot)].append(name)
        await self._listen()

    async def _listen(self) -> None:
        """Sockets in the router: questions for names, learnt addresses, refusals."""
        if self._forwarder is not None:
            return
        datagrams, listener, self._nftables, self._log = await asyncio.to_thread(self.router.inside, self._sockets)
        forwarder = self._forwarder = Forwarder(self._upstream, self._who, self.plan.answerable)
        loop = asyncio.get_running_loop()

        async def serve() -> None:
            await forwarder.serve(datagrams, listener)
            if self._log is not None:
                loop.add_reader(self._log.fileno(), self._read_log)

        # What comes later is of no request, so it is not logged as this one's.
        await loop.create_task(serve(), context=contextvars.Context())

    def _sockets(self) -> tuple[socket.socket, socket.socket, Nftables, RefusalLog | None]:
        address = (str(self.plan.resolver), 53)
        with contextlib.ExitStack() as stack:
            made: list[Any] = []
            for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
                sock = stack.enter_context(socket.socket(socket.AF_INET, kind | socket.SOCK_CLOEXEC))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                sock.setblocking(False)
                made.append(sock)
            made[1].listen(128)
            nftables = Nftables(packet_filter.TABLE)
            stack.callback(nftables.close)
            try:
                refused = RefusalLog(packet_filter.LOG_GROUP)
            except OSError as exc:  # not compiled in: what is refused is counted all the same
                log.warning("refused packets cannot be logged: %s", exc)
                refused = None
            stack.pop_all()
        return made[0], made[1], nftables, refused

    def _who(self, source: str) -> Box | None:
        slot = self.plan.slot(source)
        return self._boxes.get(slot) if slot is not None else None

    def _read_log(self) -> None:
        assert self._log is not None
        for one in self._log.read():
            if (box := self._boxes.get(one.slot)) is not None:
                port = f" {one.port}" if one.port else ""
                box.refused(f"{one.address} {one.protocol}{port}")


def _mac(slot: int, end: int = 0) -> bytes:
    """Of the sandbox's card, or of the router's end (1) of its link: a local address, the same for ever."""
    return bytes((2, 0xD5, 0xEC, end, *slot.to_bytes(2, "big")))


@contextlib.asynccontextmanager
async def _namespaces(pid: int, started: int | None = None) -> AsyncIterator[tuple[int, int]]:
    """Network and mount namespace of that process. started: its start time; None: the caller knows it to be its own."""
    opened = await asyncio.to_thread(_open_namespaces, pid, started)
    try:
        yield opened
    finally:
        for fd in opened:
            os.close(fd)


def _open_namespaces(pid: int, started: int | None = None) -> tuple[int, int]:
    started = proc.start_time(pid) if started is None else started
    try:
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(network)
            raise
    except OSError as exc:
        raise DsecError("sandbox_dead", "its first process is gone") from exc
    if started is None or proc.start_time(pid) != started:
        os.close(network)
        os.close(mounts)
        raise DsecError("sandbox_dead", "its first process is gone")
    return network, mounts
