"""memory: what a host holds for eight microVMs of one image under one workload, in four configurations.

Baseline: layers as virtio-blk disks, no reporting. Then pmem with DAX; DAMON with free page reporting; both. The guests
start a Python program with real libraries, search the libraries' files, write and read files on their disk, and are
idle then; and again. Every configuration begins with none of the files cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memorykit import Box, Guests

from dsecd.damon import policy
from dsecd.erofs.model import Manifest
from dsecd.erofs.store import ImageStore
from dsecd.vmm.kernel import KernelStore
from tests.bench import memory_picture
from tests.bench.frame import Bench, Bound, Outcome, Stage, rounded, say
from tests.bench.memory_work import MIB, PROGRAM, Series, cut, opened, watch, work
from tests.own import TREE, Base, guest_kernels

IMAGE: Final = Base("base:science", ["python3", "python3-scipy", "python3-pandas"])
GUESTS: Final = 8
MEMORY: Final = 512 * MIB
ROUNDS: Final = 2
PERIOD_S: Final = float(os.environ.get("DSEC_BENCH_PERIOD_S", "120"))
IDLE_S: Final = 60.0  # of each round, at least
PROGRAM_S: Final = 900.0
# Production waits longer than a bench can: here, what was left alone for 8 s of an idle phase is cold.
COLD: Final = policy.Policy(min_age_s=8, max_bytes_per_s=0)


@dataclass(frozen=True)
class Configuration:
    name: str
    pmem: bool
    give_back: bool


CONFIGURATIONS: Final = (
    Configuration("baseline (virtio-blk)", pmem=False, give_back=False),
    Configuration("pmem + DAX", pmem=True, give_back=False),
    Configuration("DAMON + reporting", pmem=False, give_back=True),
    Configuration("both", pmem=True, give_back=True),
)


async def run(stage: Stage) -> Outcome:
    await IMAGE.make(stage.daemon, stage.client)
    store = ImageStore(stage.daemon.state / "images")
    layers = [store.resolve(IMAGE.name)]
    found: dict[str, Series] = {}
    said: set[str] = set()
    for configuration in CONFIGURATIONS:
        with memory_directory() as memory:
            guests = Guests(
                stage.work / configuration.name.replace(" ", "-"), memory, KernelStore(guest_kernels()), store
            )
            series, words = await measure(guests, layers, configuration)
        if series.samples[-1].guests == 0:
            raise RuntimeError(f"{configuration.name}: the guests are gone")
        found[configuration.name] = series
        said |= words
        describe(configuration.name, series)
    if len(said) != 1:
        raise RuntimeError(f"the programs did not agree on what they read: {said}")
    say(f"each program searched so many files, found, and wrote (MiB): {said.pop().strip()}")
    title = f"{GUESTS} microVMs of one image, {ROUNDS} rounds of a Python program and idling (QEMU, TCG)"
    memory_picture.draw(found, TREE / "build/bench/memory.png", title)
    return outcome(found)


async def measure(guests: Guests, layers: list[Manifest], how: Configuration) -> tuple[Series, set[str]]:
    """One configuration, from the first start to the end of the last idle phase."""
    series = Series()
    boxes: list[Box] = []
    disks = [guests.scratch(f"g{number}") for number in range(GUESTS)]
    said: set[str] = set()
    async with contextlib.AsyncExitStack() as stack:
        for disk in disks:
            await guests.make_scratch(disk)
        files = await guests.files_of(layers, pmem=how.pmem)
        images_fds, disk_fds = stack.enter_context(opened(files)), stack.enter_context(opened(disks))
        watching = asyncio.create_task(
            watch(series, lambda: [box.machine.pid for box in boxes], images_fds, disk_fds)
        )  # fmt: skip
        stack.push_async_callback(ended, watching)
        for number in range(GUESTS):  # one after the other: how fast they start is another bench's
            box = guests.box(f"g{number}", layers, pmem=how.pmem, reporting=how.give_back, memory=MEMORY)
            boxes.append(await stack.enter_async_context(box))
            if how.give_back:
                await boxes[-1].start_damon(COLD)
        programs = [functools.partial(box.run, "python3", "-c", PROGRAM, timeout=PROGRAM_S) for box in boxes]
        said = await work(series, programs, rounds=ROUNDS, period_s=PERIOD_S, idle_s=IDLE_S)
        await ended(watching)  # before the guests go; it raises what stopped it
    return series, said


async def ended(task: asyncio.Task[None]) -> None:
    """Also twice."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def describe(name: str, series: Series) -> None:
    top = series.at_peak()
    parts = f"guests {top.guests / MIB:.0f}, VMMs {top.vmms / MIB:.0f}, images {top.images / MIB:.0f}, "
    took = ", ".join(f"{one:.0f}" for one in series.took)
    say(
        f"{name:22} peak {series.peak / MIB:5.0f} MiB ({parts}disks {top.disks / MIB:.0f}), "
        f"mean {series.mean / MIB:5.0f} MiB over {series.samples[-1].at:.0f} s; programs took {took} s"
    )


def outcome(found: dict[str, Series]) -> Outcome:
    base, pmem, damon, both = found.values()
    figures = {
        "pmem_peak_cut": cut(pmem, base, lambda s: s.peak), "fpr_integral_cut": cut(damon, base, lambda s: s.mean),
        "both_peak_cut": cut(both, base, lambda s: s.peak), "both_integral_cut": cut(both, base, lambda s: s.mean),
    }  # fmt: skip
    versus: dict[str, Any] = {
        name: {
            "peak_mib": round(series.peak / MIB), "mean_mib": round(series.mean / MIB),
            "integral_gib_s": rounded(series.integral / 1024 / MIB),
            "seconds": round(series.samples[-1].at - series.rounds[0][0]),
            "programs_s": [round(took) for took in series.took],
        }
        for name, series in found.items()
    }  # fmt: skip
    # Without what only an emulator needs: the figure that a host with KVM comes near.
    versus["guests_and_cache_only"] = {
        name: {
            "pmem_peak_cut": rounded(1 - _bare_peak(pmem) / _bare_peak(base)),
            "fpr_integral_cut": rounded(1 - _bare_mean(damon) / _bare_mean(base)),
            "both_integral_cut": rounded(1 - _bare_mean(both) / _bare_mean(base)),
        }[name]
        for name in ("pmem_peak_cut", "fpr_integral_cut", "both_integral_cut")
    }
    return Outcome({name: rounded(value) for name, value in figures.items()}, versus)


def _bare_peak(series: Series) -> int:
    return max(sample.total - sample.vmms for sample in series.samples)


def _bare_mean(series: Series) -> float:
    """Samples are evenly spaced but for a busy host, which both sides of a quotient have."""
    counted = [sample.total - sample.vmms for sample in series.samples if sample.at >= series.rounds[0][0]]
    return sum(counted) / len(counted)


@contextlib.contextmanager
def memory_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dsecd-bench-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


BENCH: Final = Bench(
    "memory", "host memory for eight microVMs: virtio-blk, pmem, DAMON with reporting, both",
    (Bound("pmem_peak_cut", 0.40, most=False), Bound("fpr_integral_cut", 0.21, most=False)), run,
)  # fmt: skip
