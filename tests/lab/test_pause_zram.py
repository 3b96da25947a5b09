"""Pause on cgroup v2 with swap on zram: memory really goes, and comes back. Runs in the lab VM after `make install`.

20 containers hold 50 MiB each in the lab VM's usual 3 GiB, and 100 where it has 12 (`run.py --memory 12288`), as in the
bench on a host.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from systemd_kit import run, sh, show, until

from dsecd.cgroup.groups import Cgroups, SandboxCgroup
from dsecd.client import DSecClient, DSecContainerRunArgs, Sandbox
from dsecd.container import reclaim
from dsecd.container.reclaim import Reclaim
from dsecd.wire import images as image_wire
from dsecd.zram import swap

pytestmark = pytest.mark.lab

MIB = 1 << 20
COUNT = 100 if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 11 << 30 else 20
HELD = 50
# The heap of an ordinary Python program: dicts, strings, numbers. It answers when it is asked, with a sum of all of it.
HOLDER = f"""
import os, time
held = []
def own():
    words = open('/proc/self/statm').read().split()
    return (int(words[1]) - int(words[2])) * 4096
while own() < {HELD} << 20:
    for n in range(len(held), len(held) + 1000):
        held.append({{'id': n, 'name': 'item-%d' % n, 'score': n * 0.5, 'tags': ['a%d' % n, 'b'], 'ok': n % 3 == 0}})
open('/holds', 'w').close()
while True:
    if os.path.exists('/ask'):
        os.unlink('/ask')
        open('/said', 'w').write('%d %d' % (len(held), sum(one['id'] for one in held)))
    time.sleep(0.2)
