"""Trajectories of real sandboxes: all that changes one is in its log, and answers come from there over any death."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemonkit import Daemon, asynchronous, container_args, sandbox_of

from dsecd.client import DSecClient, DsecError, Sandbox
from dsecd.wire import execs, files
from dsecd.wire import sandbox as wire
from dsecd.wire.peer import Pending
from dsecd.wire.trajectory import Entry

DSECCTL = str(Path(sys.executable).parent / "dsecctl")


async def entries(sandbox: Sandbox, after: int = 0) -> list[Entry]:
    return (await sandbox._client.trajectory(sandbox.id, after=after)).entries


def asked(found: list[Entry], method: str) -> list[tuple[Entry, Entry]]:
    """Requests of that method with their replies."""
    replies = {entry.ref: entry for entry in found if entry.event == "reply"}
    return [(entry, replies[entry.seq]) for entry in found if entry.method == method]


def text(result: Any) -> str:
    return base64.b64decode(result["stdout"]).decode()


@asynchronous
async def test_all_that_changes_it_is_there_in_order(daemon: Daemon, backend: str) -> None:
    async with sandbox_of(daemon, backend, name=f"logged-{backend}") as sandbox:
        client = sandbox._client
        await sandbox.run_shell("echo one; echo two >&2; exit 3")
        await sandbox.write_file("/etc/motd", b"x" * 200_000)
        await client.call("file.rename", files.Rename(id=f"logged-{backend}", path="/etc/motd", to="/motd"))
        with pytest.raises(DsecError):
            await sandbox.remove("/not/there")
        process = await sandbox.start(["sh", "-c", "cat; echo bye"], stdin=True)
        await process.write(b"fed", eof=True)
        assert (await process.wait()).stdout == "fedbye\n"
        session = await sandbox.session()
        await session.run("cd /tmp")
        await session.close()
        await sandbox.pause()
        await sandbox.read_file("/motd")  # resumes it, and changes nothing else
        await asyncio.sleep(0.3)
        found = await entries(sandbox)
        assert [entry.seq for entry in found] == list(range(1, len(found) + 1))
        assert all(a.at <= b.at for a, b in itertools.pairwise(found))
        assert found[0].event == "creating"
        assert found[0].data["spec"]["name"] == f"logged-{backend}"
        moves = [entry.event for entry in found if isinstance(entry.data, dict)]
        assert moves == ["creating", "started", "pause", "paused", "resume", "resumed"]
        ((request, reply),) = asked(found, "exec.run")
        assert request.who is not None
        assert (request.who.uid, request.who.pid) == (os.getuid(), os.getpid())
        assert request.params["shell"] == "echo one; echo two >&2; exit 3"
        assert (reply.result["exit_code"], text(reply.result)) == (3, "one\n")
        assert reply.took_ms >= reply.result["ran_ms"] > 0
        ((request, reply),) = asked(found, "file.write")
        assert request.params["data"]["size"] == 200_000
        assert len(request.params["data"]["sha256"]) == 64
        assert reply.result == {"size": 200_000}
        ((_, reply),) = asked(found, "file.remove")
        assert reply.error["data"]["kind"] == "not_found"
        (ended,) = [entry for entry in found if entry.event == "ended"]
        assert (ended.exec_id, text(ended.result)) == (process.id, "fedbye\n")
        assert {"exec.start", "exec.stdin", "session.open", "session.run", "session.close", "sandbox.pause"} <= {
            entry.method for entry in found
        }
        assert not (await client.verify_trajectory(sandbox.id)).altered
    async with daemon.client() as client:  # it is over; its log is not
        found = (await client.trajectory(sandbox.id)).entries
        assert asked(found, "sandbox.stop")[0][1] is found[-1]


@asynchronous
async def test_fast_forward_in_one_call(daemon: Daemon) -> None:
    """A client that comes back gives what it holds, and gets the rest: no more, no less, and knows another's log."""
    async with sandbox_of(daemon) as sandbox:
        client = sandbox._client
        for n in range(5):
            await sandbox.run_shell(f"echo {n}")
        known = await client.trajectory(sandbox.id)
        held = known.entries[-1].seq
        for n in range(5, 8):
            await sandbox.run_shell(f"echo {n}")
        async with daemon.client() as other:
            rest = await other.trajectory(sandbox.id, after=held, sum=known.sum)
            assert [text(reply.result) for _, reply in asked(rest.entries, "exec.run")] == ["5\n", "6\n", "7\n"]
            assert rest.entries[0].seq == held + 1
            with pytest.raises(DsecError) as caught:
                await other.trajectory(sandbox.id, after=held - 1, sum=known.sum)
            assert caught.value.kind == "conflict"
            with pytest.raises(DsecError) as caught:
                await other.trajectory(sandbox.id, after=10_000)
            assert caught.value.kind == "conflict"


