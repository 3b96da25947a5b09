"""`ssh://` through a real sshd on loopback: the SDK and dsecctl reach a daemon as if it were here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from daemonkit import BASE, Daemon, container_args

from dsecd.client import DsecError, DSecSyncClient

SSHD = Path("/usr/sbin/sshd")


class Sshd:
    """One sshd with a key of its own; `command` is the ssh that knows it."""

    def __init__(self, directory: Path) -> None:
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (directory / "authorized").write_text((directory / "user.pub").read_text())
        key = " ".join((directory / "host.pub").read_text().split()[:2])
        (directory / "known").write_text(f"[127.0.0.1]:{self.port} {key}\n")
        (directory / "sshd.conf").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {directory}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {directory}/authorized\nStrictModes no\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nAllowStreamLocalForwarding yes\n"
        )
        (directory / "ssh.conf").write_text(
            f"Host *\n IdentityFile {directory}/user\n IdentitiesOnly yes\n UserKnownHostsFile {directory}/known\n"
            " GlobalKnownHostsFile /dev/null\n StrictHostKeyChecking yes\n"
        )
        self.directory = directory
        self.command = f"ssh -F {directory}/ssh.conf"
        Path("/run/sshd").mkdir(exist_ok=True)
        argv = [str(SSHD), "-D", "-e", "-f", str(directory / "sshd.conf")]
        self.log = directory / "sshd.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    one = Sshd(tmp_path)
    monkeypatch.setenv("DSEC_SSH", one.command)
    yield one
    one.stop()


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


def test_refusals_say_why(daemon: Daemon, sshd: Sshd) -> None:
    """A host key that changed, nobody listening, an option as a host: one error each, and no ssh left."""
    (sshd.directory / "known").write_text("")
    with pytest.raises(DsecError, match="failed") as caught, DSecSyncClient(f"ssh://root@127.0.0.1:{sshd.port}"):
        pass
    assert caught.value.kind == "network"
    with pytest.raises(DsecError) as caught, DSecSyncClient("ssh://root@127.0.0.1:9"):
        pass
    assert caught.value.kind == "network"
    with pytest.raises(DsecError) as caught, DSecSyncClient("ssh://-oProxyCommand=x/"):
        pass
    assert caught.value.kind == "invalid"


def test_a_tunnel_that_breaks_is_an_error_not_an_exit_code(daemon: Daemon, sshd: Sshd) -> None:
    """Case 7 over ssh: sshd's session dies in the middle of a command."""

    def cut() -> None:
        for session in psutil.Process(sshd.process.pid).children(recursive=True):
            session.kill()

    with (
        DSecSyncClient(f"ssh://root@127.0.0.1:{sshd.port}{daemon.socket}") as far,
        DSecSyncClient(daemon.url) as near,
        near.run_container(container_args(container_image=BASE)) as sandbox,
    ):
        timer = threading.Timer(0.5, cut)
        timer.start()
        with pytest.raises(DsecError) as caught:
            far.get(sandbox.id).run_shell("sleep 30", timeout=40)
        timer.join()
        assert caught.value.kind == "outcome_unknown"
