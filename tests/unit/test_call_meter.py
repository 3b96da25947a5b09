"""Limits and figures of a call on files as both cgroup versions have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.cgroup.meter import V1, V2, CallFigures, CallMeter, MeterNames

MIB = 1 << 20
IDLE = 512 * MIB


def group(path: Path, names: MeterNames, *, used: int, cache: int, tasks: int) -> None:
    """One with so much in use."""
    files = {
        names.limit: "", names.usage: used, names.peak: used, "pids.max": "", "pids.current": tasks,
        "memory.stat": "anon 1\n" + "".join(f"{word.decode()} {cache // 2}\n" for word in names.cache) + "slab 1\n",
        names.ooms: "under_oom 0\noom_kill 3\n", "pids.events": "max 5\n",
    }  # fmt: skip
    if names.outer:
        files[names.outer] = ""
    for name, content in files.items():
        (path / name).write_text(f"{content}\n" if content != "" else "")


@pytest.fixture(params=[V1, V2], ids=["v1", "v2"])
def meter(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[CallMeter, Path, MeterNames]]:
    group(tmp_path, request.param, used=50 * MIB, cache=20 * MIB, tasks=7)
    one = CallMeter(tmp_path, tmp_path, request.param, IDLE, 8192)
    yield one, tmp_path, request.param
    one.close()


def value(path: Path) -> int:
    """What was written last; the files of limits begin empty, as a kernel's takes each write for itself."""
    return int(path.read_text().split("\n")[0])


def test_limits_are_what_is_there_without_cache_and_the_calls(meter: tuple[CallMeter, Path, MeterNames]) -> None:
    one, path, names = meter
    one.begin(64 * MIB, 10)
    assert value(path / names.limit) == (30 + 64) * MIB
    assert value(path / "pids.max") == 17
    if names.outer:
        assert value(path / names.outer) == (30 + 64) * MIB


def test_figures_are_what_came_since(meter: tuple[CallMeter, Path, MeterNames]) -> None:
    one, path, names = meter
    one.begin(64 * MIB, 10)
    (path / names.peak).write_text(f"{80 * MIB}\n")
    assert one.end() == CallFigures(peak=50 * MIB, oom=False, pids_limit=False)
    assert value(path / names.limit) == IDLE
    assert value(path / "pids.max") == 8192


def test_counters_are_compared_with_what_they_were(meter: tuple[CallMeter, Path, MeterNames]) -> None:
    one, path, names = meter
    one.begin(64 * MIB, 10)
    (path / names.ooms).write_text("under_oom 0\noom_kill 4\n")
    (path / "pids.events").write_text("max 6\n")
    figures = one.end()
    assert (figures.oom, figures.pids_limit) == (True, True)
    one.begin(64 * MIB, 10)
    figures = one.end()
    assert (figures.oom, figures.pids_limit) == (False, False)
