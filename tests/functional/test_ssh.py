"""`ssh://` through a real sshd on loopback: the SDK and dsecctl reach a daemon as if it were here."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemonkit import BASE, Daemon, asynchronous, container_args
from sshd_kit import FarHost, Sshd

from dsecd import client_files
from dsecd.client import DSecClient, DsecError, DSecSyncClient, Sandbox


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    one = Sshd(tmp_path)
    monkeypatch.setenv("DSEC_SSH", one.command)
    yield one
    one.stop()


@pytest.fixture
def tunnels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's tunnels begin: other tests make theirs at the same time."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


def live(tunnels: Path) -> set[Path]:
    """Directories of those on which somebody listens."""
    found = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    return {Path(path).parent for path in found if path.startswith(f"{tunnels}/") and path.endswith("/sock")}


def test_the_sdk_works_through_a_tunnel(daemon: Daemon, sshd: Sshd) -> None:
    """Create, run, move a file of several megabytes both ways, stop: all through sshd."""
    with (
        DSecSyncClient(f"ssh://root@127.0.0.1:{sshd.port}{daemon.socket}") as client,
        client.run_container(container_args(container_image=BASE)) as sandbox,
    ):
        assert sandbox.run_shell("echo over ssh").stdout == "over ssh\n"
        data = os.urandom(5_000_000)
        sandbox.write_file("/root/blob", data)
        assert sandbox.read_file("/root/blob") == data


def test_dsecctl_works_through_a_tunnel(daemon: Daemon, sshd: Sshd) -> None:
    url = f"ssh://root@127.0.0.1:{sshd.port}{daemon.socket}"
    argv = [
        str(Path(sys.executable).with_name("dsecctl")),
        "-H",
        url,
        "run",
        BASE,
        "--",
        "sh",
        "-c",
        "echo out; exit 5",
    ]
    done = subprocess.run(argv, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (5, b"out\n"), done.stderr


def refused(url: str) -> DsecError:
    with pytest.raises(DsecError) as caught, DSecSyncClient(url):
        pass
    return caught.value


def test_refusals_say_why_and_what_to_do(daemon: Daemon, sshd: Sshd) -> None:
    """A host key that changed or is not known, a key that is not let in, nobody there, an option as a host."""
    url = f"ssh://root@127.0.0.1:{sshd.port}"
    known = sshd.directory / "known"
    right, other = known.read_text(), (sshd.directory / "user.pub").read_text().split()[1]
    known.write_text(right.replace(right.split()[2], other))
    why = refused(url)
    assert why.kind == "denied"
    assert f"if the key was changed on purpose: ssh-keygen -f {known} -R '[127.0.0.1]:{sshd.port}'" in why.message
    line = why.message.partition("on purpose: ")[2]
    subprocess.run(["sh", "-c", line], check=True, capture_output=True)  # what it says can be done as it is said
    why = refused(url)
    assert (why.kind, f"ssh -p {sshd.port} root@127.0.0.1" in why.message) == ("denied", True), why
    known.write_text(right)
    (sshd.directory / "authorized").write_text("")
    why = refused(url)
    assert why.kind == "denied"
    assert "Permission denied (publickey" in why.message
    assert refused("ssh://root@127.0.0.1:9").kind == "network"
    for wrong in ("ssh://-oProxyCommand=x/", "ssh://h:x/", "ssh://h:99999/", "ssh://[1/", "ssh:///sock"):
        assert refused(wrong).kind == "invalid", wrong


def test_a_long_temporary_directory(
    daemon: Daemon, sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a socket is at most 107 bytes."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with DSecSyncClient(f"ssh://root@127.0.0.1:{sshd.port}{daemon.socket}") as client:
        assert client.list() == []


def test_a_users_master_connection_is_used_and_left_as_it_was(daemon: Daemon, sshd: Sshd, tunnels: Path) -> None:
    """ControlMaster: ssh hands the forwarding to the master and ends; it is taken back when the client closes."""
    control = sshd.directory / "cm"
    with (sshd.directory / "ssh.conf").open("a") as file:
        file.write(f" ControlMaster auto\n ControlPath {control}\n ControlPersist 60\n")
    ssh = [*sshd.command.split(), "-p", str(sshd.port)]
    subprocess.run([*ssh, "-fnN", "root@127.0.0.1"], check=True, stderr=subprocess.DEVNULL)
    try:
        url = f"ssh://root@127.0.0.1:{sshd.port}{daemon.socket}"
        with DSecSyncClient(url) as client, DSecSyncClient(url) as other:
            assert client.list() == other.list() == []
            assert len(live(tunnels)) == 2
        deadline = time.monotonic() + 10  # the master closes what it had accepted in its own time
        while live(tunnels):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        subprocess.run([*ssh, "-O", "check", "root@127.0.0.1"], check=True, stderr=subprocess.DEVNULL)
    finally:
        subprocess.run([*ssh, "-O", "exit", "root@127.0.0.1"], check=True, stderr=subprocess.DEVNULL)


def test_a_killed_clients_tunnel_ends_and_is_swept(daemon: Daemon, sshd: Sshd, tunnels: Path) -> None:
    """ssh ends with it; its directory goes with the next tunnel that is made, those that are in use stay."""
    url = f"ssh://root@127.0.0.1:{sshd.port}{daemon.socket}"
    code = "import sys, time; from dsecd.client import *\nwith DSecSyncClient(sys.argv[1]): print(1); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-uc", code, url], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        (theirs,) = live(tunnels)
        child.kill()
    deadline = time.monotonic() + 10
    while subprocess.run(["pgrep", "-f", str(theirs)], stdout=subprocess.DEVNULL).returncode == 0:
        assert time.monotonic() < deadline, "ssh is still there"
        time.sleep(0.05)
    assert theirs.is_dir()
    with DSecSyncClient(url):
        (used,) = live(tunnels)
        for path in (theirs, used):
            os.utime(path, (0, 0))
        with DSecSyncClient(url) as other:
            assert other.list() == []
            assert not theirs.exists()
            assert used.is_dir()


def test_it_goes_through_a_jump_host(daemon: Daemon, sshd: Sshd, tmp_path: Path) -> None:
    """ProxyJump of the user's configuration, by a host name that only that configuration knows."""
    (tmp_path / "jump").mkdir()
    jump = Sshd(tmp_path / "jump")
    try:
        conf = sshd.directory / "ssh.conf"
        known = (jump.directory / "known").read_text() + (sshd.directory / "known").read_text()
        (sshd.directory / "known").write_text(known)
        conf.write_text(
            f"Host node\n HostName 127.0.0.1\n Port {sshd.port}\n User root\n ProxyJump door\n"
            f"Host door\n HostName 127.0.0.1\n Port {jump.port}\n User root\n IdentityFile {jump.directory}/user\n"
            + conf.read_text()
        )
        with DSecSyncClient(f"ssh://node{daemon.socket}") as client:
            assert client.list() == []
        assert "Accepted publickey" in jump.log.read_text()
    finally:
        jump.stop()


