"""Full VMs' images, their writable disks (qcow2 overlays), and snapshots of those."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from dsecd.erofs.store import Work
from dsecd.errors import DsecError
from dsecd.vmm import qcow2
from dsecd.vmm.machine import Limits
from dsecd.vmm.shelf import Shelf

SNAPSHOT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_SNAPSHOTS: Final = 64
Profile = Literal["server", "desktop", "android"]


class VmImage(Struct, frozen=True, kw_only=True):
    """An immutable disk. size: what it takes here; virtual_size: what the guest sees; bytes.

    root: where its root file system is for a kernel of ours (`/dev/vda`); empty: it brings its own boot loader.
    agent: ours runs in it, as a service. guest_agent: it is known to run QEMU's.
    """

    name: str
    digest: str
    created: str
    source: str
    size: int
    virtual_size: int
    root: str = ""
    agent: bool = False
    guest_agent: bool = False
    profile: Profile = "server"


class DiskStore(Shelf):
    """VM images by name: `<name>/disk.qcow2`, without a backing file, and `image.json`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "VM image")

    def list(self) -> tuple[VmImage, ...]:
        """Every one that can be read, newest first."""
        found = []
        for name in self.names():
            with contextlib.suppress(DsecError):  # a damaged one is refused by name, and can be replaced
                found.append(self.get(name))
        return tuple(sorted(found, key=lambda image: (image.created, image.name), reverse=True))

    def get(self, name: str) -> VmImage:
        """By name. `not_found`, or `image` when it is damaged."""
        self.check_name(name)
        try:
            image = msgspec.json.decode((self.root / name / "image.json").read_bytes(), type=VmImage)
            size = (self.root / name / "disk.qcow2").stat().st_size
        except FileNotFoundError as exc:
            if exc.filename and Path(exc.filename).name == "disk.qcow2":
                raise DsecError("image", f"the VM image {name!r} has lost its disk: import it again") from exc
            raise self.not_found(name) from exc
        except (msgspec.ValidationError, msgspec.DecodeError) as exc:
            raise DsecError("image", f"the VM image {name!r} is damaged: import it again") from exc
        if size != image.size:
            raise DsecError("image", f"the VM image {name!r} is {size} bytes and should be {image.size}")
        return msgspec.structs.replace(image, name=name)

    def disk(self, image: VmImage) -> Path:
        return self.root / image.name / "disk.qcow2"

    def commit(self, work: Work, name: str) -> VmImage:
        """Make the workspace's directory `image` the image of that name."""
        self.put(work.path / "image", name)
        return self.get(name)


# -- writable disks ----------------------------------------------------------------------------------------------------
# The VMM gets both files as descriptors and is told which lies below; the name in the overlay's header is never used.
_BELOW: Final = "base"


def make_overlay(image: VmImage, overlay: Path, limits: Limits, size: int = 0) -> None:
    """A new, empty disk over an image, owned by the VMM's user. size: larger than the image, or 0. Blocks."""
    if size and size < image.virtual_size:
        raise DsecError(
            "invalid", f"the disk is {size >> 20} MiB and image {image.name!r} needs {-(-image.virtual_size >> 20)}"
        )
    fd = os.open(overlay, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.close(fd)
    os.chown(overlay, limits.uid, limits.gid)
    try:
        _tool(overlay, limits, ["create", "-q", "-u", "-f", "qcow2", "-o", "lazy_refcounts=on", "-F", "qcow2",
                                "-b", _BELOW, "{}", str(size or image.virtual_size)])  # fmt: skip
    except BaseException:
        overlay.unlink(missing_ok=True)
        raise


def snapshots(overlay: Path, limits: Limits) -> tuple[str, ...]:
    """Names of the snapshots of a disk that no VM has open, oldest first. Blocks."""
    text = _tool(overlay, limits, ["info", "--output=json", "{alone}"])
    try:
        info = msgspec.json.decode(text, type=_Info)
    except (msgspec.ValidationError, msgspec.DecodeError) as exc:
        raise DsecError("image", "qemu-img's answer about the disk cannot be read") from exc
    return tuple(one.name for one in info.snapshots)


def take_snapshot(overlay: Path, limits: Limits, name: str) -> None:
    """Of a disk that no VM has open (else QMP does it: `blockdev-snapshot-internal-sync`). Blocks."""
    check_snapshot(name)
    have = snapshots(overlay, limits)
    if name in have:
        raise DsecError("conflict", f"the disk has a snapshot {name!r} already")
    if len(have) >= MAX_SNAPSHOTS:
        raise DsecError("quota", f"the disk has {MAX_SNAPSHOTS} snapshots, and that is the limit")
    _tool(overlay, limits, ["snapshot", "-q", "-c", name, "{alone}"])


def revert(overlay: Path, limits: Limits, name: str) -> None:
    """Make the disk what it was. No VM may have it open. Blocks."""
    _known(overlay, limits, name)
    _tool(overlay, limits, ["snapshot", "-q", "-a", name, "{alone}"])


def drop_snapshot(overlay: Path, limits: Limits, name: str) -> None:
    """Forget a snapshot of a disk that no VM has open. Blocks."""
    _known(overlay, limits, name)
    _tool(overlay, limits, ["snapshot", "-q", "-d", name, "{alone}"])


class _Snapshot(Struct):
    name: str


class _Info(Struct):
    snapshots: list[_Snapshot] = []


def check_snapshot(name: str) -> None:
    if not SNAPSHOT.fullmatch(name) or name.isdigit():  # qemu-img takes numbers for ids
        raise DsecError("invalid", f"snapshot name {name[:80]!r} is not letters, digits, . _ - or has no letter")


def _known(overlay: Path, limits: Limits, name: str) -> None:
    check_snapshot(name)
    if name not in snapshots(overlay, limits):
        raise DsecError("not_found", f"the disk has no snapshot {name!r}")


def _tool(overlay: Path, limits: Limits, words: list[str]) -> str:
    """qemu-img on a disk below directories that its user cannot enter: through a descriptor. `{}` stands for it."""
    fd = os.open(overlay, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        path = Path(f"/proc/self/fd/{fd}")
        told = [str(path) if word == "{}" else qcow2.alone(path) if word == "{alone}" else word for word in words]
        return qcow2.tool(told, limits, fds=(fd,))
    finally:
        os.close(fd)
