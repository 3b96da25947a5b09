"""image.* for images of kind `vm`: whole disks, in a store of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from dsecd.api.flows import inflow, teller
from dsecd.errors import DsecError
from dsecd.vmm.disk_job import DiskJob
from dsecd.vmm.disk_jobs import run_disk_job
from dsecd.vmm.disks import DiskStore, VmImage
from dsecd.wire import images as wire
from dsecd.wire.call import Call

MIB = 1 << 20


class VmImages:
    """The part of `ImageApi` that is about disks."""

    def __init__(
        self, store: DiskStore, agent: Path, max_bytes: int, users: Callable[[], list[str]] = list
    ) -> None:  # fmt: skip
        """agent: the program that bootstrapped ones get.

        users: for each sandbox whose disk lies over an image, its name. Such an image stays as it is.
        """
        self._store = store
        self._agent = agent
        self._max_bytes = max_bytes
        self._users = users
        store.collect()

    async def import_(self, call: Call, params: wire.Import) -> wire.Image:
        if params.format != "auto" or params.prefix or params.env or params.workdir or params.user or params.store:
            raise DsecError("invalid", "a VM image is a disk: it has a name and a stream, and nothing else")
        job = DiskJob(
            kind="stream", source="stream", profile=params.profile, agent=params.agent, max_bytes=self._max_bytes
        )
        self._store.check_name(params.name)
        async with inflow(call) as fd:
            return self._shown(await run_disk_job(self._store, params.name, job, fd, teller(call), self._kept(call)))

    async def bootstrap(self, call: Call, params: wire.Bootstrap, suite: str) -> wire.Image:
        size = params.disk_mb * MIB
        if size > self._max_bytes:
            raise DsecError("invalid", f"a disk of {params.disk_mb} MiB is more than image_max_mb of the configuration")
        job = DiskJob(
            kind="debian", suite=suite, packages=tuple(params.include), source=f"debian {suite} by mmdebstrap",
            profile="server", agent=True, agent_file=str(self._agent), size=size, max_bytes=self._max_bytes,
        )  # fmt: skip
        return self._shown(await run_disk_job(self._store, params.name, job, None, teller(call), self._kept(call)))

    def _kept(self, call: Call) -> Callable[[], list[str]]:
        """Names of images that this caller's does not take the place of: those in use; all, but for root's admin."""
        return (lambda: [*self._users(), *self._store.names()]) if call.peer.bounded else self._users

    async def list_(self) -> list[wire.Image]:
        return [self._shown(image) for image in await asyncio.to_thread(self._store.list)]

    async def find(self, name: str) -> wire.Image | None:
        """None: there is none of that name, or it is no name that one could have."""
        try:
            return self._shown(await asyncio.to_thread(self._store.get, name))
        except DsecError as exc:
            if exc.kind in ("not_found", "invalid"):
                return None
            raise

    async def remove(self, name: str) -> None:
        await asyncio.to_thread(self._store.remove, name, self._users())

    def _shown(self, image: VmImage) -> wire.Image:
        return wire.Image(
            digest=image.digest, kind="vm", name=image.name, names=[image.name], source=image.source,
            created=image.created, data_size=image.size, disk_mb=-(-image.virtual_size // MIB), profile=image.profile,
            agent=image.agent, used_by=self._users().count(image.name),
        )  # fmt: skip
