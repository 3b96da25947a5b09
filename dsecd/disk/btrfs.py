"""Driver: one subvolume with a qgroup limit per sandbox. A clone is a snapshot.

Simple quotas (Linux 6.7+) where the kernel has them, full accounting else. They differ in one thing. With simple quotas
an extent is charged for ever to the subvolume that wrote it, so a snapshot starts at zero and its source pays. A chain
of forks could then hold a limit's worth per generation. So a clone's limit is lowered by what its source used; that
figure is kept in an xattr on the subvolume's top directory and counted in its usage: a fork has exactly the room that
its source had. What a fork deletes of the inherited data gives no room back; nor would it to the host.

No inode limit is needed: btrfs has no inode table, and inodes are metadata that is charged to the same limit.
When a limit is reached writes fail with EDQUOT, unlink still works.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dsecd.disk import btrfs_ioctl as ioctl
from dsecd.disk.pool import LIMIT_MAX, LIMIT_MIN, NEW, DiskPool
from dsecd.errors import DsecError

INHERITED: Final = "trusted.dsecd.inherited"
SETTLED: Final = 1 << 20  # bytes not on disk yet that a clone may wait for


class BtrfsPool(DiskPool):
    """Spaces are subvolumes directly below `root`, which is a directory of a mounted btrfs."""

    driver = "btrfs"

    def __init__(self, root: Path, *, owns_filesystem: bool = False, sysfs: Path = Path("/sys/fs/btrfs")) -> None:
        """`owns_filesystem`: nobody else has subvolumes there, so every qgroup without one is our rubbish."""
        super().__init__(root)
        self._owns_filesystem = owns_filesystem
        self._dropped: set[int] = set()  # qgroups of subvolumes that this process destroyed; set operations are atomic
        with directory(root) as fd:
            self._sysfs = sysfs / ioctl.fsid(fd)
            if self.quota_mode() is None:
                _enable_quota(fd)
            mode = self.quota_mode()
            if mode is None:
                raise DsecError("unsupported", f"btrfs quotas cannot be enabled on {root}")
            self.simple = mode == "squota"
        self._recover()

    def quota_mode(self) -> str | None:
        """squota, qgroup, or None while quotas are off."""
        return quota_mode(self._sysfs)

    def _make(self, path: Path, limit_bytes: int, source: Path | None) -> None:
        with directory(path.parent) as parent:
            if source is None:
                ioctl.create_subvolume(parent, path.name, limit_bytes)
                path.chmod(0o755)
                return
            used = self._usage(source)[0]
            # A little room always: overlayfs that cannot make its work directory mounts read-only.
            own = max(limit_bytes - used, LIMIT_MIN)
            with directory(source) as fd:
                ioctl.snapshot(parent, path.name, fd, own if self.simple else used + own)
        if self.simple:
            os.setxattr(path, INHERITED, str(used).encode())

    def _limit(self, path: Path, limit_bytes: int) -> None:
        own = max(limit_bytes - _inherited(path), LIMIT_MIN)
        with directory(path) as fd:
            ioctl.set_limit(fd, ioctl.subvolume_id(fd), own)

    def _usage(self, path: Path) -> tuple[int, int]:
        with directory(path) as fd:
            group = self._sysfs / f"qgroups/0_{ioctl.subvolume_id(fd)}"
        inherited = _inherited(path)
        # rsv_data is what is written but not yet on disk: without it usage lags by up to a commit (30 s). Reservations
        # for metadata are left out: they are worst cases (half a megabyte for an empty space) and go with the commit.
        used = int((group / "referenced").read_text()) + int((group / "rsv_data").read_text())
        return used + inherited, int((group / "max_referenced").read_text()) + inherited

    def settle(self, sandbox_id: str) -> None:
        """A snapshot waits until the subvolume's data is on disk. So a first one, for nothing, takes that wait."""
        path = self._existing(sandbox_id)
        with directory(path.parent) as parent, directory(path) as fd:
            number = ioctl.subvolume_id(fd)
            if int((self._sysfs / f"qgroups/0_{number}/rsv_data").read_text()) < SETTLED:
                return
            extra = path.with_name(f"{NEW}{path.name}-settle-{secrets.token_hex(4)}")
            ioctl.snapshot(parent, extra.name, fd, LIMIT_MAX)
        self._discard(extra)
        self._start_collector()

    def _discard(self, path: Path) -> None:
        with directory(path.parent) as parent, directory(path) as fd:
            group = ioctl.subvolume_id(fd)
            ioctl.destroy_subvolume(parent, path.name)
        self._dropped.add(group)

    def _sweep(self) -> bool:
        """Qgroups outlive their subvolumes: remove those that have none and to which nothing is charged any more."""
        with directory(self.root) as fd:
            # Subvolumes last: one that is made in between must not look like a qgroup without a subvolume.
            groups = ioctl.qgroups(fd)
            dead = groups - ioctl.subvolumes(fd) - {ioctl.TOP_LEVEL}
            self._dropped &= groups
            for group in dead if self._owns_filesystem else dead & self._dropped:
                try:
                    ioctl.remove_qgroup(fd, group)
                except OSError as error:
                    if error.errno == errno.EBUSY:  # a clone still shares what this one wrote
                        self._dropped.add(group)
                        continue
                    if error.errno != errno.ENOENT:
                        raise
                self._dropped.discard(group)
        return not self._dropped

    def free(self) -> tuple[int, int]:
        stat = os.statvfs(self.root)
        return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize


def quota_mode(filesystem: Path) -> str | None:
    """`filesystem` is /sys/fs/btrfs/<fsid>. Kernels before 6.7 have no `mode` and only full accounting."""
    if not (filesystem / "qgroups").is_dir():
        return None
    try:
        if (filesystem / "qgroups/enabled").read_text().strip() == "0":
            return None
        return (filesystem / "qgroups/mode").read_text().strip()
    except FileNotFoundError:
        return "qgroup"


def _enable_quota(fd: int) -> None:
    try:
        ioctl.enable_quota(fd, simple=True)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        ioctl.enable_quota(fd, simple=False)


def _inherited(path: Path) -> int:
    try:
        return int(os.getxattr(path, INHERITED))
    except OSError as error:
        if error.errno == errno.ENODATA:
            return 0
        raise


@contextmanager
def directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)
