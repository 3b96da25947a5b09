"""The SDK as a user meets it: everything it offers, once, against the real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from daemonkit import BASE, Clock, Daemon, asynchronous, container_args, launch, patience, run, sandbox_of

from dsecd.client import DSecClient, DSecContainerRunArgs, DsecError, DSecSyncClient, Sandbox, SandboxFailed
from dsecd.client_sync import SyncSandbox
from dsecd.wire import sandbox as wire

MIB = 1 << 20


def test_papers_listing(daemon: Daemon) -> None:
    """The session of the paper's listing works as it stands: open, run_container, run_shell, stop."""

    async def session() -> None:
        client = DSecClient(daemon.url)
        await client.open()
        args = DSecContainerRunArgs(
            container_image=BASE, network_rules={"pypi": False}, ttl_running_stop=600, disk_limit_mb=512
        )
        sandbox = await client.run_container(args, timeout=60)
        result = await sandbox.run_shell("echo hello")
        assert (result.exit_code, result.stdout, result.stderr) == (0, "hello\n", "")
        await sandbox.stop()
        assert sandbox.info.state == "stopped"
        await client.close()

    run(session())


# -- sandboxes --------------------------------------------------------------------------------------------------------
@asynchronous
async def test_a_sandbox_is_what_was_asked_for(daemon: Daemon, backend: str) -> None:
    """Environment, directory, user, host name, labels, owner and limits arrive; the reply says them all."""
    args = container_args(
        env={"COLOUR": "blue", "EMPTY": ""}, workdir="/srv", init_user="1000:100", hostname="crane",
        cpu_cores_limit=1.5, labels={"team": "x"}, owner="trainer-7", pids_limit=77, ttl_total=300,
        ttl_running_stop=200,
    )  # fmt: skip
    async with daemon.client() as client:
        sandbox = await client.run_container(args)
        line = 'echo "$COLOUR[$EMPTY]"; pwd; id -u; id -g; cat /proc/sys/kernel/hostname'
        assert (await sandbox.run_shell(line)).stdout.split() == ["blue[]", "/srv", "1000", "100", "crane"]
        over = await sandbox.run_shell("echo $COLOUR; pwd; id -u", env={"COLOUR": "red"}, cwd="/tmp", user="root")
        assert over.stdout.split() == ["red", "/tmp", "0"]
        info = await sandbox.refresh()
        assert (info.labels, info.cpu, info.memory_mb, info.disk_mb, info.pids) == ({"team": "x"}, 1.5, 256, 512, 77)
        assert info.owner is not None
        assert (info.owner.uid, info.owner.pid, info.owner.label) == (os.getuid(), os.getpid(), "trainer-7")
        assert info.total_deadline is not None
        assert info.running_at is not None
        assert 290 < info.total_deadline - info.running_at < 301
        assert info.commands == 2
        await sandbox.stop()
        assert (await client.get(sandbox.id)).info.state == "stopped"
        await sandbox.stop()


@pytest.mark.containers_only("nothing of it is in the backend")
@asynchronous
async def test_names_get_or_create(daemon: Daemon, backend: str) -> None:
    """A name belongs to one live sandbox: asked for again, also by many at once, it is the same; then it is free."""
    async with daemon.client() as client:
        many = await asyncio.gather(*(launch(client, backend, name="one") for _ in range(8)))
        assert len({sandbox.id for sandbox in many}) == 1
        assert (await client.get("one")).id == many[0].id
        await many[0].stop()
        with pytest.raises(DsecError) as caught:
            await client.get("one")
        assert caught.value.kind == "not_found"
        again = await launch(client, backend, name="one")
        assert again.id != many[0].id
        await again.stop()


@pytest.mark.containers_only("nothing of it is in the backend")
@asynchronous
async def test_create_many_one_result_each(daemon: Daemon, backend: str) -> None:
    """Good and bad specs in one call: results in order, an error for each bad one and a sandbox for each good one."""
    async with daemon.client() as client:
        good, bad = container_args(labels={"many": "1"}), container_args(container_image="none:1")
        made = await client.run_containers([good, bad, good, bad])
        assert [type(one) for one in made] == [Sandbox, SandboxFailed, Sandbox, SandboxFailed]
        error = made[1]
        assert isinstance(error, SandboxFailed)
        assert (error.kind, error.infra) == ("not_found", False)
        assert {s.id for s in await client.list({"many": "1"})} == {s.id for s in made if isinstance(s, Sandbox)}
        named = await client.run_containers(container_args(name="n"), 3)
        assert [one.info.name for one in named if isinstance(one, Sandbox)] == ["n-0", "n-1", "n-2"]
        assert await client.stop_many(one for one in [*made, *named] if isinstance(one, Sandbox)) == 5
        assert await client.stop_many([]) == 0


