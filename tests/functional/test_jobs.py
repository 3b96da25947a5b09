"""Jobs: many sandboxes paused, resumed and stopped by one call; one that fails keeps no other."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from daemonkit import Clock, Daemon, asynchronous, container_args, launch

from dsecd.client import DSecClient, DsecError, DSecSyncClient, Sandbox
from dsecd.wire import jobs as wire
from dsecd.wire import sandbox as sandbox_wire

COUNT = 30


async def made(client: DSecClient, count: int, job: str) -> list[Sandbox]:
    args = container_args(memory_limit_mb=64, disk_limit_mb=16, job=job)
    found = await client.run_containers(args, count)
    assert all(isinstance(one, Sandbox) for one in found), found
    return [one for one in found if isinstance(one, Sandbox)]


def states(outcomes: list[wire.Outcome]) -> set[tuple[str, bool]]:
    return {(one.state, one.error is not None) for one in outcomes}


@asynchronous
async def test_a_job_with_thirty(daemon: Daemon) -> None:
    """Paused, listed, one resumed by use, all resumed, stopped; another job is as it was. Nothing is left."""
    async with daemon.client() as client:
        boxes = await made(client, COUNT, "big")
        (other,) = await made(client, 1, "other")
        assert {one.id for one in await client.list(job="big")} == {box.id for box in boxes}
        assert {box.info.job for box in boxes} == {"big"}
        started = [await box.start(["sh", "-c", "sleep 1; echo done"]) for box in boxes[:10]]

        paused = await client.pause_job("big")
        assert {one.id for one in paused} == {box.id for box in boxes}
        assert states(paused) == {("paused", False)}
        assert states(await client.pause_job("big")) == {("paused", False)}, "again is no error"
        (big, _) = jobs = await client.jobs()
        assert [(one.job, one.uid, one.states) for one in jobs] == [
            ("big", 0, {"paused": COUNT}), ("other", 0, {"running": 1})
        ]  # fmt: skip
        assert big.memory_mb == COUNT * 64
        assert 0 < big.memory_bytes < COUNT * 64 << 20

        late = await made(client, 1, "big")
        assert (await late[0].run_shell("echo runs")).stdout == "runs\n", "a create with a paused job runs"
        assert (await boxes[3].run_shell("echo awake")).stdout == "awake\n"
        assert {one.info.state for one in await client.list(job="big", states=["paused"])} == {"paused"}
        assert len(await client.list(job="big", states=["paused"])) == COUNT - 1

        assert states(await client.resume_job("big")) == {("running", False)}
        for process in started:
            assert (await process.wait()).stdout == "done\n"
        assert (await other.refresh()).state == "running"
        assert states(await client.stop_job("big")) == {("stopped", False)}
        assert await client.stop_job("big") == [], "of a job that is over: nothing to do"
        assert [one.job for one in await client.jobs()] == ["other"]
        await other.stop()


@asynchronous
async def test_one_that_fails_keeps_no_other(daemon: Daemon) -> None:
    """One is dead by the time it is frozen, one is stopped meanwhile: the others are paused, and it is said."""
    async with daemon.client() as client:
        boxes = await made(client, 5, "mixed")
        frozen = Path(f"/sys/fs/cgroup/unified{daemon.cgroup_base}/{boxes[0].id}")
        if not frozen.exists():
            frozen = Path(f"/sys/fs/cgroup{daemon.cgroup_base}/{boxes[0].id}")
        (frozen / "cgroup.kill").write_text("1")
        stopping = asyncio.ensure_future(boxes[1].stop())
        outcomes = {one.id: one for one in await client.pause_job("mixed")}
        await stopping
        for box in boxes[2:]:
            assert (outcomes[box.id].state, outcomes[box.id].error) == ("paused", None)
        for one in outcomes.values():
            assert one.error is None or one.error.kind in ("conflict", "sandbox_dead", "timeout"), one
        await client.stop_job("mixed")


@asynchronous
async def test_a_repeated_request_is_one(daemon: Daemon) -> None:
    async with daemon.client() as client:
        (box,) = await made(client, 1, "once")
        first = await client.pause_job("once", request_id="pause-once")
        await box.resume()
        assert await client.pause_job("once", request_id="pause-once") == first
        assert (await box.refresh()).state == "running", "it was answered, not done again"
        with pytest.raises(DsecError) as caught:
            await client.stop_job("once", request_id="pause-once")
        assert caught.value.kind == "conflict"
        await box.stop()


@asynchronous
async def test_a_killed_daemon_in_the_middle(fresh_daemon: Daemon) -> None:
    """SIGKILL while a job is being paused: each of its sandboxes is running or paused, and the same request is done."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        boxes = await made(client, 10, "cut")
        asking = asyncio.ensure_future(client.pause_job("cut", request_id="cut-1"))
        while not any(one.info.state == "paused" for one in await client.list(job="cut")):
            await asyncio.sleep(0)
        daemon.kill()
        with pytest.raises(DsecError):
            await asking
    daemon.start()
    async with daemon.client() as client:
        assert len(await client.list(job="cut", states=["running", "paused"])) == len(boxes)
        assert states(await client.pause_job("cut", request_id="cut-1")) == {("paused", False)}
        for box in await client.list(job="cut"):
            assert (await box.run_shell("echo here")).stdout == "here\n"
        assert states(await client.stop_job("cut")) == {("stopped", False)}


