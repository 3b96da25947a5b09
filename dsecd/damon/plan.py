"""From records to the exact writes below `.../damon/admin/kdamonds`, in the only order that the kernel takes them in.

One function per directory, so that the calls are the tree. A directory's children exist once its nr_ file was written,
and vanish with what was in them when it is written again; `state` comes last. Nothing here touches a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from dsecd.damon.model import (
    FOREVER,
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


class Write(NamedTuple):
    """One file, by its path below `kdamonds`, and what goes into it."""

    path: str
    value: str


NR_KDAMONDS: Final = "nr_kdamonds"
STOP: Final = (Write("0/state", "off"), Write(NR_KDAMONDS, "0"))


def start(context: Context) -> list[Write]:
    """Everything from nothing to a running kdamond 0. No other may run: the kernel refuses the first write then."""
    context.check()
    return [Write(NR_KDAMONDS, "1"), Write("0/contexts/nr_contexts", "1"), *_context("0/contexts/0/", context), _ON]


def change(context: Context) -> list[Write]:
    """The same kdamond 0, running, made to follow another context of the same operations."""
    context.check()
    return [*_parts("0/contexts/0/", context), Write("0/state", "commit")]


_ON: Final = Write("0/state", "on")


def _context(at: str, context: Context) -> Iterator[Write]:
    yield Write(at + "operations", context.operations)
    yield from _parts(at, context)


def _parts(at: str, context: Context) -> Iterator[Write]:
    yield from _monitoring(at + "monitoring_attrs/", context.monitoring)
    yield from _targets(at + "targets/", context.targets)
    yield Write(at + "schemes/nr_schemes", str(len(context.schemes)))
    for number, scheme in enumerate(context.schemes):
        yield from _scheme(f"{at}schemes/{number}/", scheme, context.monitoring)


def _monitoring(at: str, monitoring: Monitoring) -> Iterator[Write]:
    yield Write(at + "intervals/sample_us", str(monitoring.sample_us))
    yield Write(at + "intervals/aggr_us", str(monitoring.aggregation_us))
    yield Write(at + "intervals/update_us", str(monitoring.update_us))
    yield Write(at + "nr_regions/min", str(monitoring.min_regions))
    yield Write(at + "nr_regions/max", str(monitoring.max_regions))


def _targets(at: str, targets: Sequence[Target]) -> Iterator[Write]:
    yield Write(at + "nr_targets", str(len(targets)))
    for number, target in enumerate(targets):
        if target.pid is not None:
            yield Write(f"{at}{number}/pid_target", str(target.pid))
        yield from _regions(f"{at}{number}/regions/", target.regions)


def _regions(at: str, regions: Sequence[Region]) -> Iterator[Write]:
    yield Write(at + "nr_regions", str(len(regions)))
    for number, region in enumerate(regions):
        yield Write(f"{at}{number}/start", str(region.start))
        yield Write(f"{at}{number}/end", str(region.end))


def _scheme(at: str, scheme: Scheme, monitoring: Monitoring) -> Iterator[Write]:
    yield Write(at + "action", scheme.action)
    if scheme.apply_interval_us:  # 6.7
        yield Write(at + "apply_interval_us", str(scheme.apply_interval_us))
    yield from _pattern(at + "access_pattern/", scheme.pattern, monitoring)
    yield from _quotas(at + "quotas/", scheme.quotas)
    yield from _watermarks(at + "watermarks/", scheme.watermarks)
    if scheme.filters:  # 6.3
        yield Write(at + "filters/nr_filters", str(len(scheme.filters)))
    for number, one in enumerate(scheme.filters):
        yield from _filter(f"{at}filters/{number}/", one)


def _pattern(at: str, pattern: AccessPattern, monitoring: Monitoring) -> Iterator[Write]:
    samples = monitoring.aggregation_us // monitoring.sample_us
    oldest = FOREVER if pattern.max_age_us is None else pattern.max_age_us // monitoring.aggregation_us
    yield Write(at + "sz/min", str(pattern.min_size))
    yield Write(at + "sz/max", str(pattern.max_size))
    yield Write(at + "nr_accesses/min", str(pattern.min_rate * samples // 1000))
    yield Write(at + "nr_accesses/max", str(pattern.max_rate * samples // 1000))
    # rounded up: what is asked to be 150 ms old is never taken at 100
    yield Write(at + "age/min", str(min(FOREVER, -(-pattern.min_age_us // monitoring.aggregation_us))))
    yield Write(at + "age/max", str(min(FOREVER, oldest)))


def _quotas(at: str, quotas: Quotas) -> Iterator[Write]:
    yield Write(at + "ms", str(quotas.time_ms))
    yield Write(at + "bytes", str(quotas.bytes))
    yield Write(at + "reset_interval_ms", str(quotas.reset_interval_ms))
    yield Write(at + "weights/sz_permil", str(quotas.size_weight))
    yield Write(at + "weights/nr_accesses_permil", str(quotas.accesses_weight))
    yield Write(at + "weights/age_permil", str(quotas.age_weight))


def _watermarks(at: str, marks: Watermarks) -> Iterator[Write]:
    yield Write(at + "metric", marks.metric)
    yield Write(at + "interval_us", str(marks.interval_us))
    yield Write(at + "high", str(marks.high))
    yield Write(at + "mid", str(marks.mid))
    yield Write(at + "low", str(marks.low))


def _filter(at: str, one: Filter) -> Iterator[Write]:
    yield Write(at + "type", one.type)
    yield Write(at + "matching", "Y" if one.matching else "N")
    if one.allow:  # 6.14
        yield Write(at + "allow", "Y")
    if one.type == "memcg":
        yield Write(at + "memcg_path", one.memcg_path)
    elif one.type == "addr":
        yield Write(at + "addr_start", str(one.start))
        yield Write(at + "addr_end", str(one.end))
    elif one.type == "target":
        yield Write(at + "damon_target_idx", str(one.target))  # the docs say target_idx; this is the file