@pytest.mark.containers_only("nothing of it is in the backend")
@asynchronous
async def test_list_by_label_state_and_owner(daemon: Daemon, backend: str) -> None:
    async with daemon.client() as client:
        a = await launch(client, backend, labels={"k": "a", "both": "y"})
        b = await launch(client, backend, labels={"k": "b", "both": "y"})
        assert {s.id for s in await client.list({"both": "y"})} == {a.id, b.id}
        assert [s.id for s in await client.list({"both": "y", "k": "b"})] == [b.id]
        assert await client.list({"k": "c"}) == []
        assert {s.id for s in await client.list(mine=True)} >= {a.id, b.id}
        await a.pause()
        paused = await client.call("sandbox.list", wire.List(states=["paused"], labels={"both": "y"}))
        assert [s.id for s in paused.sandboxes] == [a.id]
        await client.stop_many([a, b])
        ended = await client.call("sandbox.list", wire.List(states=["stopped"], labels={"both": "y"}))
        assert {s.id for s in ended.sandboxes} == {a.id, b.id}


@pytest.mark.containers_only("nothing of it is in the backend")
@asynchronous
async def test_events_tell_a_life(daemon: Daemon, backend: str) -> None:
    """A follower of a label hears creating, started, pause… to the end, in order, and nothing of others."""
    heard: list[wire.Event] = []
    async with daemon.client() as client, sandbox_of(daemon, backend):
        pending = await client.begin(
            "sandbox.events", wire.Events(labels={"e": "1"}),
            notified=lambda _m, raw: heard.append(json_event(bytes(raw))),
        )  # fmt: skip
        await asyncio.sleep(0.1)
        sandbox = await launch(client, backend, labels={"e": "1"})
        await sandbox.pause()
        await sandbox.resume()
        await sandbox.stop()
        async with asyncio.timeout(5 * patience(backend)):
            while not heard or heard[-1].state != "stopped":
                await asyncio.sleep(0.01)
        pending.cancel()
        with pytest.raises(DsecError):
            await pending.finish()
    assert {event.sandbox_id for event in heard} == {sandbox.id}
    assert [event.state for event in heard] == [
        "creating", "running", "pausing", "paused", "resuming", "running", "stopping", "stopped",
    ]  # fmt: skip
    assert [event.seq for event in heard] == sorted({event.seq for event in heard})


def json_event(raw: bytes) -> wire.Event:
    return wire.Event(**json.loads(raw))


@asynchronous
async def test_stats(daemon: Daemon, backend: str) -> None:
    """What is used is counted: memory, CPU, processes, disk, each with its limit."""
    async with sandbox_of(daemon, backend, memory_limit_mb=200, disk_limit_mb=64) as sandbox:
        hold = "x = bytearray(50 << 20); print('held', flush=True); import time; time.sleep(60)"
        process = await sandbox.start(["python3", "-c", hold], follow=True)
        async with contextlib.aclosing(process.output()) as pieces:
            async for _, data in pieces:
                assert data == b"held\n"
                break
        await sandbox.run_shell("head -c 20000000 /dev/urandom > /f; sync")
        stats = await sandbox.stats()
        most = 200 * MIB if backend == "container" else 600 * MIB  # of a VM, what its VMM has: more than the guest's
        assert 50 * MIB < stats.memory_bytes < most
        assert stats.memory_limit_bytes == 200 * MIB
        assert stats.cpu_usec > 10_000
        assert stats.pids >= (2 if backend == "container" else 1)  # a guest's agent is not counted
        assert 19 * MIB < stats.disk_bytes < stats.disk_limit_bytes <= 64 * MIB  # a guest's file system takes some
        assert stats.oom_kills == 0


