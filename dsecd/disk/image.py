"""Driver `loop-btrfs`: a sparse image in the state directory, loop-mounted, with the btrfs driver on top.

    <state>/pool.img       grown when the config asks for more, never shrunk; holes are punched as spaces are deleted
    <state>/pool.img.new   mkfs has not finished: rubbish
    <state>/pool           mount point; the spaces are directly below

The mount belongs to the host, not to the daemon: it is adopted at the next start with all sandboxes on it.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from dsecd.disk import btrfs_ioctl, linux, loop
from dsecd.disk.btrfs import BtrfsPool
from dsecd.disk.pool import PoolConfig
from dsecd.errors import DsecError

SIZE_MIN: Final = 256 << 20  # mkfs.btrfs refuses less than about 110 MiB; below this it is all metadata
_ALIGN: Final = 1 << 20
# One device, and the host's own redundancy is below: a second copy of the metadata would only double its writes.
_MKFS: Final = ("mkfs.btrfs", "--quiet", "--metadata", "single", "--data", "single", "--label", "dsecd")
# discard=async gives freed space back to the host. commit: deleted spaces are freed by a kernel thread that wakes once
# in that many seconds (default 30). nodev and nosuid: no sandbox ever sees this mount itself, so a device or set-id
# file that a tenant makes is inert here (the overlay on top has its own flags).
_FLAGS: Final = linux.MS_NOATIME | linux.MS_NODEV | linux.MS_NOSUID
_OPTIONS: Final = "discard=async,commit=10"


class LoopBtrfsPool(BtrfsPool):
    """As btrfs, and free space is also bounded by what the image can still grow into."""

    driver = "loop-btrfs"

    def __init__(self, root: Path, image: Path, reserve_bytes: int) -> None:
        self._image, self._reserve = image, reserve_bytes
        super().__init__(root, owns_filesystem=True)

    def free(self) -> tuple[int, int]:
        free, total = super().free()
        host = os.statvfs(self._image.parent)
        # Holes inside the image that btrfs calls free need host blocks before they can be written.
        room = max(host.f_bavail * host.f_frsize - self._reserve, 0)
        return min(free, room), total


def image_path(state: Path) -> Path:
    return state / "pool.img"


def mount_point(state: Path) -> Path:
    return state / "pool"


def missing() -> str | None:
    """Why this host cannot have such a pool, or None."""
    if not loop.available():
        return "no /dev/loop-control (load the module loop)"
    if shutil.which(_MKFS[0]) is None:
        return "no mkfs.btrfs (install btrfs-progs)"
    filesystems = Path("/proc/filesystems").read_text().split()
    if "btrfs" not in filesystems and not _load_btrfs():
        return "the kernel has no btrfs"
    return None


def _load_btrfs() -> bool:
    modprobe = shutil.which("modprobe")
    return modprobe is not None and subprocess.run([modprobe, "-q", "btrfs"], check=False).returncode == 0


def open_image_pool(state: Path, config: PoolConfig) -> LoopBtrfsPool:
    image, point = image_path(state), mount_point(state)
    point.mkdir(mode=0o711, exist_ok=True)
    if not image.exists():
        _format(image, _wanted_size(state, config))
    mounted = linux.mounted_at(point)
    if mounted is None:
        _mount(image, point)
    elif mounted.fstype != "btrfs":
        raise DsecError("conflict", f"{point} has a {mounted.fstype} mounted on it; unmount it")
    if config.size_bytes > image.stat().st_size:
        _grow(image, point, config.size_bytes)
    point.chmod(0o711)
    return LoopBtrfsPool(point, image, config.reserve_bytes)


def _wanted_size(state: Path, config: PoolConfig) -> int:
    host = os.statvfs(state)
    free = host.f_bavail * host.f_frsize
    size = config.size_bytes or min(int(free * config.share), free - config.reserve_bytes)
    if size < SIZE_MIN:
        raise DsecError(
            "capacity", f"a disk pool needs {SIZE_MIN >> 20} MiB at least; {state} has {free >> 20} MiB free"
        )
    return size // _ALIGN * _ALIGN


def _format(image: Path, size: int) -> None:
    new = image.with_name(image.name + ".new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        done = subprocess.run([*_MKFS, str(new)], check=False, capture_output=True, text=True)
        if done.returncode != 0:
            new.unlink()
            raise DsecError("internal", f"mkfs.btrfs failed: {done.stderr.strip()[-500:]}")
        os.fsync(fd)
    finally:
        os.close(fd)
    new.rename(image)


def _mount(image: Path, point: Path) -> None:
    fd, device = loop.attach(image)
    try:
        linux.mount(str(device), point, "btrfs", _FLAGS, _OPTIONS)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise DsecError("internal", f"{image} holds no usable btrfs ({error.strerror}); move it away") from error
        raise
    finally:
        os.close(fd)


def _grow(image: Path, point: Path, size: int) -> None:
    mounted = linux.mounted_at(point)
    assert mounted is not None
    os.truncate(image, size // _ALIGN * _ALIGN)
    loop.grow(Path(mounted.source))
    fd = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        btrfs_ioctl.resize_to_device(fd)
    finally:
        os.close(fd)


def remove_image_pool(state: Path) -> None:
    """Unmount and delete, spaces and all: for `purge` and for tests. Refused while a sandbox uses it."""
    point = mount_point(state)
    if linux.mounted_at(point) is not None:
        try:
            linux.umount(point)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise DsecError("conflict", f"{point} is in use") from error
            raise
    image_path(state).unlink(missing_ok=True)
    if point.is_dir():
        point.rmdir()
