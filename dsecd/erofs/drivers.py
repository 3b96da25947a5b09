"""Ways to mount an image, and which of them this kernel and this store can do. Found out by doing, never by version."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

from msgspec import Struct

from dsecd.erofs import meta
from dsecd.erofs.blob import DataFile
from dsecd.erofs.model import CHUNK
from dsecd.erofs.sys import attach_loop, mount_erofs, umount
from dsecd.erofs.tar import Entry
from dsecd.erofs.tree import Tree

DriverName = Literal["file", "loop"]


class Driver(Protocol):
    """One way. `mount` mounts read-only at an empty directory, or raises OSError and leaves nothing."""

    name: DriverName

    def mount(self, metadata: Path, data: Path, target: Path) -> None: ...


class FileDriver:
    """The kernel reads the image's files itself (EROFS_FS_BACKED_BY_FILE). No device, no cache of its own."""

    name: DriverName = "file"

    def mount(self, metadata: Path, data: Path, target: Path) -> None:
        mount_erofs(str(metadata), [str(data)], target)


class LoopDriver:
    """Two read-only loop devices that vanish with the mount. For kernels without the above, and files on overlayfs."""

    name: DriverName = "loop"

    def mount(self, metadata: Path, data: Path, target: Path) -> None:
        with contextlib.ExitStack() as held:
            devices = []
            for path in (metadata, data):
                fd, device = attach_loop(path)
                held.callback(os.close, fd)  # the mount keeps them then, or nobody does and they clear themselves
                devices.append(device)
            mount_erofs(devices[0], devices[1:], target)


DRIVERS: Final[tuple[Driver, ...]] = (FileDriver(), LoopDriver())  # in the order they are preferred

# A driver that cannot do *this* mount says one of these; anything else is the image's fault.
NOT_THIS_WAY: Final = frozenset(
    {errno.ENOTBLK, errno.ENODEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENXIO, errno.ENOENT}
)


class Probe(Struct, frozen=True):
    """usable, or why not: one sentence for `doctor`."""

    driver: DriverName
    usable: bool
    why: str


def probe_drivers(files: Path, mounts: Path, drivers: Sequence[Driver] = DRIVERS) -> tuple[Probe, ...]:
    """Make a tiny image in `files` (on the store's file system, which matters), mount it below `mounts`, read it back.

    Blocks. Whoever owns `mounts` sweeps what a killed probe leaves there.
    """
    metadata, data, content = _tiny_image(files)
    return tuple(_probe(driver, metadata, data, mounts / f"probe-{driver.name}", content) for driver in drivers)


def _probe(driver: Driver, metadata: Path, data: Path, target: Path, content: bytes) -> Probe:
    target.mkdir(exist_ok=True)
    try:
        driver.mount(metadata, data, target)
    except OSError as e:
        target.rmdir()
        return Probe(driver.name, False, e.strerror or str(e))
    try:
        same = (target / "file").read_bytes() == content
    except OSError as e:
        return Probe(driver.name, False, f"mounts, and then cannot be read: {e.strerror}")
    finally:
        umount(target)
        target.rmdir()
    return Probe(driver.name, same, "a test image was mounted and read" if same else "a test image read back wrong")


def _tiny_image(work: Path) -> tuple[Path, Path, bytes]:
    content = os.urandom(CHUNK + 5000)
    entry = Entry(b"file", "file")
    entry.mode, entry.size = 0o644, len(content)
    tree = Tree()
    tree.begin_layer()
    node = tree.add(entry)
    assert node is not None
    metadata, data = work / "meta.erofs", work / "data"
    with data.open("wb+") as f:
        blob = DataFile(f.fileno())
        node.size = len(content)
        for at in range(0, len(content), CHUNK):
            node.add_chunk(blob.append(content[at : at + CHUNK]))
        blob.flush()
    _, digest = blob.sums.finish()
    metadata.write_bytes(meta.Image(tree, data_size=blob.size, data_digest=digest).content)
    return metadata, data, content
