"""The installed project under systemd: units, socket activation, watchdog, restarts, cgroup v2 limits, AppArmor.

Runs in the lab VM after `make install`. The base image comes as a tar with the delivery (/srv/base.tar).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from systemd_kit import UP_S, run, sandbox, sh, shell, show, until

from dsecd.client import DSecClient, DSecFnCallArgs
from dsecd.wire import execs
from dsecd.wire import images as image_wire

pytestmark = pytest.mark.lab

SOCKET = Path("/run/dsecd/dsecd.sock")
BASE_TAR = Path("/srv/base.tar")
SLICE = Path("/sys/fs/cgroup/dsec.slice/dsecd-sandboxes.service")
DROP_IN = Path("/run/systemd/system/dsecd.service.d/lab.conf")


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
    with sandbox("base:lab", memory_limit_mb=128, pids_limit=64, cpu_cores_limit=0.5) as ident:
        yield ident


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


def test_apparmor_closes_what_a_mistake_opens(box: str) -> None:
    """Root under the profile opens none of the daemon's records, trajectories and run files."""
    log = f"/var/lib/dsecd/trajectory/{box}.log"
    look = [f"import os; os.listdir({path!r})" for path in ("/var/lib/dsecd", "/run/dsecd", "/run/dsecd/sandboxes")]
    look += [f"open({log!r}).read()", "open('/var/lib/dsecd/state.db')"]
    if Path("/sys/kernel/security/apparmor/features/network_v9/af_unix").exists():  # who connects is asked since then
        look.append(f'import socket; socket.socket(socket.AF_UNIX).connect("{SOCKET}")')
    for line in look:
        assert subprocess.run(["python3", "-c", line], capture_output=True).returncode == 0, line
        confined = ["aa-exec", "-p", "dsec-sandbox", "--", "python3", "-c", line]
        tried = subprocess.run(confined, capture_output=True, text=True)
        assert tried.returncode != 0 and "PermissionError" in tried.stderr, (line, tried.stderr)
    assert subprocess.run(["aa-exec", "-p", "dsec-sandbox", "--", "cat", "/etc/hostname"]).returncode == 0


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


CALLS = {
    "ok": ("echo $((6 * 7))", {"expected": b"42"}),
    "wrong_answer": ("echo 41", {"expected": b"42"}),
    "memory_limit": ("head -c 300000000 /dev/zero | tail -c 200000000 >/dev/null; exit 1", {}),
    "process_limit": ("for n in 1 2 3 4 5 6 7 8 9; do sleep 50 & done; wait", {"processes": 5, "wall_s": 20.0}),
    "time_limit": ("while :; do :; done", {"cpu_s": 0.5, "wall_s": 60.0}),
    "wall_limit": ("sleep 100", {"wall_s": 1.0}),
    "output_limit": ("yes", {"cpu_s": 60.0}),
    "denied": ("exec /etc/passwd", {}),
}


def test_calls_have_their_limits_from_cgroup_v2() -> None:
    """Every limit by the controllers of v2, under the AppArmor profile; and nothing of any call stays."""

    async def judge(client: DSecClient) -> dict[str, str]:
        got = {}
        for wanted, (line, more) in CALLS.items():
            argv = ["/etc/passwd"] if wanted == "denied" else ["sh", "-c", line]
            args = DSecFnCallArgs(argv=argv, container_image="base:lab", memory_limit_mb=64, **more)
            for _ in range(3):
                got[wanted] = (await client.fncall(args)).verdict
        confined = await client.fncall(
            DSecFnCallArgs(argv=["cat", "/proc/self/attr/current"], container_image="base:lab")
        )
        got["profile"] = confined.stdout.decode().strip()
        small = await client.fncall(DSecFnCallArgs(argv=["true"], container_image="base:lab"))
        got["peak"] = "small" if small.memory_kb < 8192 else f"{small.memory_kb} KiB"
        return got

    expected = {name: name for name in CALLS} | {"profile": "dsec-sandbox (enforce)", "peak": "small"}
    assert run(judge) == expected
    assert not sh("pgrep -f '^sleep 50'", False)