@asynchronous
async def test_every_changing_call_obeys_request_id(daemon: Daemon) -> None:
    """The same id: the first answer, marked; other content: conflict; and nothing is done again."""
    async with sandbox_of(daemon) as sandbox:
        client = sandbox._client
        mkdir = files.Mkdir(id=sandbox.id, path="/made", parents=False, request_id="m1")
        first = await client.call("file.mkdir", mkdir)
        again = await client.call("file.mkdir", mkdir)  # done again it would be a conflict
        assert (first.replayed, again.replayed) == (False, True)
        with pytest.raises(DsecError) as caught:
            await client.call("file.mkdir", files.Mkdir(id=sandbox.id, path="/other", request_id="m1"))
        assert caught.value.kind == "conflict"
        append = files.Write(id=sandbox.id, path="/log", data=b"x", append=True, request_id="w1")
        for expected in (False, True, True):
            assert (await client.call("file.write", append)).replayed is expected
        assert await sandbox.read_file("/log") == b"x"
        remove = files.Remove(id=sandbox.id, path="/nothing", request_id="r1")
        for _ in range(2):  # a failure is an answer, too
            with pytest.raises(DsecError, match="No such file") as caught:
                await client.call("file.remove", remove)
            assert caught.value.kind == "not_found"
        gone = [await client.call("sandbox.extend", wire.Extend(id=sandbox.id, ttl_total_s=999, request_id="e1"))
                for _ in range(2)]  # fmt: skip
        assert gone[0].total_deadline == gone[1].total_deadline
        process = await sandbox.start(["cat"], stdin=True)
        feed = execs.Stdin(id=sandbox.id, exec_id=process.id, data=b"once ", request_id="s1")
        for _ in range(3):
            await client.call("exec.stdin", feed)
        await process.write(b"", eof=True)
        assert (await process.wait()).stdout == "once "


@asynchronous
async def test_a_stream_is_content_too(daemon: Daemon) -> None:
    """The same id with the same bytes is answered, with others it is a conflict: also while the first still runs."""
    async with sandbox_of(daemon) as sandbox, daemon.client() as other:

        async def send(client: DSecClient, key: str, chunks: list[bytes], wait: float = 0.0) -> files.Written:
            async def stream() -> AsyncIterator[bytes]:
                for chunk in chunks:
                    yield chunk
                    await asyncio.sleep(wait)

            params = files.Write(id=sandbox.id, path="/log", append=True, stream=True, request_id=key)
            pending = await client.begin("file.write", params)
            await pending.pour(stream())
            done: files.Written = await pending.finish()
            return done

        one, two = [b"x" * 300_000, b"y" * 300_000], [b"x" * 300_000, b"z" * 300_000]
        first, again = await send(sandbox._client, "s", one), await send(other, "s", [b"".join(one)])
        assert (first.replayed, again.replayed, again.size) == (False, True, first.size)
        with pytest.raises(DsecError, match="was used for something else before") as caught:
            await send(other, "s", two)
        assert caught.value.kind == "conflict"
        slow = asyncio.create_task(send(sandbox._client, "t", one, 0.5))
        await asyncio.sleep(0.2)
        same = asyncio.create_task(send(other, "t", one))
        with pytest.raises(DsecError, match="was used for something else before"):
            await send(other, "t", two)
        assert ((await slow).replayed, (await same).replayed) == (False, True)
        assert await sandbox.read_file("/log") == b"".join(one) * 2


