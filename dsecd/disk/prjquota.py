"""Driver: a directory with a project quota per sandbox, on XFS or ext4. A clone copies files, sharing extents on XFS.

Project ids come from a range of our own and are kept nowhere but on the directories themselves.

NB: ext4 lets whoever has CAP_SYS_RESOURCE in the first user namespace write past a limit, and overlayfs writes to its
upper as whoever mounted it. So the launcher must give up CAP_SYS_RESOURCE before it mounts. XFS and btrfs have no such
hole.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Final

from dsecd.disk import quota
from dsecd.disk.pool import NEW, TRASH, DiskPool
from dsecd.errors import DsecError

PROJECT_FIRST: Final = 1_500_000_000
PROJECT_LAST: Final = PROJECT_FIRST + 10_000_000
_BYTES_PER_INODE: Final = 4096  # the hard inode limit that goes with a byte limit
_INODES_MIN: Final = 4096
_FICLONE: Final = 0x40049409


class ProjectQuotaPool(DiskPool):
    """Spaces are plain directories below `root`."""

    driver = "prjquota"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        if not quota.enforced(root):
            raise DsecError("unsupported", f"{root}: mount its file system with project quota (option prjquota) first")
        self._lock = threading.Lock()
        self._serial = itertools.count()
        self._used = {quota.get_project(root / name) for name in os.listdir(root)}
        self._next = max((p for p in self._used if p <= PROJECT_LAST), default=PROJECT_FIRST)
        self._recover()
        self._why_no_copies = "" if _shares(root) else f"the file system of {root} shares no blocks between files"

    def why_no_copies(self) -> str:
        return self._why_no_copies

    def _take_project(self) -> int:
        with self._lock:
            for _ in range(PROJECT_FIRST, PROJECT_LAST + 1):
                self._next = self._next + 1 if PROJECT_FIRST <= self._next < PROJECT_LAST else PROJECT_FIRST
                if self._next not in self._used:
                    self._used.add(self._next)
                    return self._next
        raise DsecError("capacity", "no free project id")

    def _make(self, path: Path, limit_bytes: int, source: Path | None) -> None:
        path.mkdir(0o755)
        project = self._take_project()
        quota.set_project(path, project)
        self._set_limits(project, limit_bytes)
        if source is not None:
            _copy(source, path)

    def _limit(self, path: Path, limit_bytes: int) -> None:
        self._set_limits(quota.get_project(path), limit_bytes)

    def _set_limits(self, project: int, limit_bytes: int) -> None:
        quota.set_limits(self.root, project, limit_bytes, max(limit_bytes // _BYTES_PER_INODE, _INODES_MIN))

    def _usage(self, path: Path) -> tuple[int, int]:
        return quota.usage(self.root, quota.get_project(path))

    def _discard(self, path: Path) -> None:
        if not path.name.startswith(TRASH):
            name = path.name.removeprefix(NEW)
            path.rename(path.with_name(f"{TRASH}{name}.{os.getpid()}-{next(self._serial)}"))

    def _sweep(self) -> bool:
        for name in os.listdir(self.root):
            if name.startswith(TRASH):
                path = self.root / name
                project = quota.get_project(path)
                shutil.rmtree(path)
                if PROJECT_FIRST <= project <= PROJECT_LAST:
                    quota.clear_limits(self.root, project)
                self._used.discard(project)
        return True

    def free(self) -> tuple[int, int]:
        stat = os.statvfs(self.root)
        return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize


def _shares(root: Path) -> bool:
    """Whether files there can share blocks: found out by cloning one."""
    with tempfile.TemporaryFile(dir=root) as a, tempfile.TemporaryFile(dir=root) as b:
        a.write(bytes(4096))
        a.flush()
        try:
            fcntl.ioctl(b.fileno(), _FICLONE, a.fileno())
        except OSError:
            return False
        return True


def _copy(source: Path, target: Path) -> None:
    """cp knows hard links, xattrs, holes and reflinks; a clone is no hot path here."""
    command = ["cp", "--archive", "--reflink=auto", "--sparse=auto", f"{source}/upper", f"{target}/"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        if "Disk quota exceeded" in done.stderr or "No space left" in done.stderr:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(target))
        raise OSError(errno.EIO, f"cp: {done.stderr.strip()[-300:]}", str(target))
