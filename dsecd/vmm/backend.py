"""microVMs as sandboxes: layers and a disk in, an agent's link out; saved while they are paused.

Whoever calls `start`, `clone` or `adopt` owns the VM and calls `VmHost.end`, also after a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from dsecd.agent.files import disk_of, guest_stats, knobs, knobs_read, wake
from dsecd.agent.frames import Field, Fields, Tag
from dsecd.agent.link import AgentLink
from dsecd.cgroup.files import CgroupStats
from dsecd.damon import guest
from dsecd.damon.policy import Policy
from dsecd.errors import DsecError
from dsecd.vmm import disk
from dsecd.vmm.body import VmBody
from dsecd.vmm.host import MIB, VmHost, round_memory, silent
from dsecd.vmm.machine import Drive, Driver, Machine, MachineSpec, Nic, Snapshot

log = logging.getLogger("dsecd.vmm")

DISK: Final = "disk.img"
READY_S: Final = 90.0  # a guest under emulation on a busy host
WAKE_S: Final = 30.0
SEED: Final = 64
GUEST_EXTRA: Final = 48 * MIB  # the guest's kernel and agent, which the tenant did not ask for


class VmLayer(Struct, frozen=True):
    """One EROFS layer: its metadata file and its data file. pmem: both are DAX-fit and padded."""

    meta: Path
    data: Path
    pmem: bool


class VmPlan(Struct, frozen=True, kw_only=True):
    """Everything the backend needs. Layers topmost first; bytes; uid: the VMM's own, no other process's."""

    id: str
    kernel: Path
    initrd: Path
    layers: tuple[VmLayer, ...]
    scratch: Path
    uid: int
    hostname: str
    memory: int
    memory_cost: int  # what the guest's kernel needs to describe its pmem devices (dsecd.pmem)
    disk: int
    pids: int
    cpu: float
    nics: tuple[Nic, ...] = ()
    net: str = ""  # what the agent is told of its card: `own/gateway`, twice with IPv6


class Template(Struct, frozen=True):
    """A saved VM that others are cloned from. Whoever made it removes `directory`; clones do not need it then."""

    directory: Path
    snapshot: Snapshot
    spec: MachineSpec


class Vm(VmBody):
    """A running or saved microVM, and the link to its agent."""

    def __init__(self, host: VmHost, spec: MachineSpec, machine: Machine | None, link: AgentLink) -> None:
        super().__init__(host, spec, machine)
        self.link = link

    @property
    def closed(self) -> asyncio.Future[None]:
        return self.link.closed

    @property
    def reason(self) -> str:
        return self.link.reason

    @property
    def resets(self) -> bool:
        """A guest on Firecracker that was saved drops all its vsock connections when it goes on."""
        return self._host.driver.address(self.spec).vsock_port is not None

    async def counters(self) -> tuple[int, int, tuple[int, int]]:
        """OOM kills and times the task limit was hit, in the guest; its disk as the guest sees it."""
        fields = await guest_stats(self.link)
        return fields.integer(Tag.OOM_KILLS, 0), fields.integer(Tag.PIDS_HITS, 0), disk_of(fields)

    async def stats(self) -> tuple[CgroupStats, tuple[int, int] | None]:
        """Memory and CPU are the VMM's, as the host pays for them; tasks are the guest's. A saved one is not asked."""
        host, saved = await asyncio.to_thread(self._cgroup.stats), self.machine is None
        fields = Fields(b"") if saved else await guest_stats(self.link)
        figures = CgroupStats(
            memory_bytes=host.memory_bytes,
            memory_peak=host.memory_peak,
            anon=host.anon,
            file=host.file,
            cpu_usec=host.cpu_usec,
            pids=fields.integer(Tag.TASKS, 0),
            oom_kills=fields.integer(Tag.OOM_KILLS, 0),
            pids_max_hits=fields.integer(Tag.PIDS_HITS, 0),
            throttled_usec=host.throttled_usec,
        )
        return figures, None if saved else disk_of(fields)

    async def balloon(self, target: int) -> None:
        """Ask the guest for all but `target` bytes."""
        if self.machine is not None:
            await self.machine.set_balloon(target)

    async def pause(self) -> None:
        """Save it to disk and end the VMM: its memory is the host's again. On failure it runs on."""
        machine = self.machine
        if machine is None:
            return
        if self.resets:
            await self.link.suspend()
        try:
            await self._host.save(machine)
        except BaseException:
            if self.resets:
                await self.link.connect_again(WAKE_S)
            raise
        await self.link.suspend()
        await self._end_machine(machine)

    async def resume(self) -> None:
        """Start a VMM from what was saved, set the guest's clock, give it fresh entropy. Of a running one: nothing."""
        if self.machine is not None:
            return
        self.machine = await self._host.load(self.spec)
        await self.link.connect_again(WAKE_S)
        await wake(self.link, time.time_ns(), secrets.token_bytes(SEED))

    async def release(self) -> None:
        """The daemon stops: let go, the VM goes on."""
        await self.link.close()
        if self.machine is not None:
            await self.machine.release()