"""


def active() -> None:
    until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")


@pytest.fixture(scope="module", autouse=True)
def units() -> Iterator[None]:
    sh("systemctl start dsecd.socket && systemctl restart dsecd.service")
    active()

    async def chunks() -> AsyncIterator[bytes]:
        with Path("/srv/base.tar").open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk

    async def fill(client: DSecClient) -> None:
        await client.import_image(image_wire.Import(name="base:pause"), chunks())

    run(fill)
    yield
    sh("swapoff -a; systemctl disable --now dsecd.service dsecd.socket dsecd-sandboxes.service")


def available() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def group_of(ident: str) -> SandboxCgroup:
    return Cgroups.detect().sandbox(ident)


def text(ident: str, name: str) -> str:
    return (group_of(ident).unified / name).read_text().strip()


async def holding(client: DSecClient, count: int, job: str) -> list[Sandbox]:
    args = DSecContainerRunArgs(container_image="base:pause", memory_limit_mb=128, disk_limit_mb=32, job=job)
    boxes = [box for box in await client.run_containers(args, count) if isinstance(box, Sandbox)]
    assert len(boxes) == count
    for box in boxes:
        await box.start(["python3", "-c", HOLDER])
    for box in boxes:
        async with asyncio.timeout(120):
            while (await box.run_shell("test -e /holds")).exit_code:
                await asyncio.sleep(0.5)
    return boxes


async def says(box: Sandbox) -> bytes:
    await box.write_file("/ask", b"")
    async with asyncio.timeout(60):
        while (await box.run_shell("test -s /said")).exit_code:
            await asyncio.sleep(0.2)
    said = await box.read_file("/said")
    await box.remove("/said")
    return said


def test_doctor_makes_swap() -> None:
    """Only when it is asked to, and only for root; once there is some, it leaves it alone."""
    assert not swap().devices
    assert "fix: dsecctl doctor --fix zram" in sh("dsecctl doctor", False)
    other = "setpriv --reuid=65534 --regid=65534 --groups=$(getent group dsec | cut -d: -f3) dsecctl doctor --fix zram"
    done = subprocess.run(["sh", "-c", other], capture_output=True, text=True)
    assert "only root may" in done.stderr, done
    assert not swap().devices
    done = subprocess.run(["dsecctl", "doctor", "--fix", "zram"], capture_output=True, text=True)
    assert "MiB of swap" in done.stderr, done
    assert len(swap().devices) == 1
    assert "pausing can use it" in " ".join(done.stdout.split())
    before = swap()
    done = subprocess.run(["dsecctl", "doctor", "--fix", "zram"], capture_output=True, text=True)
    assert (done.returncode, "there is swap already" in done.stderr) == (1, True), done
    assert swap() == before


def test_most_of_a_job_goes() -> None:
    """At least 70 % of what its containers hold: by their groups' count, and of the host's own available memory."""

    async def work(client: DSecClient) -> None:
        boxes = await holding(client, COUNT, "held")
        said = [await says(box) for box in boxes[:5]]
        assert {text(box.id, "memory.swap.max") for box in boxes} == {"0"}, "a running one has no swap"
        held, free = sum([(await box.stats()).memory_bytes for box in boxes]), available()
        began = time.monotonic()
        outcomes = await client.pause_job("held")
        took = time.monotonic() - began
        assert {(one.state, one.error) for one in outcomes} == {("paused", None)}
        stats = [await box.stats() for box in boxes]
        left, gained = sum(one.memory_bytes for one in stats), available() - free
        print(
            f"\n{COUNT} containers held {held / MIB:.0f} MiB, {left / MIB:.0f} after a pause of {took:.1f} s;", end=" "
        )
        print(f"the host has {gained / MIB:.0f} more")
        assert held > COUNT * HELD * MIB
        assert held - left >= 0.7 * held
        assert gained >= 0.7 * held
        assert all(one.swapped_bytes > HELD * MIB // 2 for one in stats)
        assert sum(one.reclaimed_bytes for one in stats) >= 0.7 * held
        (job,) = await client.jobs()
        assert (job.states, job.swapped_bytes > COUNT * HELD * MIB // 2) == ({"paused": COUNT}, True)
        assert {text(box.id, "memory.swap.max") for box in boxes} == {"max"}

        first = []
        for box in boxes:
            began = time.monotonic()
            assert (await box.run_shell("true")).ok
            first.append(time.monotonic() - began)
        print(f"first command after a resume: {statistics.median(first) * 1000:.0f} ms (emulated)")
        assert {text(box.id, "memory.swap.max") for box in boxes} == {"0"}
        assert [await says(box) for box in boxes[:5]] == said
        assert {one.state for one in await client.stop_job("held")} == {"stopped"}

    run(work)


def test_out_over_a_killed_daemon() -> None:
    """SIGKILL while it is paused: the next daemon leaves it frozen, and its memory out."""

    async def begin(client: DSecClient) -> tuple[str, bytes, int]:
        (box,) = await holding(client, 1, "kill")
        said = await says(box)
        await box.pause()
        return box.id, said, int(text(box.id, "memory.current"))

    ident, said, out = run(begin)
    sh("systemctl kill -s KILL --kill-whom=main dsecd.service")
    until("dsecd is another", lambda: show("dsecd.service", "NRestarts") != "0")
    active()

    async def look(client: DSecClient) -> None:
        box = await client.get(ident)
        assert box.info.state == "paused"
        assert group_of(ident).is_frozen()
        assert int(text(ident, "memory.current")) < out + 4 * MIB
        assert (await box.stats()).reclaimed_bytes > HELD * MIB // 2
        assert await says(box) == said
        await box.stop()

    run(look)


class OldCgroup(SandboxCgroup):
    """As on a host with v1 only: no memory.reclaim, so that its processes' memory is paged out one by one."""

    @property
    def in_steps(self) -> bool:
        return False

    def reclaim(self, amount: int) -> int:
        return 0


def test_paged_out_and_in_by_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """process_madvise from outside, on frozen processes: PAGEOUT at the pause, WILLNEED ahead of the thaw."""
    monkeypatch.setattr(reclaim, "AHEAD_S", 30.0)  # emulated: smaps alone takes longer than a resume may wait

    async def work(client: DSecClient) -> None:
        (box,) = await holding(client, 1, "advice")
        said = await says(box)
        group = OldCgroup(Cgroups.detect(), box.id)
        group.freeze()
        before = group.memory()
        gone = await asyncio.to_thread(Reclaim(group).run)
        after = group.memory()
        print(f"\npaged out {gone / MIB:.1f} of {before[0] / MIB:.1f} MiB")
        assert gone > HELD * MIB // 2
        assert after[1] > HELD * MIB // 2
        fetched = await asyncio.to_thread(reclaim.fetch_ahead, group, 0)
        print(f"fetched {fetched / MIB:.1f} MiB ahead")
        assert fetched > 0
        assert group.memory()[0] > after[0] + fetched // 2
        group.allow_swap(False)
        group.thaw()
        assert await says(box) == said
        await box.stop()

    run(work)
