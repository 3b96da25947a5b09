"""The installed project under systemd: units, socket activation, watchdog, restarts, cgroup v2 limits, AppArmor.

Runs in the lab VM after `make install`. The base image comes as a tar with the delivery (/srv/base.tar).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dsecd.client import DSecClient, DSecContainerRunArgs, DsecError, Sandbox
from dsecd.wire import execs
from dsecd.wire import images as image_wire

pytestmark = pytest.mark.lab

T = TypeVar("T")
SOCKET = Path("/run/dsecd/dsecd.sock")
BASE_TAR = Path("/srv/base.tar")
SLICE = Path("/sys/fs/cgroup/dsec.slice/dsecd-sandboxes.service")
DROP_IN = Path("/run/systemd/system/dsecd.service.d/lab.conf")
UP_S = 90.0  # everything is ten times slower under emulation


def sh(line: str, check: bool = True) -> str:
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=180)
    assert not check or done.returncode == 0, f"{line}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout.strip()


def show(unit: str, what: str) -> str:
    return sh(f"systemctl show -P {what} {unit}")


def until(what: str, holds: Callable[[], bool], seconds: float = UP_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, (
            f"{what}: not within {seconds:g} s\n{sh('journalctl -u dsecd -n 40', False)}"
        )
        time.sleep(0.1)


def run(work: Callable[[DSecClient], Coroutine[Any, Any, T]]) -> T:
    async def inside() -> T:
        async with DSecClient() as client:
            return await work(client)

    return asyncio.run(inside())


@pytest.fixture(scope="module", autouse=True)
def units() -> Iterator[None]:
    """Enabled and started as an administrator would; a base image imported."""
    sh("systemctl enable --now dsecd.socket dsecd.service")
    until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")

    async def chunks() -> AsyncIterator[bytes]:
        with BASE_TAR.open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk

    async def fill(client: DSecClient) -> None:
        await client.import_image(image_wire.Import(name="base:lab"), chunks())

    run(fill)
    yield
    sh("systemctl disable --now dsecd.service dsecd.socket dsecd-sandboxes.service")
    assert sh("findmnt -rn -t overlay -o TARGET", False) == ""


@pytest.fixture
def box() -> Iterator[str]:
    """A running sandbox's id."""
    args = DSecContainerRunArgs(container_image="base:lab", memory_limit_mb=128, pids_limit=64, cpu_cores_limit=0.5)

    async def make(client: DSecClient) -> str:
        return (await client.run_container(args)).id

    ident = run(make)
    yield ident

    async def end(client: DSecClient) -> None:
        with contextlib.suppress(DsecError):
            await (await client.get(ident)).stop()

    run(end)


async def shell(client: DSecClient, ident: str, line: str, **options: Any) -> Any:
    return await Sandbox(client, (await client.get(ident)).info).run_shell(line, **options)


def test_units_are_up_and_say_so() -> None:
    """Type=notify reached READY, STATUS is ours, the units are in their slice."""
    assert show("dsecd.service", "SubState") == "running"
    assert "sandboxes" in show("dsecd.service", "StatusText")
    assert show("dsecd.service", "Slice") == show("dsecd-sandboxes.service", "Slice") == "dsec.slice"


def test_the_socket_is_the_groups() -> None:
    """A member of dsec may talk to the daemon, somebody else may not."""
    assert sh(f"stat -c '%U:%G %a' {SOCKET}") == "root:dsec 660"
    probe = f'import socket; socket.socket(socket.AF_UNIX).connect("{SOCKET}")'
    assert subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", "python3", "-c", probe]).returncode != 0
    group = sh("getent group dsec | cut -d: -f3")
    assert subprocess.run(["setpriv", "--reuid=65534", f"--groups={group}", "python3", "-c", probe]).returncode == 0


def test_socket_activation_starts_it() -> None:
    """With the daemon stopped, a connection alone brings it up and is answered."""
    sh("systemctl stop dsecd.service")
    assert show("dsecd.service", "ActiveState") == "inactive"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(UP_S)
        sock.connect(str(SOCKET))
        sock.sendall(b'{"jsonrpc":"2.0","id":1,"method":"daemon.hello","params":{}}\n')
        answer = json.loads(sock.makefile().readline())
    assert answer["result"]["protocol"] == 1
    assert show("dsecd.service", "ActiveState") == "active"


