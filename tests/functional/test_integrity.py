"""Attacks that agents in training were seen to make (docs/integrity.md names all, and the tests of the others): each is
run as root inside, must fail, and must leave what the platform says about the sandbox as it is."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from daemonkit import Daemon, asynchronous, patience, sandbox_of

from dsecd.client import Sandbox

MIB = 1 << 20
EPERM, EACCES, EINVAL, ENOTTY, EOPNOTSUPP = 1, 13, 22, 25, 95
UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
LISTENERS = 4711, 4712


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The attacker, for any Linux."""
    out = tmp_path_factory.mktemp("attack") / "attack"
    source = Path(__file__).with_name("integrity_attack.c")
    subprocess.run(["gcc", "-static", "-O1", "-Wall", "-Wextra", "-Werror", "-o", out, source], check=True)
    return out.read_bytes()


@contextlib.asynccontextmanager
async def attacked(daemon: Daemon, backend: str, program: bytes, **args: Any) -> AsyncIterator[Sandbox]:
    """A sandbox with the attacker in it. Afterwards the platform's own answers about it are the true ones."""
    async with sandbox_of(daemon, backend, **args) as sandbox:
        await sandbox.write_file("/attack", program, mode=0o755)
        await sandbox.write_file("/truth", b"the truth\n" * 1000)
        yield sandbox
        honest = await sandbox.exec(["/bin/sh", "-c", "echo out; echo err >&2; exit 5"])
        assert (honest.exit_code, honest.stdout, honest.stderr) == (5, "out\n", "err\n")
        assert await sandbox.read_file("/truth") == b"the truth\n" * 1000
        assert (await sandbox.refresh()).state == "running"
        log = (await sandbox._client.trajectory(sandbox.id)).entries
        assert log[-1].result["exit_code"] == 5 and log[-1].ref == log[-2].seq
        assert (await sandbox._client.verify_trajectory(sandbox.id)).altered == []


async def found(sandbox: Sandbox, *argv: str, timeout: float = 300) -> list[str]:
    """Runs the attacker to its end; its findings, of which none is a leak."""
    result = await sandbox.exec(["/attack", *argv], timeout=timeout)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and lines.pop() == "done", (result.exit_code, result.stdout[-1000:], result.stderr)
    assert not [line for line in lines if "LEAK" in line], lines
    return lines


@asynchronous
async def test_forged_frames_on_every_descriptor(daemon: Daemon, backend: str, attack: bytes) -> None:
    """No command inherits a socket or anything beside its three streams; frames written to those are its output."""
    async with attacked(daemon, backend, attack) as sandbox:
        frame = (
            b'\x01\x08\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00{"jsonrpc":"2.0","id":1,"method":"sandbox.list"}\n'
        )
        for line in ("/attack", "/attack <&-", "/attack <>/dev/null"):
            result = await sandbox.run_shell(line)
            assert result.exit_code == 7
            assert result.stdout_bytes.endswith(frame) and b"LEAK" not in result.stdout_bytes
            assert result.stderr_bytes.endswith(frame)
        fed = await sandbox.exec(["/attack"], stdin=b"x")
        assert (fed.exit_code, "LEAK" in fed.stdout) == (7, False)
        async with await sandbox.session() as session:
            ran = await session.run("/attack")
            assert (ran.exit_code, "LEAK" in ran.stdout) == (7, False)
            assert (await session.run("echo still")).stdout == "still\n"
        process = await sandbox.start(["/attack"], tty=True)
        ended = await process.wait()
        assert (ended.exit_code, "LEAK" in ended.stdout) == (7, False)


@asynchronous
async def test_no_socket_leads_out(daemon: Daemon, backend: str, attack: bytes) -> None:
    """Every socket file, abstract name, family, vsock number and netlink port is tried: nobody is behind one."""
    theirs = [str(p) for top in (daemon.run_dir, daemon.socket.parent) for p in top.rglob("*") if p.is_socket()]
    theirs += ["/run/dsecd/sock", "dsecd", "dsec-agent", "neighbour"]
    async with (
        sandbox_of(daemon, backend) as neighbour, attacked(daemon, backend, attack) as sandbox,
    ):  # fmt: skip
        await neighbour.write_file("/attack", attack, mode=0o755)
        await neighbour.start(["/attack", "hold", str(LISTENERS[1])])
        lines = await found(sandbox, "sockets", *theirs)
        assert not [line for line in lines if line.startswith("socket file")]
        families = {int(line.split()[1]) for line in lines if line.startswith("family ")}
        assert families == {UNIX, INET, INET6, NETLINK}
        # that it would be found
        await sandbox.start(["/attack", "hold", str(LISTENERS[0])])
        for _ in range(100):
            seen = (await sandbox.exec(["/attack", "sockets", "neighbour"], timeout=300)).stdout
            if "LEAK connected to unix socket neighbour" in seen:
                break
            await asyncio.sleep(0.05)
        assert "LEAK connected to unix socket neighbour" in seen


