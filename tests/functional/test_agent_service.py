"""The agent as a service of somebody else's machine, without a machine.

Its port is a pseudo-terminal, this host's /dev and /sys show it in a mount namespace, and a shell starts the agent
anew, as an init would, but kills nothing that it left.

What needs a real port, a real systemd and a daemon is in test_fullvm_daemon.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import select
import signal
import socket
import subprocess
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_box import NATIVE, cgroup2_root, until
from vmkit import SerialClient

from dsecd.agent.frames import Field, FrameError, Tag, Type

ALL = (1 << 64) - 1
HELLO: list[Field] = [(Tag.CAPS, ALL)]
TTY, KILL_ALL = 1, 1

# PID 1 of a namespace: what the agent does to the machine ends there. The pty is known by its number in /dev/pts.
_INIT = """
mount --make-rprivate / && mount -t tmpfs x /mnt && mkdir /mnt/pts /mnt/shm /mnt/ports &&
mount --rbind /dev/pts /mnt/pts && ln -s pts/$1 /mnt/vport7p1 &&
for f in null zero urandom ptmx tty; do touch /mnt/$f; mount --bind /dev/$f /mnt/$f || exit; done &&
mount -t tmpfs x /sys/class && mkdir -p /sys/class/virtio-ports/vport0p1 /sys/class/virtio-ports/vport7p1 &&
echo another > /sys/class/virtio-ports/vport0p1/name && echo dsec.agent > /sys/class/virtio-ports/vport7p1/name &&
mount --move /mnt /dev && mount -t proc x /proc || exit
while :; do $2 --service; echo ended $?; sleep 0.05; done
"""


class Port:
    """QEMU's end of the port: one client at a time, and what comes while there is none waits."""

    def __init__(self, directory: Path) -> None:
        self._master, self._slave = pty.openpty()
        tty.setraw(self._slave)  # it stays open: without an agent the port is still there
        self.number = os.ttyname(self._slave).rpartition("/")[2]
        self.path = directory / "port"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._stop, self._stopping = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        peer: socket.socket | None = None
        while True:
            ready = select.select([self._stop, self._listener, *([peer, self._master] if peer else [])], [], [])[0]
            if self._stop in ready:
                break
            if self._listener in ready:
                if peer is not None:
                    peer.close()
                peer, _ = self._listener.accept()
            elif peer is not None:
                try:
                    if self._master in ready:
                        peer.sendall(os.read(self._master, 4096))
                    data = peer.recv(2048) if peer in ready else None
                except OSError:
                    data = b""
                if data:
                    os.write(self._master, data)
                elif data is not None:
                    peer.close()
                    peer = None
        if peer is not None:
            peer.close()

    def close(self) -> None:
        os.write(self._stopping, b"x")
        self._thread.join()
        self._listener.close()
        for fd in (self._master, self._slave, self._stop, self._stopping):
            os.close(fd)


class Machine:
    """What the agent runs in."""

    def __init__(self, directory: Path, port: Port, cgroup: Path) -> None:
        self.cgroup = cgroup
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _INIT, "sh", port.number,
                 str(NATIVE / "dsec-agent")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid())),
            )  # fmt: skip
        (self._init,) = until(lambda: _children(self._process.pid), "no init")
        self.port = port

    def said(self) -> str:
        return self._log.read_text()

    def agent(self) -> int:
        """Its number here."""

        def find() -> int:
            found = [pid for pid in _children(self._init) if b"--service" in _read(f"/proc/{pid}/cmdline")]
            return found[0] if len(found) == 1 else 0

        return int(until(find, "no agent"))

    def client(self) -> SerialClient:
        return SerialClient(self.port.path, HELLO)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _children(pid: int) -> list[int]:
    return [int(word) for word in _read(f"/proc/{pid}/task/{pid}/children").split()]


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    cgroup = cgroup2_root() / f"dsec-service-test-{os.getpid()}"
    cgroup.mkdir()
    port = Port(tmp_path)
    try:
        one = Machine(tmp_path, port, cgroup)
        try:
            yield one
        finally:
            one.end()
    finally:
        port.close()
        until(lambda: _removed(cgroup), "its cgroup did not become empty")


