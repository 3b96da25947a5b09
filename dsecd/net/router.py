"""The router: a network namespace of ours between the sandboxes and the host.

All links of sandboxes end in it and its packet filter decides what passes. It has one way out, a link to the host,
which sees it as one neighbour with one address. So no rule of ours is mixed with the host's own, a firewall that is
reloaded there (`flush ruleset`) takes nothing from ours, and what goes wrong here ends here.

It appears with the first sandbox that has a network, and is swept by a daemon that finds none.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import ipaddress
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from dsecd import proc
from dsecd.aio import uninterrupted
from dsecd.errors import DsecError
from dsecd.net import filter as packet_filter
from dsecd.net import netns
from dsecd.net.addresses import LINK_FAR, LINK_NEAR, Address, Pair, Plan
from dsecd.net.nft import Nft, library

log = logging.getLogger("dsecd.net")

T = TypeVar("T")

COMMAND_S: Final = 10.0
_HIGH: Final = 512  # our own descriptors are moved up here, so that the child's numbers below are free
_TOOLS: Final = {"ip": "iproute2", "nsenter": "util-linux"}
_SYSCTLS: Final = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/send_redirects": "0",
    "ipv6/conf/all/forwarding": "1",
    "ipv6/conf/default/accept_ra": "0",
    "ipv6/conf/default/addr_gen_mode": "1",  # no link-local addresses but those that we give (see addresses)
}


def obstacle() -> tuple[str, str] | None:
    """Why this host cannot give sandboxes a network, and what to do about it."""
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"no {tool} on this host", f"apt-get install {package}"
    if library() is None:
        return "no libnftables on this host", "apt-get install nftables"
    if not forwards(4):
        return "this host does not forward IPv4", "sysctl -w net.ipv4.ip_forward=1, and keep it in /etc/sysctl.d"
    if not _marks():
        return "this kernel's nftables has no marks of connections", "a kernel with CONFIG_NF_CONNTRACK_MARK"
    return None


@functools.cache
def _marks() -> bool:
    """Whether the kernel takes a rule as ours are: tried in a namespace that is gone right away."""
    if shutil.which("nft") is None:
        return True  # nothing to try it with
    rule = "add table inet t; add chain inet t c; add rule inet t c ct mark set 1"
    done = subprocess.run(["unshare", "--net", "nft", rule], capture_output=True, check=False, timeout=10)
    return done.returncode == 0


def forwards(version: int) -> bool:
    """Whether the host hands on packets of that version."""
    try:
        text = Path(f"/proc/sys/net/{'ipv4/ip_forward' if version == 4 else 'ipv6/conf/all/forwarding'}").read_text()
    except OSError:
        return False
    return text.strip() == "1"


def host_addresses() -> frozenset[Address]:
    """All that are the host's own, as they are now."""
    return frozenset(
        ipaddress.ip_address(one.address.partition("%")[0])
        for found in psutil.net_if_addrs().values()
        for one in found
        if one.family in (socket.AF_INET, socket.AF_INET6)
    )


def pins(directory: Path) -> list[int]:
    """First slots of the routers that have names there."""
    found = [path.name.removeprefix("router") for path in directory.glob("router*")]
    return sorted(int(number) for number in found if number.isdecimal())


def near6(pair: Pair, name: str) -> str:
    """IPv6 of the near end of a link, for `ip`."""
    return f"addr add {pair.near6}/127 dev {name} nodad\naddr add {LINK_NEAR}/64 dev {name} nodad\n"


