"""What only microVMs have: a kernel of their own, layers by pmem, memory that is saved, copied and checked.

Cases 1-16, 22-26 and 29 run on them, too: see the `backend` fixture. 27 and 28 are here, with few machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from daemonkit import BASE, Daemon, asynchronous, guest_kernels, init_pid, launch, sandbox_of

from dsecd import proc
from dsecd.client import DSecClient, DsecError, DSecMicroVMRunArgs, Sandbox
from dsecd.wire import execs
from dsecd.wire import sandbox as wire


@pytest.fixture(scope="module", autouse=True)
def kernels(daemon: Daemon) -> None:
    guest_kernels()
    daemon.link_kernels()


def saved(daemon: Daemon, sandbox: Sandbox) -> Path:
    return daemon.state / "vms" / sandbox.id / "saved"


@contextlib.asynccontextmanager
async def vm(daemon: Daemon, **args: object) -> AsyncIterator[Sandbox]:
    async with sandbox_of(daemon, "microvm", **args) as sandbox:
        yield sandbox


async def text(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.run_shell(command)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("root", ["pmem", "blk"])
@asynchronous
async def test_layers_reach_the_guest(daemon: Daemon, root: str) -> None:
    """By pmem, a file's pages stay out of the guest's page cache; by blk they go there."""
    async with vm(daemon, root=root) as sandbox:
        assert await text(sandbox, "uname -r") != os.uname().release
        before = int(await text(sandbox, "awk '/^Cached/ {print $2}' /proc/meminfo"))
        size = int(await text(sandbox, "cat $(find /usr/lib -type f -size +64k) | wc -c")) // 1024
        grown = int(await text(sandbox, "awk '/^Cached/ {print $2}' /proc/meminfo")) - before
        assert size > 10_000
        assert grown < size // 4 if root == "pmem" else grown > size // 2


@asynchronous
async def test_pause_gives_the_memory_back_and_the_next_call_resumes(daemon: Daemon) -> None:
    async with vm(daemon) as sandbox:
        await text(
            sandbox, "echo kept > /root/file; (while sleep 0.2; do echo x >> /root/count; done) >/dev/null 2>&1 &"
        )
        pid = init_pid(daemon, sandbox)
        await sandbox.pause()
        assert sandbox.info.state == "paused"
        assert proc.start_time(pid) is None
        assert not list(Path(daemon.config["vm_memory_dir"]).glob("*.ram"))
        assert (saved(daemon, sandbox) / "snapshot.json").exists()
        counted = 0
        for _ in range(2):
            assert await text(sandbox, "cat /root/file") == "kept"
            assert abs(float(await text(sandbox, "date +%s.%N")) - time.time()) < 1.5
            await asyncio.sleep(1)
            now = int(await text(sandbox, "wc -l < /root/count"))
            assert now > counted  # what ran goes on
            counted = now
            await sandbox.pause()
        assert (await text(sandbox, "cat /root/file")) == "kept"
        assert not saved(daemon, sandbox).exists()


@asynchronous
async def test_a_waiting_command_outlives_a_pause(daemon: Daemon) -> None:
    """Whoever waits for its result gets it, whole."""
    async with vm(daemon) as sandbox:
        running = asyncio.create_task(sandbox.run_shell("echo before; sleep 3; echo after"))
        await asyncio.sleep(1)
        await sandbox.pause()
        await sandbox.resume()
        result = await asyncio.wait_for(running, 60)
        assert (result.exit_code, result.stdout) == (0, "before\nafter\n")


@asynchronous
async def test_who_follows_a_command_attaches_again_after_a_pause(daemon: Daemon) -> None:
    """It goes on, is known, takes input that it is sent from then on, and nothing of its output is lost."""
    async with vm(daemon) as sandbox, daemon.client() as client:
        start = execs.Start(id=sandbox.id, argv=["sh", "-c", "echo one; read x; echo $x; read x; echo $x"], stdin=True)
        ident = (await client.call("exec.start", start)).exec_id
        attached = await client.begin("exec.attach", execs.Attach(id=sandbox.id, exec_id=ident, window=4096))
        await client.call("exec.stdin", execs.Stdin(id=sandbox.id, exec_id=ident, data=b"two\n"))
        await asyncio.sleep(0.5)
        await sandbox.pause()
        await sandbox.resume()
        with pytest.raises(DsecError) as caught:
            await asyncio.wait_for(attached.finish(), 60)
        assert (caught.value.kind, caught.value.retryable) == ("sandbox_dead", True)
        (known,) = (await client.call("exec.list", execs.ListExecs(id=sandbox.id))).execs
        assert (known.exec_id, known.running) == (ident, True)
        waiting = asyncio.create_task(client.call("exec.wait", execs.Wait(id=sandbox.id, exec_id=ident)))
        await client.call("exec.stdin", execs.Stdin(id=sandbox.id, exec_id=ident, data=b"three\n"))
        result = await asyncio.wait_for(waiting, 60)
        assert (result.exit_code, result.stdout) == (0, b"one\ntwo\nthree\n")


@asynchronous
async def test_forks_differ_where_they_must(daemon: Daemon) -> None:
    """Case 23: eight copies; files and memory are the source's, entropy, ids and later writes their own."""
    async with daemon.client() as client, vm(daemon, cpu_cores_limit=0.5) as sandbox:
        await text(sandbox, "echo one > /root/file; echo shared > /dev/shm/memory")
        copies = await sandbox.fork(8)
        try:
            assert all(isinstance(one, Sandbox) for one in copies), copies
            boxes = [one for one in copies if isinstance(one, Sandbox)]
            random = "head -c 9 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid"
            ask = f"cat /root/file /dev/shm/memory; {random}"
            told = [(await text(box, ask)).split("\n") for box in [*boxes, sandbox]]
            assert all(lines[:2] == ["one", "shared"] for lines in told)
            assert len({lines[2] for lines in told}) == len({lines[3] for lines in told}) == 9
            assert len({box.id for box in boxes}) == 8
            await text(boxes[0], "echo two > /root/file")
            assert await text(boxes[1], "cat /root/file") == "one"
            assert await text(sandbox, "cat /root/file") == "one"
            await boxes[0].pause()
            assert await text(boxes[0], "cat /root/file /dev/shm/memory") == "two\nshared"
        finally:
            await client.stop_many([one for one in copies if isinstance(one, Sandbox)])


