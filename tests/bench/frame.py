"""What a bench is made of: bounds, medians, a daemon with a base, the lines it prints and its JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsecd.client import DSecClient, DSecContainerRunArgs
from tests.own import Base, OwnDaemon

BASE: Final = Base("base:bench", ["python3"])
# Admission counts what sandboxes may use; here a thousand of them use nothing.
ROOMY: Final = {"disk_pool_mb": 65536, "cpu_overcommit": 1000.0, "memory_overcommit": 100.0, "disk_overcommit": 100.0}


@dataclass(frozen=True)
class Bound:
    """`figure` is to be at most (or at least) `value`."""

    figure: str
    value: float
    most: bool = True

    def line(self, figures: dict[str, float]) -> str:
        got = figures.get(self.figure)
        word = "at most" if self.most else "at least"
        met = got is not None and (got <= self.value if self.most else got >= self.value)
        return f"{'met' if met else 'NOT MET':8} {self.figure} = {got} ({word} {self.value:g})"


@dataclass
class Outcome:
    """figures: the names of the table. versus: what the peers and other views came to."""

    figures: dict[str, float] = field(default_factory=dict)
    versus: dict[str, Any] = field(default_factory=dict)


@dataclass
class Stage:
    """What a bench works with: a daemon that has the base, an open client, a directory of its own."""

    daemon: OwnDaemon
    client: DSecClient
    work: Path

    def args(self, **more: Any) -> DSecContainerRunArgs:
        values: dict[str, Any] = {
            "container_image": BASE.name, "memory_limit_mb": 256, "disk_limit_mb": 256, "pids_limit": 64, **more,
        }  # fmt: skip
        return DSecContainerRunArgs(**values)


@dataclass(frozen=True)
class Bench:
    """One entry of the table."""

    name: str
    what: str
    bounds: tuple[Bound, ...]
    run: Callable[[Stage], Awaitable[Outcome]]
    config: dict[str, Any] = field(default_factory=dict)


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def median(values: Iterable[float], digits: int = 3) -> float:
    return rounded(statistics.median(values), digits)


def rounded(value: float, digits: int = 3) -> float:
    """So many digits that count: a figure is not more exact than that."""
    return float(f"{value:.{digits}g}") if abs(value) < 1000 else float(round(value))


def spread(values: list[float]) -> str:
    """Least, median and most, for the reader."""
    return f"{min(values):.3g} … {statistics.median(values):.3g} … {max(values):.3g}"


class Clock:
    """Milliseconds of what is inside the block."""

    ms: float = 0.0


@contextmanager
def clock(into: list[float] | None = None) -> Iterator[Clock]:
    result = Clock()
    started = time.perf_counter()
    yield result
    result.ms = (time.perf_counter() - started) * 1000
    if into is not None:
        into.append(result.ms)


def environment() -> dict[str, Any]:
    """Where it was measured, and how busy that place was."""
    memory = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    model = next((line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), "")  # fmt: skip
    return {
        "kernel": platform.release(), "cpus": os.cpu_count(), "cpu": model, "memory_mb": memory >> 10,
        "python": platform.python_version(), "debian": BASE.suite, "load": rounded(os.getloadavg()[0], 3),
        "commit": _said("git", "rev-parse", "--short", "HEAD"), "crun": _said("crun", "--version"),
        "podman": _said("podman", "--version"),
    }  # fmt: skip


def _said(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0].strip()


def record(bench: Bench, outcome: Outcome) -> dict[str, Any]:
    return {"bench": bench.name, "figures": outcome.figures, "versus": outcome.versus, "env": environment()}


def as_line(result: dict[str, Any]) -> str:
    return json.dumps(result)
