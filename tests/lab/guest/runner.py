"""The lab guest's end of the host's line: reads commands from a virtio-serial port, runs them, sends back what they do.

One JSON object per line, both ways. Host: {"id", "argv", "timeout"}. Guest: {"hello"} once, then for each command
any number of {"id", "stream": "stdout"|"stderr", "data": base64} and one {"id", "status", "timed_out"}. A command
that outlives its time is killed with its process group; what it had started elsewhere (systemd units) is not its group.
Baked into the root image; uses the standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

PORT = "lab.0"
CHUNK = 32 * 1024
DRAIN_S = 0.5  # after the command's own end: a daemon it left behind may hold the pipes open for ever
ENVIRONMENT = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "DSECD_LAB": "1",
}


def open_port() -> IO[bytes]:
    for name in Path("/sys/class/virtio-ports").glob("*/name"):
        if name.read_text().strip() == PORT:
            return open(f"/dev/{name.parent.name}", "r+b", buffering=0)
    sys.exit(f"there is no virtio-serial port {PORT}")


class Line:
    """The port as lines of JSON."""

    def __init__(self, port: IO[bytes]) -> None:
        self.port = port
        self.buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[self.port.write(data) :]

    def receive(self) -> dict[str, Any]:
        while b"\n" not in self.buffer:
            data = self.port.read(CHUNK)
            if not data:  # QEMU has not connected its end yet
                time.sleep(0.05)
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def run(line: Line, request: dict[str, Any]) -> None:
    ident, deadline = request["id"], time.monotonic() + request["timeout"]
    try:
        process = subprocess.Popen(
            request["argv"],
            cwd="/root",
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        text = f"{request['argv'][0]}: {error.strerror}\n".encode()
        line.send({"id": ident, "stream": "stderr", "data": base64.b64encode(text).decode()})
        line.send({"id": ident, "status": 127, "timed_out": False})
        return
    with process:
        timed_out = forward(line, ident, process, deadline)
        with contextlib.suppress(ProcessLookupError):
            if timed_out:
                os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    line.send({"id": ident, "status": status if status >= 0 else 128 - status, "timed_out": timed_out})


def forward(line: Line, ident: int, process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Send on the output until the command has ended; true if its time ran out first."""
    ended_at: float | None = None
    pidfd = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ, "")
            assert process.stdout and process.stderr
            selector.register(process.stdout, selectors.EVENT_READ, "stdout")
            selector.register(process.stderr, selectors.EVENT_READ, "stderr")
            while selector.get_map():
                limit = deadline if ended_at is None else ended_at + DRAIN_S
                left = limit - time.monotonic()
                if left <= 0:
                    return ended_at is None
                for key, _ in selector.select(left):
                    if not key.data:
                        ended_at = time.monotonic()
                        selector.unregister(pidfd)
                        continue
                    data = os.read(key.fd, CHUNK)
                    if data:
                        line.send({"id": ident, "stream": key.data, "data": base64.b64encode(data).decode()})
                    else:
                        selector.unregister(key.fileobj)
    finally:
        os.close(pidfd)
    return False


def main() -> None:
    with open_port() as port:
        line = Line(port)
        line.send({"hello": os.uname().release})
        while True:
            run(line, line.receive())


if __name__ == "__main__":
    main()
