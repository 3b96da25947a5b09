"""Swap in compressed memory, set up when somebody asks for it: without swap, pausing gives back page cache alone.

Nothing of this happens by itself, and nothing of it lasts: the next boot has no such device. Ours may hold as
much as the host has memory, and take at most half of that for itself.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from dsecd.errors import DsecError

PRIORITY: Final = 100  # above disks
BEST: Final = ("zstd", "lz4", "lzo-rle", "lzo")  # by how much fits; speed matters less for what is paused
STEP_S: Final = 30.0
CONTROL: Final = Path("/sys/class/zram-control")


class Swap(Struct, frozen=True):
    """devices: their paths. Bytes."""

    devices: tuple[str, ...]
    total: int
    free: int


def swap() -> Swap:
    """What the host has."""
    devices = tuple(line.split()[0] for line in Path("/proc/swaps").read_text().splitlines()[1:])
    return Swap(devices, _meminfo("SwapTotal"), _meminfo("SwapFree"))


def set_up() -> str:
    """Make a device and use it; returns a sentence about it. Blocks.

    `conflict` where there is swap already, `unsupported` where the kernel has no zram, `internal` when a step fails,
    with nothing left of those before it.
    """
    if found := swap().devices:
        raise DsecError("conflict", f"there is swap already, on {', '.join(found)}: nothing was changed")
    if not CONTROL.exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # without modules it is there, or never will be
            _run("modprobe", "zram")
    if not CONTROL.exists():
        raise DsecError("unsupported", "the kernel has no zram (CONFIG_ZRAM): use a swap partition or file instead")
    memory = _meminfo("MemTotal")
    try:
        with _device() as (name, settings):
            offered = (settings / "comp_algorithm").read_text().replace("[", "").replace("]", "").split()
            algorithm = next((one for one in BEST if one in offered), offered[0])
            (settings / "comp_algorithm").write_text(algorithm)
            (settings / "disksize").write_text(str(memory))
            (settings / "mem_limit").write_text(str(memory // 2))
            _run("mkswap", f"/dev/{name}")
            _run("swapon", "-p", str(PRIORITY), f"/dev/{name}")
    except (OSError, subprocess.SubprocessError) as exc:
        said = exc.stderr.strip() if isinstance(exc, subprocess.CalledProcessError) else exc
        raise DsecError("internal", f"zram could not be set up, nothing of it is left: {said}") from exc
    size = f"{memory >> 20} MiB of swap in at most {memory >> 21} MiB of memory"
    return f"{size}, on /dev/{name} ({algorithm}), until the next boot"


@contextlib.contextmanager
def _device() -> Iterator[tuple[str, Path]]:
    """A new one and its settings; gone again if the block fails."""
    number = (CONTROL / "hot_add").read_text().strip()
    try:
        yield f"zram{number}", Path(f"/sys/block/zram{number}")
    except BaseException:
        with contextlib.suppress(OSError):
            (CONTROL / "hot_remove").write_text(number)
        raise


def _run(*argv: str) -> None:
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=STEP_S, env=env)


def _meminfo(key: str) -> int:
    """Bytes; 0 for a line that is not there."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0
