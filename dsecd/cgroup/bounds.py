"""What the groups above the sandboxes leave to all of them: limits that an administrator gave to their unit or its
slice (`systemctl set-property dsec.slice MemoryMax=…`), read from cgroup v2, whoever set them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Bounds(NamedTuple):
    """The tightest ones; None: nobody set any."""

    memory: int | None  # bytes
    cpu: float | None  # cores


def bounds(root: Path, group: Path) -> Bounds:
    """root: where the cgroup2 tree is mounted. group: below it, the parent of all sandboxes."""
    chain = [one for one in (group, *group.parents) if one != root and one.is_relative_to(root)]
    # Above memory.high all are throttled and reclaimed from, so nothing beyond it can be promised either.
    memory = [int(words[0]) for one in chain for name in ("memory.max", "memory.high") if (words := _limit(one / name))]
    cpu = [int(words[0]) / int(words[1]) for one in chain if (words := _limit(one / "cpu.max"))]
    return Bounds(min(memory, default=None), min(cpu, default=None))


def _limit(file: Path) -> list[str]:
    """The file's words; none where it says "max", or where the group has no such controller (a hybrid host's tree)."""
    try:
        words = file.read_text().split()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [] if words[:1] == ["max"] else words