# -- commands ---------------------------------------------------------------------------------------------------------
@asynchronous
async def test_exit_codes_and_signals(daemon: Daemon, backend: str) -> None:
    async with sandbox_of(daemon, backend) as sandbox:
        for line, code in (("exit 0", 0), ("exit 255", 255), ("kill -TERM $$", 143), ("kill -SEGV $$", 139)):
            assert (await sandbox.run_shell(line)).exit_code == code, line
        result = await sandbox.exec(["sleep", "5"], timeout=0.2)
        assert (result.timed_out, result.exit_code, result.ok) == (True, 137, False)
        assert (await sandbox.exec(["echo", "$HOME", "a  b", "", "ü"])).stdout == "$HOME a  b  ü\n"


@asynchronous
async def test_follow_feed_and_signal(daemon: Daemon, backend: str) -> None:
    """A started command is followed as it runs, fed by hand, signalled, and waited for; its output is kept as well."""
    async with sandbox_of(daemon, backend) as sandbox:
        line = "trap 'echo got it; exit 5' USR1; echo ready; while read -r x; do echo \"<$x>\"; echo err >&2; done"
        process = await sandbox.start(["sh", "-c", line], stdin=True, follow=True)
        seen: dict[int, bytes] = {1: b"", 2: b""}
        async for stream, data in process.output():
            seen[stream] += data
            if data == b"ready\n":
                await process.write(b"one\n")
            elif seen == {1: b"ready\n<one>\n", 2: b"err\n"}:
                await process.signal(10)
        assert seen == {1: b"ready\n<one>\ngot it\n", 2: b"err\n"}
        assert process.ended is not None
        assert process.ended.exit_code == 5
        result = await process.wait()
        assert (result.exit_code, result.stdout_bytes, result.stderr_bytes) == (5, seen[1], seen[2])
        assert (await sandbox.process(process.id).wait()).exit_code == 5, "and again, by its id"


@asynchronous
async def test_not_reading_makes_the_command_wait(daemon: Daemon, backend: str) -> None:
    """A follower that stops reading stops the writer; nothing is lost when it reads on."""
    line = "for n in $(seq 1 40); do head -c 100000 /dev/zero; date +%s.%N >> /times; done"
    async with sandbox_of(daemon, backend) as sandbox:
        process = await sandbox.start(["sh", "-c", line], follow=True, cap_bytes=1024)
        total = 0
        async for _, data in process.output():
            if total == 0:
                await asyncio.sleep(1)
                written = len((await sandbox.read_file("/times")).splitlines())
                assert written < 40, "it ran on although nobody read"
            total += len(data)
        assert total == 4_000_000
        assert process.missed == 0


@asynchronous
async def test_terminal(daemon: Daemon, backend: str) -> None:
    """A tty has its size, changes it, and answers to ^C."""
    async with sandbox_of(daemon, backend) as sandbox:
        process = await sandbox.start(["sh"], tty=True, rows=33, cols=99, follow=True)
        said = ""
        async for _, data in process.output():
            said += data.decode()
            if said.endswith(("# ", "$ ")) and "33 99" not in said:
                await process.write(b"stty size; tty\n")
            elif said.endswith(("# ", "$ ")) and "44 111" not in said:
                await process.resize(44, 111)
                await process.write(b"stty size; sleep 100\n")
            elif said.endswith("44 111\r\n"):
                await asyncio.sleep(0.1)
                await process.write(b"\x03")
                await process.write(b"exit 3\n")
        assert "/dev/pts/0" in said
        assert process.ended is not None
        assert process.ended.exit_code == 3


@asynchronous
async def test_sessions_keep_their_state(daemon: Daemon, backend: str) -> None:
    """Directory, variables, functions and background jobs live from line to line; exit codes and streams are exact."""
    async with sandbox_of(daemon, backend) as sandbox, await sandbox.session(env={"START": "yes"}) as session:
        await session.run("cd /tmp; X=5; f() { echo f$1; }")
        result = await session.run("pwd; echo $X $START; f 3; echo err >&2; (exit 4)")
        assert (result.stdout, result.stderr, result.exit_code) == ("/tmp\n5 yes\nf3\n", "err\n", 4)
        assert (await session.run("printf no-newline")).stdout == "no-newline"
        assert (await session.run("cat; echo $?")).stdout == "0\n", "a line has no stdin"
        assert (await session.run("if true; then\n echo two lines\nfi")).stdout == "two lines\n"
        broken = await session.run("echo 'unclosed")
        assert broken.exit_code != 0
        late = await session.run("sleep 60", timeout=0.5)
        assert late.timed_out
        assert (await session.run("echo $X")).stdout == "5\n", "the shell outlives a line that was killed"
        big = await session.run("yes | head -c 3000000", cap_bytes=MIB)
        assert (len(big.stdout_bytes), big.stdout_dropped) == (MIB, 3_000_000 - MIB)
        ended = await session.run("exit 6")
        assert ended.exit_code == 6
        with pytest.raises(DsecError) as caught:
            await session.run("echo more")
        assert caught.value.kind == "not_found"


