"""image.*"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from dsecd.config import Config
from dsecd.erofs.jobs import run_collapse, run_import, run_pull, run_push
from dsecd.erofs.model import ImageConfig, ImportJob, Limits, Manifest, Progress
from dsecd.erofs.mount import MountTable
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError
from dsecd.wire import base
from dsecd.wire import images as wire
from dsecd.wire.server import Call

INFLOW = 4 << 20


class ImageApi:
    """Imports run in processes of their own; the client's bytes reach them through a socket pair."""

    def __init__(self, config: Config, store: ImageStore, mounts: MountTable) -> None:
        self._store = store
        self._mounts = mounts
        self._limits = Limits(
            max_bytes=config.image_max_mb << 20, insecure_registries=tuple(config.insecure_registries)
        )
        self._slots = asyncio.Semaphore(2)  # an import fills a core and a disk; more side by side are no faster

    async def import_(self, call: Call, params: wire.Import) -> wire.Image:
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
        async with self._slots:
            if job.origin == "registry":
                return self._image(await self._run(call, job, None))
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            pump = asyncio.ensure_future(self._pump(call, ours))
            try:
                return self._image(await self._run(call, job, theirs.fileno()))
            finally:
                pump.cancel()
                with contextlib.suppress(asyncio.CancelledError, DsecError, OSError):
                    await pump
                ours.close()
                theirs.close()

    @staticmethod
    async def _pump(call: Call, sock: socket.socket) -> None:
        """The client's stream into the importer. When it breaks off, the importer sees a truncated stream."""
        loop = asyncio.get_running_loop()
        try:
            async for chunk in call.inflow(INFLOW):
                await loop.sock_sendall(sock, chunk)
        finally:
            sock.shutdown(socket.SHUT_WR)

    async def bootstrap(self, call: Call, params: wire.Bootstrap) -> wire.Image:
        job = ImportJob(
            kind="base", name=params.name, origin="bootstrap", suite=params.suite or _host_suite(),
            packages=tuple(params.include), source="mmdebstrap",
        )  # fmt: skip
        job.check()
        async with self._slots:
            return self._image(await self._run(call, job, None))

    async def collapse(self, call: Call, params: wire.Collapse) -> wire.Image:
        async with self._slots:
            made = await run_collapse(
                self._store, params.name, params.layers, max_bytes=params.max_mb << 20, put_on=params.store or "",
                progress=_teller(call), limits=self._limits,
            )  # fmt: skip
        return self._image(made)

    async def push(self, call: Call, params: wire.Push) -> wire.Pushed:
        async with self._slots:
            done = await run_push(
                self._store, params.ref, params.reference, progress=_teller(call), limits=self._limits
            )
        return wire.Pushed(digest=done.digest, sent_bytes=done.sent_bytes)

    async def pull(self, call: Call, params: wire.Pull) -> wire.Image:
        async with self._slots:
            made = await run_pull(
                self._store, params.reference, name=params.name or "", lazy=params.lazy, put_on=params.store or "",
                progress=_teller(call), limits=self._limits,
            )  # fmt: skip
        return self._image(made)

    async def _run(self, call: Call, job: ImportJob, fd: int | None) -> Manifest:
        return await run_import(self._store, job, input_fd=fd, progress=_teller(call), limits=self._limits)

    async def list(self, call: Call, params: wire.ListImages) -> wire.Images:
        found = await asyncio.to_thread(self._store.list)
        return wire.Images(images=[self._image(manifest) for manifest in found])

    async def get(self, call: Call, params: wire.ByRef) -> wire.Image:
        return self._image(await asyncio.to_thread(self._store.resolve, params.ref))

    async def remove(self, call: Call, params: wire.ByRef) -> base.Empty:
        await asyncio.to_thread(self._store.remove, params.ref, self._mounts.in_use())
        return base.Empty()

    async def gc(self, call: Call, params: wire.Gc) -> wire.Collected:
        report = await asyncio.to_thread(self._store.gc, self._mounts.in_use(), params.min_age_s)
        removed = [*report.images, *report.leftovers, *report.orphans]
        return wire.Collected(removed=removed, freed_bytes=report.freed_bytes)

    def _image(self, manifest: Manifest) -> wire.Image:
        config = manifest.config
        return wire.Image(
            digest=manifest.digest, kind=manifest.kind, name=(manifest.names or ("",))[0],
            names=list(manifest.names), source=manifest.source,
            created=manifest.created, files=manifest.files, meta_size=manifest.meta_size,
            data_size=manifest.data_size, env=config.env, workdir=config.workdir, user=config.user,
            used_by=len(self._mounts.owners(manifest.digest)), store=manifest.store,
        )  # fmt: skip


def _teller(call: Call) -> Callable[[Progress], None]:
    def progress(at: Progress) -> None:
        call.notify("progress", base.Progress(call.id, at.phase, at.done, at.total))

    return progress


def _host_suite() -> str:
    """The Debian suite this host runs (os-release)."""
    with Path("/etc/os-release").open() as file:
        for line in file:
            name, _, value = line.strip().partition("=")
            if name == "VERSION_CODENAME":
                return value.strip('"')
    raise DsecError("invalid", "this host's Debian suite is not known: name one")
