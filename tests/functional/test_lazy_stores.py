"""Stores that misbehave, seen through a mount; two hosts on one store; images that come here after all."""

from __future__ import annotations

import asyncio
import http.server
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from erofs_kit import Tar, import_now, registry
from pages_kit import World, eio, falls_back, random_files, read_all, until, worlds

from dsecd.erofs import jobs
from dsecd.erofs.model import SUM, Manifest
from dsecd.erofs.store import ImageStore
from dsecd.erofs.stores import StoreConfig
from dsecd.errors import DsecError

MIB = 1 << 20


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path) as one:
        yield one


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    return path


# -- HTTP --------------------------------------------------------------------------------------------------------------
class Faulty(http.server.ThreadingHTTPServer):
    """The data of one image, and what is wrong with the answers."""

    daemon_threads = True
    fault = ""
    data = b""

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are the point."""


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Faulty

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data, size, fault = self.server.data[first : last + 1], len(self.server.data), self.server.fault
        if fault == "redirects":
            self.send_response(302)
            self.send_header("Location", "http://198.18.255.1/elsewhere")
            data = b""
        else:
            self.send_response(206)
            shift = 4096 if fault == "sends another range" else 0
            self.send_header("Content-Range", f"bytes {first + shift}-{last + shift}/{size}")
        if fault == "has other bytes now":
            data = bytes(len(data))
        length = len(data) + {"claims more than it sends": 10, "claims less than it sends": -10}.get(fault, 0)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = bool(fault)


@pytest.fixture
def server() -> Iterator[Faulty]:
    with Faulty(("127.0.0.1", 0), Answer) as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.02,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


FAULTS = {
    "redirects": "redirected to '198.18.255.1'",
    "sends another range": "was not asked for",
    "claims more than it sends": "its length is",
    "claims less than it sends": "its length is",
    "has other bytes now": "is not what the image says",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_server_that(make: Callable[..., World], server: Faulty, fault: str) -> None:
    """What was read before is right and stays; the rest is EIO, and why is told; then all is well again."""
    content = os.urandom(12 * SUM + 77)
    world = make(stores={"far": StoreConfig(kind="http", url=f"http://127.0.0.1:{server.server_address[1]}")})
    image = world.image({"a": content})
    server.data = world.images.data_path(image).read_bytes()
    with world.mounted(image) as top:
        with (top / "a").open("rb", buffering=0) as f:
            assert os.pread(f.fileno(), 4096, 0) == content[:4096]
        time.sleep(0.3)  # what is read ahead has come
        server.fault = fault
        eio(top / "a", 11 * SUM)
        trouble = world.stats(image).trouble
        assert trouble is not None and trouble.kind == "image"
        assert FAULTS[fault] in trouble.why
        with (top / "a").open("rb", buffering=0) as f:
            assert os.pread(f.fileno(), 4096, 0) == content[:4096]
        server.fault = ""
        assert (top / "a").read_bytes() == content


# -- directories that hosts share --------------------------------------------------------------------------------------
def test_one_host_collects_while_the_other_reads(make: Callable[..., World], shared: Path) -> None:
    one, two = make(shared), make(shared)
    files = random_files(16 * MIB, 20)
    image = one.image(files)
    assert two.image(files).digest == image.digest
    stop = threading.Event()
    trouble: list[BaseException] = []

    def collect() -> None:
        try:
            one.images.remove(image.digest)
            while not stop.is_set():
                one.images.gc()
                other = import_now(one.images, Tar().file("x", os.urandom(5000)).done(), name="passing")
                one.images.remove(other.digest)
        except BaseException as exc:  # noqa: BLE001  told below
            trouble.append(exc)

    thread = threading.Thread(target=collect)
    with two.mounted(image) as top:
        (top / "f000").read_bytes()
        thread.start()
        for _ in range(3):
            read_all(top, files)
            time.sleep(0.3)
        stop.set()
        thread.join(30)
    assert trouble == []
    assert sorted(os.listdir(shared)) == [f"{image.hex}.by-{two.top.name}", f"{image.hex}.data"]
    two.images.remove(image.digest)
    assert os.listdir(shared) == []


def overwrite(path: Path, at: int, data: bytes) -> None:
    path.chmod(0o644)
    with path.open("r+b") as f:
        f.seek(at)
        f.write(data)


def test_direct_store_is_sampled_when_it_is_mounted(make: Callable[..., World], shared: Path) -> None:
    """A blob that was replaced, or zeroed at an end, is refused. One byte in the middle `verify` finds for sure."""
    world = make(shared, direct=True)
    content = os.urandom(40 * MIB)
    image = world.image({"a": content})
    path = world.images.data_path(image)
    assert world.acquire(image).driver == "file"
    world.release(image)
    for at, wrong in ((0, bytes(4096)), (image.data_size - 4096, bytes(4096)), (0, os.urandom(image.data_size))):
        good = path.read_bytes()
        overwrite(path, at, wrong)
        with pytest.raises(DsecError, match="its data is altered") as caught:
            world.acquire(image)
        assert caught.value.kind == "image"
        overwrite(path, 0, good)
    world.images.verify(image)
    overwrite(path, 20 * MIB, bytes([content[20 * MIB] ^ 1]))
    with pytest.raises(DsecError, match=rf"its data is altered \(in the piece at {20 * MIB}\)"):
        world.images.verify(image)


# -- the cache ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fstype", ["tmpfs", "overlay"])
def test_cache_where_no_events_are_falls_back(make: Callable[..., World], tmp_path: Path, fstype: str) -> None:
    """The image is mounted another way, and doctor says what the cache would need."""
    for name in ("lower", "upper", "work", "there"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    words = ["-o", options] if fstype == "overlay" else []
    subprocess.run(["mount", "-t", fstype, *words, fstype, tmp_path / "there"], check=True)
    try:
        falls_back(make(cache_dir=str(tmp_path / "there" / "cache")), "fanotify", "pre-content")
    finally:
        subprocess.run(["umount", tmp_path / "there"], check=True)


# -- images that come here after all -----------------------------------------------------------------------------------
def test_pulled_whole_while_it_is_mounted_lazily(make: Callable[..., World], tmp_path: Path) -> None:
    """The mount goes on as it is, over a restart of the daemon, too; the next one needs no registry."""
    files = random_files(16 * MIB, 20)
    tar = Tar()
    for name, content in files.items():
        tar.file(name, content)
    (tmp_path / "reg").mkdir()
    with registry(tmp_path / "reg") as address:
        source = ImageStore(tmp_path / "source")
        import_now(source, tar.done(), name="base:1")
        to = f"docker://{address}/team/base:1"
        asyncio.run(jobs.run_push(source, "base:1", to))
        world = make(more={"reg": StoreConfig(kind="registry", url=f"{address}/team/base")})

        def pull(*, lazy: bool) -> Manifest:
            return asyncio.run(jobs.run_pull(world.images, to, lazy=lazy, put_on="" if lazy else "local"))

        image = pull(lazy=True)
        assert image.store == "reg"
        top = Path(world.acquire(image).path)
        assert (top / "f000").read_bytes() == files["f000"]
        whole = pull(lazy=False)
        assert (whole.digest, whole.store) == (image.digest, "local")
        assert world.images.verify(whole) == image.data_size
        assert (top / "f001").read_bytes() == files["f001"]
        world.end_daemon()
        world.begin()
        assert world.acquire(image).driver == "fanotify"  # as it was
        world.do(world.table.adopt())
        read_all(top, files)
        world.release(image)
        assert pull(lazy=True).store == "local"  # it does not go away again
    mount = world.acquire(image)
    assert mount.driver == "file"
    read_all(Path(mount.path), files)
    world.release(image)
    until(lambda: not world.table.mounts(), "unmounted")
    world.images.remove(image.digest)
    assert not list(world.images.root.glob("[0-9a-f]*[0-9a-f]"))
