"""daemon.*"""

from __future__ import annotations

import asyncio
import os
import time

import psutil

from dsecd import __version__, scrape, zram
from dsecd.aio import uninterrupted
from dsecd.api.execs import ExecApi
from dsecd.doctor import examine
from dsecd.errors import DsecError
from dsecd.fncall.runner import Runner
from dsecd.pmem.account import page_cache
from dsecd.reload import Reloader
from dsecd.sandbox.draining import drain
from dsecd.sandbox.manager import Manager
from dsecd.wire import daemon as wire
from dsecd.wire.base import PROTOCOL
from dsecd.wire.call import Call
from dsecd.wire.server import Server


class DaemonApi:
    """What the host is, and how the daemon does."""

    def __init__(self, manager: Manager, execs: ExecApi, calls: Runner, reloader: Reloader) -> None:
        self._manager, self._execs, self._calls, self._reloader = manager, execs, calls, reloader
        self._started = time.time()
        self._process = psutil.Process()
        self._fixing = asyncio.Lock()
        self.server: Server | None = None

    @property
    def commands(self) -> int:
        return self._execs.commands

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
        psi = await asyncio.to_thread(scrape.pressure)
        backends = ["container", *(["microvm"] if await asyncio.to_thread(rooms.vms.usable) else [])]
        return wire.Info(
            version=__version__, host=self._manager.tag, started_at=self._started, backends=backends,
            runtime=rooms.containers.runtime.program, cgroups=rooms.containers.cgroups.layout,
            cpus=os.cpu_count() or 1, memory_mb=memory.total >> 20, memory_free_mb=memory.available >> 20,
            cpu_committed=admission.cpu, memory_committed_mb=admission.memory_mb, disk_free_mb=free >> 20,
            disk_total_mb=total >> 20, sandboxes=admission.count, sandboxes_max=admission.capacity.sandboxes,
            cpu_max=admission.capacity.cpu, memory_max_mb=admission.capacity.memory_mb, cordoned=admission.cordoned,
            pressure=admission.brake.reason(),
            load1=round(os.getloadavg()[0], 2),
            waits={name: part for (name, share), (part, _) in psi.items() if share == "some"},
        )  # fmt: skip

    async def cordon(self, call: Call, params: wire.Cordon) -> wire.Info:
        self._manager.admission.cordon(params.on)
        return await self.info(call, wire.InfoParams())

    async def drain(self, call: Call, params: wire.Drain) -> wire.Drained:
        return await drain(self._manager, params)

    async def reload(self, call: Call, params: wire.Reload) -> wire.Reloaded:
        _root_only(call)
        return await self._reloader.reload()

    async def stats(self, call: Call, params: wire.StatsParams) -> wire.Counters:
        server = self.server
        pmem = await page_cache({path for vm in self._manager.running_vms() for path in vm.spec.pmem})
        return wire.Counters(
            uptime_s=round(time.time() - self._started, 3), rss_bytes=self._process.memory_info().rss,
            open_fds=self._process.num_fds(), tasks=len(asyncio.all_tasks()),
            connections=len(server.connections) if server else 0, sandboxes=self._manager.counts(),
            created=self._manager.created, failed=self._manager.failed, stopped=self._manager.stopped,
            commands=self._execs.commands, requests=server.requests if server else 0,
            calls=self._calls.calls, call_places=sum(self._calls.sizes().values()),
            pmem_files=pmem.files, pmem_bytes=pmem.bytes, pmem_cached_bytes=pmem.cached_bytes,
        )  # fmt: skip

    async def doctor(self, call: Call, params: wire.DoctorParams) -> wire.Doctor:
        return wire.Doctor(checks=await examine(self._manager.rooms))

    async def fix(self, call: Call, params: wire.Fix) -> wire.Fixed:
        _root_only(call)
        async with self._fixing:
            return wire.Fixed(text=await uninterrupted(asyncio.to_thread(zram.set_up)))


def _root_only(call: Call) -> None:
    if call.peer.uid != 0:  # the group may use this host, not change it
        raise DsecError("denied", "only root may change the host: ask for it as root, on the node")