@asynchronous
async def test_a_stream_that_was_cut_off_makes_room_for_the_next(daemon: Daemon) -> None:
    """By a connection that broke, and by one that only stands still: an ssh server may not hear of its client's end.
    A part that was appended cannot be taken back: that is said, and nothing is appended twice."""
    data = b"x" * 300_000
    async with sandbox_of(daemon) as sandbox:

        async def half(client: DSecClient, key: str, append: bool) -> Pending:
            params = files.Write(id=sandbox.id, path=f"/{key}", append=append, stream=True, request_id=key)
            pending = await client.begin("file.write", params)
            assert pending.outflow is not None
            await pending.outflow.write(data[:100_000])
            return pending

        async def whole(key: str, append: bool = False) -> files.Written:
            params = files.Write(id=sandbox.id, path=f"/{key}", append=append, stream=True, request_id=key)
            pending = await sandbox._client.begin("file.write", params)
            await pending.pour(_pieces(data))
            done: files.Written = await pending.finish()
            return done

        async with daemon.client() as other:
            await half(other, "broken", append=False)
            await half(other, "part", append=True)
            await asyncio.sleep(0.2)
        async with asyncio.timeout(20):
            done = await whole("broken")
            assert (done.size, done.replayed) == (len(data), False)
            for _ in range(2):
                with pytest.raises(DsecError, match="a part of it may be there") as caught:
                    await whole("part", append=True)
                assert caught.value.kind == "outcome_unknown"
        assert len(await sandbox.read_file("/part")) <= 100_000
        async with daemon.client() as other, asyncio.timeout(30):
            standing = await half(other, "still", append=False)
            first, second = await asyncio.gather(whole("still"), whole("still"))  # both wait for the same place
            assert {first.replayed, second.replayed} == {False, True}
            with pytest.raises(DsecError, match="broke in the middle of the stream") as caught:
                await standing.finish()
            assert caught.value.kind == "network"
        assert await sandbox.read_file("/still") == data
        assert len(asked(await entries(sandbox), "file.write")) == 5


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 50_000):
        yield data[start : start + 50_000]


@asynchronous
async def test_the_same_id_from_two_clients_at_once(daemon: Daemon) -> None:
    """One run; the second is attached to it. With other content it is refused while the first still runs."""
    async with sandbox_of(daemon) as sandbox, daemon.client() as other:
        twin = await other.get(sandbox.id)
        line = "echo run >> /runs; sleep 1; wc -l < /runs"
        both = asyncio.gather(sandbox.run_shell(line, request_id="k"), twin.run_shell(line, request_id="k"))
        await asyncio.sleep(0.3)
        with pytest.raises(DsecError) as caught:
            await twin.run_shell("echo else", request_id="k")
        assert caught.value.kind == "conflict"
        results = await both
        assert [one.stdout for one in results] == ["1\n", "1\n"]
        assert sorted(one.replayed for one in results) == [False, True]
        assert len(asked(await entries(sandbox), "exec.run")) == 1