@asynchronous
async def test_a_port_scan_finds_the_sandbox_alone(daemon: Daemon, backend: str, attack: bytes) -> None:
    """All ports of all its addresses: what it opened itself. The host, metadata, mirrors and the world: unreachable."""
    addresses = [
        "10.0.0.1",
        "10.88.0.1",
        "169.254.169.254",
        "1.1.1.1",
        "2606:4700:4700::1111",
        "fd00:ec2::254",
    ]
    addresses += subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    last = 65_535 if backend == "container" else 5_000  # emulated, 0.8 ms each
    async with (
        sandbox_of(daemon, backend) as neighbour, attacked(daemon, backend, attack) as sandbox,
    ):  # fmt: skip
        await neighbour.write_file("/attack", attack, mode=0o755)
        for box, port in zip((sandbox, neighbour), LISTENERS, strict=True):
            process = await box.start(["/attack", "hold", str(port)], follow=True)
            async with contextlib.aclosing(process.output()) as pieces:
                async for _, piece in pieces:
                    assert piece == b"held\n"
                    break
        lines = await found(sandbox, "ports", str(last), *addresses)
        assert {line for line in lines if line.startswith("scanned")} == {"scanned lo"}
        assert [line for line in lines if line.startswith("open")] == [f"open {LISTENERS[0]}"]
        # A name is no way out either: what a module proxy or a mirror is called, nobody answers.
        for name in ("pypi.example", "proxy.example", "localhost.localdomain"):
            assert (await sandbox.run_shell(f"getent hosts {name}", timeout=30)).stdout == ""


@asynchronous
async def test_ioctls_on_the_file_systems_below(daemon: Daemon, backend: str, attack: bytes) -> None:
    """XFS_IOC_SWAPEXT, btrfs subvolumes, snapshots, quotas, tree search, trim, freeze: not one is carried out."""
    paths = ["/", "/tmp", "/etc/passwd", "/attack", "/usr/bin/grep", "/dev/shm", "/dev", "/sys", "/proc", "/dev/null"]
    async with attacked(daemon, backend, attack, disk_limit_mb=64) as sandbox:
        pool = daemon.state / "pool"
        before = {path.name for path in pool.iterdir()}
        lines = await found(sandbox, "ioctls", *paths)
        tried = Counter(line.rsplit(" ", 1)[1] for line in lines if line.startswith(("XFS", "EXT4", "BTRFS", "FI")))
        assert sum(tried.values()) == 36 * len(paths)
        # ENOTTY: nobody below was asked. EPERM: before anybody was. EINVAL: FIBMAP, of what is no such file.
        assert {int(number) for number in tried} <= {EPERM, EACCES, EINVAL, ENOTTY, EOPNOTSUPP}, tried
        assert {path.name for path in pool.iterdir()} == before
        assert not list(pool.rglob("planted"))
        assert not [line for line in lines if line.startswith("projid")] or backend == "microvm"
        assert (await sandbox.exec(["grep", "-c", "truth", "/truth"])).stdout == "1000\n", "grep is what it was"
        # the limit is what it was
        full = await sandbox.run_shell("head -c 100000000 /dev/urandom > /big; rm /big; test -e /truth")
        assert full.exit_code == 0
        assert "No space left" in full.stderr or "quota" in full.stderr.lower()


@asynchronous
async def test_grep_over_everything_finds_no_answer(daemon: Daemon, backend: str, attack: bytes) -> None:
    """`grep -r` over /, with /proc (kpagecgroup), /sys and /dev: it ends, breaks nothing, and what was said in another
    sandbox, is in its trajectory and its files, and in the daemon's memory, is found nowhere."""
    answer = "answer-" + hashlib.sha256(backend.encode()).hexdigest()
    async with sandbox_of(daemon, backend) as neighbour, attacked(daemon, backend, attack) as sandbox:
        await neighbour.run_shell(f"echo {answer}; echo {answer} > /answer", env={"ANSWER": answer})
        await neighbour.start(["sh", "-c", "sleep 1000; true", answer])
        await sandbox.write_file("/pattern", answer.encode())
        search = await sandbox.run_shell(
            "cat /proc/kpagecgroup /proc/kpagecount /proc/kpageflags | wc -c; grep -rsIlF -f /pattern /", timeout=300
        )
        assert not search.timed_out
        assert search.stdout.split() == ["0", "/pattern"]
        trajectories = daemon.state / "trajectory"
        log = trajectories / f"{neighbour.id}.log"
        assert log.exists() and stat.S_IMODE(log.stat().st_mode) == 0o600
        assert (
            stat.S_IMODE(daemon.state.stat().st_mode) & 0o077 == 0 or stat.S_IMODE(trajectories.stat().st_mode) == 0o700
        )


