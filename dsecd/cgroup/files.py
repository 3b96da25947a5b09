"""What the controllers' files are called and how their numbers read, for cgroup v1 and v2. No life cycle here.

Both classes answer the same questions about one sandbox; only files that exist are read, so a controller that the host
lacks gives zeros, never an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from dsecd.errors import DsecError

CPU_PERIOD_US: Final = 100_000
_CPU_QUOTA_MIN_US: Final = 1_000  # the kernel's own floor
_MEMORY_MIN: Final = 4 << 20  # with less not even the agent starts


@dataclass(frozen=True)
class CgroupLimits:
    """What a sandbox may use: bytes, tasks, and processors as a number (0.5 is half of one)."""

    memory: int
    pids: int
    cpu: float

    def __post_init__(self) -> None:
        if self.memory < _MEMORY_MIN or self.pids < 1 or self.cpu * CPU_PERIOD_US < _CPU_QUOTA_MIN_US:
            raise DsecError("invalid", f"limits are too small to start anything: {self}")

    @property
    def quota_us(self) -> int:
        return round(self.cpu * CPU_PERIOD_US)

    @property
    def shares(self) -> int:
        """v1's cpu.shares; one processor is the default 1024."""
        return min(max(round(self.cpu * 1024), 2), 262_144)

    @property
    def weight(self) -> int:
        """The same on v2's scale; one processor is the default 100. Runtimes convert `shares` less faithfully."""
        return min(max(round(self.cpu * 100), 1), 10_000)


@dataclass(frozen=True)
class CgroupStats:
    """Memory in bytes, times in microseconds; counters since the cgroup was made."""

    memory_bytes: int = 0
    memory_peak: int = 0
    anon: int = 0
    file: int = 0
    cpu_usec: int = 0
    pids: int = 0
    oom_kills: int = 0
    pids_max_hits: int = 0
    throttled_usec: int = 0
    swap: int = 0


class ControllerFiles(Protocol):
    def stats(self) -> CgroupStats: ...
    def set_limits(self, limits: CgroupLimits) -> None: ...
    def oom_kills(self) -> int: ...
    def pids_hits(self) -> int: ...
    def allow_swap(self, allow: bool) -> None: ...
    def in_steps(self) -> bool: ...
    def memory(self) -> tuple[int, int]: ...
    def reclaim(self, amount: int) -> int: ...


