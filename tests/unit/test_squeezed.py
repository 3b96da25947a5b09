"""Squeezed twins of blobs: made by the tool, read in ranges, and none of what they could do wrong gets through."""

from __future__ import annotations

import contextlib
import http.server
import os
import random
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dsecd.erofs.model import SUM
from dsecd.erofs.stores import BlobStore, StoreConfig, open_store, squeezed
from dsecd.errors import DsecError

HEAD = struct.calcsize("<8sIIQ")
NAME = "f" * 64 + ".data"


def content() -> bytes:
    """Pieces that can be squeezed, pieces that can not, and a short last one."""
    rng = random.Random(7)
    return b"".join((rng.randbytes(SUM), b"text " * (SUM // 5) + b"tail!"[: SUM % 5], bytes(SUM))) * 2 + b"end" * 1000


class Twin:
    def __init__(self, top: Path) -> None:
        self.data = content()
        self.blob = top / NAME
        self.blob.write_bytes(self.data)
        assert squeezed.main([str(top)]) == 0
        self.path = top / f"{NAME}.z"

    def lengths(self) -> list[int]:
        count = -(-len(self.data) // SUM)
        return list(struct.unpack_from(f"<{count}I", self.path.read_bytes(), HEAD))

    def patch(self, at: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(data)


@pytest.fixture
def twin(tmp_path: Path) -> Twin:
    return Twin(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlobStore]:
    with contextlib.closing(open_store("far", StoreConfig(kind="path", path=str(tmp_path), squeezed=True))) as one:
        yield one


def test_ranges(twin: Twin, store: BlobStore) -> None:
    """Random ones, with the blob itself out of reach: what comes back can only come from the twin."""
    assert twin.path.stat().st_size < 0.5 * len(twin.data)
    twin.blob.rename(twin.blob.with_suffix(".away"))
    rng = random.Random(3)
    for _ in range(200):
        at = rng.randrange(len(twin.data))
        size = rng.randrange(1, min(3 * SUM, len(twin.data) - at) + 1)
        assert store.read(NAME, at, size, 5) == twin.data[at : at + size]
    assert store.read(NAME, 0, 0, 5) == b""
    assert store.read(NAME, 0, len(twin.data), 5) == twin.data


def test_pieces_that_cannot_be_squeezed_stay_as_they_are(twin: Twin) -> None:
    assert twin.lengths()[0] == SUM


def test_without_a_twin(twin: Twin, store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blob is read as it is, and a twin that comes later is found later."""
    away = twin.path.rename(twin.path.with_suffix(".later"))
    assert store.read(NAME, 5, 10, 5) == twin.data[5:15]
    away.rename(twin.path)
    twin.blob.write_bytes(bytes(len(twin.data)))  # to tell the two apart
    assert store.read(NAME, 5, 10, 5) == bytes(10)
    monkeypatch.setattr(squeezed, "ABSENT_S", 0.0)
    assert store.read(NAME, 5, 10, 5) == twin.data[5:15]


@pytest.mark.parametrize(("at", "data"), [
    (0, b"x"),
    (8, struct.pack("<I", 4096)),
    (12, struct.pack("<I", 0)),
    (12, struct.pack("<I", 1 << 31)),
    (16, struct.pack("<Q", 1 << 40)),
    (HEAD, struct.pack("<I", 0)),
    (HEAD, struct.pack("<I", SUM + 1)),
])  # fmt: skip
def test_what_is_no_index_is_no_twin(twin: Twin, store: BlobStore, at: int, data: bytes) -> None:
    twin.patch(at, data)
    assert store.read(NAME, 0, len(twin.data), 5) == twin.data


def test_altered_piece(twin: Twin, store: BlobStore) -> None:
    """One error of the store's, and the other pieces are still read."""
    twin.patch(HEAD + 4 * len(twin.lengths()) + SUM, b"\0" * 8)
    with pytest.raises(DsecError, match=r"piece 1 cannot be expanded") as caught:
        store.read(NAME, SUM, 10, 5)
    assert (caught.value.kind, caught.value.infra, caught.value.retryable) == ("image", True, True)
    assert store.read(NAME, 0, SUM, 5) == twin.data[:SUM]


def grown(size: int, says: bool) -> bytes:
    return zstandard.ZstdCompressor(level=9, write_content_size=says).compress(b"A" * size)


@pytest.mark.parametrize(("piece", "why"), [
    (grown(64 << 20, True), "it says it holds 67108864 bytes"),
    (grown(64 << 20, False), "it says it holds -1 bytes"),
    (grown(SUM - 1, True), "it says it holds"),
    (grown(64 << 20, False)[:4] + b"\xa0" + struct.pack("<I", SUM) + grown(64 << 20, True)[9:], ""),  # it lies
])  # fmt: skip
def test_piece_that_would_grow_beyond_its_size(twin: Twin, store: BlobStore, piece: bytes, why: str) -> None:
    """The many bytes of a small frame never exist."""
    start = HEAD + 4 * len(twin.lengths()) + SUM
    twin.patch(HEAD + 4, struct.pack("<I", len(piece)))
    twin.patch(start, piece)
    with pytest.raises(DsecError, match=f"piece 1 cannot be expanded: {why}"):
        store.read(NAME, SUM, SUM, 5)


def test_truncated_twin(twin: Twin, store: BlobStore) -> None:
    os.truncate(twin.path, twin.path.stat().st_size - 10)
    with pytest.raises(DsecError, match="truncated"):
        store.read(NAME, len(twin.data) - 10, 10, 5)


def test_tool_follows_its_directory(twin: Twin, tmp_path: Path) -> None:
    before = twin.path.stat().st_mtime_ns
    assert squeezed.main([str(tmp_path)]) == 0
    assert twin.path.stat().st_mtime_ns == before  # what is there stays
    twin.patch(0, b"dsecz1\0\0")
    assert squeezed.main([str(tmp_path)]) == 0
    assert twin.path.read_bytes()[:8] == b"dsecz2\0\0"  # what an older version made does not
    twin.blob.unlink()
    assert squeezed.main([str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []
    assert squeezed.main([]) == 2


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    top: Path
    seen: list[str]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.seen.append(self.path)
        path = self.top / self.path.lstrip("/")
        if not path.exists():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        first, last = (int(text) for text in self.headers["Range"].removeprefix("bytes=").split("-"))
        whole = path.read_bytes()
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(whole)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(whole[first : last + 1])


def test_over_http(twin: Twin, tmp_path: Path) -> None:
    """The index is asked for once, each range is one request, and a 404 is no twin."""
    Handler.top, Handler.seen = tmp_path, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with contextlib.closing(open_store("web", StoreConfig(kind="http", url=url, squeezed=True))) as store:
            for at in (0, SUM, 3 * SUM + 5):
                assert store.read(NAME, at, 1000, 5) == twin.data[at : at + 1000]
            assert Handler.seen == [f"/{NAME}.z"] * 5
        twin.path.unlink()
        Handler.seen.clear()
        with contextlib.closing(open_store("web", StoreConfig(kind="http", url=url, squeezed=True))) as store:
            for at in (0, SUM):
                assert store.read(NAME, at, 1000, 5) == twin.data[at : at + 1000]
            assert Handler.seen == [f"/{NAME}.z", f"/{NAME}", f"/{NAME}"]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
