"""From a sandbox's record to a microVM: its layers as devices, its kernel, its memory."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from dsecd.agent.frames import Field
from dsecd.aio import uninterrupted
from dsecd.cgroup.groups import Cgroups
from dsecd.damon.host import HostDamon
from dsecd.damon.policy import Policy
from dsecd.disk import DiskPool
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError
from dsecd.net.segment import Card
from dsecd.pmem import fit
from dsecd.pmem.account import guest_cost, require_memory
from dsecd.pmem.backing import Backing
from dsecd.sandbox.body import Body
from dsecd.sandbox.record import Record
from dsecd.vmm import disk, fullvm
from dsecd.vmm.backend import Template, Vm, VmBackend, VmLayer, VmPlan
from dsecd.vmm.disks import DiskStore
from dsecd.vmm.fullvm import FullVm
from dsecd.vmm.host import VmHost
from dsecd.vmm.kernel import Kernel, KernelStore
from dsecd.vmm.machine import Driver, Nic

MIB: Final = 1 << 20


class VmDirs(Struct, frozen=True):
    """run: of this boot; state: of machines; memory: on tmpfs; pmem: padded copies of images' files."""

    run: Path
    state: Path
    memory: Path
    pmem: Path


class VmSettings(Struct):
    """What all VMs of this host have in common.

    kernel: by name, or the newest that fits. hello: what an agent is told first. damon: in guests; host_damon: of VMMs.
    """

    dirs: VmDirs
    kernel: str
    agent: Path
    hello: list[Field]
    damon: Policy
    host_damon: HostDamon | None = None