def _removed(cgroup: Path) -> bool:
    with contextlib.suppress(OSError):
        (cgroup / "cgroup.kill").write_text("1")
        for leaf in cgroup.glob("*/"):
            leaf.rmdir()
        cgroup.rmdir()
    return not cgroup.exists()


def test_commands_run_as_the_machines_own(machine: Machine) -> None:
    with machine.client() as client:
        status = "grep -E '^(CapEff|Seccomp|NoNewPrivs):' /proc/self/status"
        said = client.shell(f"id -u; pwd; umask; {status}", env={"PATH": "/usr/bin:/bin"}).stdout.decode().split()
        full = _read(f"/proc/{machine.agent()}/status").decode().partition("CapEff:")[2].split()[0]
        assert said == ["0", "/", "0022", "CapEff:", full, "NoNewPrivs:", "0", "Seccomp:", "0"]
        here = client.shell("readlink /proc/self/ns/pid /proc/1/ns/pid; cat /proc/1/comm").stdout.decode().split()
        assert here[0] == here[1]
        assert here[2] == "sh", "it is one of the machine's processes, whose init it sees"
        nobody = client.shell("id -u; grep ^CapEff: /proc/self/status", user=b"nobody").stdout.decode().split()
        assert nobody == ["65534", "CapEff:", "0" * 16]
        assert client.run("/no/such").error == (2, errno.ENOENT)
        hard = client.exec("sh", "-c", "setsid sleep 1000 & sleep 1000")
        until(lambda: (machine.cgroup / f"x{hard}").exists(), "no leaf")
        client.send(Type.KILL, hard, (Tag.SIGNAL, 9), (Tag.FLAGS, KILL_ALL))
        assert client.finish(hard).signal == 9
        until(lambda: not (machine.cgroup / f"x{hard}").exists(), "a process of it is left")
        terminal = client.shell("tty; test -t 0 && echo is one", flags=TTY)
        assert terminal.stdout.endswith(b"is one\r\n")


def test_files_and_ports_work(machine: Machine, tmp_path: Path) -> None:
    with machine.client() as client:
        data = bytes(range(256)) * 1000
        client.write(str(tmp_path / "file"), data)
        assert (tmp_path / "file").read_bytes() == data
        assert client.read(str(tmp_path / "file")) == data
        assert client.call(Type.STATS).integer(Tag.DISK_LIMIT) > 0
        with socket.create_server(("127.0.0.1", 0)) as server:
            channel = client.channel()
            client.send(Type.CONNECT, channel, (Tag.PORT, server.getsockname()[1]), (Tag.LIMIT, 1 << 20))
            client.expect(Type.CONNECTED, channel)
            server.accept()[0].close()


def test_another_agent_takes_over(machine: Machine) -> None:
    """Whoever talked to the last one is told; what its commands left is killed, and their numbers are not used."""
    with machine.client() as client:
        left = client.exec("sleep", "1000")
        client.expect(Type.STARTED, left)
        first = machine.agent()
        assert first in [int(word) for word in (machine.cgroup / "cgroup.procs").read_text().split()]
        os.kill(first, signal.SIGKILL)
        with pytest.raises(FrameError, match="ended the connection"):
            client.recv()
    with machine.client() as client:
        assert machine.agent() != first
        until(lambda: not _read(f"{machine.cgroup}/x{left}/cgroup.procs"), "a command outlived its agent")
        assert client.next == left + 1
        assert client.shell("echo again").stdout == b"again\n"


def test_it_ends_alone(machine: Machine) -> None:
    """Neither its init nor the host asking for its end is the machine's."""
    with machine.client() as client:
        running = client.exec("sleep", "1000")
        client.expect(Type.STARTED, running)
        first = machine.agent()
        client.raw(Type.SHUTDOWN, 0)
        until(lambda: "ended 0" in machine.said(), "it goes on")
    with machine.client() as client:
        second = machine.agent()
        assert second != first
        os.kill(second, signal.SIGTERM)
        until(lambda: machine.said().count("ended 0") == 2, "it goes on")
    with machine.client() as client:
        assert client.shell("echo alive").stdout == b"alive\n"
    assert "dsec-agent:" not in machine.said()
