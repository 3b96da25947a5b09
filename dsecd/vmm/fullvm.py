"""Full VMs: a whole disk image with its own init, a writable overlay, a screen, and an agent where it has one.

With our agent as a service inside (`dsecd.vmm.service`) all works as in other sandboxes. With QEMU's alone, whole
commands run. Both are at the mercy of the guest's root: what they say is a stranger's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from pathlib import Path
from typing import Final

from msgspec import Struct

from dsecd import proc
from dsecd.agent.command import sync
from dsecd.agent.files import disk_of, guest_stats
from dsecd.agent.frames import Fields, Tag
from dsecd.agent.link import AgentLink
from dsecd.cgroup.groups import CgroupStats
from dsecd.errors import DsecError
from dsecd.vmm import disks, live_disks, screen
from dsecd.vmm.body import VmBody
from dsecd.vmm.host import VmHost, round_memory, silent
from dsecd.vmm.machine import Drive, Driver, Machine, MachineSpec, Nic
from dsecd.vmm.qemu import QemuMachine
from dsecd.vmm.qga import GuestAgent, GuestRan
from dsecd.vmm.qmp import Qmp
from dsecd.vmm.service import QEMUS, ServiceAgent, port_open

BOOT_S: Final = 240.0  # until an agent that is known to be there answers; systemd under emulation
ANSWER_S: Final = 10.0
FLUSH_S: Final = 30.0
OVERLAY: Final = "disk.qcow2"


class FullVmPlan(Struct, frozen=True, kw_only=True):
    """kernel: to boot the image's root with; None: it has a boot loader. Bytes, cores. disk 0: the image's size."""

    id: str
    image: disks.VmImage
    below: Path
    kernel: Path | None
    scratch: Path
    uid: int
    memory: int
    disk: int
    cpu: float
    display: bool
    nics: tuple[Nic, ...] = ()


class FullVm(VmBody):
    """A running or saved full VM, and the connection to its agents, as far as it has them.

    link: to ours; None: the image has none. `guest` gives QEMU's.
    """

    def __init__(self, host: VmHost, spec: MachineSpec, machine: Machine | None) -> None:
        super().__init__(host, spec, machine)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reason = ""
        self.has_guest_agent = False  # QEMU's: its image says so, or it answered once
        self._watching: asyncio.Task[None] | None = None
        self._agent: GuestAgent | None = None
        self._lock = asyncio.Lock()
        self._service = ServiceAgent(spec.id, host.driver.address(spec)) if spec.service else None
        self.link: AgentLink | None = self._service.link if self._service is not None else None
        self._seen = (0, 0)
        if machine is not None:
            self._runs(machine)

    def _runs(self, machine: Machine, *, slept: bool = False) -> None:
        self.machine = machine
        self._watching = asyncio.get_running_loop().create_task(self._watch(machine.pid))
        if self._service is not None:
            self._service.begin(self.qmp, slept=slept)

    async def _watch(self, pid: int) -> None:
        """Its end is noticed by its process alone: agents come and go."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                await proc.readable(fd)
            finally:
                os.close(fd)
        self.reason = self.reason or "the VM powered off, or its VMM ended"
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def qmp(self) -> Qmp:
        """For screen and keys. `conflict` while it is saved."""
        machine = self.running()
        assert isinstance(machine, QemuMachine)  # `start` takes no other driver
        return machine.qmp

    async def viewer(self) -> socket.socket:
        """A connection of VNC to its screen, for one viewer, who closes it. `unsupported` without a screen."""
        if not self.spec.display:
            raise screen.no_screen()
        return await screen.vnc(self.qmp)

    async def counters(self) -> tuple[int, int, tuple[int, int] | None]:
        """OOM kills and times the task limit was hit among commands, and its root file system, as our agent says."""
        fields = await self._guest_stats()
        if fields is not None:
            self._seen = fields.integer(Tag.OOM_KILLS, 0), fields.integer(Tag.PIDS_HITS, 0)
        return *self._seen, disk_of(fields) if fields is not None else None

    async def stats(self) -> tuple[CgroupStats, tuple[int, int] | None]:
        """What its VMM uses."""
        fields = await self._guest_stats()
        return await asyncio.to_thread(self._cgroup.stats), disk_of(fields) if fields is not None else None

    async def _guest_stats(self) -> Fields | None:
        """A result must not be lost for want of these."""
        if self.link is None or not self.link.alive:
            return None
        with contextlib.suppress(DsecError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                return await guest_stats(self.link)
        return None

    async def answering(self, timeout: float = ANSWER_S) -> None:
        """Wait for our agent, where there should be one: it may be starting anew. `vmm`: it is not there in time."""
        if self._service is not None:
            await self._service.answering(timeout)

    async def guest(self, timeout: float = ANSWER_S) -> GuestAgent:
        """QEMU's guest agent, once it answers. `vmm` when it does not."""
        async with self._lock:
            if self._agent is None or not self._agent.usable:
                self._agent = await GuestAgent.connect(self.spec.directory / "qga.sock", timeout)
                self.has_guest_agent = True
            return self._agent

    async def run(self, argv: list[str], env: dict[str, str], stdin: bytes, timeout: float) -> GuestRan:
        return await (await self.guest()).exec(argv, env=env or None, stdin=stdin or None, timeout=timeout)

    async def snapshot(self, name: str) -> None:
        """Of its disk as it is now; its file systems are flushed first where QEMU's guest agent runs, or ours."""
        agent = await self.guest() if await port_open(self.qmp, QEMUS) else None
        if agent is None and self.link is not None and self.link.alive:
            with contextlib.suppress(DsecError, TimeoutError):  # else it is what a power cut would leave
                async with asyncio.timeout(FLUSH_S):
                    await sync(self.link)
        await live_disks.take(self.qmp, name, agent)

    async def revert(self, name: str) -> None:
        """Its disk becomes what the snapshot has, and it boots anew: its memory would not fit."""
        if name not in await live_disks.snapshots(self.qmp):
            raise DsecError("not_found", f"the disk has no snapshot {name!r}", sandbox_id=self.id)
        await self._let_go()
        if self._service is not None:
            await self._service.lose("its disk was reverted")
        await self._end_machine(self.running())
        try:
            await asyncio.to_thread(disks.revert, self.spec.drives[0].path, self.spec.limits, name)
            self._runs(await self._host.begun(await self._host.driver.start(self.spec)))
        except BaseException as exc:
            self.reason = f"it could not be booted from its snapshot: {exc}"
            if not self.closed.done():
                self.closed.set_result(None)
            raise
        await self.booted()

    async def booted(self) -> None:
        """Wait until an agent answers that is known to be there: ours, else QEMU's."""
        if self._service is not None:
            await self.answering(BOOT_S)
        elif self.has_guest_agent:
            await self.guest(BOOT_S)

    async def pause(self) -> None:
        """Save it to disk and end the VMM. On failure it runs on."""
        machine = self.machine
        if machine is None:
            return
        await self._host.save(machine)
        if self._service is not None:
            await self._service.suspend()
        await self._let_go()
        await self._end_machine(machine)

    async def resume(self) -> None:
        """Load it; of a running one: nothing. Its agent, where there is one, is told the time."""
        if self.machine is not None:
            return
        self._runs(await self._host.load(self.spec), slept=True)
        with contextlib.suppress(DsecError):  # a guest whose root has ended it
            if self._service is not None:
                await self._service.answering(ANSWER_S)
            elif self.has_guest_agent:
                await (await self.guest()).set_time(time.time_ns())

    async def release(self) -> None:
        if self._service is not None:
            await self._service.release()
        await self._let_go()
        if self.machine is not None:
            await self.machine.release()

    async def _let_go(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        agent, self._agent = self._agent, None
        if agent is not None:
            await agent.close()


def obstacle(driver: Driver) -> str:
    """Why this VMM runs no full VMs; "" when it does."""
    return "" if driver.name == "qemu" else f"{driver.name} runs no full VMs: set vm_driver to qemu"


async def start(host: VmHost, plan: FullVmPlan) -> FullVm:
    """Boot it; where its image is known to have an agent, until that answers. `host.end` it in any case."""
    if why := obstacle(host.driver):
        raise DsecError("unsupported", why)
    async with host.starts:
        memory = round_memory(plan.memory)
        limits = await host.place(plan.id, memory, plan.cpu, plan.uid)
        overlay = plan.scratch / OVERLAY
        await asyncio.to_thread(disks.make_overlay, plan.image, overlay, limits, plan.disk)
        spec = MachineSpec(
            id=plan.id,
            directory=host.directory(plan.id),
            vcpus=max(1, math.ceil(plan.cpu)),
            cpu=plan.cpu,
            memory=memory,
            kernel=plan.kernel and host.own(plan.id, plan.kernel),
            cmdline=("console=tty0", "console=ttyS0", "rw", f"root={plan.image.root}")
            if plan.kernel is not None
            else (),
            drives=(Drive(overlay, format="qcow2", backing=plan.below),),
            nics=plan.nics,
            memory_dir=host.memory_dir,
            display=plan.display,
            guest_agent=True,
            service=plan.image.agent,
            reboots=True,
            limits=limits,
        )
        host.note(spec)
        vm = FullVm(host, spec, await host.begun(await host.driver.start(spec)))
        vm.has_guest_agent = plan.image.guest_agent
        try:
            await vm.booted()
        except DsecError as exc:
            said = await silent(vm.running(), exc)
            await vm.release()
            raise said from exc
        except BaseException:
            await vm.release()
            raise
        return vm


async def adopt(host: VmHost, ident: str, pid: int, started: int) -> FullVm:
    """Take back what an earlier daemon started or saved."""
    spec, machine = await host.adopt(ident, pid, started)
    vm = FullVm(host, spec, machine)
    if machine is not None:
        with contextlib.suppress(DsecError):  # its root may have ended the agent, and it runs on
            await vm.answering()
    return vm
