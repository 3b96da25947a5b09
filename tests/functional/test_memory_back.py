"""Memory comes back from guests: DAMON drops their cold page cache, the balloon reports it; each half alone, too."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import daemonkit
import msgspec
import pytest
from erofs_kit import imported
from memorykit import MIB, Box, Guests

from dsecd.agent import files
from dsecd.damon import guest, policy
from dsecd.erofs.model import Manifest
from dsecd.erofs.store import ImageStore
from dsecd.pmem import account, fit
from dsecd.vmm.kernel import KernelStore
from dsecd.vmm.machine import MachineSpec

READ = 160
EAGER = policy.Policy(min_age_s=3, max_bytes_per_s=0, max_cpu_ms_per_s=0)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory, base_tar: Path) -> Iterator[Guests]:
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("qemu-system-x86_64 is not installed")
    store = ImageStore(tmp_path_factory.mktemp("store"))
    asyncio.run(imported(store, base_tar.read_bytes(), name="base"))
    memory = Path(tempfile.mkdtemp(prefix="dsecd-test-", dir="/dev/shm"))
    try:
        yield Guests(tmp_path_factory.mktemp("guests"), memory, KernelStore(daemonkit.guest_kernels()), store)
    finally:
        shutil.rmtree(memory, ignore_errors=True)  # the driver removes what it empties


@pytest.fixture(scope="module")
def base(guests: Guests) -> Manifest:
    return guests.store.resolve("base")


@contextlib.asynccontextmanager
async def full_box(guests: Guests, base: Manifest, name: str, *, reporting: bool) -> AsyncIterator[Box]:
    """A guest which has read READ MiB from its disk: they are cold from now on."""
    async with guests.box(name, [base], pmem=False, reporting=reporting) as box:
        await box.run("dd", "if=/dev/zero", "of=/big", "bs=1M", f"count={READ}", "conv=fsync", timeout=240)
        await box.run("cat", "/big", timeout=240)  # to its kept output, which drops it
        yield box


async def meminfo(box: Box) -> dict[str, int]:
    """The guest's own figures, in bytes."""
    words = (line.split() for line in (await box.run("cat", "/proc/meminfo")).splitlines())
    return {name.rstrip(":"): int(size) << 10 for name, size, *_ in words}


async def cache_falls(box: Box, to: int, within: float) -> bool:
    deadline = time.monotonic() + within
    while (await meminfo(box))["Cached"] > to:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(1)
    return True


async def rss_falls(box: Box, to: int, within: float) -> bool:
    deadline = time.monotonic() + within
    while box.rss > to:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.5)
    return True


def test_reporting_needs_damon_and_together_they_give_memory_back(guests: Guests, base: Manifest) -> None:
    """Reporting alone finds nothing free. With DAMON the cache goes; a sleeping process keeps its own memory."""
    sleeper = (
        "import time; x = bytearray(b'x') * (48 << 20); time.sleep(30);"
        "print([l.split()[1] for l in open('/proc/self/status') if 'RssAnon' in l][0])"
    )

    async def life() -> None:
        async with full_box(guests, base, "both", reporting=True) as box:
            before = box.rss
            assert before > (READ + 50) * MIB
            await asyncio.sleep(8)  # reports come 2 s after memory is free
            assert box.rss > before - 20 * MIB
            assert (await meminfo(box))["Cached"] > READ * MIB
            sleeping = asyncio.create_task(box.run("python3", "-c", sleeper))
            await box.start_damon(EAGER)
            assert await rss_falls(box, before - READ * MIB // 2, 120), f"{before >> 20} MiB, then {box.rss >> 20}"
            await files.knobs(box.link, guest.refresh_stats())
            stats = guest.stats(await files.knobs_read(box.link, guest.stats_paths()))
            assert stats.applied_bytes >= READ * MIB // 2
            assert int(await sleeping) << 10 >= 48 * MIB
            await files.knobs(box.link, guest.stop())
            assert (await box.run("stat", "-c", "%s", "/big")).strip() == str(READ * MIB)

    asyncio.run(life())


def test_damon_alone_frees_it_in_the_guest_only(guests: Guests, base: Manifest) -> None:
    async def life() -> None:
        async with full_box(guests, base, "mute", reporting=False) as box:
            before = box.rss
            await box.start_damon(EAGER)
            assert await cache_falls(box, READ * MIB // 2, 120)
            await asyncio.sleep(5)  # reporting would have come after 2 s
            assert box.rss > before - 20 * MIB

    asyncio.run(life())


def test_files_of_a_pmem_image_are_not_cached_by_the_guest(guests: Guests, base: Manifest) -> None:
    """DAX: reading all of the image's programs leaves the guest's page cache alone; from a disk it fills it."""

    async def growth(*, pmem: bool) -> int:
        async with guests.box(f"dax{pmem:d}", [base], pmem=pmem, reporting=False) as box:
            if pmem:
                assert "/big" not in await box.run("ls", "/")
            before = (await meminfo(box))["Cached"]
            await box.run(
                "sh", "-c", "cat /usr/lib/x86_64-linux-gnu/*.so* /usr/bin/* 2>/dev/null >/dev/null", timeout=240
            )
            return (await meminfo(box))["Cached"] - before

    assert fit.examine(guests.store.meta_path(base)).fit
    on_pmem, on_blk = asyncio.run(growth(pmem=True)), asyncio.run(growth(pmem=False))
    assert on_blk > 60 * MIB
    assert on_pmem < on_blk / 10, f"{on_pmem >> 20} of {on_blk >> 20} MiB"


def test_what_pmem_devices_cost_a_guest_is_what_we_say(guests: Guests, base: Manifest) -> None:
    """A guest with a 4 GiB device beside has less memory by the sixty-fourth part of it, and not more."""
    big = guests.work / "big.pmem"
    with big.open("wb") as f:
        f.truncate(4 << 30)

    async def available(*more: Path) -> int:
        def change(spec: MachineSpec) -> MachineSpec:
            return msgspec.structs.replace(spec, pmem=(*spec.pmem, *more))

        async with guests.box(f"cost{len(more)}", [base], pmem=True, reporting=False, change=change) as box:
            return (await meminfo(box))["MemFree"]

    cost = asyncio.run(available()) - asyncio.run(available(big))
    said = account.guest_cost([4 << 30])
    assert said * 0.9 < cost < said * 1.15, f"{cost >> 20} MiB, and we say {said >> 20}"
