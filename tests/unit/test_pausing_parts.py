"""Parts of pausing without a sandbox: clocks, reclaim, what a process's maps say, whose jobs are whose."""

from __future__ import annotations

import asyncio
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dsecd.cgroup.groups import SandboxCgroup
from dsecd.container import reclaim
from dsecd.container.reclaim import STEP, Mapping, Reclaim
from dsecd.errors import DsecError
from dsecd.sandbox import expiry, record
from dsecd.sandbox.jobs import Jobs
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.record import Record
from dsecd.wire import sandbox as wire

MIB = 1 << 20


# -- clocks -----------------------------------------------------------------------------------------------------------
class Time:
    """`now()` as the test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (record, expiry):
            monkeypatch.setattr(module, "now", lambda: self.now)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def a_record(**spec: Any) -> Record:
    """Running since 1000, whose deadlines count from there."""
    what = wire.Spec(image="base", **spec)
    made = Record(
        id="h-1", spec=what, backend="container", boot="b", owner=wire.Owner(0, 0), state="running", idle_since=1000.0
    )
    made.total_deadline = None if what.ttl_total_s is None else 1000 + what.ttl_total_s
    made.lease_deadline = None if what.lease_s is None else 1000 + what.lease_s
    return made


def pause(what: Record) -> None:
    expiry.stand_still(what)
    what.state = "paused"


def resume(what: Record) -> None:
    expiry.go_on(what)
    what.state = "running"


def test_total_ttl_stands_still(at: Time) -> None:
    one = a_record(ttl_total_s=60)
    at.now = 1020
    pause(one)
    assert expiry.next_end(one, False) is None
    at.now = 5000
    assert one.moment(one.total_deadline) == 5040, "40 are left"
    expiry.stand_still(one)  # a daemon that died half-way comes to it again
    resume(one)
    assert one.total_deadline == 5040
    end = expiry.next_end(one, False)
    assert end is not None
    assert (end.moment, end.which) == (5040, "total")


def test_total_ttl_goes_on(at: Time) -> None:
    one = a_record(ttl_total_s=60, paused_clock="running")
    pause(one)
    at.now = 1030
    end = expiry.next_end(one, False)
    assert end is not None
    assert end.moment == 1060
    resume(one)
    assert one.total_deadline == 1060
    one.spec.on_expiry = "pause"
    pause(one)
    assert expiry.next_end(one, False) is None, "it is paused already"


@pytest.mark.parametrize("clock", ["stopped", "running"])
def test_lease_begins_anew_at_resume(at: Time, clock: wire.PausedClock) -> None:
    one = a_record(lease_s=30, paused_clock=clock)
    at.now = 1029
    pause(one)
    at.now = 3000
    expiry.renew(one)  # its owner came back before it was resumed
    assert one.moment(one.lease_deadline) == 3030
    at.now = 4000
    resume(one)
    assert one.lease_deadline == 4030


def test_idle_time_begins_anew_and_counts_only_while_it_runs(at: Time) -> None:
    one = a_record(ttl_idle_s=10)
    pause(one)
    at.now = 2000
    assert expiry.next_end(one, False) is None
    resume(one)
    assert expiry.next_end(one, False) == expiry.End(2010, "idle", "idle for 10 s")
    at.now = 2100
    assert expiry.next_end(one, True) == expiry.End(2110, "idle", "idle for 10 s"), "it is not idle"


def test_the_first_of_all_counts(at: Time) -> None:
    one = a_record(ttl_idle_s=10, ttl_total_s=5, lease_s=7)
    assert cast(expiry.End, expiry.next_end(one, False)).which == "total"
    total = cast(expiry.End, expiry.next_end(one, False))
    expiry.act_once(one, total)
    assert cast(expiry.End, expiry.next_end(one, False)).which == "lease"
    expiry.act_again(one, total)
    assert one.total_deadline == 1000 + expiry.AGAIN_S


# -- reclaim ----------------------------------------------------------------------------------------------------------
class FakeCgroup:
    """Has `can_go` bytes that can be reclaimed, and `stays` that cannot."""

    def __init__(self, can_go: int, stays: int = 0, in_steps: bool = True) -> None:
        self.can_go, self.stays, self.in_steps = can_go, stays, in_steps
        self.sandbox_id = "h-1"
        self.calls = 0
        self.swap: list[bool] = []
        self.then: Any = lambda: None

    def memory(self) -> tuple[int, int]:
        return self.can_go + self.stays, 0

    def allow_swap(self, allow: bool) -> None:
        self.swap.append(allow)

    def reclaim(self, amount: int) -> int:
        self.calls += 1
        got = min(amount, self.can_go)
        self.can_go -= got
        self.then()
        return got

    def open_members(self) -> Any:
        return iter(())


def reclaim_of(group: FakeCgroup) -> Reclaim:
    return Reclaim(cast(SandboxCgroup, group))


def test_reclaim_goes_on_until_it_gives_nothing() -> None:
    group = FakeCgroup(40 * MIB, 10 * MIB)
    assert reclaim_of(group).run() == 40 * MIB
    assert group.calls == 40 * MIB // STEP + reclaim.DRY
    assert group.swap == [True]


def test_reclaim_is_stopped_within_a_step() -> None:
    """And leaves no swap allowed, in whatever order the two come."""
    group = FakeCgroup(1 << 40)
    one = reclaim_of(group)
    group.then = lambda: one.stop() if group.calls == 3 else None
    assert one.run() == 3 * STEP
    assert group.swap == [True, False]
    late = reclaim_of(group)
    late.stop()
    assert late.run() == 0
    assert group.swap == [True, False]


def test_reclaim_on_v1_is_one_call() -> None:
    group = FakeCgroup(40 * MIB, in_steps=False)
    assert reclaim_of(group).run() == 40 * MIB
    assert group.calls == 1


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), OSError(19, "no such device"), OSError(5, "swap")])
def test_reclaim_never_fails(error: OSError) -> None:
    """The sandbox is stopped meanwhile, or its swap is broken: the pause holds."""

    def fail() -> None:
        raise error

    group = FakeCgroup(40 * MIB)
    group.then = fail
    assert reclaim_of(group).run() == 0


def test_maps_of_a_process() -> None:
    """Its own memory is found, its files and the kernel's pages are not."""
    with mmap.mmap(-1, 3 * MIB) as area:
        area.write(b"x" * len(area))
        found = list(reclaim.anonymous(os.getpid()))
    assert sum(one.end - one.start for one in found) >= 3 * MIB
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    files = {int(line[0].split("-")[0], 16) for line in lines if len(line) > 5 and line[5].startswith("/usr")}
    kernels = {int(line[0].split("-")[0], 16) for line in lines if len(line) > 5 and line[5] in ("[vdso]", "[vvar]")}
    assert files
    assert kernels
    assert not {one.start for one in found} & (files | kernels)
    assert list(reclaim.anonymous(1 << 22)) == [], "nobody has that number"


