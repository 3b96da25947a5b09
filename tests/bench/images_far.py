"""What runs at the far end of the line: a range server over a directory, and a proxy in front of the registry.

Both let each request wait for the same two milliseconds. Neither copies a byte through Python (sendfile, splice), so
that they take little from the two cores that the measured side runs on.

    python -m tests.bench.images_far ADDRESS BLOBS_PORT DIRECTORY PROXY_PORT REGISTRY_PORT DELAY_MS
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

PIECE: Final = 1 << 20
HEAD_MAX: Final = 1 << 16
IDLE_S: Final = 300.0


class Blobs(BaseHTTPRequestHandler):
    """`GET /NAME` with one range."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = None  # a socket with a timeout does not block, and sendfile wants it to
    directory: Path
    delay_s: float

    def do_GET(self) -> None:
        time.sleep(self.delay_s)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        name = re.fullmatch(r"/([0-9a-f]{64}\.data(\.z)?)", self.path)
        if found is None or name is None:
            self.send_error(404)
            return
        with (self.directory / name[1]).open("rb") as file:
            whole = os.fstat(file.fileno()).st_size
            first, last = int(found[1]), min(int(found[2]), whole - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{whole}")
            self.send_header("Content-Length", str(last - first + 1))
            self.end_headers()
            while first <= last:
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, min(PIECE, last - first + 1))

    def log_message(self, *_: object) -> None:
        pass


class Proxy:
    """HTTP/1.1 in front of a server that names every length: what docker-registry does for GET and HEAD."""

    def __init__(self, address: tuple[str, int], port: int, delay_s: float) -> None:
        self._listening = socket.create_server(address, backlog=64)
        self._port, self._delay_s = port, delay_s

    def serve(self) -> None:
        while True:
            client, _ = self._listening.accept()
            threading.Thread(target=self._connection, args=(client,), daemon=True).start()

    def _connection(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._port), IDLE_S)
        through = os.pipe()
        with client, server, contextlib.suppress(OSError):
            for one in (client, server):
                one.settimeout(None)  # splice wants blocking ones
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request := _head(client):
                time.sleep(self._delay_s)
                server.sendall(request)
                answer = _head(server)
                client.sendall(answer)
                length = re.search(rb"(?im)^content-length: *(\d+)", answer)
                if length and not request.startswith(b"HEAD "):
                    _move(server, client, through, int(length[1]))
        for fd in through:
            os.close(fd)


def _head(peer: socket.socket) -> bytes:
    """Up to the empty line and not a byte of what follows; empty: the peer has closed."""
    while True:
        seen = peer.recv(HEAD_MAX, socket.MSG_PEEK)
        end = seen.find(b"\r\n\r\n")
        if end >= 0:
            return peer.recv(end + 4, socket.MSG_WAITALL)
        if not seen or len(seen) >= HEAD_MAX:
            return b""
        time.sleep(0.001)


def _move(source: socket.socket, target: socket.socket, through: tuple[int, int], size: int) -> None:
    while size:
        taken = os.splice(source.fileno(), through[1], min(size, PIECE))
        if not taken:
            raise OSError("the registry closed in the middle")
        size -= taken
        while taken:
            taken -= os.splice(through[0], target.fileno(), taken)


def main(argv: list[str]) -> None:
    address, blobs_port, directory, proxy_port, registry_port, delay_ms = argv
    Blobs.directory, Blobs.delay_s = Path(directory), float(delay_ms) / 1000
    proxy = Proxy((address, int(proxy_port)), int(registry_port), float(delay_ms) / 1000)
    threading.Thread(target=proxy.serve, daemon=True).start()
    ThreadingHTTPServer((address, int(blobs_port)), Blobs).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
