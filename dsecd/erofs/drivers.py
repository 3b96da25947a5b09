"""Ways to mount an image, and which of them this kernel and this store can do. Found out by doing, never by version."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from dsecd.erofs import meta
from dsecd.erofs.blob import DataFile
from dsecd.erofs.model import CHUNK, Manifest
from dsecd.erofs.pages.model import Trouble
from dsecd.erofs.sys import attach_loop, mount_erofs, umount
from dsecd.erofs.tar import Entry
from dsecd.erofs.tree import Tree

DriverName = Literal["file", "fanotify", "fscache", "loop"]


class Source(Struct, frozen=True, kw_only=True):
    """What is mounted. data: where the data file is, if that is a path of this host. manifest: None in a probe."""

    metadata: Path
    data: Path | None
    sums: Path | None = None
    manifest: Manifest | None = None


class Driver:
    """One way. `mount` mounts read-only at an empty directory, or raises OSError and leaves nothing."""

    name: DriverName
    whole = True  # it needs the data file, as a path

    def unfit(self, source: Source) -> str:
        """Why this image is not for this driver; empty: it is."""
        return "" if source.data is not None else "its data is not on a path of this host"

    def mount(self, source: Source, target: Path) -> None:
        raise NotImplementedError

    def resume(self, source: Source) -> None:
        """Go on with a mount of an earlier daemon. DsecError `image`: it must not be used any more."""

    def unmounted(self, digest: str) -> None:
        """The image is not mounted any more."""

    def trouble(self, digest: str) -> Trouble | None:
        """Reads of a mounted image that failed, so far."""

    def settle(self, mounted: Collection[str]) -> None:
        """After a restart: nothing but these images is mounted."""

    def probe(self, files: Path, mounts: Path) -> Probe:
        """Make a tiny image in `files` (on the store's file system, which matters), mount it, read it back."""
        metadata, data, content = tiny_image(files)
        with trying(mounts, self.name) as target:
            try:
                self.mount(Source(metadata=metadata, data=data), target)
            except OSError as e:
                return Probe(self.name, False, e.strerror or str(e))
            return read_back(self.name, target, content)


class FileDriver(Driver):
    """The kernel reads the image's files itself (EROFS_FS_BACKED_BY_FILE). No device, no cache of its own.

    indirect: stores whose files are not mounted straight, because nothing checks what is read from them.
    """

    name: DriverName = "file"

    def __init__(self, indirect: Collection[str] = ()) -> None:
        self._indirect = frozenset(indirect)

    def unfit(self, source: Source) -> str:
        if source.manifest is not None and source.manifest.store in self._indirect:
            return f"store {source.manifest.store} is not direct"
        return super().unfit(source)

    def mount(self, source: Source, target: Path) -> None:
        mount_erofs(str(source.metadata), [str(source.data)], target)


class LoopDriver(Driver):
    """Two read-only loop devices that vanish with the mount. For kernels without the above, and files on overlayfs."""

    name: DriverName = "loop"

    def mount(self, source: Source, target: Path) -> None:
        assert source.data is not None
        with contextlib.ExitStack() as held:
            devices = []
            for path in (source.metadata, source.data):
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
    """What each can do here. Blocks. Whoever owns `mounts` sweeps what a killed probe leaves there."""
    return tuple(driver.probe(files, mounts) for driver in drivers)


@contextlib.contextmanager
def trying(mounts: Path, name: str) -> Iterator[Path]:
    target = mounts / f"probe-{name}"
    target.mkdir(exist_ok=True)
    try:
        yield target
    finally:
        with contextlib.suppress(OSError):
            umount(target)
        target.rmdir()


def read_back(name: DriverName, target: Path, content: bytes) -> Probe:
    try:
        same = (target / "file").read_bytes() == content
    except OSError as e:
        return Probe(name, False, f"mounts, and then cannot be read: {e.strerror}")
    return Probe(name, same, "a test image was mounted and read" if same else "a test image read back wrong")


def tiny_image(work: Path) -> tuple[Path, Path, bytes]:
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
