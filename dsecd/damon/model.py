"""What a DAMON context is made of, as records that cannot be changed once they are made.

Units are people's: bytes, microseconds, milliseconds, permille. The kernel counts ages in aggregation intervals
and accesses in samples of one; `plan` converts. The tree they are written to is described in the kernel's
Documentation/admin-guide/mm/damon/usage.rst, where the meaning of each field is, too.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from dsecd.errors import DsecError

Operations = Literal["vaddr", "fvaddr", "paddr"]
Action = Literal[
    "willneed", "cold", "pageout", "hugepage", "nohugepage", "lru_prio", "lru_deprio", "migrate_hot", "migrate_cold",
    "stat",
]  # fmt: skip
FilterType = Literal["anon", "memcg", "young", "addr", "target"]

PAGE: Final = 4096
FOREVER: Final = 4294967295  # the greatest age, in intervals: the kernel's field is an unsigned int
ANY_SIZE: Final = (1 << 64) - 1


class Region(Struct, frozen=True):
    """Addresses [start, end), in bytes: virtual ones of a process, or physical ones."""

    start: int
    end: int


class Target(Struct, frozen=True):
    """What is watched: a process (vaddr), or physical memory (paddr, pid None).

    regions: only these; a process may have none, which is all of it. Physical memory must have some.
    """

    pid: int | None = None
    regions: tuple[Region, ...] = ()


class Monitoring(Struct, frozen=True):
    """How closely DAMON looks: one sample of each region per sample_us, a verdict per aggregation_us.

    update_us: how often vaddr looks for new mappings. The regions bound what it costs, whatever the memory's size.
    """

    sample_us: int = 5_000
    aggregation_us: int = 100_000
    update_us: int = 1_000_000
    min_regions: int = 10
    max_regions: int = 1_000


class AccessPattern(Struct, frozen=True):
    """Which regions a scheme is for: size in bytes, accesses in permille of the samples, age in microseconds.

    max_age_us None: however old.
    """

    min_size: int = PAGE
    max_size: int = ANY_SIZE
    min_rate: int = 0
    max_rate: int = 0
    min_age_us: int = 0
    max_age_us: int | None = None


class Quotas(Struct, frozen=True):
    """The most a scheme may do per reset interval: milliseconds of CPU, bytes. 0: no bound.

    When a quota is short, regions are taken by weight (permille each).
    """

    time_ms: int = 0
    bytes: int = 0
    reset_interval_ms: int = 1_000
    size_weight: int = 0
    accesses_weight: int = 1_000
    age_weight: int = 1_000


class Watermarks(Struct, frozen=True):
    """When a scheme works, by the permille of memory that is free: from below `mid` until above `high` or below `low`.

    metric none: always. interval_us: how often it is looked at while the scheme sleeps.
    """

    metric: Literal["none", "free_mem_rate"] = "none"
    interval_us: int = 1_000_000
    high: int = 0
    mid: int = 0
    low: int = 0


class Filter(Struct, frozen=True):
    """Pages the scheme leaves alone (allow: the only ones it takes): those that match, or, matching False, that do not.

    memcg_path is for type memcg; start and end for addr; target, an index of the context's targets, for target.
    """

    type: FilterType
    matching: bool = True
    allow: bool = False
    memcg_path: str = ""
    start: int = 0
    end: int = 0
    target: int = 0


class Scheme(Struct, frozen=True):
    """An action on the regions that fit a pattern. apply_interval_us 0: at each aggregation."""

    action: Action
    pattern: AccessPattern = AccessPattern()
    quotas: Quotas = Quotas()
    watermarks: Watermarks = Watermarks()
    filters: tuple[Filter, ...] = ()
    apply_interval_us: int = 0


class Context(Struct, frozen=True):
    """One kdamond: what it watches, how, and what it does about it."""

    operations: Operations
    targets: tuple[Target, ...]
    schemes: tuple[Scheme, ...]
    monitoring: Monitoring = Monitoring()

    def check(self) -> None:
        """Refuse what the kernel would refuse, or take and then do nothing with. DsecError `invalid`."""
        _check_monitoring(self.monitoring)
        _require(0 < len(self.targets) <= 4096, "a DAMON context has 1 to 4096 targets")
        _require(self.operations != "paddr" or len(self.targets) == 1, "physical memory is one target")
        for target in self.targets:
            _check_target(target, self.operations)
        for scheme in self.schemes:
            _check_scheme(scheme, len(self.targets))


class Stats(Struct, frozen=True):
    """What a scheme has done: regions and bytes it tried, those it was applied to, and how often a quota stopped it."""

    tried: int
    tried_bytes: int
    applied: int
    applied_bytes: int
    quota_exceeds: int


def _check_monitoring(monitoring: Monitoring) -> None:
    _require(
        0 < monitoring.sample_us <= monitoring.aggregation_us and monitoring.update_us > 0,
        "DAMON's intervals: 0 < sample <= aggregation, 0 < update",
    )
    _require(3 <= monitoring.min_regions <= monitoring.max_regions, "DAMON needs 3 regions at least, and max >= min")


def _check_target(target: Target, operations: Operations) -> None:
    if operations == "paddr":
        _require(target.pid is None, "physical memory has no pid")
        _require(target.regions, "physical memory is watched by region: give its System RAM")
    else:
        _require(target.pid is not None and target.pid > 0, "a process is watched by its pid")
    end = 0
    for region in target.regions:
        _require(end <= region.start < region.end <= ANY_SIZE, "DAMON's regions must be in order and apart")
        end = region.end


def _check_scheme(scheme: Scheme, targets: int) -> None:
    pattern, marks = scheme.pattern, scheme.watermarks
    _require(0 <= pattern.min_size <= pattern.max_size <= ANY_SIZE, "sizes of a DAMON pattern: min <= max")
    _require(
        0 <= pattern.min_rate <= pattern.max_rate <= 1000, "access rates of a DAMON pattern: 0 <= min <= max <= 1000"
    )
    _require(
        pattern.max_age_us is None or pattern.min_age_us <= pattern.max_age_us, "ages of a DAMON pattern: min <= max"
    )
    _require(pattern.min_age_us >= 0, "an age is not negative")
    _require(1000 >= marks.high >= marks.mid >= marks.low >= 0, "DAMON's watermarks: 1000 >= high >= mid >= low >= 0")
    for one in scheme.filters:
        _require(one.type != "memcg" or one.memcg_path, "a memcg filter names its group")
        _require("\n" not in one.memcg_path and len(one.memcg_path) < PAGE, "a memcg filter's path is one line")
        _require(one.type != "addr" or one.start < one.end, "an addr filter has start < end")
        _require(
            one.type != "target" or 0 <= one.target < targets, "a target filter names one of the context's targets"
        )


def _require(ok: object, message: str) -> None:
    if not ok:
        raise DsecError("invalid", message)
