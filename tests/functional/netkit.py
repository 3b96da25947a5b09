"""A world for networks: a "host" whose daemon has sandboxes, and a "far" side with servers, each a namespace of ours.

Nothing outside can be reached from here and nothing of it is needed: what answers on the far side are threads of the
tests, on sockets that were made there.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
from daemonkit import Daemon

from dsecd.net import netns

HOST4, HOST6 = "203.0.113.1", "2001:db8:1::1"
DNS4 = "203.0.113.53"
GOOD4, OTHER4, DENIED4, LAN4 = "203.0.113.10", "203.0.113.11", "203.0.113.66", "10.55.0.10"
GOOD6 = "2001:db8:1::10"
PORTS = (80, 443, 8080, 3128)
ZONE: dict[str, dict[str, list[str]]] = {
    "good.example.org": {"A": [GOOD4], "AAAA": [GOOD6]},
    "other.example.org": {"A": [OTHER4]},
    "denied.example.org": {"A": [DENIED4]},
    "files.good.example.org": {"A": [OTHER4]},
    "alias.example.org": {"CNAME": ["good.example.org"]},
    "metadata.example.org": {"A": ["169.254.169.254"]},
    "loopback.example.org": {"A": ["127.0.0.1"], "AAAA": ["::1"]},
    "host.example.org": {"A": [HOST4]},
    "lan.example.org": {"A": [LAN4]},
    "mixed.example.org": {"A": [GOOD4, "127.0.0.1", "100.88.0.9"]},
    "many.example.org": {"A": [f"203.0.113.{n}" for n in range(100, 130)]},
}
SERVICES = {
    "pypi": {"hosts": ["good.example.org", "*.good.example.org"], "ports": ["80/tcp", "443/tcp"]},
    "npm": {"hosts": ["other.example.org"]},
    "wide": {"hosts": ["203.0.113.0/24"], "ports": ["8080/tcp"]},
}


def ip(pin: Path, *lines: str) -> None:
    """A batch of `ip` commands in that namespace."""
    command = ["nsenter", f"--net={pin}", "ip", "-batch", "-"]
    subprocess.run(command, input="\n".join(lines) + "\n", text=True, check=True)


class World:
    """Both sides. connections: (address, port) of each connection that a far server accepted; questions: (name, type)
    of each DNS query that came there."""

    def __init__(self, directory: Path) -> None:
        self.host, self.far = directory / "host", directory / "far"
        self.connections: list[tuple[str, int]] = []
        self.questions: list[tuple[str, str]] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    # -- making it ----------------------------------------------------------------------------------------------------
    def open(self) -> None:
        netns.make(self.host)
        netns.make(self.far)
        fd = os.open(self.far, os.O_RDONLY | os.O_CLOEXEC)
        try:
            command = ["nsenter", f"--net={self.host}", "ip", "link", "add", "out0", "type", "veth"]
            command += ["peer", "name", "in0", "netns", f"/proc/self/fd/{fd}"]
            subprocess.run(command, check=True, pass_fds=[fd])
            ip(self.host, "link set lo up", f"addr add {HOST4}/24 dev out0", f"addr add {HOST6}/64 dev out0 nodad",
               "link set out0 up", "route add 10.55.0.0/24 dev out0",
               "route add 169.254.169.254/32 dev out0")  # fmt: skip
            addresses = [f"addr add {one}/24 dev in0" for one in (DNS4, GOOD4, OTHER4, DENIED4, LAN4)]
            addresses += ["addr add 169.254.169.254/32 dev in0", f"addr add {GOOD6}/64 dev in0 nodad"]
            ip(self.far, "link set lo up", *addresses, "link set in0 up")
            self.inside(self.host, self._forward)
            self.inside(self.far, self._serve)
        finally:
            os.close(fd)

    @staticmethod
    def _forward() -> None:
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")

    @staticmethod
    def inside(pin: Path, work: Callable[[], Any]) -> Any:
        fd = os.open(pin, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return netns.inside(fd, work)
        finally:
            os.close(fd)

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        for port in PORTS:
            sock = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, self._accept)
            self._sockets.append(sock)
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            sock = socket.socket(socket.AF_INET, kind)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((DNS4, 53))
            if kind == socket.SOCK_STREAM:
                sock.listen(16)
            selector.register(sock, selectors.EVENT_READ, self._ask if kind == socket.SOCK_DGRAM else self._ask_stream)
            self._sockets.append(sock)
        thread = threading.Thread(target=self._loop, args=(selector,), name="far side")
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()
        netns.unmake(self.host)
        netns.unmake(self.far)

    # -- the far side -------------------------------------------------------------------------------------------------
    def _loop(self, selector: selectors.BaseSelector) -> None:
        while not self._stop.is_set():
            for key, _ in selector.select(0.05):
                with contextlib.suppress(OSError):
                    key.data(key.fileobj)
        selector.close()

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        local = sock.getsockname()
        self.connections.append((local[0].removeprefix("::ffff:"), local[1]))
        thread = threading.Thread(target=self._answer, args=(sock,), name="far side: connection")
        thread.start()
        self._threads.append(thread)

    def _answer(self, sock: socket.socket) -> None:
        """A line for a line, until the other side is done: one that was cut off says nothing any more."""
        with sock:
            sock.settimeout(0.2)
            quiet = 0
            while not self._stop.is_set() and quiet < 5:
                try:
                    data = sock.recv(4096)
                except TimeoutError:
                    quiet += 1
                    continue
                except OSError:
                    return
                if not data:
                    return
                with contextlib.suppress(OSError):
                    sock.sendall(b"far:" + data)

    def _ask(self, sock: socket.socket) -> None:
        data, peer = sock.recvfrom(4096)
        sock.sendto(self._reply(data, 512), peer)

    def _ask_stream(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(2)
            size = int.from_bytes(sock.recv(2), "big")
            reply = self._reply(sock.recv(size), 65535)
            sock.sendall(len(reply).to_bytes(2, "big") + reply)

    def _reply(self, data: bytes, room: int) -> bytes:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(question.rdtype)
        self.questions.append((name, kind))
        reply = dns.message.make_response(query, recursion_available=True)
        records = ZONE.get(name, {})
        if name.endswith(".pool.example.org"):  # as many as a bench asks for
            records = {"A": [f"203.0.113.{sum(name.encode()) % 200 + 20}"]}
        elif name not in ZONE:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        if "CNAME" in records:
            target = records["CNAME"][0]
            reply.answer.append(dns.rrset.from_text(question.name, 30, "IN", "CNAME", target + "."))
            name, records = target, ZONE[target]
        if kind in records:
            reply.answer.append(dns.rrset.from_text(name + ".", 30, "IN", kind, *records[kind]))
        wire = reply.to_wire(max_size=65535)
        if len(wire) > room:
            reply.answer.clear()
            reply.flags |= dns.flags.TC
            wire = reply.to_wire()
        return wire

    # -- looking ------------------------------------------------------------------------------------------------------
    def forget(self) -> None:
        self.connections.clear()
        self.questions.clear()


def links(pin: Path) -> set[str]:
    """Interfaces of a namespace; none when it is not there."""
    if not pin.exists():
        return set()
    return {f"link {name} of {pin.name}" for _, name in World.inside(pin, socket.if_nameindex)}


def objects(pin: Path) -> set[str]:
    """Tables, chains, sets and counters of a namespace's packet filter, and elements that name a sandbox."""
    if not pin.exists():
        return set()
    done = subprocess.run(["nsenter", f"--net={pin}", "nft", "-j", "list", "ruleset"], capture_output=True, check=True)
    found = set()
    for one in json.loads(done.stdout)["nftables"]:
        ((kind, what),) = one.items()
        if kind not in ("metainfo", "rule"):
            found.add(f"nft {kind} {what['name']} of {pin.name}")
        if kind in ("map", "set") and "box" in json.dumps(what.get("elem", [])):
            found.add(f"elements of sandboxes in {what['name']} of {pin.name}")
    return found


