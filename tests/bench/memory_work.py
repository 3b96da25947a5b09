"""The memory bench's workload and its scales: what runs in a guest, what the host counts meanwhile, what comes of it.

Host memory is what the VMMs hold for themselves (anonymous memory, and guest RAM, which is shared memory on tmpfs), and
the page cache of the files behind their disks and devices, each file counted once, however many machines have it.
Nothing here knows how a machine is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsecd.pmem import account

INTERVAL_S: Final = 0.5
MIB: Final = 1 << 20

# An agent's program in the middle of its work: it starts with a real library, computes, searches the sources of all
# that is installed for Python, writes files to its disk, reads them back, and ends.
PROGRAM: Final = """
import hashlib, os, subprocess
import numpy
a = numpy.arange(400 * 400, dtype=float).reshape(400, 400) / 1e5
trace = float(numpy.linalg.norm(a @ a))
found = subprocess.run(["grep", "-rchF", "median", "/usr/lib/python3", "/usr/lib/python3.11"], stdout=subprocess.PIPE)
counts = [int(line) for line in found.stdout.split()]
os.makedirs("/root/out", exist_ok=True)
block = hashlib.sha256(str(trace).encode()).digest() * 32768
for n in range(16):
    with open(f"/root/out/{n}", "wb") as f:
        f.write(block)
        os.fsync(f.fileno())
back = sum(len(open(f"/root/out/{n}", "rb").read()) for n in range(16))
print(len(counts), sum(counts), back >> 20)
"""


@dataclass(frozen=True)
class Sample:
    """One look, in bytes, `at` seconds after the start."""

    at: float
    guests: int  # guest RAM: shared memory
    vmms: int  # anonymous memory of the VMMs: under emulation mostly translated code
    images: int  # page cache of the images' files
    disks: int  # page cache of the writable disks' files

    @property
    def total(self) -> int:
        return self.guests + self.vmms + self.images + self.disks


@dataclass
class Series:
    """Samples of one configuration, and when rounds began and programs were over."""

    samples: list[Sample] = field(default_factory=list)
    rounds: list[tuple[float, float]] = field(default_factory=list)
    took: list[float] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max(sample.total for sample in self.samples)

    @property
    def mean(self) -> float:
        """The time integral over the time: bytes. So runs of different length compare."""
        return self.integral / (self.samples[-1].at - self.rounds[0][0])

    @property
    def integral(self) -> float:
        """Byte seconds, by trapezoids, from when all guests were up: how fast they start is another bench's."""
        counted = [sample for sample in self.samples if sample.at >= self.rounds[0][0]]
        return sum((b.at - a.at) * (a.total + b.total) / 2 for a, b in itertools.pairwise(counted))

    def at_peak(self) -> Sample:
        return max(self.samples, key=lambda sample: sample.total)


def anon_and_shared(pid: int) -> tuple[int, int]:
    """RssAnon and RssShmem in bytes; nothing of a process that is gone."""
    found = {"RssAnon:": 0, "RssShmem:": 0}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition("\t")
            if name in found:
                found[name] = int(rest.split()[0]) << 10
    return found["RssAnon:"], found["RssShmem:"]


@contextlib.contextmanager
def opened(paths: Iterable[Path]) -> Iterator[list[int]]:
    """Descriptors to ask the page cache about; each inode once. Nothing of these files is cached at first."""
    with contextlib.ExitStack() as stack:
        found: dict[tuple[int, int], int] = {}
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            st = os.fstat(fd)
            found.setdefault((st.st_dev, st.st_ino), fd)
        yield list(found.values())


async def watch(series: Series, pids: Callable[[], Sequence[int]], images: Sequence[int], disks: Sequence[int]) -> None:
    """Sample until cancelled."""
    began = time.monotonic()
    while True:
        at = time.monotonic() - began
        held = [anon_and_shared(pid) for pid in pids()]
        series.samples.append(
            Sample(
                at, sum(shared for _, shared in held), sum(anon for anon, _ in held),
                sum(map(account.cached_bytes, images)), sum(map(account.cached_bytes, disks)),
            )
        )  # fmt: skip
        await asyncio.sleep(max(0.05, INTERVAL_S - (time.monotonic() - began - at)))


async def work(
    series: Series, programs: Sequence[Callable[[], Awaitable[str]]], *, rounds: int, period_s: float, idle_s: float
) -> set[str]:
    """Run every program once a round, all at once; a round lasts period_s, and idle_s at least after the last ended.

    What they said.
    """
    began = time.monotonic() - (series.samples[-1].at if series.samples else 0.0)
    said: set[str] = set()
    for _ in range(rounds):
        start = time.monotonic()
        said |= set(await asyncio.gather(*(program() for program in programs)))
        over = time.monotonic()
        series.rounds.append((start - began, over - began))
        series.took.append(over - start)
        await asyncio.sleep(max(idle_s, period_s - (over - start)))
    return said


def cut(series: Series, base: Series, of: Callable[[Series], float]) -> float:
    """How much less than the baseline, as a fraction of it."""
    return 1 - of(series) / of(base)
