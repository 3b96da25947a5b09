"""The model's address in an agent sandbox, where no model is: holds a scaffold's requests until they are answered.

Usage: python3 relay.py PORT. On PORT it is an OpenAI-compatible HTTP server for the scaffold; on PORT + 1 the worker
comes, through its daemon, gets a first line numbered 0 and every open request as a line of JSON, and sends answers as
lines, as often as it likes: what was answered stays answered. Written for any Python 3 with its standard library;
knows nothing of dsecd.

It runs among the tenant's processes, which may kill it, or talk to it as the worker does. They can cheat nobody but
their own scaffold so: what counts is in the daemon's log.
"""

from __future__ import annotations

import http.server
import json
import select
import socket
import sys
import threading
from typing import Any

OPEN_MAX = 64  # requests at once
BODY_MAX = 4 << 20
LOOK_S = 1.0  # how soon a scaffold that hung up is noticed


class Item:
    """One request."""

    def __init__(self, ident: int, body: Any) -> None:
        self.ident, self.body = ident, body
        self.answer: tuple[int, bytes] | None = None
        self.left = False  # whoever asked has hung up: who asks the same again takes its place


class Book:
    """All requests that are not delivered yet."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.items: dict[int, Item] = {}
        self.last = 0

    def enter(self, body: Any) -> Item | None:
        with self.changed:
            for item in self.items.values():
                if item.left and item.body == body:
                    item.left = False
                    return item
            if len(self.items) >= OPEN_MAX:
                left = next((one.ident for one in self.items.values() if one.left), None)
                if left is None:
                    return None
                del self.items[left]  # nobody came back for it
            self.last += 1
            item = self.items[self.last] = Item(self.last, body)
            self.changed.notify_all()
            return item

    def settle(self, ident: int, status: int, body: Any) -> None:
        with self.changed:
            item = self.items.get(ident)
            if item is not None and item.answer is None:
                item.answer = status, json.dumps(body).encode()
                self.changed.notify_all()

    def close(self, item: Item) -> None:
        with self.changed:
            self.items.pop(item.ident, None)


BOOK = Book()


class Model(http.server.BaseHTTPRequestHandler):
    """What the scaffold takes for its model."""

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if not 0 < size <= BODY_MAX:
            self.send(413, {"error": {"message": "the request is empty or too long", "type": "invalid_request_error"}})
            return
        try:
            body = json.loads(self.rfile.read(size))
        except ValueError:
            self.send(400, {"error": {"message": "the request is not JSON", "type": "invalid_request_error"}})
            return
        if isinstance(body, dict) and body.get("stream"):
            self.send(400, {"error": {"message": "streaming is not supported", "type": "invalid_request_error"}})
            return
        item = BOOK.enter(body)
        if item is None:
            self.send(429, {"error": {"message": "too many requests at once", "type": "rate_limit_error"}})
            return
        answer = self.wait(item)
        if answer is not None:
            self.send_raw(*answer)
            BOOK.close(item)

    def wait(self, item: Item) -> tuple[int, bytes] | None:
        """None: the scaffold hung up first."""
        while True:
            with BOOK.changed:
                if item.answer is None:
                    BOOK.changed.wait(LOOK_S)
                if item.answer is not None:
                    return item.answer
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                with BOOK.changed:
                    item.left = True
                return None

    def do_GET(self) -> None:
        self.send(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})

    def send(self, status: int, body: Any) -> None:
        self.send_raw(status, json.dumps(body).encode())

    def send_raw(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


def serve_worker(listener: socket.socket) -> None:
    """One worker at a time; a newer connection replaces an older one."""
    current: socket.socket | None = None
    while True:
        sock, _ = listener.accept()
        if current is not None:
            try:
                current.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        current = sock
        threading.Thread(target=tell, args=(sock,), daemon=True).start()
        threading.Thread(target=hear, args=(sock,), daemon=True).start()


def tell(sock: socket.socket) -> None:
    told: set[int] = set()
    try:
        sock.sendall(b'{"id": 0, "body": null}\n')  # it listens, on both ports
        while True:
            with BOOK.changed:
                fresh = [item for item in BOOK.items.values() if item.ident not in told and item.answer is None]
                if not fresh:
                    BOOK.changed.wait()
                    continue
            for item in fresh:
                told.add(item.ident)
                sock.sendall(json.dumps({"id": item.ident, "body": item.body}).encode() + b"\n")
    except OSError:
        pass


def hear(sock: socket.socket) -> None:
    try:
        with sock, sock.makefile("rb") as lines:
            for line in lines:
                answer = json.loads(line)
                BOOK.settle(answer["id"], answer["status"], answer["body"])
    except (OSError, ValueError, KeyError, TypeError):
        pass


def main() -> None:
    port = int(sys.argv[1])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Model)
    server.daemon_threads = True
    listener = socket.create_server(("127.0.0.1", port + 1))
    threading.Thread(target=serve_worker, args=(listener,), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
