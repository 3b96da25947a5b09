"""A real sshd with keys of its own, on loopback or in a network namespace behind a veth link; sshfs mounts of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

SSHD = Path("/usr/sbin/sshd")


class Sshd:
    """`command` is the ssh that knows it. within: how to start a program where it is to live."""

    def __init__(self, directory: Path, address: str = "127.0.0.1", within: Sequence[str | Path] = ()) -> None:
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
        self.address = address
        self.port = 22 if within else _free_port(address)
        self.within = tuple(within)
        (directory / "authorized").write_text((directory / "user.pub").read_text())
        key = " ".join((directory / "host.pub").read_text().split()[:2])
        (directory / "known").write_text(f"[{address}]:{self.port} {key}\n{address} {key}\n")
        (directory / "sshd.conf").write_text(
            f"ListenAddress {address}\nPort {self.port}\nHostKey {directory}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {directory}/authorized\nStrictModes no\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nAllowStreamLocalForwarding yes\nSubsystem sftp internal-sftp\n"
        )
        (directory / "ssh.conf").write_text(
            f"Host *\n IdentityFile {directory}/user\n IdentitiesOnly yes\n UserKnownHostsFile {directory}/known\n"
            " GlobalKnownHostsFile /dev/null\n StrictHostKeyChecking yes\n"
        )
        self.directory = directory
        self.command = f"ssh -F {directory}/ssh.conf"
        self.log = directory / "sshd.log"
        Path("/run/sshd").mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        argv = [*self.within, SSHD, "-D", "-e", "-f", self.directory / "sshd.conf"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while True:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex((self.address, self.port)) == 0:
                    return
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)

    def kill(self) -> None:
        """It and its sessions, as when the machine fails."""
        everybody = self._everybody()
        self._signal(signal.SIGKILL)
        self.process.wait(10)
        psutil.wait_procs(everybody[1:], 10)

    def kill_connections(self) -> None:
        """Those there are; it goes on to listen."""
        for one in self._everybody()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def freeze(self, *, frozen: bool) -> None:
        """Connections stay, and nothing answers."""
        self._signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def _everybody(self) -> list[psutil.Process]:
        daemon = psutil.Process(self.process.pid)
        return [daemon, *daemon.children(recursive=True)]

    def _signal(self, number: int) -> None:
        for one in self._everybody():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


class FarHost:
    """A network namespace at the other end of a veth link."""

    def __init__(self) -> None:
        number = os.getpid()
        self.name = f"imgc{number}"
        self.link = f"imc{number}"
        net = f"198.18.{number % 256}"  # for tests of networks (RFC 2544), and nobody's
        self.address = f"{net}.2"
        self.within = ("ip", "netns", "exec", self.name)
        try:
            _ip("netns", "add", self.name)
            _ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _ip("address", "add", f"{net}.1/24", "dev", self.link)
            _ip("link", "set", self.link, "up")
            _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", self.name, "link", "set", device, "up")
        except BaseException:
            self.end()
            raise

    def plug(self, *, plugged: bool) -> None:
        _ip("-n", self.name, "link", "set", "eth0", "up" if plugged else "down")

    def end(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False)
        subprocess.run(["ip", "link", "del", self.link], check=False, stderr=subprocess.DEVNULL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def sshfs(sshd: Sshd, there: Path, here: Path, alive_s: int = 2) -> Iterator[None]:
    """`there` of the sshd's host, mounted at `here`. It connects again when the connection breaks.

    alive_s: how long the far end may say nothing before it does.
    """
    options = ",".join((
        f"ssh_command={sshd.command}", "reconnect", "ConnectTimeout=2", "ServerAliveInterval=1",
        f"ServerAliveCountMax={alive_s}",
    ))  # fmt: skip
    here.mkdir()
    log = sshd.directory / "sshfs.log"
    with log.open("ab") as noise:
        process = subprocess.Popen(
            ["sshfs", "-f", "-o", options, f"root@{sshd.address}:{there}", here],
            stdin=subprocess.DEVNULL, stdout=noise, stderr=noise, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 10
        while not os.path.ismount(here):
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.02)
        yield
    finally:
        everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        subprocess.run(["umount", here], check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)  # one whose server came and went may stay for ever
        for one in everybody:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(10)
        if os.path.ismount(here):  # it was busy: a test failed
            subprocess.run(["umount", "-l", here], check=False)