def test_bites_cover_a_mapping() -> None:
    odd = Mapping(4096, 4096 + 2 * reclaim.BITE + 8192)
    pieces = list(reclaim.bites(odd))
    assert sum(length for _, length in pieces) == odd.end - odd.start
    assert [start for start, _ in pieces] == [4096, 4096 + reclaim.BITE, 4096 + 2 * reclaim.BITE]


def test_advice_of_a_wrong_range_is_no_error() -> None:
    fd = os.pidfd_open(os.getpid())
    try:
        assert not reclaim.advise(fd, reclaim.WILLNEED, 4096, 4096), "there is no mapping"
        with mmap.mmap(-1, MIB) as area:
            area.write(b"x" * len(area))
            assert all(
                reclaim.advise(fd, reclaim.WILLNEED, start, length)
                for one in reclaim.anonymous(os.getpid())
                for start, length in reclaim.bites(one)
                if one.end - one.start == MIB
            )
    finally:
        os.close(fd)


# -- jobs -------------------------------------------------------------------------------------------------------------
class FakeManager:
    """Three records of job `j`: two of user 1000, one of root, one of which is still being created for ever."""

    def __init__(self) -> None:
        self.records = [a_record(job="j"), a_record(job="j"), a_record(job="j")]
        for n, one in enumerate(self.records):
            one.id, one.owner = f"h-{n}", wire.Owner(1000 if n else 0, 0)
        self.paused: list[str] = []
        self.pausing = SimpleNamespace(freeze=self.freeze, give_back=self.freeze, resume=self.freeze)

    def all(self, states: Any, labels: Any, uid: int | None, job: str | None = None) -> list[Record]:
        return [r for r in self.records if r.spec.job == job and uid in (None, r.owner.uid) and not states]

    async def freeze(self, ident: str) -> None:
        if ident == "h-2":
            raise DsecError("timeout", "it did not freeze")
        self.paused.append(ident)

    async def wait(self, ident: str, states: set[str]) -> None:
        await asyncio.sleep(100)


def test_only_my_own_and_root_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = FakeManager()
    jobs = Jobs(cast(Manager, manager))
    mine = asyncio.run(jobs.pause("j", 1000))
    assert [(one.id, one.error and one.error.kind) for one in mine.results] == [("h-1", None), ("h-2", "timeout")]
    assert manager.paused == ["h-1"]
    assert [one.id for one in asyncio.run(jobs.resume("j", 0)).results] == ["h-0", "h-1", "h-2"]
    with pytest.raises(DsecError, match="no sandbox of yours"):
        asyncio.run(jobs.pause("j", 1001))
    monkeypatch.setattr("dsecd.sandbox.jobs.SETTLE_S", 0.01)
    manager.records[0].state = "creating"
    (root, *_) = asyncio.run(jobs.pause("j", 0)).results
    assert root.error is not None
    assert (root.error.kind, root.error.retryable) == ("timeout", True)
