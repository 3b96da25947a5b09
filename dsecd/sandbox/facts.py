"""What the chooser is told about this host and about an image, found out by asking those who would have to do it."""

from __future__ import annotations

import asyncio
from typing import Final

from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError
from dsecd.sandbox.choose import Form, Host, Task
from dsecd.sandbox.record import now
from dsecd.sandbox.vms import Vms
from dsecd.vmm.disks import DiskStore
from dsecd.wire import sandbox as wire

FRESH_S: Final = 5.0  # a burst of creations asks once; a kernel that was just imported is seen soon


class Facts:
    """One per daemon, which all have function calls."""

    def __init__(self, vms: Vms, images: ImageStore) -> None:
        self._vms = vms
        self._images = images
        self._host = Host()
        self._asked = -FRESH_S
        self._asking = asyncio.Lock()

    async def host(self) -> Host:
        """What each backend lacks here."""
        async with self._asking:
            if now() - self._asked > FRESH_S:
                microvm, fullvm, emulated = await asyncio.to_thread(self._vms.lacking)
                self._host = Host(microvm=microvm, fullvm=fullvm, emulated=emulated)
                self._asked = now()
        return self._host

    async def task(self, spec: wire.Spec) -> Task:
        """What a spec declares. `not_found` when its image is here in no form."""
        return Task(
            needs=spec.needs or wire.Needs(),
            device=bool(spec.devices),
            images=await asyncio.to_thread(forms, self._images, self._vms.disks, spec.image),
            layered=spec.workspace is not None or bool(spec.toolkits),
        )

    async def chosen(self, asked: wire.Choose) -> Task:
        """What a question declares, which may be about no image at all."""
        if asked.image is None:
            return Task(needs=asked.needs, device=bool(asked.devices))
        return await self.task(wire.Spec(image=asked.image, needs=asked.needs, devices=asked.devices))


def forms(images: ImageStore, disks: DiskStore, ref: str) -> frozenset[Form]:
    """In which forms an image of that name is here; `not_found` in none. Blocks."""
    found: set[Form] = set()
    missing: DsecError | None = None
    form: Form
    for form, look in (("layers", images.resolve), ("disk", disks.get)):
        try:
            look(ref)
        except DsecError as exc:
            if exc.kind not in ("not_found", "invalid"):  # a digest is no name of a disk
                raise
            missing = missing or exc
        else:
            found.add(form)
    if not found and missing is not None:
        raise missing
    return frozenset(found)
