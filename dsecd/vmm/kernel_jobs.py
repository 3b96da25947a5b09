"""Imports and builds guest kernels, each in a process of its own, and commits what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from dsecd.erofs.jobs import run_child
from dsecd.erofs.model import Progress
from dsecd.erofs.store import Work
from dsecd.vmm.kernel import Kernel, KernelStore
from dsecd.vmm.kernel_job import KernelJob
from dsecd.vmm.shelf_job import made

IMPORT_S: Final = 1800.0
BUILD_S: Final = 4 * 3600.0  # minutes on a host that does nothing else


async def import_deb(
    store: KernelStore, name: str, package: str, progress: Callable[[Progress], None] = lambda _: None
) -> Kernel:
    """The kernel of a Debian package, or of the one it depends on, with the modules that guests need."""
    return await _made(store, name, _job(store, package=package), progress, IMPORT_S)


async def build(
    store: KernelStore, name: str, options: tuple[str, ...] = (),
    progress: Callable[[Progress], None] = lambda _: None,
) -> Kernel:  # fmt: skip
    """A kernel from the distribution's source with dsecd/vmm/guest.config, and options (CONFIG_X=y) above it."""
    return await _made(store, name, _job(store, options=options), progress, BUILD_S)


def _job(store: KernelStore, *, package: str = "", options: tuple[str, ...] = ()) -> KernelJob:
    return KernelJob(
        kind="deb" if package else "build", package=package, options=options, apt=str(store.root / "apt"),
        known={one.recipe: str(store.root / one.name) for one in store.list() if one.recipe},
    )  # fmt: skip


async def _made(
    store: KernelStore, name: str, job: KernelJob, progress: Callable[[Progress], None], limit_s: float
) -> Kernel:
    """Cancelling kills the child and all that it started; nothing half-made stays."""
    store.check_name(name)

    async def make(work: Work) -> None:
        await run_child(work, "dsecd.vmm.kernel_job", [msgspec.json.encode(job).decode()], [], progress)
        progress(Progress("commit", 0))

    return await made(store, make, lambda work: store.commit(work, name), limit_s, "the kernel", "the kernel")
