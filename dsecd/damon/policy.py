"""What the daemon does by default: cold file pages leave a guest; cold memory of VMM processes leaves the host.

Both halves are needed for memory to come back. In the guest, DAMON drops cold page cache, and the balloon's free
page reporting hands the freed pages to the host. On the host, vaddr schemes push the cold rest to swap, where there
is swap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from dsecd.damon.model import (
    AccessPattern,
    Context,
    Filter,
    Monitoring,
    Quotas,
    Region,
    Scheme,
    Target,
    Watermarks,
)

# One look in 50 ms and a verdict each second: ages are counted in tens of seconds here, and eight idle guests
# on a small host must not spend it on looking.
_CALM: Final = Monitoring(sample_us=50_000, aggregation_us=1_000_000, update_us=5_000_000, max_regions=500)


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may set, for guests or for the host. Times in seconds, rates per second, watermarks in permille.

    min_age_s: memory that nobody touched for so long is cold.
    max_bytes_per_s, max_cpu_ms_per_s: bounds of the work; 0: none.
    file_only: leave anonymous memory alone (in guests: they have no swap).
    high, mid, low: of free memory, see `Watermarks`; all 0: always at work.
    """

    enabled: bool = True
    min_age_s: float = 30.0
    max_bytes_per_s: int = 128 << 20
    max_cpu_ms_per_s: int = 50
    file_only: bool = True
    high: int = 0
    mid: int = 0
    low: int = 0


GUEST: Final = Policy()
# Processes cannot be told apart by page type before 6.14, and MADV_PAGEOUT takes file pages only of writable files.
HOST: Final = Policy(min_age_s=120.0, file_only=False)


def guest(ram: Sequence[Region], policy: Policy = GUEST) -> Context:
    """Physical memory of a guest, by its own kernel. ram: its System RAM."""
    return Context("paddr", (Target(regions=tuple(ram)),), (_pageout(policy),), _CALM)


def host(pids: Iterable[int], policy: Policy = HOST) -> Context:
    """VMM processes, all in one context: so that one kernel thread watches them, within one quota."""
    return Context("vaddr", tuple(Target(pid) for pid in pids), (_pageout(policy),), _CALM)


def _pageout(policy: Policy) -> Scheme:
    age = round(policy.min_age_s * 1_000_000)
    quotas = Quotas(time_ms=policy.max_cpu_ms_per_s, bytes=policy.max_bytes_per_s)
    marks = Watermarks()
    if policy.high:
        marks = Watermarks("free_mem_rate", high=policy.high, mid=policy.mid, low=policy.low)
    filters = (Filter("anon"),) if policy.file_only else ()
    return Scheme("pageout", AccessPattern(min_age_us=age), quotas, marks, filters)
