"""The hosts of a fleet: an inventory says which there are, and each is looked at again and again.

An inventory is a TOML file, or a program that prints the same as JSON, so that anything can be the source:

    [hosts.node1]
    url = "ssh://node1"          # or unix:///run/dsecd/dsecd.sock, with tags = ["burst", ...] and tag = "n1" if need be
    [policy]
    burst_above = 0.8
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import time
import tomllib
from collections import Counter
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from dsecd.errors import DsecError
from dsecd.placement import Policy, View, Want
from dsecd.spans import span
from dsecd.wire import base, daemon, images, sandbox
from dsecd.wire import devices as device_wire
from dsecd.wire import fleet as wire
from dsecd.wire.peer import Notified, Peer
from dsecd.wire.ssh import forwarded

log = logging.getLogger("dsecd.fleet")

LOOK_S: Final = 1.0  # between two looks at a host
ANSWER_S: Final = 5.0  # a host that takes longer is not well, and gets no new sandboxes
LOST_LOOKS: Final = 6  # so late in a row, and it is away: what is under way there is not given up for less
QUESTION_S: Final = 20.0  # for what only reads, so that one host does not hold up an answer about all
IMAGES_EVERY: Final = 10  # looks
AGAIN_S: Final = 15.0  # at most, between two attempts to reach a host
INVENTORY_S: Final = 10.0
INVENTORY_MAX: Final = 4 << 20


class HostConfig(Struct, forbid_unknown_fields=True):
    """tags: for filters; `burst`: only for what may leave. tag: what its ids begin with, if that is to be checked."""

    url: Annotated[str, Meta(pattern=r"^(ssh|unix)://")]
    tags: list[str] = []
    tag: str = ""


class PolicyConfig(Struct, forbid_unknown_fields=True, frozen=True):
    draws: Annotated[int, Meta(ge=1, le=64)] = 3
    burst_above: Annotated[float, Meta(ge=0, le=1)] = 0.8
    burst_images: list[str] = []


class Listing(Struct, forbid_unknown_fields=True):
    hosts: dict[Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")], HostConfig] = {}
    policy: PolicyConfig = PolicyConfig()


# For whom the hosts are asked: the principal of the client, "" for the fleet itself.
acting: ContextVar[str] = ContextVar("acting", default="")


def at_host(method: str, host: str) -> str:
    """Name of the span in which a host was asked."""
    return f"{method} at {host}"


class Host:
    """One host: the way to it, what was seen last, what was placed since."""

    def __init__(self, name: str, config: HostConfig, claims: dict[str, str]) -> None:
        self.name = name
        self.config = config
        self.tag = config.tag
        self._claims = claims  # which host each tag belongs to
        self.version = ""
        self.cordoned = False
        self.pressure = ""
        self.path: str | None = None  # of a socket here that leads there
        self.seen: float | None = None
        self.trouble: tuple[float, str] | None = None  # when it was lost last, and why
        self.placed = self.losses = 0
        self.known = asyncio.Event()  # it was reached, or could not be
        self.view = View(name, frozenset(config.tags), why="was not reached yet")
        self._peer: Peer | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str:
        """Why nothing can be asked of it; "" it answers."""
        return "" if self._peer is not None else self.view.why

    async def call(self, method: str, params: base.Params, notified: Notified | None = None) -> Any:
        """Errors are the host's; `network`, retryable, when there is no way to it."""
        if self._peer is None:
            raise DsecError("network", f"host {self.name} cannot be reached: {self.problem}")
        with span(at_host(method, self.name), "fleet"):
            return await self._peer.start(method, params, notified=notified, as_=acting.get()).finish()

    async def question(self, method: str, params: base.Params) -> Any:
        """As `call`, of what changes nothing: in a bounded time."""
        try:
            async with asyncio.timeout(QUESTION_S):
                return await self.call(method, params)
        except TimeoutError as exc:
            text = f"host {self.name} did not answer {method} within {QUESTION_S:g} s"
            raise DsecError("network", text) from exc

    def settled(self, want: Want) -> None:
        """What was placed there has come to be: the next look that begins after this counts it."""
        self.placed += 1
        self.view.settle(want, time.monotonic())

    def public(self) -> wire.Host:
        view = self.view
        return wire.Host(
            name=self.name, url=self.config.url, tag=self.tag, tags=self.config.tags, version=self.version,
            problem=self.problem, cordoned=self.cordoned, pressure=self.pressure,
            sandboxes=view.sandboxes, sandboxes_max=view.sandboxes_max, cpu=view.cpu, cpu_max=view.cpu_max,
            memory_mb=view.memory_mb, memory_max_mb=view.memory_max_mb, load=round(view.load(), 4),
            age_s=None if self.seen is None else round(time.monotonic() - self.seen, 3),
            trouble=self.trouble[1] if self.trouble else "",
            trouble_s=round(time.monotonic() - self.trouble[0], 3) if self.trouble else None,
        )  # fmt: skip

    # -- looking ------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        wait = 0.25
        while True:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    await self._reach(stack)
                    wait = 0.25
                    await self._watch()
            except TimeoutError:
                why = f"did not answer within {ANSWER_S:g} s"
            except (DsecError, OSError) as exc:
                why = exc.message if isinstance(exc, DsecError) else str(exc)
            self._lost(why[:500])
            await asyncio.sleep(wait)
            wait = min(2 * wait, AGAIN_S)

    async def _reach(self, stack: contextlib.AsyncExitStack) -> None:
        url = self.config.url
        path = url.removeprefix("unix://") if url.startswith("unix://") else await stack.enter_async_context(
            forwarded(url)
        )  # fmt: skip
        async with asyncio.timeout(ANSWER_S):
            peer = await Peer.connect_unix(path)
            stack.push_async_callback(peer.aclose)
            hello: daemon.Welcome = await peer.call("daemon.hello", daemon.Hello(client="dsec-fleet"))
            if hello.protocol != base.PROTOCOL:
                raise DsecError(
                    "unsupported", f"speaks protocol {hello.protocol}, this fleet {base.PROTOCOL}: upgrade one"
                )
            if self.config.tag and hello.host != self.config.tag:
                said = hello.host[:64]
                raise DsecError("conflict", f"says that it is {said!r}, and the inventory {self.config.tag!r}")
            if (owner := self._claims.setdefault(hello.host, self.name)) != self.name:
                raise DsecError("conflict", f"has the same tag as {owner}: give one of them another host_tag")
            self.tag, self.version, self.path = hello.host, hello.version, path
            await self._look(peer, 0)
        self._peer = peer
        self.known.set()

    async def _watch(self) -> None:
        peer, looks, late = self._peer, 0, 0
        assert peer is not None
        while True:
            done, _ = await asyncio.wait((peer.closed,), timeout=LOOK_S)
            if done:
                raise DsecError("network", "the connection broke")
            looks += 1
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._look(peer, looks)
                late = 0
            except TimeoutError:
                late += 1
                self.view.why = f"did not answer within {ANSWER_S:g} s"
                if late == LOST_LOOKS:
                    raise

    async def _look(self, peer: Peer, looks: int) -> None:
        began = time.monotonic()
        info: daemon.Info = await peer.call("daemon.info", daemon.InfoParams())
        view = self.view
        if looks % IMAGES_EVERY == 0:
            found: images.Images = await peer.call("image.list", images.ListImages())
            view.images = frozenset(name for one in found.images for name in (one.digest, one.name) if name)
            pools: device_wire.DevicePools = await peer.call("device.list", device_wire.ListDevices())
            view.devices = frozenset(pool.name for pool in pools.pools if pool.devices)
        view.seen(began, info.sandboxes, info.cpu_committed, info.memory_committed_mb)
        view.backends = frozenset(info.backends)
        view.sandboxes_max, view.cpu_max = max(1, info.sandboxes_max), info.cpu_max or 1.0
        view.memory_max_mb = info.memory_max_mb or 1
        self.cordoned, self.pressure = info.cordoned, info.pressure
        view.why = "takes no new sandboxes" if info.cordoned else info.pressure
        self.seen = time.monotonic()

    def _lost(self, why: str) -> None:
        if self._peer is not None or self.view.why != why:
            log.warning("host %s: %s", self.name, why)
        if self._peer is not None:
            self.losses += 1
            self.trouble = time.monotonic(), why
        self._peer = self.path = None
        self.view.lost(why)
        self.known.set()