def picture(world: World, daemon: Daemon) -> set[str]:
    """All of both that a sandbox may leave behind."""
    pins = (world.host, router(daemon))
    found = {item for pin in pins for item in links(pin) | objects(pin)}
    return {item.replace(f" of {router(daemon).name}", " of router") for item in found}


def router(daemon: Daemon) -> Path:
    """The name of its first router's namespace."""
    return daemon.run_dir / f"net/router{daemon.config['id_first_slot']}"


@contextlib.contextmanager
def nothing_more(world: World, daemon: Daemon) -> Iterator[None]:
    """What is there at the end was there at the beginning, but for the router itself."""
    before = picture(world, daemon)
    yield
    allowed = _of_router(daemon)
    deadline = time.monotonic() + 5
    while extra := {item for item in picture(world, daemon) - before if item not in allowed}:
        assert time.monotonic() < deadline, sorted(extra)
        time.sleep(0.05)


def _of_router(daemon: Daemon) -> set[str]:
    name = f"dsec{daemon.config['id_first_slot']}"
    host = {f"link {name} of host", f"nft table {name} of host"}
    host |= {f"nft chain {chain} of host" for chain in ("input", "source")}
    router = {f"link {one} of router" for one in ("lo", "out")} | {"nft table dsecd of router"}
    router |= {f"nft chain {chain} of router" for chain in ("guard", "input", "forward", "source")}
    router |= {f"nft set {one} of router" for one in ("bound4", "bound6", "never4", "never6")}
    return host | router | {f"nft map {one} of router" for one in ("from_box", "to_box", "ask")}


# What a test runs inside: one connection, and how it went.
CONNECT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as sock:
        sock.sendall(b"hello")
        print(sock.recv(100).decode())
except OSError as exc:
    print("failed:", exc)
"""