class VmBackend:
    """microVMs of this host: all boot the same agent and follow the same DAMON policy."""

    def __init__(self, host: VmHost, hello: list[Field], damon: Policy) -> None:
        self.host = host
        self._hello = hello
        self._damon = damon

    async def start(self, plan: VmPlan) -> Vm:
        """Boot it and greet its agent."""
        async with self.host.starts:
            spec = await self._prepare(plan)
            hello = [*self._hello, (Tag.HOSTNAME, plan.hostname.encode())]
            async with contextlib.AsyncExitStack() as stack:
                machine = await self.host.driver.start(spec)
                stack.push_async_callback(machine.release)
                await self.host.begun(machine)
                try:
                    link = await AgentLink.connect(machine.agent, hello, READY_S)
                except DsecError as exc:
                    raise await silent(machine, exc) from exc
                stack.push_async_callback(link.close)
                await self._calm(link, plan.id)
                stack.pop_all()
                return Vm(self.host, spec, machine, link)

    async def _calm(self, link: AgentLink, ident: str) -> None:
        """Start DAMON in the guest: cold file pages become free, and free pages the host's. It must not, but should."""
        if not self._damon.enabled:
            return
        try:
            (iomem,) = await knobs_read(link, [guest.IOMEM])
            await knobs(link, guest.start(guest.system_ram(iomem.decode("ascii", "replace")), self._damon))
        except (DsecError, ValueError) as exc:
            log.warning("no DAMON in the guest: %s, going on without", exc, extra={"sandbox_id": ident})

    async def _prepare(self, plan: VmPlan) -> MachineSpec:
        memory = round_memory(plan.memory + plan.memory_cost + GUEST_EXTRA)
        limits = await self.host.place(plan.id, memory, plan.cpu, plan.uid)
        image = plan.scratch / DISK
        await disk.make(image, plan.disk, plan.uid, self.host.templates)
        pmem, drives, words = _devices(plan.layers)
        drives.append(Drive(image))
        words += [f"dsec.net={plan.net}"] if plan.net else []
        spec = MachineSpec(
            id=plan.id,
            directory=self.host.directory(plan.id),
            vcpus=max(1, math.ceil(plan.cpu)),
            cpu=plan.cpu,
            memory=memory,
            kernel=self.host.own(plan.id, plan.kernel),
            initrd=self.host.own(plan.id, plan.initrd),
            cmdline=(*words, f"dsec.upper={_vd(len(drives) - 1)}", f"dsec.pids={plan.pids}", _link(self.host.driver)),
            pmem=tuple(pmem),
            drives=tuple(drives),
            nics=plan.nics,
            memory_dir=self.host.memory_dir,
            limits=limits,
        )
        self.host.note(spec)
        return spec

    @contextlib.asynccontextmanager
    async def template(self, vm: Vm) -> AsyncIterator[Template]:
        """A VM that stands still for the length of the block, and is saved: what `clone` starts from."""
        directory = self.host.state(vm.id) / f"template-{secrets.token_hex(4)}"
        directory.mkdir(mode=0o700)
        if vm.machine is None:
            yield Template(directory, await asyncio.to_thread(self.host.saved_again, vm.id, directory), vm.spec)
            return
        machine = vm.running()
        await machine.pause()
        try:
            try:
                snapshot = await machine.snapshot(directory)
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, directory, True)
                raise
            yield Template(directory, snapshot, vm.spec)
        finally:
            if vm.resets:
                await vm.link.suspend()
            await machine.resume()
            if vm.resets:
                await vm.link.connect_again(WAKE_S)

    async def clone(
        self, template: Template, ident: str, uid: int, hostname: str, scratch: Path, tap: str = "", net: str = ""
    ) -> Vm:
        """Another VM from a template, its memory shared copy-on-write, on its own copy of the disk. tap, net: if the
        source has a card, behind which link is the copy's, and what its agent is told of it."""
        async with self.host.starts:
            source = template.spec
            limits = await self.host.place(ident, source.memory, source.cpu, uid)
            spec = msgspec.structs.replace(
                source,
                id=ident,
                directory=self.host.directory(ident),
                limits=limits,
                kernel=source.kernel and self.host.own(ident, source.kernel),
                initrd=source.initrd and self.host.own(ident, source.initrd),
                drives=(*source.drives[:-1], Drive(scratch / DISK)),
                nics=tuple(msgspec.structs.replace(nic, tap=tap) for nic in source.nics),
            )
            self.host.note(spec)
            async with contextlib.AsyncExitStack() as stack:
                machine = await self.host.driver.restore(spec, template.snapshot, template.directory, clone=True)
                stack.push_async_callback(machine.release)
                await machine.resume()
                link = await AgentLink.connect(machine.agent, self._hello, WAKE_S)
                stack.push_async_callback(link.close)
                await wake(link, time.time_ns(), secrets.token_bytes(SEED), hostname, net)
                stack.pop_all()
                return Vm(self.host, spec, machine, link)

    async def adopt(self, ident: str, pid: int, started: int) -> Vm:
        """Take back what an earlier daemon started or saved. `sandbox_dead` when it is gone."""
        spec, machine = await self.host.adopt(ident, pid, started)
        if machine is None:
            return Vm(self.host, spec, None, AgentLink.asleep(self.host.driver.address(spec), self._hello))
        try:
            return Vm(self.host, spec, machine, await AgentLink.connect(machine.agent, self._hello, READY_S))
        except BaseException:
            await machine.release()
            raise


def _devices(layers: tuple[VmLayer, ...]) -> tuple[list[Path], list[Drive], list[str]]:
    """pmem files, drives, and the words of the command line that say what is what."""
    pmem: list[Path] = []
    drives: list[Drive] = []
    words = []
    for layer in layers:
        names = []
        for path in (layer.meta, layer.data):
            if layer.pmem:
                names.append(f"pmem{len(pmem)}")
                pmem.append(path)
            else:
                names.append(_vd(len(drives)))
                drives.append(Drive(path, read_only=True))
        words.append(f"dsec.lower={':'.join(names)}")
    if len(pmem) + len(drives) > MAX_DEVICES:
        raise DsecError("unsupported", f"{len(layers)} layers: a microVM has slots for {MAX_DEVICES // 2}; merge some "
                        "with `dsecctl image collapse`")  # fmt: skip
    return pmem, drives, words


MAX_DEVICES: Final = 22  # q35's root bus has 31 slots, and our other devices take the rest


def _vd(number: int) -> str:
    return f"vd{chr(ord('a') + number)}"


def _link(driver: Driver) -> str:
    return "dsec.link=serial:dsec.agent" if driver.name == "qemu" else "dsec.link=vsock:1024"