@asynchronous
async def test_a_fresh_command_needs_a_container(daemon: Daemon) -> None:
    """A copy of a microVM has its processes: the error says what to do instead."""
    async with vm(daemon) as sandbox:
        with pytest.raises(DsecError, match="new sandbox") as caught:
            await sandbox.run_shell("true", fresh=True)
        assert caught.value.kind == "unsupported"


def test_restart_takes_running_and_paused_ones_back(fresh_daemon: Daemon) -> None:
    """Cases 25 and 26: politely, then with SIGKILL; a command that ran meanwhile has its result."""
    fresh_daemon.link_kernels()

    async def begin() -> tuple[str, str, str]:
        async with fresh_daemon.client() as client:
            one, two = [await launch(client, "microvm") for _ in range(2)]
            process = await one.start(["/bin/sh", "-c", "sleep 2; echo done"])
            await two.run_shell("echo kept > /root/file")
            await two.pause()
            return one.id, two.id, process.id

    one, two, command = asyncio.run(begin())
    for politely in (True, False):
        fresh_daemon.restart(politely=politely)

    async def look() -> None:
        async with fresh_daemon.client() as client:
            states = {box.id: box.info.state for box in await client.list()}
            assert states == {one: "running", two: "paused"}
            first, second = await client.get(one), await client.get(two)
            assert (await first.process(command).wait()).stdout == "done\n"
            assert (await second.run_shell("cat /root/file")).stdout == "kept\n"
            assert (await first.run_shell("true")).exit_code == 0
            await client.stop_many([first, second])

    asyncio.run(look())


