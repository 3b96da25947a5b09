"""A live sandbox: its record, its resources on one exit stack, and what talks to it.

Ending a sandbox is closing the stack, in every case: stop, failure half-way through a start, death, a leftover of an
earlier daemon. There is no second list of things to remove.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from dsecd.agent.link import AgentLink
from dsecd.aio import uninterrupted
from dsecd.container.backend import ContainerBackend
from dsecd.container.bundle import Plan
from dsecd.devices.model import Bind, Grant
from dsecd.devices.pools import DevicePools, wanted
from dsecd.disk import DiskPool
from dsecd.envconfig import EnvConfig
from dsecd.erofs.mount import MountTable
from dsecd.erofs.pages.client import Pages
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError
from dsecd.metrics import DAEMON
from dsecd.net.network import Network
from dsecd.sandbox import networks
from dsecd.sandbox.body import Body
from dsecd.sandbox.commands import Commands
from dsecd.sandbox.cpus import CpuChooser
from dsecd.sandbox.guests import GuestCommands
from dsecd.sandbox.ids import Slots
from dsecd.sandbox.record import Record, now
from dsecd.sandbox.recorder import Recorder
from dsecd.sandbox.sessions import Sessions
from dsecd.sandbox.vms import Vms
from dsecd.spans import span
from dsecd.vmm.backend import Template
from dsecd.vmm.fullvm import FullVm

MIB = 1 << 20
GIVEN_BACK = DAEMON.counter(
    "dsecd_pause_reclaimed_bytes", "What pauses gave back to the host.", ("backend",), unit="bytes"
)
START_S = DAEMON.histogram(
    "dsecd_sandbox_start_seconds", "To build and start one, failures too; by backend and how it ended.",
    ("backend", "outcome"),
)  # fmt: skip
TELL_S = 30.0  # until the agent in a full VM, if it is an agent, has told its commands
TELL_ALL_S = 120.0  # until that of a microVM has, which has nothing else to do, or its kernel is somebody else's


class Rooms(Struct):
    """The leaf rooms and backends that sandboxes are built from."""

    images: ImageStore
    mounts: MountTable
    pages: Pages
    pool: DiskPool
    containers: ContainerBackend
    vms: Vms
    devices: DevicePools
    network: Network
    slots: Slots
    cpus: CpuChooser
    recorder: Recorder
    environments: EnvConfig


async def enter_layer(rooms: Rooms, stack: contextlib.AsyncExitStack, owner: str, digest: str) -> Path:
    """Where that image is mounted, for this owner until the stack is closed."""
    stack.push_async_callback(rooms.mounts.release, digest, owner)
    with span("mount a layer"):
        return Path((await rooms.mounts.acquire(digest, owner)).path)


class Live:
    """One sandbox that is not over yet. `body` is set once it runs, also while it is paused."""

    def __init__(self, record: Record, rooms: Rooms, binds: tuple[Bind, ...] = ()) -> None:
        self.record = record
        self.rooms = self._rooms = rooms
        self._binds = binds  # directories of the daemon's own, for a container that is being made
        # Callbacks only, each pushed before its step is tried (all of them may be called for nothing). No asynchronous
        # generators: a loop that ends closes those it finds, and a daemon that stops would end its sandboxes.
        self.stack = contextlib.AsyncExitStack()
        self.lock = asyncio.Lock()  # one life-cycle move at a time
        self.changed = asyncio.Event()
        self.body: Body | None = None
        self.commands: Commands | None = None
        self.sessions: Sessions | None = None
        self.guest: GuestCommands | None = None  # of a full VM without our agent, in place of both
        self.oom_seen = 0
        self.pids_seen = 0
        self.denied_seen: dict[str, int] = {}  # by digest of a layer
        self._known = False  # the agent's commands were asked for since the daemon started

    async def start(self, copy_of: str = "") -> None:
        """Build it from the bottom up. On failure everything that was built is on `stack`.

        copy_of: a disk space that a container's is a copy of; else it is empty.
        """
        began, outcome = time.monotonic(), "internal"
        try:
            await self._start(copy_of)
            outcome = "ok"
        except asyncio.CancelledError:
            outcome = "gone"
            raise
        except DsecError as exc:
            outcome = exc.kind
            raise
        finally:
            START_S.observe(time.monotonic() - began, self.record.backend, outcome)

    async def _start(self, copy_of: str) -> None:
        record, rooms = self.record, self._rooms
        devices = await self._lease()  # first: whoever waits for a device holds nothing yet
        lowers = [str(await self._enter_layer(digest)) for digest in record.layers]
        record.slot = rooms.slots.take()
        self.stack.callback(rooms.slots.free, record.slot)
        base = rooms.slots.base(record.slot)
        spec = record.spec
        self.stack.push_async_callback(asyncio.to_thread, rooms.pool.destroy, record.id)
        self._known = True
        if record.backend != "container":
            self.stack.push_async_callback(rooms.vms.end, record.id)
            with span("network card"):
                card = await networks.card_for(self)
            with span("boot", "launcher"):
                if record.backend == "fullvm":
                    self._ready(await rooms.vms.start_full(record, base, rooms.pool, card))
                else:
                    self._ready(await rooms.vms.start(record, base, rooms.images, rooms.pool, card))
            with span("network"):
                await networks.configure(self)
            return
        make = functools.partial(rooms.pool.clone, copy_of) if copy_of else rooms.pool.create
        with span("disk"):
            space = await uninterrupted(asyncio.to_thread(make, record.id, spec.disk_mb * MIB, base))
        plan = Plan(
            id=record.id,
            lowers=tuple(lowers),
            scratch=str(space.path),
            id_base=base,
            hostname=spec.hostname or spec.name or "sandbox",
            memory=spec.memory_mb * MIB,
            pids=spec.pids,
            cpu=spec.cpu,
            devices=msgspec.structs.replace(devices, binds=devices.binds + self._binds),
        )
        self.stack.push_async_callback(rooms.containers.end, record.id)
        self._ready(await rooms.containers.start(plan))
        with span("network"):
            await networks.follow(self, spec.network_rules)

    async def _lease(self) -> Grant:
        """The devices it asks for; their variables go above the image's and the caller's, as CDI has it."""
        record, devices = self.record, self._rooms.devices
        if not record.spec.devices:
            return Grant()
        self.stack.callback(devices.release, record.id)
        with span("wait for devices"):
            asked = wanted(record.spec.devices)
            record.devices, grant = await devices.lease(record.id, asked, record.spec.device_wait_s)
        record.spec.env = {**record.spec.env, **grant.env}
        return grant

    async def start_fork(self, source: str) -> None:
        """Of a VM, first half, while the source stands still: layers, ids, and a copy of its disk."""
        record, rooms = self.record, self._rooms
        for digest in record.layers:
            await self._enter_layer(digest)
        record.slot = rooms.slots.take()
        self.stack.callback(rooms.slots.free, record.slot)
        self.stack.push_async_callback(asyncio.to_thread, rooms.pool.destroy, record.id)
        limit, base = rooms.vms.disk_limit(record), rooms.slots.base(record.slot)
        await uninterrupted(asyncio.to_thread(rooms.pool.clone, source, record.id, limit, base))

    async def finish_fork(self, template: Template) -> None:
        """Second half: a machine of its own."""
        record, rooms = self.record, self._rooms
        card = await networks.card_for(self, needed=bool(template.spec.nics))
        self.stack.push_async_callback(rooms.vms.end, record.id)
        self._ready(await rooms.vms.clone(record, template, rooms.slots.base(record.slot), rooms.pool, card))
        await self._take_back()

    async def adopt(self) -> None:
        """Take everything back after a daemon restart, running or paused; `sandbox_dead` when it is gone."""
        record, rooms = self.record, self._rooms
        self.stack.callback(rooms.devices.release, record.id)
        rooms.devices.claim(record.id, record.devices)
        for digest in record.layers:
            await self._enter_layer(digest)
        rooms.slots.claim(record.slot)
        self.stack.callback(rooms.slots.free, record.slot)
        self.stack.push_async_callback(asyncio.to_thread, rooms.pool.destroy, record.id)
        if record.backend == "container":
            self.stack.push_async_callback(rooms.containers.end, record.id)
            self._ready(await rooms.containers.adopt(record.id, record.pid, record.ticks, record.frozen))
        else:
            self.stack.push_async_callback(rooms.vms.end, record.id)
            self._ready(await rooms.vms.adopt(record))
        await networks.take_back(self)
        if record.pid and not record.frozen:
            await self._take_back()

    async def _take_back(self) -> None:
        self._known = True
        if self.commands is None:
            return
        link = self.commands.link
        if self.record.backend == "container":
            await self.commands.take_back()
        elif not link.outlived:
            try:
                async with asyncio.timeout(TELL_ALL_S):
                    await self.commands.take_back()
            except TimeoutError as exc:
                raise DsecError("sandbox_dead", f"its agent has not told its commands in {TELL_ALL_S:g} s") from exc
        elif link.alive:
            try:
                async with asyncio.timeout(TELL_S):
                    await self.commands.take_back()
            except (DsecError, TimeoutError):  # its root has a hand in it; the VM is taken back, its commands are not
                await link.close("it did not tell its commands")

    async def pause(self) -> None:
        """Freeze or save it."""
        assert self.body is not None
        await self.body.pause()
        self.record.pid, self.record.ticks = self.body.pid, self.body.started

    async def give_back(self) -> bool:
        """Once it is paused: let its memory go. Whether it is known how much that was."""
        found = None if self.body is None else await self.body.give_back()
        if found is not None:
            self.record.reclaimed = found
            GIVEN_BACK.add(found, self.record.backend)
        return found is not None

    async def resume(self) -> None:
        assert self.body is not None
        await self.body.resume()
        self.record.pid, self.record.ticks = self.body.pid, self.body.started
        if not self._known:
            await self._take_back()

    async def _enter_layer(self, digest: str) -> Path:
        return await enter_layer(self._rooms, self.stack, self.record.id, digest)

    def _ready(self, body: Body) -> None:
        self.body = body
        self.record.pid, self.record.ticks = body.pid, body.started
        if isinstance(body, FullVm) and body.link is None:
            self.guest = GuestCommands(self.record, body)
        if body.link is not None:
            # A VM's processors are its own.
            cpus = self._rooms.cpus if self.record.backend == "container" else None
            self.commands = Commands(self.record, body.link, cpus, self._ended)
            self.sessions = Sessions(self.commands)

    async def _ended(self, exec_id: str) -> None:
        if self.commands is not None:
            await self._rooms.recorder.command_ended(self.record.id, self.commands, exec_id)

    @property
    def link(self) -> AgentLink:
        """The agent's link; `sandbox_dead` when there is none."""
        if self.body is None:
            raise DsecError("sandbox_dead", f"sandbox {self.record.id} is over", sandbox_id=self.record.id)
        if self.body.link is None:
            raise DsecError(
                "unsupported", "in a full VM without dsec-agent only whole commands run: no files, terminals or ports"
            )
        return self.body.link

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """While inside, the sandbox is not idle."""
        commands = self.commands or self.guest
        if commands is None:
            yield
            return
        commands.busy += 1
        try:
            yield
        finally:
            commands.busy -= 1
            self.record.idle_since = now()

    @property
    def busy(self) -> int:
        """Commands and calls under way."""
        found = self.commands or self.guest
        return found.busy if found is not None else 1

    def kill(self) -> None:
        """SIGKILL to all of it. A start that is still under way, or waits for a device, fails soon."""
        self._rooms.devices.abandon(self.record.id)
        if self.body is not None:
            self.body.kill()

    async def close(self) -> None:
        """End it: close the stack. Safe to call at any point, and again."""
        body, self.body = self.body, None
        if body is not None:
            body.kill()
            await body.release()
        await self.stack.aclose()