class Router:
    """Its namespace, while there is one. first: the first slot of those that it serves."""

    def __init__(self, plan: Plan, directory: Path, first: int) -> None:
        self.plan = plan
        self.name = f"dsec{first}"  # of the host's link to it, and of our table there
        self._pair = plan.uplink(first)
        self._directory = directory
        self._pin = directory / f"router{first}"
        self._told: frozenset[Address] = frozenset()  # the host's addresses that its packet filter knows
        self._namespace: int | None = None
        self._filter: Nft | None = None

    @property
    def is_open(self) -> bool:
        return self._namespace is not None

    @property
    def resolv_conf(self) -> Path:
        """What sandboxes with a network see as /etc/resolv.conf."""
        return self._directory / "resolv.conf"

    async def six(self) -> bool:
        """Whether sandboxes get IPv6."""
        return await asyncio.to_thread(forwards, 6)

    async def open(self) -> None:
        """Make it, unless it is there. `unsupported` where the host cannot."""
        if self._namespace is not None:
            return
        if (why := await asyncio.to_thread(obstacle)) is not None:
            raise DsecError("unsupported", f"no network for sandboxes: {why[0]}: {why[1]}")
        try:
            await uninterrupted(asyncio.to_thread(self._make))
            await self._connect()
            await self._fill()
        except BaseException:
            await asyncio.shield(self.remove())
            raise

    def _make(self) -> None:
        self._directory.mkdir(mode=0o711, exist_ok=True)
        self._look()
        if (taken := self.plan.taken()) is not None:
            raise DsecError("conflict", f"this host has {taken}: choose another network.subnet{taken.version}")
        if not self.resolv_conf.exists():  # it is mounted in sandboxes
            self.resolv_conf.write_bytes(self.plan.resolv_conf)
            self.resolv_conf.chmod(0o644)
        netns.unmake(self._pin)
        netns.make(self._pin)
        self._namespace = netns.open_pinned(self._pin)
        self.inside(_configure)
        self._filter = self.inside(Nft)

    async def _connect(self) -> None:
        pair, name, up = self._pair, self.name, packet_filter.UPLINK
        if any(found == name for _, found in socket.if_nameindex()):  # of a router that is no more
            await self.ip_here(f"link del {name}\n")
        await self.ip_here(
            f"link add {name} type veth peer name {up} netns /proc/self/fd/4\n"
            f"link set {name} addrgenmode none\n"
            f"addr add {pair.near4}/31 dev {name}\n"
            f"link set {name} up\n"
            + (near6(pair, name) if await self.six() else "")
        )  # fmt: skip
        await self.ip(
            f"link set lo up\naddr add {self.plan.resolver}/32 dev lo\n"
            f"addr add {pair.far4}/31 dev {up}\naddr add {pair.far6}/127 dev {up} nodad\nlink set {up} up\n"
            f"addr add {LINK_FAR}/64 dev {up} nodad\n"
            f"route add default via {pair.near4}\nroute add default via {pair.near6}\n"
        )

    async def find(self) -> bool:
        """Take back what an earlier daemon made; whether there is any."""
        self._namespace = await asyncio.to_thread(netns.open_pinned, self._pin)
        if self._namespace is None:
            return False
        self._filter = await asyncio.to_thread(self.inside, Nft)
        await asyncio.to_thread(self._look)
        await self._fill()
        return True

    async def _fill(self) -> None:
        """Its packet filter, without sandboxes, and the host's."""
        self._told = self.plan.host
        await uninterrupted(asyncio.to_thread(self._nft().apply, packet_filter.base(self.plan)))
        await _nft_here(packet_filter.host(self.name, self._pair))

    async def mend(self) -> None:
        """Put the host's part back where its firewall was reloaded."""
        if self._namespace is not None:
            await uninterrupted(asyncio.to_thread(self._mend))

    def _mend(self) -> None:
        with contextlib.closing(Nft()) as nft:
            if self.name not in {one["table"]["name"] for one in nft.listing("tables inet") if "table" in one}:
                log.warning("the host's table %s was gone: its firewall was reloaded, putting it back", self.name)
                nft.apply(packet_filter.host(self.name, self._pair))

    async def remove(self) -> None:
        """Nothing of it is left. When there is none, too."""
        self.release()
        await asyncio.to_thread(netns.unmake, self._pin)
        with contextlib.suppress(DsecError):
            await self.ip_here(f"link del {self.name}\n")
        with contextlib.suppress(DsecError):
            await _nft_here(f"delete table inet {self.name}\n")

    def release(self) -> None:
        """Let go of it; it goes on."""
        if self._filter is not None:
            self._filter.close()
        namespace, self._namespace, self._filter = self._namespace, None, None
        if namespace is not None:
            os.close(namespace)

    # -- in it --------------------------------------------------------------------------------------------------------
    def _look(self) -> None:
        self.plan.host = host_addresses()

    def inside(self, work: Callable[[], T]) -> T:
        """Done in it, in another thread. Blocks for as long as that takes."""
        return netns.inside(self._open(), work)

    def _open(self) -> int:
        if self._namespace is None:
            raise DsecError("network", "the sandboxes' router is gone")
        return self._namespace

    def _nft(self) -> Nft:
        if self._filter is None:
            raise DsecError("network", "the sandboxes' router is gone")
        return self._filter

    async def nft(self, text: str) -> None:
        """One transaction in its packet filter, which knows the host's addresses as they are now then."""
        await uninterrupted(asyncio.to_thread(self._apply, text))

    def _apply(self, text: str) -> None:
        self._look()
        host = self.plan.host
        self._nft().apply((packet_filter.never(self.plan) if host != self._told else "") + text)
        self._told = host

    async def ip(self, text: str, other: int | None = None) -> None:
        """A batch of `ip` commands in it; other: another namespace, as fd 4."""
        await _run("ip", ["-batch", "-"], text, at=self._open(), other=other)

    async def ip_here(self, text: str) -> None:
        """On the host, with the router as fd 4."""
        await _run("ip", ["-batch", "-"], text, other=self._namespace)

    async def ip_at(self, namespace: int, text: str) -> None:
        """In another namespace, with the router as fd 4."""
        await _run("ip", ["-batch", "-"], text, at=namespace, other=self._open())

    async def listing(self, what: str) -> list[dict[str, Any]]:
        """What its packet filter has: `counters table inet dsecd`."""
        return await uninterrupted(asyncio.to_thread(self._nft().listing, what))

    def links(self) -> list[str]:
        """Names of the interfaces in it. Blocks for a moment."""
        return [name for _, name in self.inside(socket.if_nameindex)]


