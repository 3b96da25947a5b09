"""image.*"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsecd.aio import uninterrupted
from dsecd.api.flows import inflow, teller
from dsecd.api.vmimages import VmImages
from dsecd.config import Config
from dsecd.erofs.jobs import run_collapse, run_import, run_pull, run_push
from dsecd.erofs.model import ImageConfig, ImportJob, Limits, Manifest
from dsecd.erofs.mount import MountTable
from dsecd.erofs.pages.client import Pages
from dsecd.erofs.pages.trace import figures
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError
from dsecd.wire import base
from dsecd.wire import images as wire
from dsecd.wire.call import Call


class ImageApi:
    """Imports run in processes of their own; the client's bytes reach them through a socket pair."""

    def __init__(self, config: Config, store: ImageStore, mounts: MountTable, pages: Pages, vms: VmImages,
                 gone: Callable[[], int]) -> None:  # fmt: skip
        """gone: called (and blocking) when images were removed; gives the bytes that others then let go of."""
        self._gone = gone
        self._store = store
        self._mounts = mounts
        self._pages = pages
        self._limits = Limits(
            max_bytes=config.image_max_mb << 20, insecure_registries=tuple(config.insecure_registries),
            authfile=config.registry_authfile,
        )  # fmt: skip
        self._vms = vms
        self.slots = asyncio.Semaphore(2)  # an import fills a core and a disk; more side by side are no faster

    def limits(self, call: Call) -> Limits:
        """Of what this caller imports: names of images are everybody's, and only root's admin moves one."""
        return msgspec.structs.replace(self._limits, new_name=call.peer.bounded)

    async def import_(self, call: Call, params: wire.Import) -> wire.Image:
        if params.kind == "vm":
            async with self.slots:
                return await self._vms.import_(call, params)
        config = ImageConfig(env=params.env, workdir=params.workdir or "", user=params.user or "")
        job = ImportJob(
            kind=params.kind, name=params.name, prefix=params.prefix, config=config,
            source=params.reference or params.format, store=params.store or "",
            origin="registry" if params.format == "registry" else "stream",
            format="auto" if params.format == "registry" else params.format,
            reference=(params.reference or "") if params.format == "registry" else "",
            tag=(params.reference or "") if params.format in ("oci", "docker") else "",
        )  # fmt: skip
        job.check()
        async with self.slots:
            if job.origin == "registry":
                return self.shown(await self._run(call, job, None))
            async with inflow(call) as fd:
                return self.shown(await self._run(call, job, fd))

    async def bootstrap(self, call: Call, params: wire.Bootstrap) -> wire.Image:
        if params.kind == "vm":
            async with self.slots:
                return await self._vms.bootstrap(call, params, params.suite or _host_suite())
        job = ImportJob(
            kind="base", name=params.name, origin="bootstrap", suite=params.suite or _host_suite(),
            packages=tuple(params.include), source="mmdebstrap",
        )  # fmt: skip
        job.check()
        async with self.slots:
            return self.shown(await self._run(call, job, None))

    async def collapse(self, call: Call, params: wire.Collapse) -> wire.Image:
        async with self.slots:
            made = await run_collapse(
                self._store, params.name, params.layers, max_bytes=params.max_mb << 20, put_on=params.store or "",
                progress=teller(call), limits=self.limits(call),
            )  # fmt: skip
        return self.shown(made)

    async def push(self, call: Call, params: wire.Push) -> wire.Pushed:
        async with self.slots:
            done = await run_push(
                self._store, params.ref, params.reference, progress=teller(call), limits=self.limits(call)
            )
        return wire.Pushed(digest=done.digest, sent_bytes=done.sent_bytes)

    async def pull(self, call: Call, params: wire.Pull) -> wire.Image:
        async with self.slots:
            made = await run_pull(
                self._store, params.reference, name=params.name or "", lazy=params.lazy, put_on=params.store or "",
                progress=teller(call), limits=self.limits(call),
            )  # fmt: skip
        return self.shown(made)

    async def _run(self, call: Call, job: ImportJob, fd: int | None) -> Manifest:
        return await run_import(self._store, job, input_fd=fd, progress=teller(call), limits=self.limits(call))

    async def list(self, call: Call, params: wire.ListImages) -> wire.Images:
        found = await asyncio.to_thread(self._store.list)
        images = [*(self.shown(manifest) for manifest in found), *await self._vms.list_()]
        return wire.Images(images=sorted(images, key=lambda image: image.created, reverse=True))

    async def get(self, call: Call, params: wire.ByRef) -> wire.Image:
        if (vm := await self._vms.find(params.ref)) is not None:
            return vm
        manifest = await asyncio.to_thread(self._store.resolve, params.ref)
        found = self.shown(manifest)
        found.reads = await asyncio.to_thread(self._reads, manifest)
        return found

    async def verify(self, call: Call, params: wire.ByRef) -> wire.Verified:
        async with self.slots:  # it reads all of it
            manifest = await asyncio.to_thread(self._store.resolve, params.ref)
            compared = await uninterrupted(asyncio.to_thread(self._store.verify, manifest))
        return wire.Verified(digest=manifest.digest, data_bytes=compared)

    def _reads(self, manifest: Manifest) -> wire.Reads | None:
        """From the recorded trace, and, while it is mounted, from the page server. Blocks."""
        recorded = figures(self._store.trace_path(manifest), manifest.data_size)
        stats = self._pages.peek()
        live = next((one for one in stats.images if one.image == manifest.digest), None) if stats is not None else None
        if not recorded.runs and live is None:
            return None
        trouble = live.trouble if live is not None else None
        return wire.Reads(
            runs=recorded.runs, touched_bytes=recorded.touched_bytes, touched_percent=recorded.touched_percent,
            hit_rate=recorded.hit_rate, cached_bytes=live.cached_bytes if live is not None else None,
            denied=trouble.denied if trouble is not None else 0, why=trouble.why if trouble is not None else "",
        )  # fmt: skip

    async def remove(self, call: Call, params: wire.ByRef) -> base.Empty:
        if await self._vms.find(params.ref) is not None:
            await self._vms.remove(params.ref)
        else:
            await asyncio.to_thread(self._store.remove, params.ref, self._mounts.in_use())
            await asyncio.to_thread(self._gone)
        return base.Empty()

    async def gc(self, call: Call, params: wire.Gc) -> wire.Collected:
        report = await asyncio.to_thread(self._store.gc, self._mounts.in_use(), params.min_age_s)
        freed = report.freed_bytes + await asyncio.to_thread(self._gone)
        removed = [*report.images, *report.leftovers, *report.orphans]
        return wire.Collected(removed=removed, freed_bytes=freed)

    def shown(self, manifest: Manifest) -> wire.Image:
        """What a client sees of it."""
        config = manifest.config
        return wire.Image(
            digest=manifest.digest, kind=manifest.kind, name=(manifest.names or ("",))[0],
            names=list(manifest.names), source=manifest.source,
            created=manifest.created, files=manifest.files, meta_size=manifest.meta_size,
            data_size=manifest.data_size, env=config.env, workdir=config.workdir, user=config.user,
            used_by=len(self._mounts.owners(manifest.digest)), store=manifest.store, below=list(manifest.below),
            builder=None if (by := manifest.builder) is None else wire.ImageBuilder(by.uid, by.label),
        )  # fmt: skip


def _host_suite() -> str:
    """The Debian suite this host runs (os-release)."""
    with Path("/etc/os-release").open() as file:
        for line in file:
            name, _, value = line.strip().partition("=")
            if name == "VERSION_CODENAME":
                return value.strip('"')
    raise DsecError("invalid", "this host's Debian suite is not known: name one")
