"""Control groups of sandboxes: where they are, making, freezing, killing and removing them.

    hybrid   <root>/<controller>/dsecd/<id>   made by the OCI runtime, limits and figures
             <root>/unified/dsecd/<id>        made by us, delegated to the sandbox's root; freeze and kill
    v2       <root>/<base>/<id>               made by us, everything

The runtime is told `linux.cgroupsPath = <base>/<id>`; crun and runc keep a directory that exists, and its owner. In
both layouts the sandbox's root owns its directory and `cgroup.procs` there: enough to make leaf groups and to clone3()
into them. Limits, cgroup.freeze, cgroup.kill and cgroup.subtree_control stay the host's, so no leaf ever gets a
controller of its own.

Under systemd `<base>` is the cgroup of dsecd-sandboxes.service (Delegate=yes), whose process sits in `<base>/holder`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dsecd.cgroup.files import (
    CgroupLimits,
    CgroupStats,
    ControllerFiles,
    V1Files,
    V2Files,
    oci_resources,
    write,
)
from dsecd.cgroup.meter import V1, V2, CallMeter
from dsecd.errors import DsecError

__all__ = ["CgroupLimits", "CgroupStats", "Cgroups", "SandboxCgroup", "oci_resources"]

Layout = Literal["v2", "hybrid"]
HOLDER: Final = "holder"
UNIT: Final = "dsecd-sandboxes.service"
NEEDED: Final = ("memory", "pids", "cpu")
WANTED: Final = ("io", "cpuset")
# Leaf groups are made by the tenant's side: one for each command that runs, so a few hundred is plenty.
DESCENDANTS_MAX: Final = 1024
DEPTH_MAX: Final = 4
# /sys/kernel/cgroup/delegate without cgroup.procs
_GIVEN_AWAY: Final = ("cgroup.threads", "cgroup.subtree_control", "memory.oom.group", "memory.reclaim")
_FREEZE_S: Final = 5.0
_REMOVE_S: Final = 10.0


@dataclass(frozen=True)
class Cgroups:
    """The layout of this host and our place in it. Make one with `detect`, then call `prepare` once."""

    root: Path
    layout: Layout
    base: str  # begins with a slash, as /proc/<pid>/cgroup and linux.cgroupsPath have it

    @classmethod
    def detect(
        cls,
        root: Path = Path("/sys/fs/cgroup"),
        base: str | None = None,
        *,
        own: Path = Path("/proc/self/cgroup"),
        systemd: Path = Path("/run/systemd/system"),
    ) -> Cgroups:
        """Look, touch nothing. `base` overrides where sandboxes go; it must be delegated to us then."""
        if (root / "cgroup.controllers").exists():
            found = base or (_unit_base(root, own) if systemd.exists() else "/dsecd")
            return cls(root, "v2", _checked(found))
        if (root / "unified/cgroup.controllers").exists():
            missing = [name for name in NEEDED if not (root / name / "cgroup.procs").exists()]
            if missing:
                raise DsecError("unsupported", f"no cgroup v1 hierarchy for {', '.join(missing)} below {root}")
            return cls(root, "hybrid", _checked(base or "/dsecd"))
        raise DsecError(
            "unsupported",
            f"{root} is neither cgroup v2 nor hybrid; boot with systemd.unified_cgroup_hierarchy=1, "
            f"or mount cgroup2 at {root}/unified beside the v1 hierarchies",
        )

    @property
    def unified(self) -> Path:
        """The parent of all sandboxes in the cgroup2 tree."""
        top = self.root if self.layout == "v2" else self.root / "unified"
        return top / self.base.lstrip("/")

    @property
    def swap_accounting(self) -> bool:
        if self.layout == "v2":
            return True
        return (self.root / "memory/memory.memsw.limit_in_bytes").exists()

    def obstacle(self) -> str | None:
        """Why crun would refuse this host, and what to do; None where it works. runc does not mind."""
        if self.layout == "v2":
            return None
        taken = (self.root / "unified/cgroup.controllers").read_text().split()
        if not taken:
            return None
        fix = "; ".join(f"mkdir -p {self.root}/{c} && mount -t cgroup -o {c} cgroup {self.root}/{c}" for c in taken)
        return f"crun needs a hybrid host whose cgroup2 mount has no controllers, this one has {' '.join(taken)}: {fix}"

    def prepare(self) -> None:
        """Make the parent, and on v2 hand the controllers down to it. Repeatable."""
        self.unified.mkdir(mode=0o755, parents=True, exist_ok=True)
        if self.layout == "hybrid":
            return
        self._vacate()
        for directory in self._chain():
            _hand_down(directory)
        enabled = (self.unified / "cgroup.subtree_control").read_text().split()
        missing = [name for name in NEEDED if name not in enabled]
        if missing:
            raise DsecError(
                "unsupported",
                f"the controllers {', '.join(missing)} do not reach {self.unified}: give {UNIT} Delegate=yes, "
                "or name a delegated cgroup as the base",
            )

    def sandbox(self, sandbox_id: str) -> SandboxCgroup:
        return SandboxCgroup(self, sandbox_id)

    def list_existing(self) -> list[str]:
        """Ids that have a group in any hierarchy: for recovery, and for sweeping leftovers."""
        found: set[str] = set()
        for parent in self.parents():
            with contextlib.suppress(FileNotFoundError):
                found.update(entry.name for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False))
        return sorted(found - {HOLDER})

    def oci_resources(self, *, memory: int, pids: int, cpu: float) -> dict[str, Any]:
        return oci_resources(CgroupLimits(memory, pids, cpu), swap_accounting=self.swap_accounting)

    def remove_base(self) -> None:
        """Take our own (empty) parent groups away: for uninstalling and for tests."""
        for parent in self.parents():
            with contextlib.suppress(FileNotFoundError):
                parent.rmdir()

    def parents(self) -> list[Path]:
        """Our parent group in each hierarchy (v1 ones may share one directory through symlinks)."""
        if self.layout == "v2":
            return [self.unified]
        tops = {top.resolve() for top in self.root.iterdir() if (top / "cgroup.procs").exists()}
        return sorted(top / self.base.lstrip("/") for top in tops)

    def _chain(self) -> list[Path]:
        """From the highest group that is ours to change, down to the parent of the sandboxes."""
        parts = self.base.strip("/").split("/")
        below = [self.root.joinpath(*parts[: i + 1]) for i in range(len(parts))]
        # Above a unit everything is systemd's. Elsewhere the root group has nobody else to do it.
        return below[-1:] if self.base.endswith(f"/{UNIT}") or len(parts) > 1 else [self.root, *below]

    def _vacate(self) -> None:
        """No internal processes: whoever sits in the parent itself (the unit's own process) moves to its leaf."""
        members = (self.unified / "cgroup.procs").read_text().split()
        if members:
            holder = self.unified / HOLDER
            holder.mkdir(exist_ok=True)
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    write(holder / "cgroup.procs", pid)


class SandboxCgroup:
    """One sandbox's groups. Holds no descriptors: 1,000 idle sandboxes cost nothing here."""

    def __init__(self, cgroups: Cgroups, sandbox_id: str) -> None:
        if "/" in sandbox_id or sandbox_id in ("", ".", "..", HOLDER):
            raise DsecError("invalid", f"not a sandbox id: {sandbox_id[:80]!r}")
        self._cgroups = cgroups
        self.sandbox_id = sandbox_id
        self.unified = cgroups.unified / sandbox_id
        v2 = cgroups.layout == "v2"
        self._files: ControllerFiles = V2Files(self.unified) if v2 else V1Files(self._v1_path)

    @property
    def oci_path(self) -> str:
        """linux.cgroupsPath"""
        return f"{self._cgroups.base}/{self.sandbox_id}"

    def paths(self) -> list[Path]:
        """The directories that exist."""
        return [path for parent in self._cgroups.parents() if (path := parent / self.sandbox_id).is_dir()]

    def create_unified(self, owner_uid: int) -> None:
        """Before the runtime starts. An existing group is taken over as it is (recovery)."""
        self.unified.mkdir(mode=0o755, exist_ok=True)
        write(self.unified / "cgroup.max.descendants", DESCENDANTS_MAX)
        write(self.unified / "cgroup.max.depth", DEPTH_MAX)
        # The directory: mkdir of leaves. cgroup.procs: clone3(CLONE_INTO_CGROUP) asks for write permission on the
        # common ancestor's. Nothing else, or the tenant could lift its own limits.
        for path in (self.unified / "cgroup.procs", self.unified):
            os.chown(path, owner_uid, owner_uid)

    def create_all(self) -> None:
        """In every hierarchy, for a process of ours that no OCI runtime starts. Nothing in them is given away."""
        wanted = [self._v1_path(name) for name in (*NEEDED, "cpuacct")] if self._cgroups.layout == "hybrid" else []
        for path in (self.unified, *wanted):
            path.mkdir(mode=0o755, parents=True, exist_ok=True)

    def seal(self) -> None:
        """After the runtime's create: on v2 crun gives away the kernel's whole delegation list.

        No limit is among them, but what the tenant does not need it does not get.
        """
        for name in _GIVEN_AWAY:
            with contextlib.suppress(FileNotFoundError):
                os.chown(self.unified / name, 0, 0)

    def open_fd(self) -> int:
        """A descriptor for the agent; the caller closes it once the runtime has it."""
        return os.open(self.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def freeze(self, timeout: float = _FREEZE_S) -> None:
        set_frozen(self.unified, True, timeout)

    def thaw(self, timeout: float = _FREEZE_S) -> None:
        set_frozen(self.unified, False, timeout)

    def is_frozen(self) -> bool:
        return is_frozen(self.unified)

    def is_populated(self) -> bool:
        try:
            return _event(self.unified / "cgroup.events", "populated")
        except FileNotFoundError:
            return False

    def kill(self) -> None:
        """SIGKILL to everything inside, at once and without races with fork; frozen tasks die too."""
        with contextlib.suppress(FileNotFoundError):
            write(self.unified / "cgroup.kill", 1)
        for path in self.paths():  # a runtime that died half-way had joined some hierarchies only
            if path != self.unified:
                _kill_members(path / "cgroup.procs")

    def remove(self, timeout: float = _REMOVE_S) -> None:
        """Take the groups away in every hierarchy, leaves first. Kill first; a group that is not there is no error."""
        deadline = time.monotonic() + timeout
        for path in self.paths():
            _remove_tree(path, deadline)

    def stats(self) -> CgroupStats:
        return self._files.stats()

    def set_limits(self, *, memory: int, pids: int, cpu: float) -> None:
        """At run time. EBUSY from memory: it cannot be lowered below what is in use (v1)."""
        try:
            self._files.set_limits(CgroupLimits(memory, pids, cpu))
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise DsecError("conflict", f"{self.sandbox_id} uses more memory than {memory}") from error
            if error.errno == errno.ENOENT:
                raise DsecError("not_found", f"no cgroup for sandbox {self.sandbox_id}") from error
            raise

    def oom_kills(self) -> int:
        """One small read: cheap enough to ask after every command that failed."""
        return self._files.oom_kills()

    def pids_hits(self) -> int:
        return self._files.pids_hits()

    def call_meter(self, *, memory: int, pids: int) -> CallMeter:
        """For a sandbox of calls; memory and pids are its own limits, between calls."""
        if self._cgroups.layout == "v2":
            return CallMeter(self.unified, self.unified, V2, memory, pids)
        return CallMeter(self._v1_path("memory"), self._v1_path("pids"), V1, memory, pids)

    def allow_swap(self, allow: bool) -> None:
        """For pausing, before `reclaim`: without it only file pages can go."""
        self._files.allow_swap(allow)

    @property
    def in_steps(self) -> bool:
        """Whether `reclaim` keeps to its amount. Else all that can go goes at once, and on an old v2 nothing does."""
        return self._files.in_steps()

    def reclaim(self, amount: int) -> int:
        """Give back up to `amount` bytes (v1: all it can); returns what became free. Takes as long as the disk does."""
        return self._files.reclaim(amount)

    def memory(self) -> tuple[int, int]:
        """Bytes in use, and bytes swapped out: three small reads."""
        return self._files.memory()

    def open_members(self) -> Iterator[tuple[int, int]]:
        """Pid and pidfd of each process inside; the descriptor is closed when the next one is asked for."""
        for group in _descend(self.unified):
            for pid in _members(group / "cgroup.procs"):
                with contextlib.suppress(ProcessLookupError):
                    fd = os.pidfd_open(pid)
                    try:
                        if pid in _members(group / "cgroup.procs"):  # not a number that was reused meanwhile
                            yield pid, fd
                    finally:
                        os.close(fd)

    def _v1_path(self, controller: str) -> Path:
        return self._cgroups.root / controller / self._cgroups.base.lstrip("/") / self.sandbox_id


def set_frozen(group: Path, frozen: bool, timeout: float) -> None:
    """Freeze or thaw a group of the cgroup2 tree and wait until it is; `timeout` when it does not."""
    write(group / "cgroup.freeze", int(frozen))
    if not _wait_event(group / "cgroup.events", "frozen", frozen, timeout):
        if frozen:  # never leave it half-way: a task in an uninterruptible wait may take for ever
            write(group / "cgroup.freeze", 0)
        raise DsecError("timeout", f"{group.name} did not {'freeze' if frozen else 'thaw'} in {timeout:g} s")


def is_frozen(group: Path) -> bool:
    """Of a group of the cgroup2 tree."""
    return _event(group / "cgroup.events", "frozen")


def _checked(base: str) -> str:
    if not base.startswith("/") or base.strip("/") == "" or ".." in base.split("/"):
        raise DsecError("invalid", f"a cgroup base looks like /dsecd, not {base!r}")
    return "/" + base.strip("/")


def _unit_base(root: Path, own: Path) -> str:
    """The sandboxes' unit: beside our own (the same slice), else in any slice."""
    mine = next((line[3:].strip() for line in own.read_text().splitlines() if line.startswith("0::")), "/")
    here = root / mine.lstrip("/")
    near = [parent / UNIT for parent in (here, *here.parents) if parent.is_relative_to(root)]
    for path in (*near, *sorted(root.glob(f"*/{UNIT}"))):
        if path.is_dir():
            return "/" + str(path.relative_to(root))
    raise DsecError("unsupported", f"{UNIT} does not run: start it, or name a delegated cgroup as the base")


def _hand_down(directory: Path) -> None:
    """Enable for the children what the directory itself has; one by one, since one refusal would undo all."""
    offered = (directory / "cgroup.controllers").read_text().split()
    control = directory / "cgroup.subtree_control"
    enabled = control.read_text().split()
    for name in (*NEEDED, *WANTED):
        if name in offered and name not in enabled:
            try:
                write(control, f"+{name}")
            except OSError as error:  # `prepare` says it in words if a needed one is missing
                if error.errno not in (errno.EBUSY, errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL):
                    raise


def _event(path: Path, key: str) -> bool:
    return f"{key} 1" in path.read_text().splitlines()


def _wait_event(path: Path, key: str, value: bool, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    with path.open() as file:
        poll = select.poll()
        poll.register(file, select.POLLPRI | select.POLLERR)
        while True:
            file.seek(0)
            if (f"{key} 1" in file.read().splitlines()) == value:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            poll.poll(left * 1000)


def _kill_members(procs: Path) -> None:
    """By pidfd, opened before the membership is read again: a number that was reused meanwhile is not killed."""
    for pid in _members(procs):
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if pid in _members(procs):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            continue
        finally:
            os.close(fd)


def _members(procs: Path) -> set[int]:
    try:
        return {int(pid) for pid in procs.read_text().split()}
    except FileNotFoundError:
        return set()


def _descend(top: Path) -> Iterator[Path]:
    """Deepest first. The tree may shrink meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(top)):
            if entry.is_dir(follow_symlinks=False):
                yield from _descend(Path(entry.path))
    yield top


def _remove_tree(top: Path, deadline: float) -> None:
    pause = 0.001
    while True:
        try:
            for path in _descend(top):
                with contextlib.suppress(FileNotFoundError):
                    path.rmdir()
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise
            if time.monotonic() > deadline:
                pids = (top / "cgroup.procs").read_text().split()[:5]
                raise DsecError("internal", f"cgroup {top} stays busy; processes in it: {pids}") from error
            time.sleep(pause)
            pause = min(pause * 2, 0.1)
        else:
            return
