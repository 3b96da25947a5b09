"""Copies of containers, and commands in a fresh one: files as they are at one instant, and no process."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator

import pytest
from daemonkit import Daemon, asynchronous, launch, names_running, sandbox_of
from packkit import MESS, differences, tree
from test_restart import nothing_but

from dsecd.client import DSecClient, DsecError, Sandbox, SandboxFailed
from dsecd.wire import sandbox as wire


@contextlib.asynccontextmanager
async def stopped_after(client: DSecClient, made: list[Sandbox | SandboxFailed]) -> AsyncIterator[list[Sandbox]]:
    """All of them were made; they are stopped afterwards."""
    failed = [one for one in made if isinstance(one, SandboxFailed)]
    good = [one for one in made if isinstance(one, Sandbox)]
    try:
        assert not failed, failed[:3]
        yield good
    finally:
        await client.stop_many(good)


@asynchronous
async def test_a_copy_has_the_files_and_no_process(daemon: Daemon) -> None:
    """The same tree with other ids on the host; what one writes, the other does not see; nothing runs in the copy."""
    async with sandbox_of(daemon, labels={"k": "v"}, name="source") as box:
        assert (await box.run_shell(MESS)).exit_code == 0
        await box.start(["sleep", "1000"])
        async with stopped_after(box._client, await box.fork()) as (copy,):
            assert copy.id != box.id and copy.info.name is None and copy.info.labels == {"k": "v"}
            assert differences(await tree(box), await tree(copy)) == []
            assert "sleep" not in await names_running(copy)
            assert "sleep" in await names_running(box)
            await copy.run_shell("echo theirs > /work/new; rm -r /work/deep; echo x >> /work/linked")
            assert (await box.run_shell("test -e /work/new")).exit_code == 1
            assert (await box.run_shell("cat /work/linked")).stdout == "one\n"
            await box.write_file("/later", "x")
            assert (await copy.run_shell("test -e /later")).exit_code == 1


@asynchronous
async def test_case_23_eight_copies_differ(daemon: Daemon) -> None:
    """Eight forks: first reads of /dev/urandom and fresh UUIDs all differ; so does what Python makes of it."""
    ask = "import os, random; print(os.urandom(16).hex(), random.random(), hash('x'))"
    async with sandbox_of(daemon) as box, stopped_after(box._client, await box.fork(8)) as copies:
        said = [(await copy.exec(["python3", "-c", ask])).stdout.split() for copy in copies]
        for column in zip(*said, strict=True):
            assert len(set(column)) == 8, column
        kernel = [(await one.run_shell("cat /proc/sys/kernel/random/uuid")).stdout for one in copies]
        assert len(set(kernel)) == 8


@asynchronous
async def test_a_copy_of_a_copy_and_of_a_paused_one(daemon: Daemon) -> None:
    """A paused source stays paused; a copy can be copied after its source has gone."""
    async with sandbox_of(daemon) as box:
        await box.run_shell("echo 1 > /n; chown 7:8 /n")
        await box.pause()
        first = (await box.fork())[0]
        assert (await box.refresh()).state == "paused"
        assert isinstance(first, Sandbox)
        await first.run_shell("echo 2 >> /n")
        second = (await first.fork())[0]
        assert isinstance(second, Sandbox)
        await first.stop()
        assert (await second.run_shell("cat /n; stat -c '%u %g' /n")).stdout == "1\n2\n7 8\n"
        await second.stop()


@asynchronous
async def test_the_source_hardly_stops(daemon: Daemon) -> None:
    """A counter in it stands still for an instant while 4 copies are made, however long they take."""
    spin = (
        "import time\nworst=0;last=time.monotonic();end=last+6\n"
        "while last<end:\n time.sleep(0.001);now=time.monotonic();worst=max(worst,now-last);last=now\nprint(worst)"
    )
    async with sandbox_of(daemon, cpu_cores_limit=2) as box:
        process = await box.start(["python3", "-c", spin])
        await asyncio.sleep(1)
        async with stopped_after(box._client, await box.fork(4)):
            pass
        worst = float((await process.wait()).stdout)
        assert worst < 0.5, worst


@pytest.mark.slow
@asynchronous
async def test_fifty_at_once(fresh_daemon: Daemon) -> None:
    """Fifty copies in one call, all with the files; when they are stopped nothing is left of them."""
    async with sandbox_of(fresh_daemon, memory_limit_mb=64, disk_limit_mb=32) as box:
        await box.write_file("/mark", "x" * 1000)
        async with stopped_after(box._client, await box.fork(50)) as copies:
            marks = await asyncio.gather(*(copy.read_file("/mark") for copy in copies))
            assert set(marks) == {b"x" * 1000}
        await nothing_but(fresh_daemon, {box.id})


@asynchronous
async def test_some_fail_and_leave_nothing(fresh_daemon: Daemon) -> None:
    """What admission has no room for fails by itself; the others run; nothing of the failed ones is left."""
    fresh_daemon.stop()
    fresh_daemon.config["max_sandboxes"] = 4
    fresh_daemon.start()
    async with sandbox_of(fresh_daemon) as box:
        made = await box.fork(6)
        good = [one for one in made if isinstance(one, Sandbox)]
        assert len(good) == 3
        assert {one.kind for one in made if isinstance(one, SandboxFailed)} == {"capacity"}
        await nothing_but(fresh_daemon, {box.id, *(one.id for one in good)})
        await box._client.stop_many(good)
        await nothing_but(fresh_daemon, {box.id})


@asynchronous
async def test_killed_in_the_middle(fresh_daemon: Daemon) -> None:
    """SIGKILL while copies are made: the source lives, half-made copies and the picture they are made from are gone."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        box = await launch(client)
        await box.write_file("/f", "kept")
        work = asyncio.create_task(box.fork(60))
        await asyncio.sleep(0.15)
        daemon.kill()
        with pytest.raises(DsecError):
            await work
    daemon.start()
    async with daemon.client() as client:
        alive = {one.id for one in await client.list()}
        assert box.id in alive
        again = await client.get(box.id)
        assert await again.read_file("/f") == b"kept"
        await nothing_but(daemon, alive)
        await client.stop_many([one for one in await client.list() if one.id != box.id])
        await nothing_but(daemon, {box.id})
        await again.stop()


