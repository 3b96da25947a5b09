"""Stores against real servers on loopback that misbehave on demand, and real directories."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsecd.erofs.stores import BlobStore, StoreConfig, open_store
from dsecd.errors import DsecError

DATA = os.urandom(300_000)
DIGEST = "sha256:" + hashlib.sha256(DATA).hexdigest()
BLOB_PATH = f"/v2/team/images/blobs/{DIGEST}"


Open = Callable[[StoreConfig], BlobStore]


class Server(http.server.ThreadingHTTPServer):
    """`fault` is what the next answers do wrong; `seen` are the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault = ""
        self.elsewhere = ""
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.connections = 0

    def process_request(self, request: Any, address: Any) -> None:
        self.connections += 1
        super().process_request(request, address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are the point of these tests."""

    @property
    def netloc(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))
        if self.path.startswith("/token"):
            self._send(200, json.dumps({"token": "let-me-in", "expires_in": 300}).encode())
            return
        fault = self.server.fault
        if fault == "challenge" and self.headers.get("Authorization") != "Bearer let-me-in":
            self.send_response(401)
            where = f'Bearer realm="http://{self.server.netloc}/token",service="reg",scope="x"'
            self.send_header("WWW-Authenticate", where)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "redirect":
            self.send_response(307)
            self.send_header("Location", f"http://{self.server.elsewhere}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        first, last = (int(text) for text in self.headers["Range"].removeprefix("bytes=").split("-"))
        body = DATA[first : last + 1]
        span = f"bytes {first}-{last}/{len(DATA)}"
        match fault:
            case "whole":
                self._send(200, DATA)
            case "missing":
                self._send(404, b"no")
            case "other range":
                self._send(206, body, f"bytes {first + 1}-{last + 1}/{len(DATA)}")
            case "short":
                self._send(206, body[:-10], span)
            case "long":
                self._send(206, body + b"more", span)
            case "cut":
                self._send(206, body, span, claim=len(body) + 100)
                self.close_connection = True
            case "reset":
                self.connection.close()
            case "drip":
                self.send_response(206)
                self.send_header("Content-Range", span)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.05)
            case "hang":
                time.sleep(1)
            case _:
                self._send(206, body, span)

    def _send(self, status: int, body: bytes, span: str = "", claim: int | None = None) -> None:
        self.send_response(status)
        if span:
            self.send_header("Content-Range", span)
        self.send_header("Content-Length", str(len(body) if claim is None else claim))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield one
    one.shutdown()
    thread.join()
    one.server_close()


@pytest.fixture
def opened() -> Iterator[Callable[[StoreConfig], BlobStore]]:
    """Opens stores, and closes them."""
    with contextlib.ExitStack() as stack:
        yield lambda config: stack.enter_context(contextlib.closing(open_store("web", config)))


def refused(store: Any, blob: str, timeout_s: float = 2.0) -> str:
    with pytest.raises(DsecError) as caught:
        store.read(blob, 1000, 2000, timeout_s)
    assert (caught.value.kind, caught.value.infra) == ("image", True)
    return caught.value.message


def test_http_ranges_come_over_one_connection(server: Server, opened: Open) -> None:
    store = opened(StoreConfig(kind="http", url=f"http://{server.netloc}/blobs"))
    for offset, size in ((0, 1), (4096, 65536), (299_999, 1), (0, len(DATA))):
        assert store.read("b.data", offset, size, 2) == DATA[offset : offset + size]
    assert store.read("b.data", 5, 0, 2) == b""
    assert server.connections == 1
    assert server.seen[0][0] == "/blobs/b.data"


def test_http_survives_a_server_that_closed_an_idle_connection(server: Server, opened: Open) -> None:
    store = opened(StoreConfig(kind="http", url=f"http://{server.netloc}"))
    assert store.read("b", 0, 10, 2) == DATA[:10]
    server.fault = "reset"
    refused(store, "b")
    server.fault = ""
    assert store.read("b", 0, 10, 2) == DATA[:10]


@pytest.mark.parametrize("fault", ["whole", "missing", "other range", "short", "long", "cut", "reset"])
def test_http_never_takes_wrong_bytes(server: Server, opened: Open, fault: str) -> None:
    store = opened(StoreConfig(kind="http", url=f"http://{server.netloc}"))
    server.fault = fault
    refused(store, "b")
    server.fault = ""
    assert store.read("b", 1000, 2000, 2) == DATA[1000:3000]


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_http_has_one_deadline_for_the_whole_answer(server: Server, opened: Open, fault: str) -> None:
    store = opened(StoreConfig(kind="http", url=f"http://{server.netloc}"))
    server.fault = fault
    started = time.monotonic()
    refused(store, "b", 0.3)
    assert time.monotonic() - started < 1.5


def test_http_follows_only_named_redirects(server: Server, opened: Open) -> None:
    other = Server()
    thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        server.fault, server.elsewhere = "redirect", other.netloc
        config = StoreConfig(kind="http", url=f"http://{server.netloc}")
        assert "which `redirects` does not name" in refused(opened(config), "b")
        named = StoreConfig(kind="http", url=f"http://{server.netloc}", redirects=(other.netloc,))
        assert opened(named).read("b", 7, 70, 2) == DATA[7:77]
        server.elsewhere = server.netloc  # for ever
        assert "more than 4 redirects" in refused(opened(config), "b")
    finally:
        other.shutdown()
        thread.join()
        other.server_close()


def test_http_says_when_nobody_is_there(opened: Open) -> None:
    store = opened(StoreConfig(kind="http", url="http://127.0.0.1:9"))
    assert "refused" in refused(store, "b")


def test_registry_answers_a_token_challenge_once(server: Server, opened: Open) -> None:
    store = opened(StoreConfig(kind="registry", url=f"{server.netloc}/team/images"))
    server.fault = "challenge"
    assert store.read(DIGEST, 10, 100, 2) == DATA[10:110]
    assert store.read(DIGEST, 20, 100, 2) == DATA[20:120]
    paths = [path for path, _ in server.seen]
    assert paths[0] == paths[2] == paths[3] == BLOB_PATH
    assert len(paths) == 4
    assert paths[1].startswith("/token?scope=repository%3Ateam%2Fimages%3Apull")


def test_registry_takes_digests_only(server: Server, opened: Open) -> None:
    store = opened(StoreConfig(kind="registry", url=f"{server.netloc}/team/images"))
    assert "is not a digest" in refused(store, "../../etc/passwd")


def test_directory_reads_and_refuses(tmp_path: Path, opened: Open) -> None:
    (tmp_path / "b.data").write_bytes(DATA)
    (tmp_path / "link").symlink_to("/etc/passwd")
    store = opened(StoreConfig(kind="path", path=str(tmp_path)))
    assert store.read("b.data", 4096, 8192, 2) == DATA[4096 : 4096 + 8192]
    for blob in ("../b.data", "a/b", "", ".hidden", "b\0"):
        assert "is not the name of a blob" in refused(store, blob)
    assert "symbolic links" in refused(store, "link")
    (tmp_path / "b.data").write_bytes(DATA[:1500])
    assert "truncated" in refused(store, "b.data")
    (tmp_path / "b.data").unlink()
    assert "No such file" in refused(store, "b.data")


def test_directory_that_hangs_costs_a_few_threads(tmp_path: Path, opened: Open) -> None:
    """A FIFO nobody writes stands for a server that is away: open(2) does not return."""
    os.mkfifo(tmp_path / "away")
    store = opened(StoreConfig(kind="path", path=str(tmp_path)))
    for _ in range(8):
        assert "no answer within" in refused(store, "away", 0.02)
    assert "8 reads hang already" in refused(store, "away", 0.02)
    fds = [os.open(tmp_path / "away", os.O_WRONLY | os.O_NONBLOCK) for _ in range(1)]
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    "config",
    [
        StoreConfig(kind="path", path="relative"),
        StoreConfig(kind="http", url="ftp://x/"),
        StoreConfig(kind="http", url="http://"),
        StoreConfig(kind="registry", url="https://host/repo"),
        StoreConfig(kind="registry", url="host"),
    ],
)
def test_configuration_is_checked(config: StoreConfig) -> None:
    with pytest.raises(DsecError) as caught:
        open_store("bad", config)
    assert caught.value.kind == "invalid"