@asynchronous
async def test_bad_requests(daemon: Daemon) -> None:
    async with daemon.client() as client:
        for act in (client.pause_job, client.resume_job, client.stop_job):
            with pytest.raises(DsecError, match="no sandbox of yours") as caught:
                await act("nobody-knows-it")
            assert caught.value.kind == "not_found"
            with pytest.raises(DsecError) as caught:
                await act("../etc")
            assert caught.value.kind == "invalid"
        with pytest.raises(DsecError) as caught:
            await launch(client, job="no spaces")
        assert caught.value.kind == "invalid"


def test_the_other_faces(daemon: Daemon) -> None:
    """dsecctl job, and the blocking SDK."""

    def ctl(*words: str) -> str:
        line = [sys.executable, "-c", "from dsecctl.main import main; main()", "-H", daemon.url, *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with DSecSyncClient(daemon.url) as client:
        box = client.run_container(container_args(job="faces"))
        assert [one.job for one in client.jobs()] == ["faces"]
        assert ctl("job", "pause", "faces") == f"{box.id}\n"
        head, row = ctl("job", "list").splitlines()
        assert head.split() == ["JOB", "UID", "SANDBOXES", "MEMORY", "SWAPPED", "USED"]
        assert "1 paused" in row
        assert [one["state"] for one in json.loads(ctl("--json", "job", "resume", "faces"))] == ["running"]
        assert ctl("ps", "-q", "--job", "faces") == f"{box.id}\n"
        box.write_file("/root/data", bytes(8 << 20))  # the first pause may have left nothing to give
        assert client.pause_job("faces")[0].state == "paused"
        assert "gave back" in ctl("stats", box.id)
        assert client.resume_job("faces")[0].state == "running"
        assert client.list(job="faces")[0].info.job == "faces"
        assert client.stop_job("faces")[0].state == "stopped"


@asynchronous
async def test_pausing_thirty_is_fast(daemon: Daemon) -> None:
    """Side by side: in all less than if each took half a second, and nobody else waits for it."""
    async with daemon.client() as client:
        boxes = await made(client, COUNT, "fast")
        (other,) = await made(client, 1, "bystander")
        with Clock() as clock:
            pausing = asyncio.ensure_future(client.pause_job("fast"))
            while not pausing.done():
                with Clock() as one:
                    await other.run_shell("true")
                assert one.took < 1
            assert states(await pausing) == {("paused", False)}
        assert clock.took < COUNT / 2
        found: sandbox_wire.Sandboxes = await client.call("sandbox.list", sandbox_wire.List(job="fast"))
        assert len(found.sandboxes) == len(boxes)
        await client.stop_job("fast")
        await other.stop()
