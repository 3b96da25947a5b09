"""The log of one sandbox: order, sums, what a crash, a bad disk or a hand may do to its file."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.errors import DsecError
from dsecd.sandbox import logfile, trajectory
from dsecd.sandbox.trajectory import Trajectories
from dsecd.wire.trajectory import Entry

BOX = "h-0"


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Trajectories]:
    made = Trajectories(tmp_path / "log")
    yield made
    made.close()


def file_of(logs: Trajectories) -> Path:
    (path,) = logs._directory.iterdir()
    return path


def reopened(logs: Trajectories) -> Trajectories:
    """As a daemon that starts finds it."""
    logs.close()
    logs.__init__(logs._directory)  # type: ignore[misc]
    return logs


def fill(logs: Trajectories, count: int = 5) -> None:
    async def work() -> None:
        for number in range(count):
            assert await logs.note(BOX, "step", {"n": number}) == number + 1

    asyncio.run(work())


def kept(logs: Trajectories, ident: str = BOX, after: int = 0) -> list[int]:
    entries = asyncio.run(logs.read(ident, after))
    assert [entry.seq for entry in entries] == list(range(after + 1, after + 1 + len(entries)))
    return [entry.data["n"] for entry in entries]


def test_entries_come_back_in_order_and_over_a_restart(logs: Trajectories) -> None:
    fill(logs)
    assert kept(logs) == [0, 1, 2, 3, 4]
    assert kept(reopened(logs), after=3) == [3, 4]
    assert asyncio.run(logs.note(BOX, "step", {"n": 5})) == 6
    assert kept(logs) == [0, 1, 2, 3, 4, 5]
    assert not asyncio.run(logs.verify(BOX)).bad


def test_many_writers_one_order(logs: Trajectories) -> None:
    """Numbers are given in the order of the calls, to each log its own, and the files have all of them."""

    async def work() -> None:
        async def writer(ident: str) -> list[int]:
            return [await logs.note(ident, "step", {"n": n}) for n in range(20)]

        rows = await asyncio.gather(*(writer(f"h-{n % 5}") for n in range(50)))
        for box in range(5):
            mine = sorted(seq for n, row in enumerate(rows) if n % 5 == box for seq in row)
            assert mine == list(range(1, 201))
            assert [entry.seq for entry in await logs.read(f"h-{box}")] == mine

    asyncio.run(work())


def test_lazy_entries_are_written_soon_and_before_those_behind_them(logs: Trajectories) -> None:
    async def work() -> None:
        await logs.append(BOX, Entry(event="step"), lazy=True)
        await asyncio.sleep(2 * trajectory.LAZY_S)
        assert file_of(logs).stat().st_size > 0
        await logs.append(BOX, Entry(event="step"), lazy=True)
        await logs.note(BOX, "step")
        assert [entry.seq for entry in await logs.read(BOX)] == [1, 2, 3]

    asyncio.run(work())


def test_lazy_entries_are_not_lost_when_the_daemon_stops(logs: Trajectories) -> None:
    asyncio.run(logs.append(BOX, Entry(event="step", data={"n": 0}), lazy=True))
    assert kept(reopened(logs)) == [0]


def test_a_torn_tail_is_cut_off_wherever_it_was_torn(logs: Trajectories) -> None:
    fill(logs, 3)
    path = file_of(logs)
    whole = path.read_bytes()
    last = len(whole) - whole[:-1].rindex(b"\n") - 1
    for lost in range(1, last + 1):
        path.write_bytes(whole[:-lost])
        assert kept(reopened(logs)) == [0, 1]
        assert asyncio.run(logs.note(BOX, "step", {"n": 7})) == 3
        assert kept(reopened(logs)) == [0, 1, 7]
        assert not asyncio.run(logs.verify(BOX)).bad


def test_a_flipped_bit_is_found_and_costs_one_entry(logs: Trajectories) -> None:
    """Anywhere in the file: that entry is named, the others can still be read, and the log goes on."""
    fill(logs, 6)
    path = file_of(logs)
    whole = path.read_bytes()
    ends = [n for n, byte in enumerate(whole) if byte == 10]
    chance = random.Random(7)
    for _ in range(200):
        at = chance.randrange(len(whole) - 1)  # the very last line end: that is a torn tail
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
        hit = sum(end < at for end in ends) + 1
        reopened(logs)
        bad = [one.seq for one in asyncio.run(logs.verify(BOX)).bad]
        assert bad
        assert bad[0] in (hit, hit + 1)
        with pytest.raises(DsecError, match=f"entry {bad[0]} of the trajectory of {BOX} was altered") as caught:
            kept(logs)
        assert caught.value.infra
        if at not in ends and whole[at] ^ 10 not in (1, 2, 4, 8, 16, 32, 64, 128):
            assert bad == [hit]
            assert kept(logs, after=hit) == list(range(hit, 6))
            assert asyncio.run(logs.note(BOX, "step", {"n": 6})) == 7
            assert kept(reopened(logs), after=hit) == list(range(hit, 7))
        path.unlink()
        path.write_bytes(whole)


def test_what_changes_under_a_running_daemon_is_found_too(logs: Trajectories) -> None:
    fill(logs)
    path = file_of(logs)
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(b'"n":2') + 4)
        file.write(b"9")
    with pytest.raises(DsecError, match="entry 3 of the trajectory"):
        kept(logs)
    assert [one.seq for one in asyncio.run(logs.verify(BOX)).bad] == [3]


def test_an_entry_that_is_taken_out_put_in_or_moved(logs: Trajectories) -> None:
    fill(logs)
    path = file_of(logs)
    lines = path.read_bytes().splitlines(keepends=True)
    for forged in (
        [lines[0], *lines[2:]],
        [lines[0], lines[2], lines[1], *lines[3:]],
        [*lines[:2], lines[1], *lines[2:]],
    ):
        path.write_bytes(b"".join(forged))
        assert asyncio.run(reopened(logs).verify(BOX)).bad


def test_a_log_of_another_sandbox_is_no_log_of_this_one(logs: Trajectories) -> None:
    fill(logs)
    file_of(logs).rename(logs._directory / f"h-1{logfile.SUFFIX}")
    assert [one.seq for one in asyncio.run(reopened(logs).verify("h-1")).bad] == [1]


def test_who_holds_more_than_there_is(logs: Trajectories) -> None:
    fill(logs)
    with pytest.raises(DsecError, match=r"ends at 5: whoever holds 9") as caught:
        kept(logs, after=9)
    assert caught.value.kind == "conflict"


@pytest.mark.parametrize("ident", ["h-9", "../log/h-0", "", ".", "a/b", "h-0.log", "a" * 200])
def test_no_log_and_no_path(logs: Trajectories, ident: str) -> None:
    fill(logs)
    with pytest.raises(DsecError) as caught:
        kept(logs, ident)
    assert caught.value.kind == "not_found"


def test_long_logs_come_in_pages(logs: Trajectories) -> None:
    async def work() -> None:
        for _ in range(8):
            await logs.note(BOX, "step", "x" * (trajectory.PAGE // 3))
        after, pages = 0, 0
        while after < 8:
            page = await logs.page(BOX, after)
            assert sum(map(len, page.lines)) < 1.1 * trajectory.PAGE
            assert page.last == 8
            after += len(page.lines)
            pages += 1
        assert pages == 4

    asyncio.run(work())


def test_retention(logs: Trajectories) -> None:
    async def work() -> None:
        for number in range(5):
            await logs.note(f"h-{number}", "step", "x" * 1000)
            path = logs._directory / f"h-{number}{logfile.SUFFIX}"
            os.utime(path, (0, time.time() - 1000 * (5 - number)))
        assert await logs.trim({"h-0"}, 3500, 1 << 20) == ["h-1"]
        assert await logs.trim({"h-0"}, 86400, 3500) == ["h-2"]
        assert await logs.trim({"h-0", "h-3", "h-4"}, 1, 1) == []
        assert sorted(os.listdir(logs._directory)) == [f"h-{n}{logfile.SUFFIX}" for n in (0, 3, 4)]

    asyncio.run(work())


def test_a_clock_that_jumps_removes_nothing(logs: Trajectories, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(logs)
    real = time.time
    monkeypatch.setattr(trajectory.time, "time", lambda: real() + 10 * 365 * 86400)
    assert asyncio.run(logs.trim(set(), 86400, 1 << 30)) == []
    assert kept(logs) == [0, 1, 2, 3, 4]