@pytest.mark.parametrize("again_s", [0.0, None], ids=["at once", "made again"])
def test_a_tunnel_that_breaks_is_an_error_not_an_exit_code(daemon: Daemon, sshd: Sshd, again_s: float | None) -> None:
    """Case 7 over ssh: sshd's session dies in the middle of a command. By default it is asked again: one run."""
    with (
        DSecSyncClient(f"ssh://root@127.0.0.1:{sshd.port}{daemon.socket}", again_s=again_s) as far,
        DSecSyncClient(daemon.url) as near,
        near.run_container(container_args(container_image=BASE)) as sandbox,
    ):
        timer = threading.Timer(0.5, sshd.kill_connections)
        timer.start()
        if again_s is None:
            result = far.get(sandbox.id).run_shell("echo run >> /runs; sleep 2; cat /runs; exit 3", timeout=40)
            assert (result.exit_code, result.stdout, result.replayed) == (3, "run\n", True)
        else:
            with pytest.raises(DsecError) as caught:
                far.get(sandbox.id).run_shell("sleep 30", timeout=40)
            assert caught.value.kind == "outcome_unknown"
        timer.join()


@asynchronous
async def test_a_file_and_a_tree_outlive_their_tunnel(
    daemon: Daemon, sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sshd's sessions die in the middle of each: they are brought from their start again, and are there once."""
    data = secrets.token_bytes(8 << 20)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_bytes(data)
    cuts = 0

    def cut(stream: Callable[..., AsyncIterator[bytes]]) -> Callable[..., AsyncIterator[bytes]]:
        async def broken(*args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
            nonlocal cuts
            left = 3  # pieces before the cut
            async for piece in stream(*args, **kwargs):
                yield piece
                left -= 1
                if left == 0 and not cuts:
                    cuts += 1
                    sshd.kill_connections()

        return broken

    url = f"ssh://root@127.0.0.1:{sshd.port}{daemon.socket}"
    async with daemon.client() as near, DSecClient(url) as client:
        box = await near.run_container(container_args(container_image=BASE))
        there = Sandbox(client, box.info)
        monkeypatch.setattr(client_files, "_chunks", cut(client_files._chunks))
        assert await there.write_file("/root/file", data) == len(data)
        assert cuts == 1
        assert await box.read_file("/root/file") == data
        cuts = 0
        monkeypatch.setattr(client_files, "pack", cut(client_files.pack))
        assert (await there.upload(tmp_path / "tree", "/root/tree")).issues == []
        assert cuts == 1
        assert await box.read_file("/root/tree/file") == data
        await box.stop()


CALLS, BOXES = 500, 10


@asynchronous
async def test_five_hundred_calls_outlive_their_tunnel(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In flight over one tunnel between network namespaces, whose server's sessions are killed and whose link is
    down for longer than ssh waits: each has its one answer, and each ran once."""
    far = FarHost()
    try:
        sshd = Sshd(tmp_path, far.address, far.within)
        try:
            monkeypatch.setenv("DSEC_SSH", f"{sshd.command} -o ServerAliveInterval=1 -o ServerAliveCountMax=2")
            async with (
                daemon.client() as near,
                DSecClient(f"ssh://root@{far.address}{daemon.socket}", again_s=120) as client,
            ):
                args = container_args(container_image=BASE, pids_limit=400)
                boxes = [one for one in await near.run_containers(args, BOXES) if isinstance(one, Sandbox)]
                there = [Sandbox(client, one.info) for one in boxes]
                line = "echo x >>/root/n$N; while [ ! -e /root/go ]; do sleep 1; done; echo $N"
                calls = [
                    asyncio.create_task(
                        there[n % BOXES].run_shell(line, env={"N": str(n)}, request_id=f"tunnel-{n}", timeout=300)
                    )
                    for n in range(CALLS)
                ]
                await _all(boxes, "ls /root | grep -c ^n", str(CALLS // BOXES))
                sshd.kill_connections()
                await asyncio.sleep(1)
                far.plug(plugged=False)
                await asyncio.sleep(5)
                far.plug(plugged=True)
                for one in boxes:
                    await one.run_shell("touch /root/go")
                async with asyncio.timeout(120):
                    results = await asyncio.gather(*calls)
                assert [one.stdout for one in results] == [f"{n}\n" for n in range(CALLS)]
                assert sum(one.replayed for one in results) > CALLS // 2
                await _all(boxes, "cat /root/n* | wc -l", str(CALLS // BOXES))
                await near.stop_many(boxes)
        finally:
            sshd.stop()
    finally:
        far.end()


async def _all(boxes: list[Sandbox], line: str, expected: str) -> None:
    """Until that is what it says in each of them."""
    async with asyncio.timeout(90):
        for one in boxes:
            while (await one.run_shell(line)).stdout.strip() != expected:
                await asyncio.sleep(0.2)
