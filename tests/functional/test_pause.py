"""Pause of containers: what is given back, what stands still, what a resume finds. Restarts: with a killed daemon."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import pytest
from daemonkit import BASE, Clock, Daemon, asynchronous, guest_kernels, launch, sandbox_of

from dsecd.client import DSecClient, Sandbox
from dsecd.wire import execs
from dsecd.wire import sandbox as wire
from dsecd.zram import swap

MIB = 1 << 20
COUNTER = "n=0; while :; do n=$((n+1)); echo $n > /new; mv /new /count; sleep 0.01; done"
HOLDER = "import os,time; x = bytearray(os.urandom(1<<20) * 48); open('/holds','w').close(); time.sleep(1000)"
# Steps of their own: what is frozen between two of them does not take them.
TEN_STEPS = "i=0; while [ $i -lt 10 ]; do sleep 0.1; i=$((i+1)); done; echo ten"


async def exists(sandbox: Sandbox, path: str) -> None:
    async with asyncio.timeout(20):
        while (await sandbox.run_shell(f"test -e {path}")).exit_code:
            await asyncio.sleep(0.05)


def group_of(daemon: Daemon, sandbox: Sandbox) -> Path:
    """Its directory in the cgroup2 tree."""
    for top in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        path = Path(top + daemon.cgroup_base) / sandbox.id
        if (path / "cgroup.events").exists():
            return path
    raise AssertionError("it has no group")


def is_frozen(daemon: Daemon, sandbox: Sandbox) -> bool:
    return "frozen 1" in (group_of(daemon, sandbox) / "cgroup.events").read_text()


# -- memory -----------------------------------------------------------------------------------------------------------
@asynchronous
async def test_page_cache_is_given_back(daemon: Daemon) -> None:
    """What a command wrote goes from memory, and is read again afterwards; stats of a paused one says how much went."""
    async with sandbox_of(daemon) as sandbox:
        made = await sandbox.run_shell("head -c 40000000 /dev/urandom > /big; sync; sha256sum /big")
        before = (await sandbox.stats()).memory_bytes
        await sandbox.pause()
        stats = await sandbox.stats()
        assert (await sandbox.refresh()).state == "paused", "stats is no use"
        assert stats.reclaimed_bytes > 32 * MIB
        assert before - stats.memory_bytes >= stats.reclaimed_bytes - 4 * MIB
        assert (await sandbox.run_shell("sha256sum /big")).stdout == made.stdout
        assert (await sandbox.stats()).reclaimed_bytes == stats.reclaimed_bytes, "it is of the last pause"


@pytest.mark.skipif(swap().free < 200 * MIB, reason="without swap there is no place for it (the lab VM has zram)")
@asynchronous
async def test_anonymous_memory_is_swapped_out(daemon: Daemon) -> None:
    """Only while it is paused; resumed, it has it back."""
    async with sandbox_of(daemon) as sandbox:
        await sandbox.start(["python3", "-c", HOLDER])
        await exists(sandbox, "/holds")
        assert (await sandbox.stats()).swapped_bytes == 0
        await sandbox.pause()
        stats = await sandbox.stats()
        assert min(stats.reclaimed_bytes, stats.swapped_bytes) > 32 * MIB
        assert (await sandbox.run_shell("echo here")).stdout == "here\n"


@asynchronous
async def test_pause_and_resume_at_once(daemon: Daemon) -> None:
    """A resume while memory is being given back does not wait for that, and both callers get their answer."""
    async with sandbox_of(daemon, memory_limit_mb=1024) as sandbox:
        await sandbox.run_shell("head -c 300000000 /dev/zero > /big; cat /big > /dev/null")
        for _ in range(5):
            pausing = asyncio.ensure_future(sandbox.pause())
            while (await sandbox.refresh()).state == "running":
                await asyncio.sleep(0)
            with Clock() as clock:
                assert (await sandbox.run_shell("echo here")).stdout == "here\n"
            assert clock.took < 1
            await pausing
            assert (await sandbox.refresh()).state == "running"
            await sandbox.run_shell("cat /big > /dev/null")


@asynchronous
async def test_first_command_after_a_pause(daemon: Daemon) -> None:
    """From the request to the end of `true`: 50 ms beyond what one takes at that time, with all else that runs here."""
    async with sandbox_of(daemon) as sandbox:
        plain, first = [], []
        for _ in range(15):
            with Clock() as clock:
                await sandbox.run_shell("true")
            plain.append(clock.took)
            await sandbox.pause()
            with Clock() as clock:
                await sandbox.run_shell("true")
            first.append(clock.took)
        assert statistics.median(first) < 3 * statistics.median(plain) + 0.05, (first, plain)


# -- single flight ----------------------------------------------------------------------------------------------------
@asynchronous
async def test_a_hundred_requests_are_one_resume(daemon: Daemon) -> None:
    async with sandbox_of(daemon, labels={"many": "yes"}) as sandbox, daemon.client() as other:
        seen: list[str] = []

        async def watch() -> None:
            async for event in other.events({"many": "yes"}, since=0):
                seen.append(event.event)

        watching = asyncio.ensure_future(watch())
        await sandbox.pause()
        results = await asyncio.gather(*(sandbox.run_shell(f"echo {n}") for n in range(100)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(100)]
        async with asyncio.timeout(5):
            while "resumed" not in seen:
                await asyncio.sleep(0.01)
        watching.cancel()
        assert seen == ["creating", "started", "pause", "paused", "resume", "resumed"]


# -- commands ---------------------------------------------------------------------------------------------------------
@asynchronous
async def test_a_running_command_waits(daemon: Daemon) -> None:
    """Its result comes after the resume; the time between counts neither for its timeout nor in its figures."""
    async with sandbox_of(daemon) as sandbox, daemon.client() as other:
        running = asyncio.ensure_future(sandbox.run_shell(TEN_STEPS, timeout=3))
        await asyncio.sleep(0.4)
        await (await other.get(sandbox.id)).pause()
        await asyncio.sleep(3.5)
        assert not running.done()
        assert (await sandbox.refresh()).state == "paused"
        await sandbox.resume()
        result = await asyncio.wait_for(running, 5)
        assert (result.exit_code, result.stdout, result.timed_out) == (0, "ten\n", False)
        assert result.ran_ms < 2500


@asynchronous
async def test_a_timeout_goes_on_after_a_pause(daemon: Daemon) -> None:
    """What was left of it, is left; a command that starts after the pause has its own."""
    async with sandbox_of(daemon) as sandbox:
        running = asyncio.ensure_future(sandbox.run_shell("while :; do sleep 0.05; done", timeout=1))
        await asyncio.sleep(0.3)
        await sandbox.pause()
        await asyncio.sleep(1.5)
        await sandbox.resume()
        with Clock() as clock:
            assert (await asyncio.wait_for(running, 5)).timed_out
        assert 0.3 < clock.took < 1.5
        assert (await sandbox.run_shell("sleep 5", timeout=0.3)).timed_out
        assert (await sandbox.run_shell("true", timeout=0.3)).ok


@asynchronous
async def test_a_line_of_a_session_waits(daemon: Daemon) -> None:
    """The same for it: what it wrote is whole, its timeout has stood still, and its shell is alive."""
    async with sandbox_of(daemon) as sandbox:
        session = await sandbox.session()
        running = asyncio.ensure_future(session.run(TEN_STEPS, timeout=2))
        await asyncio.sleep(0.4)
        await sandbox.pause()
        await asyncio.sleep(3)
        assert not running.done()
        await sandbox.resume()
        result = await asyncio.wait_for(running, 5)
        assert (result.exit_code, result.stdout, result.timed_out) == (0, "ten\n", False)
        assert result.ran_ms < 2000
        assert (await session.run("sleep 9", timeout=0.3)).timed_out
        assert (await session.run("echo alive")).stdout == "alive\n"


@asynchronous
async def test_case_24_clock_after_a_pause(daemon: Daemon) -> None:
    """The wall clock inside is right at the first command: a container has the host's, and a microVM's is set."""
    guest_kernels()
    daemon.link_kernels()
    async with sandbox_of(daemon) as container, sandbox_of(daemon, "microvm") as vm:
        for sandbox in (container, vm):
            await sandbox.pause()
        await asyncio.sleep(40)
        for sandbox in (container, vm):
            began = time.time()
            said = float((await sandbox.run_shell("date +%s.%N")).stdout)
            assert began - 1 < said < time.time() + 1


# -- time -------------------------------------------------------------------------------------------------------------
async def state_of(client: DSecClient, sandbox: Sandbox) -> str:
    return (await client.get(sandbox.id)).info.state


@asynchronous
async def test_deadlines_stand_still(daemon: Daemon) -> None:
    """Total TTL and lease do not run out in a pause; afterwards the TTL has what was left, and the lease all of it."""
    async with daemon.client() as client:
        spec = wire.Spec(image=BASE, ttl_total_s=2.5, lease_s=1.5, memory_mb=64, disk_mb=64)
        made = await _create(client, spec)
        await made.pause()
        assert made.info.total_deadline is not None
        await asyncio.sleep(3)
        info = (await client.get(made.id)).info
        assert info.state == "paused"
        assert info.paused_at is not None
        assert info.total_deadline is not None
        assert 1 < info.total_deadline - time.time() < 2.6, "as if it went on now"
        await made.resume()
        with Clock() as clock:
            over: wire.Sandbox = await client.call("sandbox.wait", wire.Wait(id=made.id, timeout_s=10))
        assert 1 < clock.took < 2.6
        assert "lease" in over.reason


@asynchronous
async def test_deadlines_that_go_on(daemon: Daemon) -> None:
    """paused_clock=running: it ends at its time, paused or not, and nothing of it is left."""
    async with daemon.client() as client:
        for what in ({"ttl_total_s": 1.5}, {"lease_s": 1.5}):
            spec = wire.Spec(image=BASE, paused_clock="running", memory_mb=64, disk_mb=64, **what)  # type: ignore[arg-type]
            made = await _create(client, spec)
            await made.pause()
            over: wire.Sandbox = await client.call("sandbox.wait", wire.Wait(id=made.id, timeout_s=10))
            assert over.state == "stopped"
            assert over.ended_at is not None
            assert 1.4 < over.ended_at - over.created_at < 3.5


@asynchronous
async def test_idle_time_is_no_pause(daemon: Daemon) -> None:
    async with daemon.client() as client:
        sandbox = await launch(client, ttl_running_stop=1)
        await sandbox.pause()
        await asyncio.sleep(1.5)
        assert await state_of(client, sandbox) == "paused"
        await sandbox.resume()
        await asyncio.sleep(0.5)
        assert await state_of(client, sandbox) == "running"
        over: wire.Sandbox = await client.call("sandbox.wait", wire.Wait(id=sandbox.id, timeout_s=5))
        assert "idle" in over.reason


@asynchronous
async def test_a_total_ttl_pauses_once(daemon: Daemon) -> None:
    """on_expiry=pause: who resumes it, even before its memory is out, is not paused again for the same deadline."""
    async with daemon.client() as client, asyncio.timeout(30):
        sandbox = await launch(client, ttl_total=1, on_expiry="pause")
        await client.call("sandbox.wait", wire.Wait(id=sandbox.id, states=["paused"], timeout_s=5))
        assert (await sandbox.run_shell("sleep 1; echo worked")).stdout == "worked\n"
        assert await state_of(client, sandbox) == "running"
        await sandbox.extend(ttl_total=0.5)
        await client.call("sandbox.wait", wire.Wait(id=sandbox.id, states=["paused"], timeout_s=5))
        await sandbox.stop()


async def _create(client: DSecClient, spec: wire.Spec) -> Sandbox:
    """Not by the SDK's own call: nobody renews its lease."""
    info: wire.Sandbox = await client.call("sandbox.create", wire.Create(spec=spec))
    return await client.get(info.id)


