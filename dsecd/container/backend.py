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
from pathlib import Path
from typing import Any, Final

from dsecd import proc
from dsecd.agent.frames import Field, Tag
from dsecd.agent.link import AgentLink
from dsecd.container.bundle import Plan, config
from dsecd.container.cgroup import Cgroups, SandboxCgroup
from dsecd.container.runtime import Runtime
from dsecd.container.seccomp import caps_mask
from dsecd.errors import DsecError

log = logging.getLogger("dsecd.container")

READY_S: Final = 30.0
KILL_S: Final = 20.0


class Container:
    """A running container: its init (the agent), its cgroup, the link."""

    def __init__(self, ident: str, pid: int, started: int, cgroup: SandboxCgroup, link: AgentLink) -> None:
        self.id = ident
        self.pid = pid
        self.started = started
        self.cgroup = cgroup
        self.link = link


class ContainerBackend:
    """One OCI runtime, one agent, one filter: the same for all containers of this host."""

    def __init__(
        self, runtime: Runtime, agent: Path, run_dir: Path, cgroups: Cgroups, seccomp: bytes, apparmor: str = ""
    ) -> None:
        self.runtime = runtime
        self.cgroups = cgroups
        self._agent = agent
        self._run_dir = run_dir
        hello: list[Field] = [(Tag.SECCOMP, seccomp), (Tag.CAPS, caps_mask())]
        if apparmor:
            hello.append((Tag.APPARMOR, apparmor.encode()))
        self._hello = hello
        # More starts at once than this only fight for the kernel's mount and cgroup locks.
        self._starts = asyncio.Semaphore(2 * (os.cpu_count() or 1))

    def directory(self, ident: str) -> Path:
        return self._run_dir / ident

    async def start(self, plan: Plan) -> Container:
        """Start a new container and greet its agent. `end` it in any case."""
        async with self._starts:
            return await self._start(plan, self.cgroups.sandbox(plan.id))

    async def _start(self, plan: Plan, cgroup: SandboxCgroup) -> Container:
        directory = self.directory(plan.id)
        with contextlib.ExitStack() as stack:
            listener, group_fd = self._prepare(stack, plan, directory, cgroup)
            pid, link = await _both(
                self.runtime.run(plan, directory, {3: listener, 4: group_fd}),
                AgentLink.connect(f"{directory}/agent.sock", self._hello, READY_S),
            )
        cgroup.seal()
        started = proc.start_time(pid)
        if started is None:
            await link.close()
            raise DsecError("sandbox_dead", "the container died while it started", sandbox_id=plan.id)
        return Container(plan.id, pid, started, cgroup, link)

    def _prepare(
        self, stack: contextlib.ExitStack, plan: Plan, directory: Path, cgroup: SandboxCgroup
    ) -> tuple[int, int]:
        """Run directory, config.json, listening socket, cgroup: microseconds of local work each."""
        # Searchable, because the runtime walks to the root file system as the sandbox's own root; nothing in it is
        # readable to others, and the agent's socket is root's alone.
        directory.mkdir(mode=0o711)
        (directory / "stage").mkdir(mode=0o711)
        resources = self.cgroups.oci_resources(memory=plan.memory, pids=plan.pids, cpu=plan.cpu)
        text = config(plan, f"{directory}/stage/root", self._agent, cgroup.oci_path, resources)
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

    async def adopt(self, ident: str, pid: int, started: int) -> Container:
        """Take back what an earlier daemon started. `sandbox_dead` when it is gone; `end` it in any case."""
        if proc.start_time(pid) != started:
            raise DsecError("sandbox_dead", "the container's init is gone", sandbox_id=ident)
        link = await AgentLink.connect(f"{self.directory(ident)}/agent.sock", self._hello, READY_S)
        return Container(ident, pid, started, self.cgroups.sandbox(ident), link)

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
    running = asyncio.ensure_future(run)
    connecting = asyncio.ensure_future(connect)
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
