"""The daemon is killed at any moment: nothing it acknowledged is lost, nothing runs twice, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import leftovers
import pytest
from daemonkit import Clock, Daemon, asynchronous, container_args, launch, patience, sandbox_of

from dsecd.client import DSecClient, DsecError, ExecResult, Sandbox
from dsecd.wire import execs
from dsecd.wire import sandbox as wire

# What a client may see of a daemon that goes down: nothing that looks like a result.
CUT = {"outcome_unknown", "network", "shutting_down"}


@contextlib.asynccontextmanager
async def client_of(daemon: Daemon, url: str | None = None) -> AsyncIterator[DSecClient]:
    """A client whose daemon may die; closing it is no error then."""
    client = DSecClient(url or daemon.url)
    await client.open()
    try:
        yield client
    finally:
        await client.close()


async def wait_exec(client: DSecClient, ident: str, exec_id: str) -> execs.Ran:
    ran: execs.Ran = await client.call("exec.wait", execs.Wait(id=ident, exec_id=exec_id, timeout_s=30))
    return ran


def things(daemon: Daemon) -> dict[str, set[str]]:
    """Per kind, the ids of sandboxes that have something on the host."""
    groups = [directory for directory in Path("/sys/fs/cgroup").glob(f"*{daemon.cgroup_base}") if directory.is_dir()]
    return {
        "run directories": names_in(daemon.run_dir / "sandboxes"),
        "disk spaces": names_in(daemon.state / "pool"),
        "cgroups": {name for group in groups for name in names_in(group)},
        "runtime states": names_in(daemon.run_dir / "runtime"),
    }


def names_in(directory: Path) -> set[str]:
    """Directories that are named like a sandbox of these tests."""
    if not directory.is_dir():
        return set()
    return {entry.name for entry in os.scandir(directory) if entry.is_dir() and entry.name.startswith("t")}


async def nothing_but(daemon: Daemon, idents: set[str]) -> None:
    """Exactly these sandboxes have something on the host (disk spaces may follow a moment later)."""
    deadline = time.monotonic() + 10
    while any(found != idents for found in things(daemon).values()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert things(daemon) == dict.fromkeys(things(daemon), idents)


@pytest.mark.parametrize("politely", [True, False], ids=["SIGTERM", "SIGKILL"])
@asynchronous
async def test_running_command_ends_while_no_daemon_is_there(
    fresh_daemon: Daemon, backend: str, politely: bool
) -> None:
    """A started command goes on without a daemon, ends, and its output and status are fetched from the next one."""
    daemon = fresh_daemon
    async with client_of(daemon) as client:
        sandbox = await launch(client, backend)
        line = "for n in 1 2 3 4; do echo $n; echo err$n >&2; sleep 0.25; done; echo end > /end; exit 9"
        process = await sandbox.start(["sh", "-c", line])
    if politely:
        daemon.stop()
    else:
        daemon.kill()
    time.sleep(1.5)
    daemon.start()
    async with client_of(daemon) as client:
        with Clock() as clock:
            ran = await wait_exec(client, sandbox.id, process.id)
        assert clock.took < 1, "it had ended already"
        assert (ran.exit_code, ran.stdout, ran.stderr) == (9, b"1\n2\n3\n4\n", b"err1\nerr2\nerr3\nerr4\n")
        again = await client.get(sandbox.id)
        assert await again.read_file("/end") == b"end\n"
        await again.stop()
    await nothing_but(daemon, set())


@pytest.mark.parametrize("politely", [True, False], ids=["SIGTERM", "SIGKILL"])
@asynchronous
async def test_request_id_runs_once_over_a_restart(fresh_daemon: Daemon, backend: str, politely: bool) -> None:
    """The same request_id before, during and after a restart: one run (a counter file says so), one answer."""
    daemon = fresh_daemon
    line = "echo run >> /runs; sleep 1; echo answer; exit 4"
    async with client_of(daemon) as client:
        sandbox = await launch(client, backend)
        early = await sandbox.run_shell("echo early >> /early; exit 2", request_id="early")
        cut = asyncio.create_task(sandbox.run_shell(line, request_id="cut"))
        await asyncio.sleep(0.4)
        daemon.restart(politely=politely)
        with pytest.raises(DsecError) as caught:
            await cut
        assert caught.value.kind in CUT
        assert caught.value.infra
    async with client_of(daemon) as client:
        same = await client.get(sandbox.id)
        first, second = await asyncio.gather(
            same.run_shell(line, request_id="cut"), same.run_shell(line, request_id="cut")
        )
        for result in (first, second):
            assert (result.exit_code, result.stdout, result.replayed) == (4, "answer\n", True)
        assert await same.read_file("/runs") == b"run\n"
        again = await same.run_shell("echo early >> /early; exit 2", request_id="early")
        assert (again.exit_code, again.exec_id, again.replayed) == (2, early.exec_id, True)
        assert await same.read_file("/early") == b"early\n"
        with pytest.raises(DsecError) as caught:
            await same.run_shell("echo something else", request_id="early")
        assert caught.value.kind == "conflict"
        await same.stop()


@pytest.mark.containers_only("too many to emulate")
@asynchronous
async def test_create_with_request_id_over_a_kill(fresh_daemon: Daemon, backend: str) -> None:
    """A create cut by SIGKILL, asked for again with its request_id: one sandbox, whatever the moment."""
    daemon = fresh_daemon
    for n, pause in enumerate((0.0, 0.01, 0.03, 0.06, 0.12)):
        async with client_of(daemon) as client:
            task = asyncio.create_task(client.run_container(container_args(labels={"n": str(n)}), request_id=f"c{n}"))
            await asyncio.sleep(pause)
            daemon.restart(politely=False)
            with contextlib.suppress(DsecError):
                await task
        async with client_of(daemon) as client:
            sandbox = await client.run_container(container_args(labels={"n": str(n)}), request_id=f"c{n}")
            assert [s.id for s in await client.list({"n": str(n)})] == [sandbox.id]
            assert (await sandbox.run_shell("echo usable")).stdout == "usable\n"
            await sandbox.stop()
    await nothing_but(daemon, set())


@asynchronous
async def test_case_25_paused_over_restarts(fresh_daemon: Daemon, backend: str) -> None:
    """Paused; restarted politely and by SIGKILL: still paused and frozen; one resumes and counts on, another stops."""
    daemon = fresh_daemon
    counter = "n=0; while :; do n=$((n+1)); echo $n > /new; mv /new /count; sleep 0.01; done"
    async with client_of(daemon) as client:
        one, two = await launch(client, backend), await launch(client, backend)
        await one.start(["sh", "-c", counter])
        async with asyncio.timeout(2 * patience(backend)):  # an emulated guest takes a while to start it
            while (await one.run_shell("test -s /count")).exit_code:
                await asyncio.sleep(0.05)
        await one.pause()
        await two.pause()
    for politely in (True, False):
        daemon.restart(politely=politely)
        async with client_of(daemon) as client:
            assert {s.id: s.info.state for s in await client.list()} == {one.id: "paused", two.id: "paused"}
            same = await client.get(one.id)
            await asyncio.sleep(0.1)  # what runs is counted when it leaves its CPU
            cpu = (await same.stats()).cpu_usec
            await asyncio.sleep(0.3)
            assert (await same.stats()).cpu_usec - cpu < 1000, "it is frozen"
    async with client_of(daemon) as client:
        await (await client.get(two.id)).stop()
        same = await client.get(one.id)
        await same.resume()
        first = int(await same.read_file("/count"))
        assert first > 0
        async with asyncio.timeout(2 * patience(backend)):
            while int(await same.read_file("/count")) <= first:
                await asyncio.sleep(0.2)
        await same.stop()
    await nothing_but(daemon, set())


@pytest.mark.containers_only("too many to emulate")
@asynchronous
async def test_deadlines_and_names_survive(fresh_daemon: Daemon, backend: str) -> None:
    """Names, labels, owners and deadlines are the same after SIGKILL; a deadline that passed meanwhile is kept."""
    daemon = fresh_daemon
    async with client_of(daemon) as client:
        named = await launch(client, backend, name="named", labels={"a": "b"}, ttl_total=60, owner="me")
        short = await launch(client, backend, ttl_total=1.5)
        before = await named.refresh()
    daemon.kill()
    time.sleep(1.5)
    daemon.start()
    async with client_of(daemon) as client:
        after = (await client.get("named")).info
        assert (after.id, after.labels, after.owner, after.created_at) == (
            before.id, before.labels, before.owner, pytest.approx(before.created_at, abs=0.01),
        )  # fmt: skip
        assert after.total_deadline == pytest.approx(before.total_deadline, abs=0.01)
        over = await client.call("sandbox.wait", wire.Wait(id=short.id, timeout_s=2))
        assert over.state == "stopped"
        assert (await client.run_container(container_args(name="named"))).id == before.id
        await (await client.get("named")).stop()
        assert (await client.get(before.id)).info.state == "stopped"


@asynchronous
async def test_ended_meanwhile(fresh_daemon: Daemon, backend: str) -> None:
    """A sandbox whose init died while no daemon was there is `failed` afterwards, with the reason, and is removed."""
    from daemonkit import init_pid

    daemon = fresh_daemon
    async with client_of(daemon) as client:
        sandbox = await launch(client, backend)
    pid = init_pid(daemon, sandbox)
    daemon.kill()
    os.kill(pid, 9)
    daemon.start()
    async with client_of(daemon) as client:
        assert await client.list() == []
        info = (await client.get(sandbox.id)).info
        assert (info.state, bool(info.reason)) == ("failed", True)
    await nothing_but(daemon, set())


@asynchronous
async def test_large_output_over_a_kill(fresh_daemon: Daemon, backend: str) -> None:
    """Output over the cap, written across a SIGKILL: head, tail and the count of dropped bytes are exact."""
    daemon = fresh_daemon
    line = "yes 0123456789abcde | head -c 3000000; sleep 1; yes fedcba9876543210 | head -c 3000000; exit 3"
    expected = (b"0123456789abcde\n" * 200_000)[:3_000_000] + (b"fedcba9876543210\n" * 200_000)[:3_000_000]
    async with client_of(daemon) as client:
        sandbox = await launch(client, backend)
        process = await sandbox.start(["sh", "-c", line], cap_bytes=1 << 20)
        await asyncio.sleep(0.5)
    daemon.restart(politely=False)
    async with client_of(daemon) as client:
        ran = await wait_exec(client, sandbox.id, process.id)
        half = 1 << 19
        assert ran.stdout == expected[:half] + expected[-half:]
        assert (ran.exit_code, ran.stdout_dropped, ran.stdout_head) == (3, 6_000_000 - (1 << 20), half)
        await (await client.get(sandbox.id)).stop()


class Burst:
    """Clients that create, use and stop until the daemon goes away; remembers what was acknowledged."""

    def __init__(self, daemon: Daemon, number: int, seed: int) -> None:
        self.daemon = daemon
        self.number = number
        self.random = random.Random(seed)
        self.created: set[str] = set()
        self.stopped: set[str] = set()
        self.stopping: set[str] = set()
        self.answers: dict[str, tuple[str, ExecResult]] = {}
        self.asked: dict[str, str] = {}
        self.written: dict[str, str] = {}

    async def work(self, number: int) -> None:
        with contextlib.suppress(DsecError):
            async with client_of(self.daemon) as client:
                for step in range(1000):
                    await self._one(client, f"{self.number}-{number}-{step}")

    async def _one(self, client: DSecClient, key: str) -> None:
        try:
            sandbox = await client.run_container(container_args(memory_limit_mb=64, disk_limit_mb=16))
            self.created.add(sandbox.id)
            request = f"burst-{key}"
            self.asked[request] = sandbox.id
            result = await sandbox.run_shell(f"echo {key} >> /runs; echo {key}", request_id=request)
            self.answers[request] = (sandbox.id, result)
            await sandbox.write_file("/written", key)
            self.written[sandbox.id] = key
            if self.random.random() < 0.5:
                self.stopping.add(sandbox.id)
                await sandbox.stop()
                self.stopped.add(sandbox.id)
        except DsecError as error:
            assert error.kind in CUT, error
            raise


@pytest.mark.containers_only("too many to emulate")
@pytest.mark.slow
@asynchronous
async def test_killed_at_random_moments(fresh_daemon: Daemon, backend: str) -> None:
    """SIGKILL at random moments of a create/exec/stop burst, six times: what was acknowledged holds, nothing leaks."""
    daemon = fresh_daemon
    seed = int(os.environ.get("DSECD_SEED", time.time_ns() % 100_000))
    print(f"DSECD_SEED={seed}")  # shown when this fails
    rng = random.Random(seed)
    for number in range(6):
        burst = Burst(daemon, number, rng.randrange(1 << 30))
        tasks = [asyncio.create_task(burst.work(n)) for n in range(4)]
        await asyncio.sleep(rng.uniform(0.05, 1.2))
        daemon.restart(politely=False)
        await asyncio.gather(*tasks)
        async with client_of(daemon) as client:
            await check_burst(client, daemon, burst)
            await client.stop_many(await client.list())
        await nothing_but(daemon, set())
    found = {item for item in leftovers.mounts_below([daemon.run_dir]) if "/images/" not in item}
    assert found == set()


async def check_burst(client: DSecClient, daemon: Daemon, burst: Burst) -> None:
    alive = {s.id: s for s in await client.list()}
    assert {s.info.state for s in alive.values()} <= {"running"}
    assert burst.created - burst.stopping <= alive.keys(), "an acknowledged sandbox is lost"
    assert not burst.stopped & alive.keys(), "a stopped one is back"
    for ident in burst.stopped:
        assert (await client.get(ident)).info.state == "stopped"
    await nothing_but(daemon, set(alive))
    results = await asyncio.gather(*(s.run_shell("echo $((6*7))") for s in alive.values()))
    assert [r.stdout for r in results] == ["42\n"] * len(alive)
    for ident in alive.keys() & burst.written.keys():
        assert (await alive[ident].read_file("/written")).decode() == burst.written[ident]
    for request, ident in burst.asked.items():
        if ident not in alive:
            continue
        key = request.removeprefix("burst-")
        try:
            again = await alive[ident].run_shell(f"echo {key} >> /runs; echo {key}", request_id=request)
        except DsecError as error:
            assert error.kind == "outcome_unknown", error
            assert request not in burst.answers, "an acknowledged result is lost"
        else:
            assert (again.exit_code, again.stdout) == (0, f"{key}\n")
            if request in burst.answers:
                assert again.exec_id == burst.answers[request][1].exec_id
        runs = await alive[ident].run_shell("cat /runs 2>/dev/null | wc -l")
        assert int(runs.stdout) <= 1, "it ran twice"


@pytest.mark.containers_only("too many to emulate")
@asynchronous
async def test_two_daemons_on_one_state(fresh_daemon: Daemon, backend: str) -> None:
    """A second daemon on the same state directory, or the same socket, is refused and harms nothing."""
    daemon = fresh_daemon
    async with sandbox_of(daemon, backend) as sandbox:
        seen = daemon.log_size()
        second = daemon.spawn()
        assert await asyncio.to_thread(second.wait, 10) == 1
        assert "another dsecd runs on" in daemon.log_since(seen)
        other = Daemon(daemon.directory / "other", socket=str(daemon.socket))
        seen = other.log_size()
        third = other.spawn()
        assert await asyncio.to_thread(third.wait, 10) == 1
        assert "another daemon listens on" in other.log_since(seen)
        other.destroy()
        assert (await sandbox.run_shell("echo fine")).stdout == "fine\n"


@asynchronous
async def test_stale_socket_is_replaced_a_file_is_not(fresh_daemon: Daemon) -> None:
    """The socket of a killed daemon is taken over; a plain file in its place is left alone and named."""
    daemon = fresh_daemon
    daemon.kill()
    assert daemon.socket.is_socket()
    daemon.start()
    daemon.stop()
    assert not daemon.socket.exists(), "a polite stop takes its socket away"
    daemon.socket.write_text("precious")
    process = daemon.spawn()
    assert await asyncio.to_thread(process.wait, 10) == 1
    assert "is not a socket" in daemon.tail()
    assert daemon.socket.read_text() == "precious"
    daemon.socket.unlink()


@pytest.mark.containers_only("too many to emulate")
@asynchronous
async def test_stop_during_calls(fresh_daemon: Daemon, backend: str) -> None:
    """SIGTERM with calls under way: it ends within seconds, every call fails and says so, sandboxes go on."""
    daemon = fresh_daemon
    async with client_of(daemon) as client:
        sandbox = await launch(client, backend)
        events = await client.begin("sandbox.events", wire.Events())
        calls = [
            asyncio.create_task(sandbox.run_shell("sleep 60")),
            asyncio.create_task(client.call("sandbox.wait", wire.Wait(id=sandbox.id))),
            asyncio.create_task(events.finish()),
        ]
        await asyncio.sleep(0.3)
        with Clock() as clock:
            assert await asyncio.to_thread(daemon.stop) == 0
        assert clock.took < 5
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, DsecError), error
            assert error.kind in CUT, error
            assert error.infra
    daemon.start()
    async with client_of(daemon) as client:
        same = await client.get(sandbox.id)
        assert isinstance(same, Sandbox)
        assert same.info.state == "running"
        await same.stop()
