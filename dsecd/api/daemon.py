"""daemon.*"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import psutil

from dsecd import __version__
from dsecd.doctor import examine
from dsecd.errors import DsecError
from dsecd.sandbox.manager import Manager
from dsecd.wire import daemon as wire
from dsecd.wire.base import PROTOCOL
from dsecd.wire.server import Call, Server


class DaemonApi:
    """What the host is, and how the daemon does."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._started = time.time()
        self._process = psutil.Process()
        self.server: Server | None = None
        self.execs: Any = None

    def hello(self, call: Call, params: wire.Hello) -> wire.Welcome:
        if params.protocol < PROTOCOL:
            raise DsecError("unsupported", f"this daemon speaks protocol {PROTOCOL}, the client {params.protocol}")
        return wire.Welcome(
            protocol=PROTOCOL, version=__version__, host=self._manager.tag, uid=call.peer.uid, pid=os.getpid()
        )

    async def info(self, call: Call, params: wire.InfoParams) -> wire.Info:
        rooms, admission = self._manager.rooms, self._manager.admission
        free, total = await asyncio.to_thread(rooms.pool.free)
        memory = psutil.virtual_memory()
        return wire.Info(
            version=__version__, host=self._manager.tag, started_at=self._started, backends=["container"],
            runtime=rooms.containers.runtime.program, cgroups=rooms.containers.cgroups.layout,
            cpus=os.cpu_count() or 1, memory_mb=memory.total >> 20, memory_free_mb=memory.available >> 20,
            cpu_committed=admission.cpu, memory_committed_mb=admission.memory_mb, disk_free_mb=free >> 20,
            disk_total_mb=total >> 20, sandboxes=admission.count, sandboxes_max=admission.capacity.sandboxes,
        )  # fmt: skip

    def stats(self, call: Call, params: wire.StatsParams) -> wire.Counters:
        server = self.server
        return wire.Counters(
            uptime_s=round(time.time() - self._started, 3), rss_bytes=self._process.memory_info().rss,
            open_fds=self._process.num_fds(), tasks=len(asyncio.all_tasks()),
            connections=len(server.connections) if server else 0, sandboxes=self._manager.counts(),
            created=self._manager.created, failed=self._manager.failed, stopped=self._manager.stopped,
            commands=self.execs.commands if self.execs else 0, requests=server.requests if server else 0,
        )  # fmt: skip

    async def doctor(self, call: Call, params: wire.DoctorParams) -> wire.Doctor:
        return wire.Doctor(checks=await examine(self._manager.rooms))