# -- the daemon dies --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("politely", [True, False], ids=["SIGTERM", "SIGKILL"])
@asynchronous
async def test_frozen_over_a_restart(fresh_daemon: Daemon, politely: bool) -> None:
    """It is never thawed by a daemon that takes it back; its command's timeout, its time and its result are kept."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        sandbox = await launch(client, ttl_total=60)
        await sandbox.start(["sh", "-c", COUNTER])
        command = await sandbox.start(["sh", "-c", TEN_STEPS], timeout=3)
        await asyncio.sleep(0.3)
        left = (await sandbox.refresh()).total_deadline
        assert left is not None
        left -= time.time()
        await sandbox.pause()
        count = (await sandbox.stats()).cpu_usec
    if politely:
        daemon.stop()
    else:
        daemon.kill()
    await asyncio.sleep(3)
    assert is_frozen(daemon, sandbox)
    daemon.start()
    async with daemon.client() as client:
        same = await client.get(sandbox.id)
        assert same.info.state == "paused"
        assert is_frozen(daemon, sandbox)
        stats = await same.stats()
        assert stats.cpu_usec - count < 1000, "it has not run for a moment"
        assert is_frozen(daemon, sandbox)
        assert same.info.total_deadline is not None
        assert abs(same.info.total_deadline - time.time() - left) < 0.5
        result = await wait_exec(client, same.id, command.id)
        assert (result.exit_code, result.stdout) == (0, b"ten\n")
        first = int(await same.read_file("/count"))
        await asyncio.sleep(0.3)
        assert int(await same.read_file("/count")) > first
        await same.pause()
        await same.stop()
        assert await client.list() == []
    assert not Path(f"/sys/fs/cgroup/unified{daemon.cgroup_base}/{sandbox.id}").exists()


async def wait_exec(client: DSecClient, ident: str, exec_id: str) -> execs.Ran:
    ran: execs.Ran = await client.call("exec.wait", execs.Wait(id=ident, exec_id=exec_id, timeout_s=20))
    return ran


@asynchronous
async def test_dead_while_paused(daemon: Daemon) -> None:
    """Its init is killed from outside while it is frozen: it ends as failed, and nothing is left."""
    async with daemon.client() as client:
        sandbox = await launch(client)
        await sandbox.pause()
        (group_of(daemon, sandbox) / "cgroup.kill").write_text("1")
        over: wire.Sandbox = await client.call("sandbox.wait", wire.Wait(id=sandbox.id, timeout_s=10))
        assert over.state == "failed"