async def _nft_here(text: str) -> None:
    """On the host, where changes are few."""

    def run() -> None:
        with contextlib.closing(Nft()) as nft:
            nft.apply(text)

    await uninterrupted(asyncio.to_thread(run))


def _configure() -> None:
    for key, value in _SYSCTLS.items():
        Path("/proc/sys/net", key).write_text(value)


async def _run(tool: str, words: list[str], text: str, *, at: int | None = None, other: int | None = None) -> bytes:
    """Its output; `network` with its first words when it fails. Files in memory, so that nobody waits for a pipe.

    at: the namespace that it runs in (None: the host's). other: another one, as its descriptor 4.
    """
    found, nsenter = shutil.which(tool), shutil.which("nsenter")
    if found is None or nsenter is None:
        raise DsecError("unsupported", f"{(nsenter and tool) or 'nsenter'} is not installed on this host")
    argv = [found, *words] if at is None else [nsenter, "--net=/proc/self/fd/3", "--", found, *words]
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(os.fdopen(os.memfd_create("in", os.MFD_CLOEXEC), "wb", buffering=0))
        out = stack.enter_context(os.fdopen(os.memfd_create("out", os.MFD_CLOEXEC), "rb", buffering=0))
        given.write(text.encode())
        given.seek(0)
        passed = {0: given.fileno(), 1: out.fileno(), 2: out.fileno(), 3: at, 4: other}
        lifted = {}
        for number, fd in passed.items():
            if fd is not None:
                lifted[number] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
                stack.callback(os.close, lifted[number])
        try:
            status = await proc.wait(proc.spawn(argv, lifted), COMMAND_S)
        except TimeoutError as exc:
            raise DsecError("network", f"{tool} did not end within {COMMAND_S:g} s") from exc
        out.seek(0)
        said = out.read()
    if status != 0:
        why = said.decode("utf-8", "replace").strip()
        log.debug("%s refused: %s\n%s", tool, why, text)
        raise DsecError("network", f"{tool}: {why.splitlines()[0][:300] if why else f'status {status}'}")
    return said
