"""What the kernel counts: memory in use, CPU time of processes and groups, sectors written by a device."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_TICK: Final = os.sysconf("SC_CLK_TCK")


def meminfo() -> dict[str, int]:
    """/proc/meminfo in KiB."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def used_kib(at: dict[str, int]) -> int:
    """Everything but free memory and page cache: anonymous and shared pages, all slab, page tables, kernel stacks,
    per-CPU data and what has no name. MemAvailable is kinder: it counts half of the reclaimable slab as free."""
    return at["MemTotal"] - at["MemFree"] - at["Buffers"] - at["Cached"] + at["Shmem"]


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


def cpu_s(pid: int) -> float:
    """CPU time of a process, all its threads, in nanosecond steps."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def agents_cpu_s(cgroup_base: str) -> float:
    """CPU time of everything in the sandboxes' control groups."""
    v1 = Path("/sys/fs/cgroup/cpuacct" + cgroup_base)
    if (v1 / "cpuacct.usage").exists():
        return int((v1 / "cpuacct.usage").read_text()) / 1e9
    for line in Path(f"/sys/fs/cgroup{cgroup_base}/cpu.stat").read_text().splitlines():
        if line.startswith("usage_usec"):
            return int(line.split()[1]) / 1e6
    raise RuntimeError("no group counts the CPU time of sandboxes")


def device_of(path: Path) -> str:
    """The block device that a path's file system is on, by the name the kernel has for it."""
    best, source = "", ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        if (str(path) + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, source = point, right.split()[1]
    real = Path(os.path.realpath(source)).name
    if not Path(f"/sys/class/block/{real}/stat").exists():
        real = Path(os.path.realpath(f"/sys/dev/block/{_number(path)}")).name
    return real


def _number(path: Path) -> str:
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def written_bytes(device: str) -> int:
    return int(Path(f"/sys/class/block/{device}/stat").read_text().split()[6]) * 512


def process_written_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("write_bytes"):
            return int(line.split()[1])
    return 0