class Inventory:
    """The hosts there are. Read again every so often; what is new is reached, what is gone is let go of."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self.hosts: dict[str, Host] = {}
        self._claims: dict[str, str] = {}
        self.policy = Policy()

    async def refresh(self) -> None:
        """`invalid` with what is wrong with it; the hosts stay as they were then."""
        listing = await read(self._source)
        rules = listing.policy
        self.policy = Policy(rules.draws, rules.burst_above, frozenset(rules.burst_images))
        for name, host in list(self.hosts.items()):
            if listing.hosts.get(name) != host.config:
                log.info("host %s is not in the inventory any more", name)
                del self.hosts[name]
                await host.stop()
                for tag in [tag for tag, owner in self._claims.items() if owner == name]:
                    del self._claims[tag]
        # What the inventory says goes before what a host says, and the host that was there before one that comes.
        self._claims.update({config.tag: name for name, config in listing.hosts.items() if config.tag})
        for name, config in listing.hosts.items():
            if name not in self.hosts:
                self.hosts[name] = Host(name, config, self._claims)
                self.hosts[name].start()

    async def known(self) -> None:
        """Until each was reached, or could not be: what one host has made, another must not be asked for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S + 1):
                await asyncio.gather(*(host.known.wait() for host in self.hosts.values()))

    async def close(self) -> None:
        await asyncio.gather(*(host.stop() for host in self.hosts.values()))