@pytest.mark.parametrize("harm", ["truncated", "altered", "of another version", "gone"])
@asynchronous
async def test_a_harmed_snapshot_is_refused(daemon: Daemon, harm: str) -> None:
    """`vmm` in one sentence, and nothing is started from it."""
    async with vm(daemon) as sandbox:
        await sandbox.pause()
        directory = saved(daemon, sandbox)
        ram = directory / "ram"
        if harm == "truncated":
            os.truncate(ram, ram.stat().st_size // 2)
        elif harm == "altered":
            with ram.open("r+b") as file:
                file.seek(ram.stat().st_size // 2)
                file.write(b"x")
        elif harm == "gone":
            ram.unlink()
        else:
            note = directory / "snapshot.json"
            note.write_text(note.read_text().replace('"version":"', '"version":"0.'))
        with pytest.raises(DsecError) as caught:
            await sandbox.run_shell("true")
        assert caught.value.kind in ("vmm", "sandbox_dead"), caught.value
        assert caught.value.infra
        assert len(str(caught.value)) < 400


@asynchronous
async def test_the_vmm_killed_while_it_boots(daemon: Daemon) -> None:
    """One clear error, nothing left (the fixtures look)."""
    async with daemon.client() as client:
        starting = asyncio.create_task(launch(client, "microvm"))
        directory = daemon.run_dir / "sandboxes"
        while not (found := [path for path in directory.glob("*/vmm.pid") if path.read_text()]):
            assert not starting.done(), starting
            await asyncio.sleep(0.01)
        os.kill(int(found[0].read_text().split()[0]), signal.SIGKILL)
        with pytest.raises(DsecError) as caught:
            await starting
        assert caught.value.kind in ("vmm", "sandbox_dead")
        assert caught.value.infra


HOLDER = """
import asyncio, sys
from dsecd.client import DSecClient, DSecMicroVMRunArgs
async def main():
    async with DSecClient(sys.argv[1]) as client:
        box = await client.run_microvm(DSecMicroVMRunArgs(container_image=sys.argv[2], memory_limit_mb=256, lease_s=3))
        print(box.id, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


@asynchronous
async def test_cases_27_and_28_deadlines_end_machines(daemon: Daemon) -> None:
    """One whose client is killed, and one whose time is over, end by the deadline they were given; no VMM is left."""
    command = [sys.executable, "-c", HOLDER, daemon.url, BASE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            held = await asyncio.to_thread(holder.stdout.readline)
            async with vm(daemon) as timed, daemon.client() as client:
                lost = await client.get(held.strip())
                await asyncio.sleep(4)
                assert (await lost.run_shell("echo kept")).stdout == "kept\n", "while its client lives"
                machines = [init_pid(daemon, box) for box in (lost, timed)]
                await timed.extend(ttl_total=2)
                holder.kill()
                deadlines = [time.time() + 3, timed.info.total_deadline]
                for box, deadline in zip((lost, timed), deadlines, strict=True):
                    async with asyncio.timeout(20):
                        over: wire.Sandbox = await client.call("sandbox.wait", wire.Wait(id=box.id))
                    assert over.ended_at is not None and deadline is not None
                    assert over.ended_at < deadline + 2
                assert timed.info.total_deadline - 0.002 <= over.ended_at
                assert not [pid for pid in machines if Path(f"/proc/{pid}").exists()]
        finally:
            holder.kill()


@asynchronous
async def test_a_guest_that_panics_is_dead_at_once(daemon: Daemon) -> None:
    async with daemon.client() as client:
        sandbox = await launch(client, "microvm")
        running = asyncio.create_task(sandbox.run_shell("sleep 100"))
        await asyncio.sleep(1)
        os.kill(init_pid(daemon, sandbox), signal.SIGSEGV)
        with pytest.raises(DsecError) as caught:
            await asyncio.wait_for(running, 10)
        assert (caught.value.kind, caught.value.infra) == ("sandbox_dead", True)
        async with asyncio.timeout(10):
            while (await sandbox.refresh()).state != "failed":
                await asyncio.sleep(0.05)


@asynchronous
async def test_console_is_bounded_and_shown(daemon: Daemon) -> None:
    async with vm(daemon) as sandbox:
        data = await sandbox.console()
        assert len(data) <= 65_536
        assert b"\n" in data or data == b""


async def _refused(client: DSecClient, **args: object) -> DsecError:
    with pytest.raises(DsecError) as caught:
        await client.run_microvm(DSecMicroVMRunArgs(container_image=BASE, **args), timeout=120)  # type: ignore[arg-type]
    return caught.value


@asynchronous
async def test_bad_input(daemon: Daemon) -> None:
    async with daemon.client() as client:
        assert (await _refused(client, memory_limit_mb=1 << 22)).kind == "invalid"
        assert (await _refused(client, network_rules={"no-such-service": True})).kind == "invalid"


def test_without_a_kernel_it_says_what_to_do(fresh_daemon: Daemon) -> None:
    for path in (fresh_daemon.state / "kernels").glob("*/"):
        shutil.rmtree(path)

    async def ask() -> DsecError:
        async with fresh_daemon.client() as client:
            return await _refused(client)

    error = asyncio.run(ask())
    assert error.kind == "vmm"
    assert "dsecctl kernel import-deb" in str(error)


@asynchronous
async def test_shared_pages_are_counted_once(daemon: Daemon) -> None:
    """Two guests of one image map the same two files."""
    async with vm(daemon) as one, vm(daemon) as two:
        await text(one, "cat /usr/bin/python3* > /dev/null")
        stats = daemon.ask("daemon.stats")["result"]
        assert stats["pmem_files"] == 2
        assert 0 < stats["pmem_cached_bytes"] <= stats["pmem_bytes"]
        cached = stats["pmem_cached_bytes"]
        await text(two, "cat /usr/bin/python3* > /dev/null")
        assert daemon.ask("daemon.stats")["result"]["pmem_cached_bytes"] < cached + (4 << 20)