TEST = "#!/bin/sh\necho FAIL > /tests/result\nsleep 0.3\ncat /tests/result\n"


@asynchronous
async def test_killed_and_asked_again(fresh_daemon: Daemon) -> None:
    """With a request_id a fork that a dead daemon left half-done is done over: so many copies, and not more."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        box = await launch(client)
        params = wire.Fork(id=box.id, count=20, request_id="forks-1")
        work = asyncio.create_task(client.call("sandbox.fork", params))
        while len(daemon.sandboxes()) < 3:
            await asyncio.sleep(0.005)
        daemon.kill()
        with pytest.raises(DsecError):
            await work
    daemon.start()
    async with daemon.client() as client:
        made: wire.Created = await client.call("sandbox.fork", params)
        idents = {one.sandbox.id for one in made.results if one.sandbox is not None}
        assert len(idents) == 20
        await nothing_but(daemon, {box.id, *idents})
        await client.stop_many(await client.list())


# -- fresh commands ----------------------------------------------------------------------------------------------------
@asynchronous
async def test_a_verdict_without_the_agents_processes(daemon: Daemon) -> None:
    """A process rewrites the results all the time, and a session has LD_PRELOAD and PATH of its own: a fresh command
    sees none of it, and nothing that it does stays."""
    async with sandbox_of(daemon) as box:
        await box.write_file("/tests/run.sh", TEST, mode=0o755)
        session = await box.session()
        await session.run("export LD_PRELOAD=/evil.so PATH=/evil")
        await box.start(["sh", "-c", "while :; do echo PASS > /tests/r; mv /tests/r /tests/result; done"])
        await asyncio.sleep(0.3)
        assert (await box.run_shell("sh /tests/run.sh")).stdout == "PASS\n", "the agent wins where its processes are"
        for _ in range(3):
            verdict = await box.run_shell("sh /tests/run.sh; echo $LD_PRELOAD; ls /proc | grep -c '^[0-9]'", fresh=True)
            assert verdict.stdout.splitlines()[:2] == ["FAIL", ""], verdict.stdout
        await box.run_shell("touch /made-there", fresh=True)
        assert (await box.run_shell("test -e /made-there")).exit_code == 1
        assert [one.id for one in await box._client.list()].count(box.id) == 1


@asynchronous
async def test_what_files_can_still_do(daemon: Daemon) -> None:
    """A replaced program is a file: a fresh command that runs it runs the replacement. The documents say so."""
    async with sandbox_of(daemon) as box:
        await box.run_shell(r"printf '#!/bin/sh\necho forged\n' > /bin/judge; chmod 755 /bin/judge")
        assert (await box.run_shell("judge", fresh=True)).stdout == "forged\n"


FORGERY = r"""
mkdir -p /work/app/deep /srv/x; echo 42 > /work/app/answer; echo no > /work/other; ln -s /etc /work/app/deep/out
rm -rf /srv; ln -s /etc /srv; cp /bin/true /usr/bin/new; printf forged > /etc/issue; rm /etc/debian_version
rm -rf /usr/share/perl5; mkdir /usr/share/perl5
echo /usr/lib/junk.so > /etc/ld.so.preload; echo junk > /usr/lib/junk.so
"""
LOOK = r"""
cat /work/app/answer; cat /etc/debian_version > /dev/null && echo there; grep -c forged /etc/issue
ls /work/other /usr/bin/new /deep /etc/ld.so.preload 2> /dev/null; test -L /srv || echo plain
readlink /work/app/deep/out
ls /usr/share/perl5 | wc -l
"""


@asynchronous
async def test_only_the_solution_is_kept(daemon: Daemon) -> None:
    """Programs, /etc/ld.so.preload, directories replaced, a symlink on the way: with `keep` none of it counts. The kept
    path is as the sandbox has it, and the sandbox stays as it was."""
    async with sandbox_of(daemon) as box:
        count = (await box.run_shell("ls /usr/share/perl5 | wc -l")).stdout.strip()
        await box.exec(["python3", "-c", "import os; os.makedirs('/deep/' + '/'.join(['d'] * 1500))"])
        await box.run_shell(FORGERY)
        before = await tree(box)
        kept = await box.run_shell(LOOK, fresh=True, keep=["/work//app/.", "/srv/x/y", "/usr/share/perl5/none"])
        assert kept.stdout.split() == ["42", "there", "0", "plain", "/etc", count], kept.stdout
        assert "junk.so" not in kept.stderr
        assert "junk.so" in (await box.run_shell("true; ls /", fresh=True)).stderr, "files alone can still do this"
        assert differences(before, await tree(box)) == []
        for bad in (["/"], ["relative"], ["/a/../b"]):
            with pytest.raises(DsecError) as caught:
                await box.run_shell("true", fresh=True, keep=bad)
            assert caught.value.kind == "invalid"
        with pytest.raises(DsecError, match="for fresh commands"):
            await box.run_shell("true", keep=["/work"])


@asynchronous
async def test_leases_of_copies(daemon: Daemon) -> None:
    """The SDK renews those of forks, whoever holds the source's; a fresh command outlives the lease and the TTL."""
    async with sandbox_of(daemon, lease_s=1.5, ttl_running_stop=1.0) as box, daemon.client() as other:
        copies = await other.fork(box.id, 2)
        late = box.run_shell("sleep 4; echo done", fresh=True)
        keep = asyncio.gather(*(copy.run_shell("sleep 4") for copy in copies if isinstance(copy, Sandbox)))
        assert (await late).stdout == "done\n"
        assert [result.exit_code for result in await keep] == [0, 0]
        async with stopped_after(other, copies):
            pass