class Vms:
    """The VM side of this host. A host that cannot run any says so when one is asked for."""

    def __init__(
        self, settings: VmSettings, cgroups: Cgroups, kernels: KernelStore, disks: DiskStore, find: Callable[[], Driver]
    ) -> None:
        self.kernels, self.disks = kernels, disks
        self.kernel, self.agent = settings.kernel, settings.agent
        self.memory_dir = settings.dirs.memory
        self._settings = settings
        self._cgroups = cgroups
        self._find = find
        self._finding = threading.Lock()
        self._host: VmHost | None = None
        self._fit: set[str] = set()  # digests of images that were seen to be fit for DAX
        self.backing = Backing(settings.dirs.pmem)

    def host(self) -> VmHost:
        """Found out once; `unsupported` says what is missing. Blocks the first time, for up to a second."""
        with self._finding:
            if self._host is None:
                driver = self._find()
                self.backing.open()
                dirs = self._settings.dirs
                self._host = VmHost(driver, dirs.run, dirs.state, dirs.memory, self._cgroups, self._settings.host_damon)
            return self._host

    @property
    def host_damon(self) -> HostDamon | None:
        return self._settings.host_damon

    def _micro(self, host: VmHost) -> VmBackend:
        return VmBackend(host, self._settings.hello, self._settings.damon)

    def tidy(self, images: ImageStore) -> int:
        """Remove padded copies of images that are gone; bytes that this gives back. Blocks."""
        if not self._settings.dirs.pmem.exists():
            return 0
        found = images.list()
        digests = {digest for one in found for digest in (one.meta_digest, one.data_digest)}
        return self.backing.keep({digest.removeprefix("sha256:") for digest in digests})

    def usable(self) -> bool:
        """Whether a microVM could be started now. Blocks as `backend` does."""
        try:
            self.host()
            self.kernels.default(self.kernel)
        except DsecError:
            return False
        return True

    def lacking(self) -> tuple[str, str, bool]:
        """What is missing for a microVM and for a full VM ("" nothing), and whether they are emulated. Blocks."""
        try:
            driver = self.host().driver
        except DsecError as exc:
            return exc.message, exc.message, False
        micro = ""
        try:
            self.kernels.default(self.kernel)
        except DsecError as exc:
            micro = exc.message
        return micro, fullvm.obstacle(driver), driver.accel == "tcg"

    async def start(self, record: Record, uid: int, images: ImageStore, pool: DiskPool, card: Card | None) -> Vm:
        """Boot it, with a network card or without. `end` it in any case."""
        host = await asyncio.to_thread(self.host)
        spec = record.spec
        needs: tuple[str, ...] = ("pvh", "blk", "serial") if host.driver.name == "qemu" else ("blk", "vsock")
        if spec.root == "pmem":
            needs += ("pmem", "dax")
        kernel = await asyncio.to_thread(self.kernels.default, self.kernel, *needs)
        layers = tuple([await self._layer(images, digest, spec.root) for digest in record.layers])
        sizes = [path.stat().st_size for layer in layers if layer.pmem for path in (layer.meta, layer.data)]
        require_memory(spec.memory_mb * MIB, sizes)
        space = await uninterrupted(asyncio.to_thread(pool.create, record.id, self.disk_limit(record), uid))
        plan = VmPlan(
            id=record.id,
            kernel=self.kernels.vmlinux(kernel),
            initrd=await asyncio.to_thread(self.kernels.initrd, kernel, self.agent),
            layers=layers,
            scratch=space.path,
            uid=uid,
            hostname=spec.hostname or spec.name or "sandbox",
            memory=spec.memory_mb * MIB,
            memory_cost=guest_cost(sizes),
            disk=spec.disk_mb * MIB,
            pids=spec.pids,
            cpu=spec.cpu,
            nics=_nics(card),
            net="" if card is None else card.words,
        )
        return await self._micro(host).start(plan)

    async def _layer(self, images: ImageStore, digest: str, root: str) -> VmLayer:
        manifest = await asyncio.to_thread(images.resolve, digest)
        try:
            meta, data = images.meta_path(manifest), images.data_path(manifest)
        except DsecError as exc:
            raise DsecError(
                "unsupported", f"{exc.message}; a microVM needs it whole on this host: `dsecctl image pull` it"
            ) from exc
        if root == "blk":
            return VmLayer(meta, data, pmem=False)
        if digest not in self._fit:
            await asyncio.to_thread(fit.require, meta, manifest.name or digest[7:19])
            self._fit.add(digest)
        return VmLayer(
            (await self.backing.get(meta, manifest.meta_digest.removeprefix("sha256:"))).path,
            (await self.backing.get(data, manifest.data_digest.removeprefix("sha256:"))).path,
            pmem=True,
        )

    @contextlib.asynccontextmanager
    async def template(self, body: Body) -> AsyncIterator[Template]:
        """`unsupported` for what is no microVM."""
        if not isinstance(body, Vm):
            raise DsecError("unsupported", "only microVMs can be forked yet")
        async with self._micro(self.host()).template(body) as template:
            yield template

    async def clone(self, record: Record, template: Template, uid: int, pool: DiskPool, card: Card | None) -> Vm:
        """From a template, on the disk space that was cloned for it, with a card if the source has one. `end` it in
        any case."""
        name = record.spec.hostname or record.spec.name or "sandbox"
        return await self.clone_of(record.id, name, template, uid, pool, card)

    async def clone_of(
        self, ident: str, hostname: str, template: Template, uid: int, pool: DiskPool, card: Card | None
    ) -> Vm:
        """The same of what has no record, and perhaps keeps its name."""
        space = await asyncio.to_thread(pool.open, ident)
        link = ("", "") if card is None else (card.tap, card.words)
        return await self._micro(self.host()).clone(template, ident, uid, hostname, space.path, *link)

    def disk_limit(self, record: Record) -> int:
        return _with_slack(record.spec.disk_mb * MIB)

    async def start_full(self, record: Record, uid: int, pool: DiskPool, card: Card | None) -> FullVm:
        """Boot a full VM, with a network card or without. `end` it in any case."""
        host = await asyncio.to_thread(self.host)
        spec = record.spec
        image = await asyncio.to_thread(self.disks.get, spec.image)
        kernel = None
        if image.root:
            kernel = self.kernels.vmlinux(await asyncio.to_thread(self._disk_kernel))
        disk_size = max(spec.disk_mb * MIB, image.virtual_size)
        space = await uninterrupted(asyncio.to_thread(pool.create, record.id, _with_slack(disk_size), uid))
        plan = fullvm.FullVmPlan(
            id=record.id, image=image, below=self.disks.disk(image), kernel=kernel, scratch=space.path, uid=uid,
            memory=spec.memory_mb * MIB, disk=disk_size, cpu=spec.cpu,
            display=(spec.profile or image.profile) != "server", nics=_nics(card),
        )  # fmt: skip
        return await fullvm.start(host, plan)

    def _disk_kernel(self) -> Kernel:
        """One that finds a disk's root without an initramfs: the named one, else the newest that can."""
        wanted = [self.kernels.get(self.kernel)] if self.kernel else []
        for kernel in (*wanted, *self.kernels.list()):
            if all(kernel.features.get(need) == "built-in" for need in ("blk", "ext4")):
                return kernel
        raise DsecError(
            "vmm", "no guest kernel here has virtio-blk and ext4 built in: make one, `dsecctl kernel build`"
        )

    async def adopt(self, record: Record) -> Vm | FullVm:
        host = await asyncio.to_thread(self.host)
        if record.backend == "fullvm":
            return await fullvm.adopt(host, record.id, record.pid, record.ticks)
        return await self._micro(host).adopt(record.id, record.pid, record.ticks)

    async def end(self, ident: str) -> None:
        if self._host is not None:
            await self._host.end(ident)

    async def sweep(self, keep: set[str]) -> None:
        """End the VMs that no record owns. A host that never had one is not asked what it can do."""
        if self._settings.dirs.state.exists():
            await (await asyncio.to_thread(self.host)).sweep(keep)


def _nics(card: Card | None) -> tuple[Nic, ...]:
    return () if card is None else (Nic(card.tap, card.mac),)


def _with_slack(size: int) -> int:
    """Of the space that holds an image of so many bytes: a sixteenth more, for the image's own tables and copies."""
    return size * 17 // 16 + disk.SLACK
