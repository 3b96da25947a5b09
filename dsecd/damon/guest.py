"""The same plans for a guest: path and value pairs for the agent's KNOBS frame. Nothing here touches a file or a link.

A guest's kernel does not pick its own memory for paddr schemes, so its /proc/iomem is read first (KNOB_READ of
`IOMEM`). What it answers is a stranger's: it can only harm that guest, and is bounded here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from dsecd.damon import plan, policy
from dsecd.damon.model import PAGE, Region, Stats
from dsecd.damon.plan import Write
from dsecd.damon.sysfs import ROOT
from dsecd.errors import DsecError

IOMEM: Final = "/proc/iomem"
REPORTING_ORDER: Final = "/sys/module/page_reporting/parameters/page_reporting_order"

_MAX_REGIONS: Final = 32
_MAX_ADDRESS: Final = 1 << 52  # what x86-64 can have of physical addresses
_RAM: Final = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16}) : System RAM")
_STATS: Final = ("nr_tried", "sz_tried", "nr_applied", "sz_applied", "qt_exceeds")

Knob = tuple[str, str]


def system_ram(iomem: str) -> tuple[Region, ...]:
    """The System RAM of a guest's /proc/iomem, whole pages only; a last line that was cut off is left out.

    Persistent memory is not System RAM there: what the guest maps of an image is never paged out by its DAMON.
    """
    lines = iomem.split("\n")[:-1]
    found: list[Region] = []
    for line in lines:
        if match := _RAM.fullmatch(line):  # an indented line is a part of one before it
            start, end = -(-int(match[1], 16) // PAGE) * PAGE, (int(match[2], 16) + 1) // PAGE * PAGE
            if start < end <= _MAX_ADDRESS and (not found or found[-1].end <= start) and len(found) < _MAX_REGIONS:
                found.append(Region(start, end))
    if not found or found[-1].end == PAGE:
        raise DsecError("vmm", "the guest does not say where its memory is: DAMON cannot be started in it")
    return tuple(found)


def start(ram: Sequence[Region], settings: policy.Policy = policy.GUEST) -> list[Knob]:
    """Knobs which start the policy in a guest that runs no DAMON yet."""
    return _knobs(plan.start(policy.guest(ram, settings)))


def change(ram: Sequence[Region], settings: policy.Policy) -> list[Knob]:
    """Knobs which make a running one follow other settings, from its next turn on."""
    return _knobs(plan.change(policy.guest(ram, settings)))


def stop() -> list[Knob]:
    """Knobs which end it."""
    return _knobs(plan.STOP)


def reporting_order(order: int) -> list[Knob]:
    """Report free blocks of 2^order pages and more to the host (9: 2 MiB; smaller finds more and costs more calls)."""
    if not 0 <= order <= 10:
        raise DsecError("invalid", "a page reporting order is 0 to 10")
    return [(REPORTING_ORDER, str(order))]


def refresh_stats() -> list[Knob]:
    """A knob after which `stats_paths` can be read."""
    return _knobs([Write("0/state", "update_schemes_stats")])


def stats_paths() -> list[str]:
    """What to read for `stats`, in order."""
    return [f"{ROOT}/0/contexts/0/schemes/0/stats/{name}" for name in _STATS]


def stats(answers: Sequence[bytes]) -> Stats:
    """From the answers to `stats_paths`."""
    words = [answer.strip() for answer in answers]
    if len(words) != len(_STATS) or not all(re.fullmatch(rb"[0-9]{1,20}", word) for word in words):
        raise DsecError("vmm", "the guest's DAMON figures are not numbers")
    return Stats(*map(int, words))


def _knobs(writes: Sequence[Write]) -> list[Knob]:
    return [(f"{ROOT}/{path}", value) for path, value in writes]
