"""What the daemon's metrics say of its rooms, looked at when somebody asks. docs/metrics.md has them all.

Rooms count what happens (`Manager.created`, `Runner.calls`, the page server's figures); here it is only read. What is
measured as it happens (requests, execs, syncs of logs) is declared where it is measured.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

import psutil

from dsecd.api.daemon import DaemonApi
from dsecd.config import Config
from dsecd.fncall.runner import Runner
from dsecd.metrics import DAEMON
from dsecd.metricsconfig import address
from dsecd.pmem.account import page_cache
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.pressure import Pressure
from dsecd.scrape import Process, Scrapes, loopback, pressure
from dsecd.wire.server import bound

SANDBOXES: Final = DAEMON.gauge("dsecd_sandboxes", "Sandboxes that are not over.", ("state", "backend"))
CREATED: Final = DAEMON.counter("dsecd_sandboxes_created", "Sandboxes that came to run.")
FAILED: Final = DAEMON.counter("dsecd_sandboxes_failed", "Sandboxes that ended by themselves, or did not come to run.")
STOPPED: Final = DAEMON.counter("dsecd_sandboxes_stopped", "Sandboxes that were stopped.")
COMMANDS: Final = DAEMON.counter("dsecd_commands", "Commands that were asked for.")
RECEIVED: Final = DAEMON.counter("dsecd_requests_received", "Requests that were read, also what is no request of ours.")
CONNECTIONS: Final = DAEMON.gauge("dsecd_connections", "Clients that are connected.")
CPU: Final = DAEMON.gauge(
    "dsecd_admission_cpu_cores", "CPU that is promised (reserved), and that may be (limit).", ("kind",), "cores"
)
MEMORY: Final = DAEMON.gauge("dsecd_admission_memory_bytes", "The same of memory.", ("kind",), "bytes")
DISK: Final = DAEMON.gauge("dsecd_admission_disk_bytes", "The same of disk.", ("kind",), "bytes")
COUNT: Final = DAEMON.gauge("dsecd_admission_sandboxes", "The same of how many there are.", ("kind",))
CORDONED: Final = DAEMON.gauge("dsecd_cordoned", "1: the host takes no new sandboxes.")
POOL_FREE: Final = DAEMON.gauge("dsecd_disk_pool_free_bytes", "What writable space can still grow by.", unit="bytes")
POOL: Final = DAEMON.gauge("dsecd_disk_pool_bytes", "All writable space.", unit="bytes")
HOST_FREE: Final = DAEMON.gauge(
    "dsecd_host_memory_available_bytes", "What the host could give without swapping.", unit="bytes"
)
HOST_LOAD: Final = DAEMON.gauge("dsecd_host_load1", "Processes that run or wait, over the last minute.")
PSI: Final = DAEMON.gauge(
    "dsecd_host_pressure_ratio",
    "Part of the last 10 s in which some, or all, of what could run waited for cpu, memory or io.",
    ("resource", "share"), "ratio",
)  # fmt: skip
PSI_TOTAL: Final = DAEMON.counter(
    "dsecd_host_pressure_seconds", "The same, since the host started.", ("resource", "share"), "seconds"
)
DAMON_OUT: Final = DAEMON.counter(
    "dsecd_damon_reclaimed_bytes", "What the host's DAMON scheme paged out of VMMs, since it was made.", unit="bytes"
)
BALLOON: Final = DAEMON.gauge("dsecd_balloon_bytes", "Memory that guests were asked to do without now.", unit="bytes")
PMEM: Final = DAEMON.gauge("dsecd_pmem_bytes", "Files that running microVMs map, each counted once.", unit="bytes")
PMEM_CACHED: Final = DAEMON.gauge(
    "dsecd_pmem_cached_bytes", "What of them is in the page cache, once for all guests.", unit="bytes"
)
EVENTS: Final = DAEMON.counter(
    "dsecd_image_reads", "Reads of images that are filled on demand, by hit and miss.", ("result",)
)
FETCHED: Final = DAEMON.counter("dsecd_image_fetched_bytes", "What was fetched from stores for them.", unit="bytes")
EVICTED: Final = DAEMON.counter("dsecd_image_evicted_bytes", "What the cache let go of.", unit="bytes")
DENIED: Final = DAEMON.counter("dsecd_image_reads_failed", "Reads that got EIO: their store did not answer.")
FAULTS: Final = DAEMON.summary("dsecd_image_fault_seconds", "How long reads waited that had to.", "seconds")
CACHE: Final = DAEMON.gauge(
    "dsecd_image_cache_bytes", "Size of the cache: what is used, and its limit.", ("kind",), "bytes"
)
CALLS: Final = DAEMON.counter("dsecd_fncall_calls", "Stateless calls that were run.")
PLACES: Final = DAEMON.gauge("dsecd_fncall_places", "Places for calls: idle, busy, starting.", ("state",))
CALLS_WAITING: Final = DAEMON.gauge("dsecd_fncall_waiting", "Calls that wait for a place.")
LOGS_WAITING: Final = DAEMON.gauge("dsecd_trajectory_queue", "Trajectories that wait for a thread to write them.")


class Metrics:
    """One per daemon."""

    def __init__(self, config: Config, manager: Manager, runner: Runner, daemon: DaemonApi, squeeze: Pressure) -> None:
        self._config, self._manager, self._runner, self._daemon = config, manager, runner, daemon
        self._squeeze = squeeze
        self.process = Process(DAEMON, "dsecd")
        self._scrapes = Scrapes(DAEMON, self._collect)

    async def open(self, group: int | None) -> None:
        """Listen where the configuration says. group: who may connect beside root."""
        wanted = self._config.metrics
        path = Path(wanted.socket or f"{self._config.run_dir}/metrics.sock")
        if path.is_socket():  # of a daemon that was killed
            path.unlink()
        await self._scrapes.serve(bound(path, 0o177))
        if group is not None:
            os.chown(path, 0, group)
        path.chmod(int(wanted.socket_mode, 8))
        if wanted.listen:
            await self._scrapes.serve(loopback(*address(wanted.listen)))

    async def close(self) -> None:
        await self._scrapes.close()
        Path(self._config.metrics.socket or f"{self._config.run_dir}/metrics.sock").unlink(missing_ok=True)

    async def _collect(self) -> None:
        self._sandboxes()
        self._requests()
        self.process.look()
        self._calls()
        await self._host()
        await self._memory()
        await self._images()

    def _sandboxes(self) -> None:
        manager = self._manager
        SANDBOXES.clear()
        counts: dict[tuple[str, str], int] = {}
        for record in manager.all((), {}, None):
            key = record.state, record.backend
            counts[key] = counts.get(key, 0) + 1
        for labels, count in counts.items():
            SANDBOXES.set(count, *labels)
        CREATED.set(manager.created)
        FAILED.set(manager.failed)
        STOPPED.set(manager.stopped)
        promised, limits = manager.admission, manager.admission.capacity
        CPU.set(promised.cpu, "reserved")
        CPU.set(limits.cpu, "limit")
        MEMORY.set(promised.memory_mb << 20, "reserved")
        MEMORY.set(limits.memory_mb << 20, "limit")
        DISK.set(promised.disk_mb << 20, "reserved")
        DISK.set(limits.disk_mb << 20, "limit")
        COUNT.set(promised.count, "reserved")
        COUNT.set(limits.sandboxes, "limit")
        CORDONED.set(promised.cordoned)
        LOGS_WAITING.set(manager.trajectory.waiting)

    def _requests(self) -> None:
        server = self._daemon.server
        if server is not None:
            RECEIVED.set(server.requests)
            CONNECTIONS.set(len(server.connections))
        COMMANDS.set(self._daemon.commands)

    def _calls(self) -> None:
        CALLS.set(self._runner.calls)
        idle, busy, starting, waiting = self._runner.occupancy()
        for count, state in ((idle, "idle"), (busy, "busy"), (starting, "starting")):
            PLACES.set(count, state)
        CALLS_WAITING.set(waiting)

    async def _host(self) -> None:
        free, total = await asyncio.to_thread(self._manager.rooms.pool.free)
        POOL_FREE.set(free)
        POOL.set(total)
        HOST_FREE.set(psutil.virtual_memory().available)
        HOST_LOAD.set(os.getloadavg()[0])
        for labels, (part, seconds) in (await asyncio.to_thread(pressure)).items():
            PSI.set(part / 100, *labels)
            PSI_TOTAL.set(seconds, *labels)

    async def _memory(self) -> None:
        vms = self._manager.running_vms()
        files = await page_cache({path for vm in vms for path in vm.spec.pmem})
        PMEM.set(files.bytes)
        PMEM_CACHED.set(files.cached_bytes)
        BALLOON.set(sum(self._squeeze.taken.values()))
        damon = self._manager.rooms.vms.host_damon
        if damon is not None and (done := await damon.stats()) is not None:
            DAMON_OUT.set(done.applied_bytes)

    async def _images(self) -> None:
        pages = self._manager.rooms.pages
        stats = await asyncio.to_thread(pages.peek)
        if stats is None:  # no such image was used yet, or it is busy: as it was last seen
            return
        EVENTS.set(stats.hits, "hit")
        EVENTS.set(stats.waits, "miss")
        FETCHED.set(stats.fetched_bytes)
        EVICTED.set(stats.evicted_bytes)
        DENIED.set(stats.denied)
        FAULTS.set(stats.waited, stats.waited_s)
        CACHE.set(stats.cached_bytes, "used")
        CACHE.set(stats.cache_bytes, "limit")
