"""Imports and bootstraps VM images, each in a process of its own, and commits what comes of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import msgspec

from dsecd.erofs.jobs import run_child
from dsecd.erofs.model import Progress
from dsecd.erofs.store import Work
from dsecd.errors import DsecError
from dsecd.vmm.disk_job import DiskJob
from dsecd.vmm.disks import DiskStore, VmImage
from dsecd.vmm.shelf_job import made

LIMIT_S: Final = 3600.0


async def run_disk_job(
    store: DiskStore, name: str, job: DiskJob, input_fd: int | None = None,
    progress: Callable[[Progress], None] = lambda _: None, in_use: Callable[[], Collection[str]] = tuple,
) -> VmImage:  # fmt: skip
    """The image that came of it. Cancelling kills the child and all that it started; nothing half-made stays.

    input_fd: for a stream: a pipe, socket or file, read from where it stands to its end; it stays the caller's.
    in_use: names of images that stay as they are: replacing one would change what is below the disks that lie over it.
    """
    store.check_name(name)
    _refuse(name, in_use())

    async def make(work: Work) -> None:
        given = [] if input_fd is None else [input_fd]
        told = [str(-1 if input_fd is None else input_fd), msgspec.json.encode(job).decode()]
        await run_child(work, "dsecd.vmm.disk_job", told, given, progress)
        _refuse(name, in_use())
        progress(Progress("commit", 0))

    def commit(work: Work) -> VmImage:
        _own(work.path / "image")
        return store.commit(work, name)

    return await made(store, make, commit, LIMIT_S, "the VM image", "the image")


def _refuse(name: str, in_use: Collection[str]) -> None:
    if name in in_use:
        raise DsecError(
            "conflict", f"the VM image {name!r} is in use, or not yours to replace: import under another name"
        )


def _own(image: Path) -> None:
    """The importer worked as nobody; from here on the files are root's, and nobody writes to them any more."""
    for path in image.iterdir():
        os.chown(path, 0, 0, follow_symlinks=False)
        path.chmod(0o400)
    image.chmod(0o700)