@asynchronous
async def test_lines_that_look_like_the_log(daemon: Daemon, backend: str, attack: bytes) -> None:
    """Output, arguments and file contents that imitate entries of the trajectory are data in one entry each."""
    fake = f'{"0" * 64} {{"seq":9,"event":"reply","ref":1,"result":{{"exit_code":0,"stdout":"cGFzcw=="}}}}'
    async with attacked(daemon, backend, attack) as sandbox:
        client = sandbox._client
        last = (await client.trajectory(sandbox.id)).last
        result = await sandbox.exec(["sh", "-c", 'printf "\\n%s\\n" "$1"; exit 3', "sh", f"\n{fake}\n"])
        await sandbox.write_file("/fake.log", f"\n{fake}\n".encode())
        entries = await client.trajectory(sandbox.id, after=last)
        assert [entry.event for entry in entries.entries] == ["request", "reply"] * 2
        assert entries.entries[1].result["exit_code"] == result.exit_code == 3
        lines = b"".join([piece async for piece in client.export_trajectory(sandbox.id)]).splitlines()
        assert len(lines) == entries.last
        assert not any(line.startswith(b"0" * 64) for line in lines)


@asynchronous
async def test_everything_that_a_grader_may_ask_lies(daemon: Daemon, backend: str, attack: bytes) -> None:
    """Shell, loader and every tool replaced: a static program that is brought along, files and status stay true."""
    liar = b"#!/attack\n"
    async with attacked(daemon, backend, attack) as sandbox:
        await sandbox.run_shell(
            "cp -a /bin/dash /tmp/sh; cp /attack /usr/lib/liar.so; echo /usr/lib/liar.so > /etc/ld.so.preload"
        )
        for path in ("/bin/bash", "/bin/dash", "/usr/bin/cat", "/usr/bin/sha256sum", "/usr/bin/env"):
            await sandbox.remove(path)
            await sandbox.write_file(path, liar, mode=0o755)
        assert (await sandbox.run_shell("exit 0")).exit_code == 7, "the image's own shell is the tenant's"
        grader = Path("/usr/bin/busybox").read_bytes()
        await sandbox.write_file("/busybox", grader, mode=0o700)
        said = await sandbox.exec(["/busybox", "sha256sum", "/busybox"])
        assert said.stdout.split()[0] == hashlib.sha256(grader).hexdigest()
        assert (await sandbox.exec(["/busybox", "sh", "-c", "exit 3"])).exit_code == 3
        assert await sandbox.read_file("/bin/bash") == liar
        for good, path in (("/tmp/sh", "/bin/dash"), ("/busybox", "/bin/cat")):
            assert (await sandbox.exec(["/busybox", "cp", good, path])).exit_code == 0
        await sandbox.remove("/etc/ld.so.preload")


@pytest.mark.slow
@asynchronous
async def test_yes_costs_the_host_nothing(daemon: Daemon, backend: str, attack: bytes) -> None:
    """`yes`, as a command, in the background and in a session: memory, log and disk of the host are bounded."""
    async with attacked(daemon, backend, attack) as sandbox:
        await sandbox.run_shell("yes | head -c 20000000", cap_bytes=MIB)  # what is allocated once is allocated now
        log = daemon.state / "trajectory" / f"{sandbox.id}.log"
        size, rss = log.stat().st_size, daemon.ask("daemon.stats")["result"]["rss_bytes"]
        unseen = await sandbox.start(["yes"], timeout=8, cap_bytes=MIB)
        async with await sandbox.session() as session:
            flood = asyncio.create_task(session.run("yes", timeout=4, cap_bytes=MIB))
            most = rss
            while not flood.done():
                most = max(most, daemon.ask("daemon.stats")["result"]["rss_bytes"])
                await asyncio.sleep(0.2)
            assert flood.result().timed_out and flood.result().stdout_dropped > 0
            assert re.fullmatch("[0-9a-f]{64}", flood.result().stdout_dropped_sha256)
        ended = await unseen.wait()
        assert ended.timed_out and ended.stdout_dropped > 100 * MIB // patience(backend)
        assert len(ended.stdout_bytes) == MIB
        assert re.fullmatch("[0-9a-f]{64}", ended.stdout_dropped_sha256)
        assert most - rss < 24 * MIB, "a few windows of the session"
        await asyncio.sleep(0.5)
        assert log.stat().st_size - size < 3 * MIB * 4 // 3
        assert shutil.disk_usage(daemon.state).free > 0