def test_limits_are_the_kernels(box: str) -> None:
    """memory.max, pids.max and cpu.max of the sandbox's cgroup, below the delegated unit."""
    group = SLICE / box
    assert (group / "memory.max").read_text() == f"{128 << 20}\n"
    assert (group / "pids.max").read_text() == "64\n"
    assert (group / "cpu.max").read_text() == "50000 100000\n"


def test_memory_limit_is_real(box: str) -> None:
    """Allocating past the limit is `oom`, the sandbox goes on, the host does not notice."""

    async def work(client: DSecClient) -> None:
        hog = "x = bytearray(256 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"
        result = await shell(client, box, f"python3 -c '{hog}'", timeout=120)
        assert result.oom
        assert result.exit_code != 0
        assert (await shell(client, box, "echo alive")).stdout == "alive\n"

    run(work)


def test_apparmor_confines_commands(box: str) -> None:
    """Commands run under the profile in enforce mode; it binds root; the agent is not in it."""

    async def work(client: DSecClient) -> None:
        seen = await shell(client, box, "cat /proc/self/attr/current; mount -t tmpfs x /mnt; echo $?")
        assert seen.stdout.splitlines()[0] == "dsec-sandbox (enforce)"
        assert seen.stdout.splitlines()[-1] != "0"

    run(work)


@pytest.mark.parametrize("way", ["restart", "kill"])
def test_a_running_command_outlives_the_daemon(box: str, way: str) -> None:
    """Restarted politely or killed: the command goes on, its result is there, the sandbox is usable."""
    key = f"lab-{way}"
    line = "sleep 8; echo done; echo x >> /root/count"

    async def begin(client: DSecClient) -> str:
        started: execs.Started = await client.call("exec.start", execs.Start(id=box, shell=line, request_id=key))
        return started.exec_id

    exec_id = run(begin)
    pid = show("dsecd.service", "MainPID")
    if way == "restart":
        sh("systemctl restart dsecd.service")
    else:
        os.kill(int(pid), signal.SIGKILL)
    until("a new daemon", lambda: show("dsecd.service", "MainPID") not in ("0", pid))
    until("it is ready", lambda: show("dsecd.service", "ActiveState") == "active")

    async def finish(client: DSecClient) -> None:
        result: execs.Ran = await client.call("exec.wait", execs.Wait(id=box, exec_id=exec_id))
        assert (result.exit_code, result.stdout) == (0, b"done\n")
        again: execs.Started = await client.call("exec.start", execs.Start(id=box, shell=line, request_id=key))
        assert again.exec_id == exec_id
        assert (await shell(client, box, "cat /root/count")).stdout == "x\n"

    run(finish)


def test_the_watchdog_ends_a_daemon_that_hangs(box: str) -> None:
    """Stopped with SIGSTOP: systemd kills and restarts it; the sandbox goes on."""
    DROP_IN.parent.mkdir(parents=True, exist_ok=True)
    DROP_IN.write_text("[Service]\nWatchdogSec=4\n")
    try:
        sh("systemctl daemon-reload && systemctl restart dsecd.service")
        pid = show("dsecd.service", "MainPID")
        os.kill(int(pid), signal.SIGSTOP)
        until("a new daemon", lambda: show("dsecd.service", "MainPID") not in ("0", pid))
        until("it is ready", lambda: show("dsecd.service", "ActiveState") == "active")
        assert "Watchdog timeout" in sh("journalctl -u dsecd.service -b --no-pager")

        async def work(client: DSecClient) -> None:
            assert (await shell(client, box, "echo alive")).stdout == "alive\n"

        run(work)
    finally:
        DROP_IN.unlink()
        sh("systemctl daemon-reload && systemctl restart dsecd.service")


def test_the_journal_has_fields(box: str) -> None:
    """journalctl finds a sandbox's lines by its id."""
    lines = sh(f"journalctl -b -o json SANDBOX_ID={box}").splitlines()
    assert any(json.loads(line)["MESSAGE"].startswith("started") for line in lines)
    assert all(json.loads(line)["REQUEST_ID"] for line in lines)


def test_stopping_the_sandboxes_unit_ends_them(box: str) -> None:
    """The administrator's way to end everything: the daemon reports each as dead."""
    sh("systemctl stop dsecd.service dsecd-sandboxes.service && systemctl start dsecd.service")

    async def work(client: DSecClient) -> None:
        assert (await client.get(box)).info.state == "failed"

    run(work)


def test_doctor_fails_nothing() -> None:
    report = json.loads(sh("dsecctl --json doctor"))
    failed = [check for check in report if check["level"] == "fail"]
    assert failed == []
