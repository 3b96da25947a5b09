"""A coordinator as its own process; and nodes: daemons each with a view of a machine of its own, behind a real sshd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from daemonkit import Daemon
from sshd_kit import Sshd

from dsecd.client import DSecClient, DsecError
from dsecd.wire import fleet as fleet_wire


class Fleet:
    """A dsec-fleet process over an inventory file."""

    def __init__(self, directory: Path, hosts: dict[str, dict[str, Any]]) -> None:
        self.directory = directory
        self.socket = directory / "fleet.sock"
        self.inventory = directory / "fleet.toml"
        self.list(hosts)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def list(self, hosts: dict[str, dict[str, Any]]) -> None:
        text = "".join(
            f"[hosts.{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in one.items())
            for name, one in hosts.items()
        )
        self.inventory.write_text(text)

    def start(self) -> Fleet:
        argv = [sys.executable, "-m", "dsecd.fleet", "-i", self.inventory, "-s", self.socket]
        with open(self.directory / "fleet.log", "ab") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        return self

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(20)
            self.process = None

    async def ready(self, up: int) -> None:
        """Until so many hosts answer."""
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(DsecError):
                async with DSecClient(self.url) as client:
                    status: fleet_wire.Status = await client.call("fleet.status", fleet_wire.StatusParams())
                    if sum(not host.problem for host in status.hosts) == up:
                        return
            assert time.monotonic() < deadline, (self.directory / "fleet.log").read_text()
            await asyncio.sleep(0.05)


# PID 1 of a view: it only reaps.
INIT = "trap : CHLD; while :; do sleep 1000 & wait $!; done"


class Net:
    """A bridge here, and a network namespace for each node behind it."""

    def __init__(self, nodes: int) -> None:
        number = os.getpid()
        self.bridge = f"flb{number}"
        self.prefix = f"198.19.{number % 256}"  # for tests of networks (RFC 2544), and nobody's
        self.names = [f"fln{number}-{n}" for n in range(nodes)]
        self._links = [f"fl{number}-{n}" for n in range(nodes)]
        lines = [f"link add {self.bridge} type bridge", f"addr add {self.prefix}.1/24 dev {self.bridge}"]
        lines += [f"link set {self.bridge} up"]
        for n, (name, link) in enumerate(zip(self.names, self._links, strict=True)):
            lines += [f"netns add {name}", f"link add {link} type veth peer name eth0 netns {name}"]
            lines += [f"link set {link} master {self.bridge} up"]
            lines += [f"-n {name} addr add {self.address(n)}/24 dev eth0", f"-n {name} link set lo up"]
            lines += [f"-n {name} link set eth0 up"]
        try:
            for line in lines:
                subprocess.run(["ip", *line.split()], check=True)
        except BaseException:
            self.end()
            raise

    def address(self, node: int) -> str:
        return f"{self.prefix}.{10 + node}"

    def plug(self, node: int, *, plugged: bool) -> None:
        subprocess.run(["ip", "link", "set", self._links[node], "up" if plugged else "down"], check=True)

    def end(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, stderr=subprocess.DEVNULL)


class Node(Daemon):
    """A daemon in mount, PID and network namespaces of its own, where also an sshd is. `lose` is the machine's end."""

    def __init__(self, directory: Path, net: Net, number: int, **config: Any) -> None:
        super().__init__(directory, **config)
        self._net, self._number = net, number
        self._view: subprocess.Popen[bytes] | None = None
        self.sshd: Sshd | None = None

    @property
    def url_there(self) -> str:
        return f"ssh://root@{self._net.address(self._number)}{self.socket}"

    def boot(self) -> Node:
        """The view, its sshd and the daemon."""
        command = ["nsenter", f"--net=/run/netns/{self._net.names[self._number]}", "--"]
        command += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", INIT]
        self._view = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._first = _child(self._view.pid)
        within = self.enter
        if self.sshd is None:
            place = self.directory / "sshd"
            place.mkdir()
            self.sshd = Sshd(place, self._net.address(self._number), within)
        else:
            self.sshd.within = tuple(within)
            self.sshd.start()
        self.start()
        return self

    @property
    def enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._first), "--mount", "--pid", "--net", "--"]

    @property
    def pid(self) -> int:
        return _child(super().pid)

    @property
    def own_pid(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])

    def _end(self, number: int, timeout: float) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return super()._end(0, timeout)

    def plug(self, *, plugged: bool) -> None:
        """Its link, in or out."""
        self._net.plug(self._number, plugged=plugged)

    def lose(self) -> None:
        """All that runs there is gone at once: daemon, sandboxes, sshd."""
        view, self._view = self._view, None
        if view is None:
            return
        os.kill(self._first, signal.SIGKILL)
        view.wait(20)
        if self.sshd is not None:
            self.sshd.process.wait(20)
        if self.process is not None:
            super()._end(0, 20)


def _child(pid: int) -> int:
    """Of nsenter and unshare, who wait for their one child."""
    deadline = time.monotonic() + 10
    while not (found := psutil.Process(pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found[0].pid


@contextlib.contextmanager
def nodes(directory: Path, images: Path, count: int, ids_each: int) -> Iterator[list[Node]]:
    """With these images, ids apart. DSEC_SSH reaches them all."""
    net = Net(count)
    made: list[Node] = []
    before = os.environ.get("DSEC_SSH")
    try:
        for n in range(count):
            first = 50 + ids_each * n
            slots = {"id_first_slot": first, "id_last_slot": first + ids_each - 1, "max_sandboxes": ids_each}
            one = Node(directory / f"node{n}", net, n, host_tag=f"n{n}", disk_pool_mb=2048, **slots)
            made.append(one)
            one.state.mkdir()
            subprocess.run(["cp", "-al", images, one.state / "images"], check=True)
            one.boot()
        known, conf = directory / "known", directory / "ssh.conf"
        sshds = [one.sshd for one in made if one.sshd is not None]
        known.write_text("".join((one.directory / "known").read_text() for one in sshds))
        conf.write_text(
            "".join(f"Host {one.address}\n IdentityFile {one.directory}/user\n" for one in sshds)
            + f"Host *\n IdentitiesOnly yes\n UserKnownHostsFile {known}\n GlobalKnownHostsFile /dev/null\n"
            " StrictHostKeyChecking yes\n ConnectTimeout 3\n ServerAliveInterval 1\n ServerAliveCountMax 2\n"
        )
        os.environ["DSEC_SSH"] = f"ssh -F {conf} -o ServerAliveInterval=1"
        yield made
    finally:
        for one in made:
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                if one.process is not None and (alive := list(one.sandboxes())):
                    one.ask("sandbox.stop_many", {"ids": alive})
                if one.process is not None:
                    one.stop()
            one.lose()
            one.destroy()
        net.end()
        if before is None:
            os.environ.pop("DSEC_SSH", None)
        else:
            os.environ["DSEC_SSH"] = before
