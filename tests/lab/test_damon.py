"""DAMON on a real host, which the lab VM is: cold memory of processes goes to swap; others' kdamonds are let alone."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.damon import plan, policy
from dsecd.damon.host import HostDamon
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
from dsecd.damon.sysfs import Sysfs
from dsecd.errors import DsecError

pytestmark = pytest.mark.lab

MIB = 1 << 20
HELD = 128
EAGER = policy.Policy(min_age_s=2, max_bytes_per_s=0, max_cpu_ms_per_s=0, file_only=False)
ZRAM = Path("/sys/block/zram0")
HOLDER = f"x = bytearray(b'ab') * ({HELD} << 19)\nprint('held', flush=True)\nimport time; time.sleep(600)"


@pytest.fixture
def swap() -> Iterator[None]:
    (ZRAM / "disksize").write_text("512M")
    try:
        subprocess.run("mkswap -q /dev/zram0 && swapon /dev/zram0", shell=True, check=True)
        yield
        subprocess.run(["swapoff", "/dev/zram0"], check=True)
    finally:
        (ZRAM / "reset").write_text("1")


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process with HELD MiB of its own which it does not touch, as an idle VMM is."""
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    assert Sysfs().count() == 0
    yield
    assert Sysfs().count() == 0


def status(pid: int, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


async def swapped(pid: int, size: int, within: float) -> bool:
    deadline = time.monotonic() + within
    while status(pid, "VmSwap") < size:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.5)
    return True


def test_cold_memory_of_a_process_goes_to_swap(swap: None, holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Two processes by two daemons: the second takes the first one's kdamond back, watches both, and removes it."""

    async def life() -> None:
        first = HostDamon(tmp_path / "damon.json", EAGER)
        assert first.obstacle() == ""
        await first.watch(holder.pid)
        assert await swapped(holder.pid, HELD * MIB // 2, 60), f"{status(holder.pid, 'VmSwap') >> 20} MiB are swapped"
        stats = await first.stats()
        assert stats is not None
        assert stats.applied_bytes >= HELD * MIB // 2
        second = HostDamon(tmp_path / "damon.json", EAGER)
        assert second.obstacle() == ""
        await second.watch(holder.pid)
        with subprocess.Popen(["sleep", "600"]) as other:
            try:
                await second.watch(other.pid)
                assert Sysfs().read("0/contexts/0/targets/nr_targets") == "2"
            finally:
                other.kill()
        await second.forget(other.pid)
        assert Sysfs().running()
        await second.forget(holder.pid)

    asyncio.run(life())
    assert not (tmp_path / "damon.json").exists()


def test_processes_that_die_end_the_kdamond_and_the_next_one_starts_it(
    holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    async def life() -> None:
        ours = HostDamon(tmp_path / "damon.json", EAGER)
        with subprocess.Popen(["sleep", "600"]) as short:
            await ours.watch(short.pid)
            short.kill()
        deadline = time.monotonic() + 60
        while Sysfs().running():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        assert await ours.stats() is None
        await ours.watch(holder.pid)
        assert Sysfs().running()
        await ours.stop()

    asyncio.run(life())


def test_anothers_kdamond_stays_as_it_is(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    sysfs = Sysfs()
    ram = Region(1 << 20, 2 << 20)
    sysfs.apply(plan.start(Context("paddr", (Target(regions=(ram,)),), ())))
    try:
        pid = sysfs.pid()
        ours = HostDamon(tmp_path / "damon.json", EAGER)
        assert "another DAMON user" in ours.obstacle()
        with pytest.raises(DsecError) as refused:
            asyncio.run(ours.watch(holder.pid))
        assert refused.value.kind == "conflict"
        asyncio.run(ours.stop())
        assert sysfs.running()
        assert sysfs.pid() == pid
    finally:
        sysfs.apply(plan.STOP)


def test_the_kernel_takes_everything_the_plan_can_say() -> None:
    """Each write of a full context, with every field away from its default, on the real files; read back."""
    scheme = Scheme(
        "pageout", AccessPattern(8192, 1 << 40, 0, 200, 3_000_000, 60_000_000), Quotas(7, 9 << 20, 2000, 1, 2, 3),
        Watermarks("free_mem_rate", 2_000_000, 900, 800, 100),
        (Filter("anon"), Filter("memcg", memcg_path="/system.slice"), Filter("addr", False, start=4096, end=8192),
         Filter("young")), 1_000_000,
    )  # fmt: skip
    context = Context("paddr", (Target(regions=(Region(1 << 20, 64 << 20),)),), (scheme,), Monitoring(6000, 120_000))
    sysfs = Sysfs()
    writes = plan.start(context)
    sysfs.apply(writes)
    try:
        last = {write.path: write.value for write in writes if not write.path.endswith("state")}
        differing = {path: sysfs.read(path) for path, value in last.items() if sysfs.read(path) != value}
        assert differing == {}
        sysfs.apply(plan.change(context))
        assert sysfs.running()
    finally:
        sysfs.apply(plan.STOP)
