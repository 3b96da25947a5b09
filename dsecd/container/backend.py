"""Start containers, take them back after a daemon restart, end them.

Whoever calls `start` or `adopt` owns the container and calls `end`, also after a failure. A daemon that lets go of its
sandboxes without ending them (restart) simply never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from dsecd import proc
from dsecd.agent.address import AgentAddress
from dsecd.agent.frames import Field, Tag
from dsecd.agent.link import AgentLink
from dsecd.aio import uninterrupted
from dsecd.cgroup.groups import Cgroups, CgroupStats, SandboxCgroup
from dsecd.container.bundle import Plan, config
from dsecd.container.reclaim import Reclaim, fetch_ahead
from dsecd.container.runtime import Runtime
from dsecd.errors import DsecError
from dsecd.spans import span, spent

log = logging.getLogger("dsecd.container")

READY_S: Final = 30.0
KILL_S: Final = 20.0
HOLD_S: Final = 1.0  # an agent answers at once, unless its sandbox has no CPU left for it


class Container:
    """A running container: its init (the agent), its cgroup, the link."""

    def __init__(
        self, ident: str, pid: int, started: int, cgroup: SandboxCgroup, link: AgentLink, reclaimers: Executor
    ) -> None:
        self.id = ident
        self._reclaimers = reclaimers
        self._reclaim: Reclaim | None = None
        self._reclaiming: asyncio.Future[int] | None = None
        self._stopped: asyncio.Future[int] | None = None
        self._pid = pid
        self._started = started
        self.cgroup = cgroup
        self.link = link

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def started(self) -> int:
        return self._started

    @property
    def closed(self) -> asyncio.Future[None]:
        return self.link.closed

    @property
    def reason(self) -> str:
        return self.link.reason

    def kill(self) -> None:
        self._stop_reclaim()
        self.cgroup.kill()

    async def counters(self) -> tuple[int, int, None]:
        """OOM kills and times the task limit was hit: two small reads. The pool knows of its disk."""
        return self.cgroup.oom_kills(), self.cgroup.pids_hits(), None

    async def stats(self) -> tuple[CgroupStats, None]:
        return await asyncio.to_thread(self.cgroup.stats), None

    async def memory(self) -> tuple[int, int]:
        return await asyncio.to_thread(self.cgroup.memory)

    async def pause(self) -> None:
        """Freeze all of it; on failure it runs on."""
        await self.link.hold(HOLD_S)
        try:
            await asyncio.to_thread(self.cgroup.freeze)
        except DsecError:
            await asyncio.to_thread(self.cgroup.thaw)
            self.link.go_on()
            raise
        self._reclaim = Reclaim(self.cgroup)

    async def give_back(self) -> int | None:
        if self._reclaim is None:
            return None
        if self._reclaiming is None:
            self._reclaiming = asyncio.ensure_future(self._run(self._reclaim, self._stopped))
        return await asyncio.shield(self._reclaiming)

    async def _run(self, reclaim: Reclaim, earlier: asyncio.Future[int] | None) -> int:
        if earlier is not None:  # of another pause, in its last step: it may not forbid swap behind our back
            await asyncio.wait((earlier,))
        return await asyncio.get_running_loop().run_in_executor(self._reclaimers, reclaim.run)

    async def resume(self) -> None:
        """Thaw it. The agent of one that was taken back paused is greeted only now: frozen, it could not answer."""
        self._stop_reclaim()
        await asyncio.to_thread(self._thaw)
        if self.link.suspended:
            await self.link.connect_again(READY_S)
        else:
            self.link.go_on()

    def _thaw(self) -> None:
        self.cgroup.allow_swap(False)
        try:
            fetch_ahead(self.cgroup, self._pid)
        except OSError as exc:
            log.info("nothing is fetched ahead: %s", exc, extra={"sandbox_id": self.id})
        self.cgroup.thaw()

    def _stop_reclaim(self) -> None:
        if self._reclaim is not None:
            self._reclaim.stop()
            self._stopped = self._reclaiming or self._stopped
            self._reclaim = self._reclaiming = None

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """While inside, none of its processes runs. For moments: nothing of its memory is given back."""
        try:
            await uninterrupted(asyncio.to_thread(self.cgroup.freeze))
            yield
        finally:
            await uninterrupted(asyncio.to_thread(self.cgroup.thaw))

    async def release(self) -> None:
        self._stop_reclaim()
        await self.link.close()


class ContainerBackend:
    """One OCI runtime, one agent, one filter: the same for all containers of this host."""

    def __init__(
        self, runtime: Runtime, agent: Path, run_dir: Path, cgroups: Cgroups, hello: list[Field], apparmor: str = ""
    ) -> None:
        self.runtime = runtime
        self.cgroups = cgroups
        self._agent = agent
        self._run_dir = run_dir
        self._hello = [*hello, (Tag.APPARMOR, apparmor.encode())] if apparmor else hello
        # More starts at once than this only fight for the kernel's mount and cgroup locks.
        cpus = os.cpu_count() or 1
        self._starts = asyncio.Semaphore(2 * cpus)
        # Threads of its own: a job that is paused must not keep another one's thaw waiting.
        self._reclaimers = ThreadPoolExecutor(cpus, "reclaim")

    def directory(self, ident: str) -> Path:
        return self._run_dir / ident

    async def start(self, plan: Plan) -> Container:
        """Start a new container and greet its agent. `end` it in any case."""
        with span("wait for a turn to start"):
            await self._starts.acquire()
        try:
            return await self._start(plan, self.cgroups.sandbox(plan.id))
        finally:
            self._starts.release()

    async def _start(self, plan: Plan, cgroup: SandboxCgroup) -> Container:
        directory = self.directory(plan.id)
        with contextlib.ExitStack() as stack:
            listener, group_fd = self._prepare(stack, plan, directory, cgroup)
            pid, link = await _both(
                self.runtime.run(plan, directory, {3: listener, 4: group_fd}),
                AgentLink.connect(AgentAddress(directory / "agent.sock"), self._hello, READY_S),
            )
        cgroup.seal()
        started = proc.start_time(pid)
        if started is None:
            await link.close()
            raise DsecError("sandbox_dead", "the container died while it started", sandbox_id=plan.id)
        return Container(plan.id, pid, started, cgroup, link, self._reclaimers)

    def _prepare(
        self, stack: contextlib.ExitStack, plan: Plan, directory: Path, cgroup: SandboxCgroup
    ) -> tuple[int, int]:
        """Run directory, config.json, listening socket, cgroup: microseconds of local work each."""
        # Searchable, because the runtime walks to the root file system as the sandbox's own root; nothing in it is
        # readable to others, and the agent's socket is root's alone.
        directory.mkdir(mode=0o711)
        (directory / "stage").mkdir(mode=0o711)
        resources = self.cgroups.oci_resources(memory=plan.memory, pids=plan.pids, cpu=plan.cpu)
        text = config(plan, f"{directory}/stage", self._agent, cgroup.oci_path, resources)
        (directory / "config.json").write_bytes(text)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        stack.callback(listener.close)
        listener.bind(f"{directory}/agent.sock")
        (directory / "agent.sock").chmod(0o600)
        listener.listen(4)
        cgroup.create_unified(plan.id_base)
        group_fd = cgroup.open_fd()
        stack.callback(os.close, group_fd)
        return listener.fileno(), group_fd

    async def adopt(self, ident: str, pid: int, started: int, paused: bool) -> Container:
        """Take back what an earlier daemon started, running or paused. `sandbox_dead` when it is gone.

        `end` it in any case. A paused one stays frozen, and its memory out: its agent is greeted by `resume`.
        """
        if proc.start_time(pid) != started:
            raise DsecError("sandbox_dead", "the container's init is gone", sandbox_id=ident)
        cgroup, address = self.cgroups.sandbox(ident), AgentAddress(self.directory(ident) / "agent.sock")
        if paused:
            await asyncio.to_thread(cgroup.freeze)  # an earlier daemon may have died half-way
            link = AgentLink.asleep(address, self._hello)
        else:
            await asyncio.to_thread(cgroup.thaw)
            link = await AgentLink.connect(address, self._hello, READY_S)
        return Container(ident, pid, started, cgroup, link, self._reclaimers)

    async def end(self, ident: str) -> None:
        """Kill what runs, remove what is left: callable at any point of a start, and twice. No cancel stops it."""
        await asyncio.shield(self._end(ident))

    async def _end(self, ident: str) -> None:
        cgroup = self.cgroups.sandbox(ident)
        cgroup.kill()
        await self.runtime.delete(ident)
        await asyncio.to_thread(cgroup.remove)
        await asyncio.to_thread(shutil.rmtree, self.directory(ident), True)

    async def sweep(self, keep: set[str]) -> list[str]:
        """End every container, cgroup and run directory that no record owns; returns their ids."""
        found = {*self.runtime.known(), *self.cgroups.list_existing()}
        with contextlib.suppress(FileNotFoundError):
            found |= set(os.listdir(self._run_dir))
        strays = sorted(found - keep)
        for ident in strays:
            log.warning("removing a container nobody owns: %s", ident, extra={"sandbox_id": ident})
            await self._end(ident)
        return strays


async def _both(run: Any, connect: Any) -> tuple[int, AgentLink]:
    """Start the runtime and wait for the agent side by side; if one fails, neither is left."""
    running = asyncio.ensure_future(spent("start the container", "launcher", run))
    connecting = asyncio.ensure_future(spent("agent answers", "agent", connect))
    try:
        await asyncio.wait((running, connecting), return_when=asyncio.FIRST_EXCEPTION)
        return running.result(), connecting.result()
    except BaseException:
        for task in (running, connecting):
            task.cancel()
        done = await asyncio.gather(running, connecting, return_exceptions=True)
        if isinstance(done[1], AgentLink):
            await done[1].close()
        if isinstance(done[0], DsecError):  # the runtime's own words say more than a link that closed
            raise done[0] from None
        raise