@asynchronous
async def test_answers_come_from_the_log_over_a_kill(fresh_daemon: Daemon) -> None:
    """Killed with hundreds of answers given and one command under way: all of them are there, none runs again."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        sandbox = await client.run_container(container_args(name="kept"))
        lines = [f"echo {n} >> /runs; echo answer {n}" for n in range(300)]
        firsts = await asyncio.gather(*(sandbox.run_shell(line, request_id=f"k{n}") for n, line in enumerate(lines)))
        before = await client.trajectory(sandbox.id)
        daemon.restart(politely=False)
    async with daemon.client() as client:
        same = await client.get("kept")
        for n, line in enumerate(lines):
            result = await same.run_shell(line, request_id=f"k{n}")
            assert (result.replayed, result.stdout, result.exec_id) == (True, f"answer {n}\n", firsts[n].exec_id)
        assert len((await same.read_file("/runs")).split()) == 300
        found = await client.trajectory(same.id)
        assert found.entries[: len(before.entries)] == before.entries
        assert len(found.entries) == len(before.entries), "a replay changes nothing"
        assert not (await client.verify_trajectory(same.id)).altered
        await same.stop()


@asynchronous
async def test_the_end_of_a_command_nobody_waited_for_is_recorded_over_a_kill(fresh_daemon: Daemon) -> None:
    daemon = fresh_daemon
    async with daemon.client() as client:
        sandbox = await client.run_container(container_args())
        await sandbox.start(["sh", "-c", "sleep 1.5; echo late"])
        daemon.kill()
    await asyncio.sleep(2)
    daemon.start()
    async with daemon.client() as client:
        same = await client.get(sandbox.id)
        await asyncio.sleep(0.5)
        daemon.restart(politely=False)
    async with daemon.client() as client:
        same = await client.get(sandbox.id)
        await asyncio.sleep(0.5)
        found = [entry for entry in await entries(same) if entry.event == "ended"]
        assert [text(entry.result) for entry in found] == ["late\n"]
        await same.stop()


@asynchronous
async def test_what_was_altered_is_never_an_answer(fresh_daemon: Daemon) -> None:
    """Bits flip in the file of recorded answers: the agent's word, or `outcome_unknown`; nothing runs again."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        sandbox = await client.run_container(container_args())
        await sandbox.run_shell("echo run >> /runs; echo secret", request_id="k")
        append = files.Write(id=sandbox.id, path="/log", data=b"x", append=True, request_id="w")
        assert (await client.call("file.write", append)).size == 1
        other = await client.run_container(container_args())
        await other.run_shell("echo fine", request_id="o")
        daemon.stop()
    path = daemon.state / "trajectory" / f"{sandbox.id}.log"
    whole = path.read_bytes()
    whole = whole.replace(base64.b64encode(b"secret\n"), base64.b64encode(b"Secret\n"))
    path.write_bytes(whole.replace(b'"size":1', b'"size":9'))
    daemon.start()
    async with daemon.client() as client:
        same = await client.get(sandbox.id)
        assert (await same.run_shell("echo run >> /runs; echo secret", request_id="k")).stdout == "secret\n"
        with pytest.raises(DsecError) as caught:
            await client.call("file.write", append)
        assert (caught.value.kind, caught.value.infra) == ("outcome_unknown", True)
        assert await same.read_file("/log") == b"x"
        assert await same.read_file("/runs") == b"run\n"
        assert (await same.run_shell("echo goes on")).stdout == "goes on\n"
        found = await client.verify_trajectory(same.id)
        assert len(found.altered) == 2
        fine = await (await client.get(other.id)).run_shell("echo fine", request_id="o")
        assert (fine.stdout, fine.replayed) == ("fine\n", True)
        done = subprocess.run(
            [DSECCTL, "-H", daemon.url, "trajectory", "verify", same.id],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        assert f"entry {found.altered[0].seq} was altered" in done.stdout
        for one in (sandbox.id, other.id):
            await (await client.get(one)).stop()


@pytest.fixture
def full_disk(fresh_daemon: Daemon) -> Iterator[Path]:
    """A daemon whose trajectories are on a disk of 1 MiB."""
    fresh_daemon.stop()
    place = fresh_daemon.state / "trajectory"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", place], check=True)
    try:
        fresh_daemon.start()
        yield place
    finally:
        if fresh_daemon.process is not None:
            fresh_daemon.ask("sandbox.stop_many", {"ids": list(fresh_daemon.sandboxes())})
            fresh_daemon.stop()
        subprocess.run(["umount", place], check=True)


@asynchronous
async def test_a_full_disk_is_one_clear_error_and_loses_nothing(fresh_daemon: Daemon, full_disk: Path) -> None:
    async with fresh_daemon.client() as client:
        sandbox = await client.run_container(container_args())
        await sandbox.run_shell("echo run >> /runs; echo kept", request_id="before")
        (full_disk / "ballast").write_bytes(bytes(os.statvfs(full_disk).f_bavail * 4096))
        with contextlib.suppress(DsecError):
            await sandbox.run_shell("head -c 100000 /dev/urandom | base64")  # what is left of its last page
        for _ in range(2):
            with pytest.raises(DsecError, match="make room in state_dir") as caught:
                await sandbox.run_shell("echo run >> /runs; head -c 9000 /dev/zero", request_id="during")
            assert (caught.value.kind, caught.value.infra) == ("disk_full", True)
        (full_disk / "ballast").unlink()
        result = await sandbox.run_shell("echo run >> /runs; head -c 9000 /dev/zero", request_id="during")
        assert len(result.stdout_bytes) == 9000
        assert await sandbox.read_file("/runs") == b"run\nrun\n"
        again = await sandbox.run_shell("echo run >> /runs; echo kept", request_id="before")
        assert (again.stdout, again.replayed) == ("kept\n", True)
        assert not (await client.verify_trajectory(sandbox.id)).altered
        await sandbox.stop()


@asynchronous
async def test_dsecctl_shows_and_exports(daemon: Daemon, tmp_path: Path) -> None:
    def ctl(*args: str) -> str:
        command = [DSECCTL, "-H", daemon.url, "trajectory", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    async with sandbox_of(daemon) as sandbox:
        await sandbox.run_shell("echo a very long line " + "x" * 200)
        shown = await asyncio.to_thread(ctl, "show", sandbox.id)
        assert all(len(line) <= 80 for line in shown.splitlines())
        assert "exec.run echo a very" in shown
        assert "exit 0" in shown
        found = json.loads(await asyncio.to_thread(ctl, "show", sandbox.id, "--json"))
        await asyncio.to_thread(ctl, "export", sandbox.id, "-o", str(tmp_path / "log"))
        lines = (tmp_path / "log").read_bytes().splitlines()
        assert [json.loads(line[33:])["seq"] for line in lines] == [entry["seq"] for entry in found["entries"]]
        assert (tmp_path / "log").read_bytes() == (daemon.state / "trajectory" / f"{sandbox.id}.log").read_bytes()
        assert "intact" in await asyncio.to_thread(ctl, "verify", sandbox.id)