async def read(source: Path) -> Listing:
    """An inventory from a file, or from what a program prints. `invalid` says what is wrong."""
    try:
        if os.access(source, os.X_OK):
            content = json.loads(await asyncio.to_thread(_printed, source))
        else:
            content = tomllib.loads(await asyncio.to_thread(source.read_text))
        listing = msgspec.convert(content, Listing)
    except OSError as exc:
        raise DsecError("invalid", f"the inventory {source} cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # a ValidationError is a ValueError
        raise DsecError("invalid", f"the inventory {source} is not one: {str(exc)[:200]}") from exc
    tags = Counter(config.tag for config in listing.hosts.values() if config.tag)
    if twice := [tag for tag, count in tags.items() if count > 1]:
        raise DsecError("invalid", f"the inventory {source} is not one: two hosts have the tag {twice[0]!r}")
    return listing


def _printed(source: Path) -> bytes:
    """What it prints, of a bounded length in a bounded time; its process group is gone then. What it left behind with
    its output still open (a session of its own) is not waited for. In a thread."""
    deadline, said, null = time.monotonic() + INVENTORY_S, b"", subprocess.DEVNULL
    late = DsecError("invalid", f"the inventory {source} did not end within {INVENTORY_S:g} s")
    process = subprocess.Popen([source], stdin=null, stdout=subprocess.PIPE, stderr=null, start_new_session=True)
    assert process.stdout is not None
    try:
        while True:
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise late
            if not (piece := os.read(process.stdout.fileno(), 1 << 16)):
                break
            said += piece
            if len(said) > INVENTORY_MAX:
                raise DsecError("invalid", f"the inventory {source} prints more than {INVENTORY_MAX >> 20} MiB")
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as exc:
        raise late from exc
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()
    if status:
        raise DsecError("invalid", f"the inventory {source} ended with status {status}")
    return said


def want_of(spec: sandbox.Spec) -> Want:
    """What a host must have for it. Its group is the label `group`."""
    stack = (spec.image, *([spec.workspace] if spec.workspace else []), *spec.toolkits)
    return Want(
        backend=spec.backend, cpu=spec.cpu, memory_mb=spec.memory_mb, disk_mb=spec.disk_mb, images=stack,
        devices=tuple(ask.partition(":")[0] for ask in spec.devices), group=spec.labels.get("group", ""),
    )  # fmt: skip
