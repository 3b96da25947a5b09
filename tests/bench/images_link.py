"""Two ends and a thin line: this host's network namespace and one of our own, joined by a veth pair that is shaped.

Both directions are held to 200 Mbit/s by TBF. What is at the far end (docker-registry, our range server, the proxy that
makes the registry as far away as the range server) is started into that namespace and ends with it.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench import images_content

RATE: Final = "200mbit"
DELAY_MS: Final = 2.0  # added to each request at the far end, as the test host has no netem
NEAR: Final = "10.211.77.1"
FAR: Final = "10.211.77.2"
BLOBS: Final = 8080  # ports at the far end
REGISTRY: Final = 5000  # the proxy
BEHIND: Final = 5001  # docker-registry itself, on the loopback interface there


@dataclass(frozen=True)
class Link:
    """`blobs`: where the range server is. `registry`: host:port of the registry, through the proxy."""

    device: str
    blobs: str = f"http://{FAR}:{BLOBS}"
    registry: str = f"{FAR}:{REGISTRY}"

    def received(self) -> int:
        """Bytes that have come over the line, headers included."""
        return int(Path(f"/sys/class/net/{self.device}/statistics/rx_bytes").read_text())


@contextlib.contextmanager
def far_end(storage: Path, blobs: Path) -> Iterator[Link]:
    """The line with both servers up. storage: docker-registry's; blobs: what the range server gives."""
    ours = "".join(random.choices(string.ascii_lowercase, k=6))  # no process id: what has ours is a daemon's leftover
    space, near, far = f"dsecd-far-{ours}", f"dnear-{ours}", f"dfar-{ours}"
    inside = ("nsenter", f"--net=/run/netns/{space}")
    _run("ip", "netns", "add", space)
    try:
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
        for prefix, device, address in (((), near, NEAR), (inside, far, FAR)):
            _run(*prefix, "ip", "address", "add", f"{address}/30", "dev", device)
            _run(*prefix, "ip", "link", "set", device, "up")
            _run(*prefix, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", RATE, "burst", "256kb",
                 "latency", "50ms")  # fmt: skip
        _run(*inside, "ip", "link", "set", "lo", "up")
        with images_content.serving(storage, BEHIND, inside), _servers(inside, blobs):
            yield Link(near)
    finally:
        subprocess.run(["ip", "link", "delete", near], capture_output=True, timeout=20, check=False)  # and its peer
        _run("ip", "netns", "delete", space)


@contextlib.contextmanager
def _servers(inside: tuple[str, ...], blobs: Path) -> Iterator[None]:
    process = subprocess.Popen(
        [*inside, sys.executable, "-m", "tests.bench.images_far", FAR, str(BLOBS), str(blobs), str(REGISTRY),
         str(BEHIND), str(DELAY_MS)], stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 20
        while not (_answers(REGISTRY, "/v2/", 200) and _answers(BLOBS, "/", 404)):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the far end does not answer")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(10)


def _answers(port: int, path: str, status: int) -> bool:
    connection = http.client.HTTPConnection(FAR, port, timeout=2)  # which knows of no proxy
    try:
        connection.request("GET", path)
        return connection.getresponse().status == status
    except OSError:
        return False
    finally:
        connection.close()


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()[-300:]}")