@asynchronous
async def test_many_commands_at_once(daemon: Daemon, backend: str) -> None:
    """200 commands side by side on one connection and in one sandbox: each has its own output."""
    async with sandbox_of(daemon, backend, pids_limit=1024) as sandbox:
        results = await asyncio.gather(*(sandbox.exec(["echo", str(n)]) for n in range(200)))
        assert [r.stdout for r in results] == [f"{n}\n" for n in range(200)]


@asynchronous
async def test_output_larger_than_a_message(daemon: Daemon, backend: str) -> None:
    """8 MiB on stdout and 8 MiB on stderr of one command arrive whole, although no message holds them."""
    async with sandbox_of(daemon, backend, memory_limit_mb=512) as sandbox:
        line = "yes 0123456789abcde | head -c 8388608; yes fedcba987654321 | head -c 8388608 >&2"
        result = await sandbox.run_shell(line)
        assert result.stdout_bytes == b"0123456789abcde\n" * (8 * MIB // 16)
        assert result.stderr_bytes == b"fedcba987654321\n" * (8 * MIB // 16)
        keyed = await sandbox.run_shell(line, request_id=f"big-{backend}")
        again = await sandbox.run_shell(line, request_id=f"big-{backend}")
        assert again.replayed
        assert (again.stdout_bytes, again.stderr_bytes) == (keyed.stdout_bytes, keyed.stderr_bytes)


@asynchronous
async def test_cancelled_command_is_killed(daemon: Daemon, backend: str) -> None:
    """A cancelled run_shell kills what it started; the connection and its other calls go on."""
    async with sandbox_of(daemon, backend) as sandbox:
        other = asyncio.create_task(sandbox.run_shell("sleep 1; echo other"))
        task = asyncio.create_task(sandbox.run_shell("sleep 77 & sleep 78"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(2 * patience(backend)):
            while "sleep 7" in (await sandbox.run_shell("ps -eo args")).stdout:
                await asyncio.sleep(0.02)
        assert (await other).stdout == "other\n"


# -- ports ------------------------------------------------------------------------------------------------------------
ECHO = """
import socket
s = socket.socket(); s.bind(("127.0.0.1", 8080)); s.listen(); print("up", flush=True)
while True:
    c, _ = s.accept()
    while True:
        d = c.recv(65536)
        if not d: break
        c.sendall(d)
    c.sendall(b"bye"); c.close()
"""


@asynchronous
async def test_tunnel_to_a_port(daemon: Daemon, backend: str) -> None:
    """Bytes both ways under credit, half-close, several tunnels at once; a port nobody listens on is `not_found`."""
    async with sandbox_of(daemon, backend) as sandbox:
        probe = await sandbox.exec(["python3", "-c", "import socket"])
        if probe.exit_code != 0:
            pytest.skip("this base has no socket module")
        server = await sandbox.start(["python3", "-c", ECHO], follow=True)
        async with contextlib.aclosing(server.output()) as pieces:
            assert (await anext(pieces)) == (1, b"up\n")
        for _ in range(2):
            tunnel = await sandbox.connect_port(8080)
            data = os.urandom(3 * MIB)

            async def feed(tunnel: object = tunnel, data: bytes = data) -> None:
                for start in range(0, len(data), 100_000):
                    await tunnel.write(data[start : start + 100_000])  # type: ignore[attr-defined]
                tunnel.write_eof()  # type: ignore[attr-defined]

            feeding = asyncio.create_task(feed())
            back = b""
            while chunk := await tunnel.read():
                back += chunk
            await feeding
            assert back == data + b"bye"
            await tunnel.close()


# -- trees ------------------------------------------------------------------------------------------------------------
@asynchronous
async def test_tree_keeps_modes_links_and_times(daemon: Daemon, backend: str, tmp_path: Path) -> None:
    """Modes, symlinks, hard links, empty directories and times survive a round trip; owners are root's unless asked."""
    top = tmp_path / "top"
    (top / "empty").mkdir(parents=True)
    (top / "script").write_text("#!/bin/sh\necho ran\n")
    (top / "script").chmod(0o755)
    os.utime(top / "script", (1_000_000_000, 1_000_000_000))
    os.link(top / "script", top / "hard")
    (top / "soft").symlink_to("script")
    os.chown(top / "hard", 1234, 1234)
    async with sandbox_of(daemon, backend) as sandbox:
        report = await sandbox.upload(top, "/work/here")
        assert (report.entries >= 4, report.issues) == (True, [])
        assert (await sandbox.exec(["/work/here/soft"])).stdout == "ran\n"
        look = await sandbox.run_shell("cd /work/here && stat -c '%n %a %u %Y' script empty && readlink soft")
        assert look.stdout.splitlines() == [
            "script 755 0 1000000000", f"empty 755 0 {int((top / 'empty').stat().st_mtime)}", "script",
        ]  # fmt: skip
        inodes = await sandbox.run_shell("stat -c %i /work/here/script /work/here/hard | uniq | wc -l")
        assert inodes.stdout == "1\n"
        await sandbox.upload(top, "/owned", uid=None)
        assert (await sandbox.stat("/owned/hard")).uid == 1234
        report = await sandbox.download("/work/here", tmp_path / "back")
        assert report.issues == []
        assert (tmp_path / "back/soft").readlink() == Path("script")
        assert (tmp_path / "back/script").stat().st_nlink == 2
        assert (tmp_path / "back/script").stat().st_mode & 0o777 == 0o755
        assert (tmp_path / "back/empty").is_dir()


@asynchronous
async def test_trees_as_tar(daemon: Daemon, backend: str, tmp_path: Path) -> None:
    """A tar made by anybody goes in as it is, and what comes out is a tar that tarfile reads."""
    subprocess.run(["tar", "-C", "/usr/share/common-licenses", "-cf", tmp_path / "in.tar", "."], check=True)

    async def pieces(path: Path) -> object:
        with open(path, "rb") as file:
            while chunk := file.read(10_000):
                yield chunk

    async with sandbox_of(daemon, backend) as sandbox:
        await sandbox.upload_tar(pieces(tmp_path / "in.tar"), "/in")  # type: ignore[arg-type]
        with open(tmp_path / "out.tar", "wb") as out:
            await sandbox.download_tar("/in", lambda data: asyncio.to_thread(out.write, data))
    with tarfile.open(tmp_path / "in.tar") as a, tarfile.open(tmp_path / "out.tar") as b:
        assert {m.name.removeprefix("./") for m in a if m.isreg()} == {
            m.name.removeprefix("./") for m in b if m.isreg()
        }


# -- clients ----------------------------------------------------------------------------------------------------------
@asynchronous
async def test_errors_of_a_client(daemon: Daemon, tmp_path: Path) -> None:
    """No daemon, no right, not open, a URL that is none: each a DsecError of its kind at once."""
    for url, kind in ((f"unix://{tmp_path}/none", "network"), ("http://x", "invalid"), ("ssh://", "invalid")):
        with pytest.raises(DsecError) as caught:
            await DSecClient(url).open()
        assert caught.value.kind == kind, url
    with pytest.raises(DsecError, match="not open"):
        await DSecClient(daemon.url).list()
    client = await DSecClient(daemon.url).open()
    await client.close()
    await client.close()
    with pytest.raises(DsecError, match="not open"):
        await client.list()


@pytest.mark.containers_only("nothing of it is in the backend")
@asynchronous
async def test_deadline_of_a_creation(daemon: Daemon, backend: str) -> None:
    """A creation that is not done in time is `timeout`, and nothing of it is left."""
    async with daemon.client() as client:
        with pytest.raises(DsecError) as caught:
            await client.run_container(container_args(labels={"late": "1"}), timeout=0.005)
        assert caught.value.kind == "timeout"
        async with asyncio.timeout(5 * patience(backend)):
            while await client.list({"late": "1"}):
                await asyncio.sleep(0.02)


@pytest.mark.containers_only("nothing of it is in the backend")
@asynchronous
async def test_request_id_gives_the_same_sandbox(daemon: Daemon, backend: str) -> None:
    """The same request_id, twice at once and once later: one sandbox; for something else: `conflict`."""
    async with daemon.client() as client:
        args = container_args(labels={"idem": "1"})
        both = await asyncio.gather(*(client.run_container(args, request_id="same") for _ in range(2)))
        later = await client.run_container(args, request_id="same")
        assert {s.id for s in both} == {later.id}
        with pytest.raises(DsecError) as caught:
            await client.run_container(container_args(labels={"idem": "2"}), request_id="same")
        assert caught.value.kind == "conflict"
        assert len(await client.list({"idem": "1"})) == 1
        await later.stop()


@pytest.mark.containers_only("nothing of it is in the backend")
@asynchronous
async def test_lease_is_kept_by_an_idle_process(daemon: Daemon, backend: str) -> None:
    """A client that makes no call keeps its lease for as long as it is open; closed, the sandbox ends."""
    async with daemon.client() as watcher:
        async with daemon.client() as client:
            sandbox = await launch(client, backend, lease_s=0.6)
            await asyncio.sleep(1.5)
            assert (await watcher.get(sandbox.id)).info.state == "running"
        over = await watcher.call("sandbox.wait", wire.Wait(id=sandbox.id, timeout_s=3))
        assert (over.state, "lease" in over.reason) == ("stopped", True)


def test_sync_client_mirrors(client: DSecSyncClient, sandbox: SyncSandbox, tmp_path: Path) -> None:
    """DSecSyncClient does the same without an event loop."""
    assert sandbox.exec(["echo", "a b"]).stdout == "a b\n"
    assert sandbox.run_shell("exit 3").exit_code == 3
    sandbox.write_file("/f", "text")
    assert sandbox.read_file("/f") == b"text"
    assert "f" in [entry.name for entry in sandbox.list_dir("/")]
    (tmp_path / "up").mkdir()
    (tmp_path / "up/x").write_text("x")
    assert sandbox.upload(str(tmp_path / "up"), "/up").issues == []
    sandbox.download("/up", str(tmp_path / "down"))
    assert (tmp_path / "down/x").read_text() == "x"
    session = sandbox.session()
    session.run("X=1")
    assert session.run("echo $X").stdout == "1\n"
    session.close()
    sandbox.pause()
    sandbox.resume()
    assert sandbox.stats().pids >= 1
    assert sandbox.id in [one.id for one in client.list()]
    assert client.get(sandbox.id).info.state == "running"
    assert BASE in [image.name for image in client.images()]
    with pytest.raises(DsecError, match="no sandbox"):
        client.get("nothing")


def test_sync_client_in_many_threads(client: DSecSyncClient, sandbox: SyncSandbox) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda n: sandbox.exec(["echo", str(n)]).stdout, range(50)))
    assert outputs == [f"{n}\n" for n in range(50)]


def test_sdk_needs_no_root_and_no_daemon_packages(daemon: Daemon) -> None:
    """The SDK alone, with nothing but msgspec from outside the standard library."""
    code = (
        "import sys\n"
        "class Deny:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('cffi', 'psutil', 'pyroute2', 'systemd', 'click'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Deny())\n"
        "from dsecd.client import DSecSyncClient\n"
        "with DSecSyncClient(sys.argv[1]) as c: print(len(c.images()) > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, daemon.url], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.containers_only("nothing of it is in the backend")
@asynchronous
async def test_doctor_info_and_stats(daemon: Daemon, backend: str) -> None:
    """The daemon describes itself: plausible numbers, no failed check on a host where the tests run."""
    info = daemon.ask("daemon.info")["result"]
    assert info["cpus"] >= 1
    assert 0 < info["disk_free_mb"] <= info["disk_total_mb"]
    assert backend in info["backends"]
    with Clock() as clock:
        checks = daemon.ask("daemon.doctor")["result"]["checks"]
    assert clock.took < 20
    assert {check["level"] for check in checks} <= {"ok", "warn", "fail"}
    assert [check for check in checks if check["level"] == "fail"] == []
    stats = daemon.ask("daemon.stats")["result"]
    assert stats["rss_bytes"] < 150 * MIB
    assert stats["open_fds"] > 0