@asynchronous
async def test_a_fresh_command_ends_with_everything(fresh_daemon: Daemon) -> None:
    """Its limits and time-outs count; a request_id answers again without running; a killed daemon leaves no copy."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        box = await launch(client)
        late = await box.run_shell("echo a; sleep 60", fresh=True, timeout=1)
        assert late.timed_out and late.stdout == "a\n"
        first = await box.run_shell("cat /proc/sys/kernel/random/uuid", fresh=True, request_id="g1")
        again = await box.run_shell("cat /proc/sys/kernel/random/uuid", fresh=True, request_id="g1")
        assert first.stdout == again.stdout
        await nothing_but(daemon, {box.id})
        work = asyncio.create_task(box.run_shell("sleep 60", fresh=True, request_id="g2"))
        while len(await client.list()) < 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        daemon.kill()
        with pytest.raises(DsecError):
            await work
    daemon.start()
    async with daemon.client() as client:
        box = await client.get(box.id)
        await nothing_but(daemon, {box.id})
        with pytest.raises(DsecError) as caught:
            await box.run_shell("sleep 60", fresh=True, request_id="g2")
        assert caught.value.kind == "outcome_unknown"
        await box.stop()


@asynchronous
async def test_how_long_a_copy_takes(daemon: Daemon) -> None:
    """Not a bench: it only must not be seconds."""
    took = []
    async with sandbox_of(daemon) as box:
        await box.run_shell("mkdir /many; cd /many; for i in $(seq 200); do echo $i > $i; done")
        for _ in range(8):
            began = time.monotonic()
            copies = await box.fork()
            took.append(time.monotonic() - began)
            await box._client.stop_many([one for one in copies if isinstance(one, Sandbox)])
    print(f"fork: {statistics.median(took) * 1000:.1f} ms, {[round(t * 1000) for t in took]}")
    assert statistics.median(took) < 1.0
