"""The two functions that touch DAMON's files on this host, and what their errors mean.

Features are found by file, never by version: a file that is not there is a field that this kernel lacks. Writes to
`state` wait for the kdamond's next turn, so everything here blocks: call it in a thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dsecd.damon.model import Operations, Stats
from dsecd.damon.plan import NR_KDAMONDS, Write
from dsecd.errors import DsecError

ROOT: Final = Path("/sys/kernel/mm/damon/admin/kdamonds")
_STATS: Final = ("nr_tried", "sz_tried", "nr_applied", "sz_applied", "qt_exceeds")


class Sysfs:
    """A `kdamonds` directory: the kernel's, or a test's."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root

    def read(self, path: str) -> str:
        """At most 4 KiB, without the newline. OSError when it cannot be read."""
        fd = os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 4096).decode("ascii", "replace").strip()
        finally:
            os.close(fd)

    def write(self, path: str, value: str) -> None:
        """One write(2), into a file that is there."""
        fd = os.open(self.root / path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)

    def apply(self, writes: Iterable[Write]) -> None:
        """All of them in order, or up to the first that the kernel refuses."""
        for path, value in writes:
            try:
                self.write(path, value)
            except OSError as e:
                raise _refused(path, value, e) from e

    def present(self) -> bool:
        """Has this kernel DAMON with its sysfs interface?"""
        return (self.root / NR_KDAMONDS).exists()

    def count(self) -> int:
        """How many kdamonds somebody has made here. Those of kernel modules (DAMON_RECLAIM) are not counted."""
        return _number(self.read(NR_KDAMONDS))

    def running(self, kdamond: int = 0) -> bool:
        try:
            return self.read(f"{kdamond}/state") == "on"
        except FileNotFoundError:
            return False

    def pid(self, kdamond: int = 0) -> int | None:
        """Of the kernel thread; None when it does not run."""
        try:
            pid = _number(self.read(f"{kdamond}/pid"))
        except FileNotFoundError:
            return None
        return pid if pid > 0 else None

    def operations(self) -> frozenset[Operations]:
        """What the kernel can watch. Asked of a kdamond that exists: there is no other place that says it."""
        known: tuple[Operations, ...] = ("vaddr", "fvaddr", "paddr")
        words = self.read("0/contexts/0/avail_operations").split()
        return frozenset(name for name in known if name in words)

    def stats(self, scheme: int = 0) -> Stats:
        """Of kdamond 0, which must run, as of now."""
        self.apply([Write("0/state", "update_schemes_stats")])
        at = f"0/contexts/0/schemes/{scheme}/stats/"
        return Stats(*(_number(self.read(at + name)) for name in _STATS))


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError as e:
        raise DsecError("internal", f"DAMON answered {text[:64]!r} where a number was expected") from e


def _refused(path: str, value: str, error: OSError) -> DsecError:
    what = f"{path} = {value!r}"
    if error.errno == errno.EBUSY:
        return DsecError("conflict", f"another DAMON user runs on this host: stop it, or set no DAMON policy ({what})")
    if error.errno == errno.ENOENT:
        return DsecError("unsupported", f"this kernel's DAMON has no {path}: leave that field at its default")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DsecError("denied", f"DAMON cannot be set from here ({what}): dsecd must be root, /sys writable")
    return DsecError("vmm", f"DAMON refused {what}: {error.strerror}")
