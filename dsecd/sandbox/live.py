"""A live sandbox: its record, its resources on one exit stack, and what talks to it.

Ending a sandbox is closing the stack, in every case: stop, failure half-way through a start, death, a leftover of an
earlier daemon. There is no second list of things to remove.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from dsecd.agent.link import AgentLink
from dsecd.container.backend import Container, ContainerBackend
from dsecd.container.bundle import Plan
from dsecd.disk import DiskPool
from dsecd.erofs.aio import uninterrupted
from dsecd.erofs.mount import MountTable
from dsecd.erofs.pages.client import Pages
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError
from dsecd.sandbox.commands import Commands
from dsecd.sandbox.cpus import CpuChooser
from dsecd.sandbox.ids import Slots
from dsecd.sandbox.record import Record, now
from dsecd.sandbox.sessions import Sessions

MIB = 1 << 20


class Rooms(Struct):
    """The leaf rooms and backends that sandboxes are built from."""

    images: ImageStore
    mounts: MountTable
    pages: Pages
    pool: DiskPool
    containers: ContainerBackend
    slots: Slots
    cpus: CpuChooser


class Live:
    """One sandbox that is not over yet. `container` is set while it runs."""

    def __init__(self, record: Record, rooms: Rooms) -> None:
        self.record = record
        self._rooms = rooms
        # Callbacks only, each pushed before its step is tried (all of them may be called for nothing). No asynchronous
        # generators: a loop that ends closes those it finds, and a daemon that stops would end its sandboxes.
        self.stack = contextlib.AsyncExitStack()
        self.lock = asyncio.Lock()  # one life-cycle move at a time
        self.changed = asyncio.Event()
        self.container: Container | None = None
        self.commands: Commands | None = None
        self.sessions: Sessions | None = None
        self.oom_seen = 0
        self.pids_seen = 0
        self.denied_seen: dict[str, int] = {}  # by digest of a layer

    async def start(self) -> None:
        """Build it from the bottom up. On failure everything that was built is on `stack`."""
        record, rooms = self.record, self._rooms
        lowers = [str(await self._enter_layer(digest)) for digest in record.layers]
        record.slot = rooms.slots.take()
        self.stack.callback(rooms.slots.free, record.slot)
        base = rooms.slots.base(record.slot)
        spec = record.spec
        self.stack.push_async_callback(asyncio.to_thread, rooms.pool.destroy, record.id)
        space = await uninterrupted(asyncio.to_thread(rooms.pool.create, record.id, spec.disk_mb * MIB, base))
        plan = Plan(
            id=record.id,
            lowers=tuple(lowers),
            scratch=str(space.path),
            id_base=base,
            hostname=spec.hostname or spec.name or "sandbox",
            memory=spec.memory_mb * MIB,
            pids=spec.pids,
            cpu=spec.cpu,
        )
        self.stack.push_async_callback(rooms.containers.end, record.id)
        self._ready(await rooms.containers.start(plan))

    async def adopt(self) -> None:
        """Take everything back after a daemon restart; `sandbox_dead` when its init is gone."""
        record, rooms = self.record, self._rooms
        for digest in record.layers:
            await self._enter_layer(digest)
        rooms.slots.claim(record.slot)
        self.stack.callback(rooms.slots.free, record.slot)
        self.stack.push_async_callback(asyncio.to_thread, rooms.pool.destroy, record.id)
        self.stack.push_async_callback(rooms.containers.end, record.id)
        self._ready(await rooms.containers.adopt(record.id, record.pid, record.ticks))
        assert self.commands is not None
        await self.commands.take_back()

    async def _enter_layer(self, digest: str) -> Path:
        self.stack.push_async_callback(self._rooms.mounts.release, digest, self.record.id)
        return Path((await self._rooms.mounts.acquire(digest, self.record.id)).path)

    def _ready(self, container: Container) -> None:
        self.container = container
        self.record.pid, self.record.ticks = container.pid, container.started
        self.attach_link()

    def attach_link(self) -> None:
        """(Re)build what talks over the container's link."""
        assert self.container is not None
        self.commands = Commands(self.record, self.container.link, self._rooms.cpus)
        self.sessions = Sessions(self.commands)

    @property
    def link(self) -> AgentLink:
        """The agent's link; `sandbox_dead` when there is none."""
        if self.container is None:
            raise DsecError("sandbox_dead", f"sandbox {self.record.id} is over", sandbox_id=self.record.id)
        return self.container.link

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """While inside, the sandbox is not idle."""
        commands = self.commands
        if commands is None:
            yield
            return
        commands.busy += 1
        try:
            yield
        finally:
            commands.busy -= 1
            self.record.idle_since = now()

    async def close(self) -> None:
        """End it: close the stack. Safe to call at any point, and again."""
        container, self.container = self.container, None
        if container is not None:
            container.cgroup.kill()
            await container.link.close()
        await self.stack.aclose()