class V2Files:
    """Everything is in the one directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def stats(self) -> CgroupStats:
        memory, cpu = _table(self._path / "memory.stat"), _table(self._path / "cpu.stat")
        return CgroupStats(
            memory_bytes=_number(self._path / "memory.current"),
            memory_peak=_number(self._path / "memory.peak"),
            anon=memory.get("anon", 0),
            file=memory.get("file", 0),
            cpu_usec=cpu.get("usage_usec", 0),
            pids=_number(self._path / "pids.current"),
            oom_kills=self.oom_kills(),
            pids_max_hits=self.pids_hits(),
            throttled_usec=cpu.get("throttled_usec", 0),
            swap=_number(self._path / "memory.swap.current"),
        )

    def memory(self) -> tuple[int, int]:
        return _number(self._path / "memory.current"), _number(self._path / "memory.swap.current")

    def oom_kills(self) -> int:
        return _table(self._path / "memory.events").get("oom_kill", 0)

    def pids_hits(self) -> int:
        return _table(self._path / "pids.events").get("max", 0)

    def set_limits(self, limits: CgroupLimits) -> None:
        write(self._path / "memory.max", limits.memory)
        write(self._path / "pids.max", limits.pids)
        write(self._path / "cpu.max", f"{limits.quota_us} {CPU_PERIOD_US}")
        write(self._path / "cpu.weight", limits.weight)

    def allow_swap(self, allow: bool) -> None:
        """A running sandbox has none (its memory limit is all it gets); a paused one may be swapped out."""
        if (self._path / "memory.swap.max").exists():
            write(self._path / "memory.swap.max", "max" if allow else 0)

    def in_steps(self) -> bool:
        return (self._path / "memory.reclaim").exists()  # Linux 5.19

    def reclaim(self, amount: int) -> int:
        before = _number(self._path / "memory.current")
        with _partial(errno.EAGAIN, errno.EINTR):
            write(self._path / "memory.reclaim", amount)
        return max(before - _number(self._path / "memory.current"), 0)


class V1Files:
    """One directory for each controller; `where` finds them."""

    def __init__(self, where: Callable[[str], Path]) -> None:
        self._where = where

    def stats(self) -> CgroupStats:
        memory = self._where("memory")
        usage = _table(memory / "memory.stat")
        return CgroupStats(
            memory_bytes=_number(memory / "memory.usage_in_bytes"),
            memory_peak=_number(memory / "memory.max_usage_in_bytes"),
            anon=usage.get("total_rss", 0),
            file=usage.get("total_cache", 0),
            cpu_usec=_number(self._where("cpuacct") / "cpuacct.usage") // 1000,
            pids=_number(self._where("pids") / "pids.current"),
            oom_kills=self.oom_kills(),
            pids_max_hits=self.pids_hits(),
            throttled_usec=_table(self._where("cpu") / "cpu.stat").get("throttled_time", 0) // 1000,
            swap=usage.get("total_swap", 0),
        )

    def memory(self) -> tuple[int, int]:
        memory = self._where("memory")
        return _number(memory / "memory.usage_in_bytes"), _table(memory / "memory.stat").get("total_swap", 0)

    def oom_kills(self) -> int:
        return _table(self._where("memory") / "memory.oom_control").get("oom_kill", 0)

    def pids_hits(self) -> int:
        return _table(self._where("pids") / "pids.events").get("max", 0)

    def set_limits(self, limits: CgroupLimits) -> None:
        memory, cpu = self._where("memory"), self._where("cpu")
        names = ["memory.limit_in_bytes"]
        if (memory / "memory.memsw.limit_in_bytes").exists():
            names.append("memory.memsw.limit_in_bytes")
        # memory <= memory+swap must hold after each single write: raise the outer one first, lower it last.
        if limits.memory > _number(memory / names[0]):
            names.reverse()
        for name in names:
            write(memory / name, limits.memory)
        write(self._where("pids") / "pids.max", limits.pids)
        write(cpu / "cpu.cfs_period_us", CPU_PERIOD_US)
        write(cpu / "cpu.cfs_quota_us", limits.quota_us)
        write(cpu / "cpu.shares", limits.shares)

    def allow_swap(self, allow: bool) -> None:
        """Nothing to do: v1 bounds memory and swap together, so swapping out is always allowed."""

    def in_steps(self) -> bool:
        return False

    def reclaim(self, amount: int) -> int:
        memory = self._where("memory")  # v1 cannot be told how much
        before = _number(memory / "memory.usage_in_bytes")
        with _partial(errno.EBUSY, errno.EINTR):
            write(memory / "memory.force_empty", 0)
        return max(before - _number(memory / "memory.usage_in_bytes"), 0)


def oci_resources(limits: CgroupLimits, *, swap_accounting: bool = True) -> dict[str, Any]:
    """`linux.resources` of config.json, which runtimes translate to v1 or v2. `swap` is memory and swap: so no swap."""
    memory = {"limit": limits.memory}
    if swap_accounting:
        memory["swap"] = limits.memory
    return {
        "memory": memory,
        "pids": {"limit": limits.pids},
        "cpu": {"quota": limits.quota_us, "period": CPU_PERIOD_US, "shares": limits.shares},
        "devices": [{"allow": False, "access": "rwm"}],  # the runtime adds /dev/null and its like
    }


def write(path: Path, value: int | str) -> None:
    """Never with O_CREAT: in a group that is gone that would give EACCES instead of ENOENT."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _number(path: Path) -> int:
    """0 for a file that is not there; `max` is infinite for our purposes."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return 0
    return 1 << 62 if text == "max" else int(text)


def _table(path: Path) -> dict[str, int]:
    """Lines of `key number`; {} for a file that is not there."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


@contextlib.contextmanager
def _partial(*numbers: int) -> Any:
    """Reclaim is best effort: these errnos say "less than asked", which the caller sees from the figures."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
