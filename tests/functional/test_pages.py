"""Images that are filled while they are read: through a real mount, with everything that can go wrong on the way."""

from __future__ import annotations

import errno
import http.server
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pages_kit import SERVER, World, drop_caches, eio, random_files, read_all, readers, servers, until, worlds
from pages_server import Moody

from dsecd.erofs.model import SUM, Manifest
from dsecd.erofs.pages.model import Watched
from dsecd.erofs.pages.server import PageServer
from dsecd.erofs.pages.trace import figures
from dsecd.erofs.stores import StoreConfig
from dsecd.erofs.sys import mount_erofs, umount
from dsecd.errors import DsecError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
MIB = 1 << 20


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path) as one:
        yield one


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


def test_eight_readers(world: World) -> None:
    files = random_files(40 * MIB, 60)
    image = world.image(files)
    with world.mounted(image) as top:
        threads, errors = readers(top, files, 8, 60)
        for thread in threads:
            thread.join(60)
        assert errors == []
        read_all(top, files)
        stats = world.pages.stats()
        assert stats.fetched_bytes == image.data_size  # nothing twice
        assert world.stats(image).complete
    assert world.pages.stats().images == ()


def test_no_more_events_once_it_is_complete(world: World) -> None:
    files = random_files(4 * MIB, 5)
    image = world.image(files)
    with world.mounted(image) as top:
        read_all(top, files)
        time.sleep(0.4)
        before = world.pages.stats().events
        drop_caches(top, files)
        read_all(top, files)
        assert world.pages.stats().events == before


def test_server_killed_under_load(world: World) -> None:
    """Readers only wait, and read what is right."""
    files = random_files(40 * MIB, 60)
    image = world.image(files)
    world.far.mood("ok", delay_s=0.02)
    with world.mounted(image) as top:
        first = world.pages.stats()
        threads, errors = readers(top, files, 8, 60)
        killed = set()
        while any(thread.is_alive() for thread in threads) and len(killed) < 8:
            time.sleep(0.15)
            killed.add(world.kill_server())
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert len(killed) >= 3
        read_all(top, files)
        last = world.pages.stats()
        assert last.inherited and last.generation == first.generation and last.pid not in killed
        assert last.denied == 0


def test_event_that_was_read_and_not_named(world: World) -> None:
    """A server dies between reading an event and learning which file it is about: the next one fills that range of all
    files, and answers by number."""
    stores = {"far": Moody("far", world.far.path)}
    files = {"a": os.urandom(300_000)}
    image, other = world.image(files), world.image({"b": os.urandom(200_000)}, "other")
    world.config.run.mkdir()
    world.config.cache.mkdir()
    first = PageServer(world.config, stores, None)
    target = world.top / "mnt"
    target.mkdir()
    for one in (other, image):
        path = first.watch(watched(world, one), resume=False)
    mount_erofs(str(world.images.meta_path(image)), [str(path)], target)
    reader = subprocess.Popen(["cat", target / "a"], stdout=subprocess.PIPE)
    poll = select.poll()
    poll.register(first.group, select.POLLIN)
    assert poll.poll(5000)
    with first._lock:
        found = first._journal.read(first.group)
    assert found is not None
    os.close(found[1].fd)
    again = os.dup(first.group)
    for fd in (first.group, first._wake_r, first._wake_w):
        os.close(fd)
    for file in first._table.all():
        file.cached.close()
    second = PageServer(world.config, stores, again)
    try:
        assert second.inherited
        second.start()
        assert reader.communicate(timeout=20)[0] == files["a"]
        assert second.stats().cached_bytes >= 3 * SUM  # the other file's first chunk, too
    finally:
        reader.kill()
        umount(target)
        second.stop()


def watched(world: World, image: Manifest) -> Watched:
    return Watched(
        image=image.digest, data_digest=image.data_digest, data_size=image.data_size, store="far",
        sums=str(world.images.sums_path(image)), blob=f"{image.hex}.data",
    )  # fmt: skip


def test_store_away_and_back(world: World) -> None:
    image = world.image({"a": os.urandom(3 * MIB)})
    with world.mounted(image) as top:
        world.far.mood("down")
        began = time.monotonic()
        eio(top / "a")
        assert 1.9 < time.monotonic() - began < 4
        trouble = world.stats(image).trouble
        assert trouble is not None and trouble.denied >= 1 and trouble.kind == "image"
        assert "connection refused" in trouble.why
        world.far.mood("ok")
        assert len((top / "a").read_bytes()) == 3 * MIB


def test_store_comes_back_while_a_reader_waits(make: Callable[..., World]) -> None:
    world = make(deadline_s=20.0)
    content = os.urandom(MIB)
    image = world.image({"a": content})
    with world.mounted(image) as top:
        world.far.mood("down")
        reader = subprocess.Popen(["sha256sum", top / "a"], stdout=subprocess.PIPE)
        time.sleep(1.0)
        assert reader.poll() is None
        assert world.stats(image).waiting >= 1
        world.far.mood("ok")
        assert reader.wait(5) == 0
        assert reader.stdout is not None
        reader.stdout.close()


def test_killed_reader_leaves_nothing_behind(make: Callable[..., World]) -> None:
    world = make(deadline_s=1.5)
    image = world.image({"a": os.urandom(MIB)})
    with world.mounted(image) as top:
        world.far.mood("down")
        reader = subprocess.Popen(["cat", top / "a"], stdout=subprocess.DEVNULL)
        until(lambda: world.stats(image).waiting, "it waits")
        reader.kill()
        reader.wait(5)
        until(lambda: not world.stats(image).waiting, "nobody waits")


@pytest.mark.parametrize("mode", ["truncated", "lying"])
def test_store_gives_other_bytes(world: World, mode: str) -> None:
    """EIO and never wrong bytes; when the store is honest again, the same read works."""
    content = os.urandom(2 * MIB + 12345)
    image = world.image({"a": content})
    with world.mounted(image) as top:
        world.far.mood(mode)
        eio(top / "a")
        eio(top / "a", 2 * MIB + 4096)
        assert world.stats(image).cached_bytes <= 4 * SUM  # lies are in the first byte of a request
        world.far.mood("ok")
        assert (top / "a").read_bytes() == content


def test_slow_store_and_one_fetch_for_all(make: Callable[..., World]) -> None:
    world = make(deadline_s=10.0)
    content = os.urandom(MIB)
    image = world.image({"a": content})
    world.far.mood("ok", delay_s=0.5)
    with world.mounted(image) as top:
        threads, errors = readers(top, {"a": content}, 8, 1)
        for thread in threads:
            thread.join(20)
        assert errors == []
        assert sum(size for _, _, size in world.far.requests()) == MIB  # and nothing twice


def test_hanging_store_holds_up_only_its_own(world: World) -> None:
    """More readers than workers wait for a store; what is in the cache is still read."""
    files = random_files(20 * MIB, 20)
    image, other = world.image(files), world.image({"b": os.urandom(5000)}, "other")
    with world.mounted(other) as here:
        (here / "b").read_bytes()
        with world.mounted(image) as top:
            world.far.mood("hang")
            waiting = [subprocess.Popen(["cat", top / name], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
                       for name in files]  # fmt: skip
            until(lambda: world.stats(image).waiting >= 12, "they wait")
            drop_caches(here, {"b": b""})
            began = time.monotonic()
            assert len((here / "b").read_bytes()) == 5000
            assert time.monotonic() - began < 0.5
            for process in waiting:
                process.wait(20)
            world.far.mood("ok")


def test_two_images_with_the_same_data(world: World) -> None:
    """They share a cache file; one's end does not make the other see holes."""
    files = random_files(3 * MIB, 3)
    one, two = world.image(files), world.image(files, "two")
    assert one.digest == two.digest
    two = world.image({**files, "empty": b""}, "three")
    assert one.data_digest == two.data_digest
    first, second = world.acquire(one), world.acquire(two)
    world.release(one)
    read_all(Path(second.path), files)
    assert first.path != second.path
    world.release(two)


def test_eviction(make: Callable[..., World]) -> None:
    """Down to the bound, least recently read first, while it is mounted; what went is fetched again."""
    world = make(cache_bytes=8 * MIB, settle_s=0.3)
    files = random_files(24 * MIB, 20)
    image = world.image(files)
    with world.mounted(image) as top:
        for _ in range(3):
            read_all(top, files)
            until(lambda: world.pages.stats().cached_bytes <= 8 * MIB, "evicted")
            until(lambda: world.data_file(image).stat().st_blocks * 512 <= 9 * MIB, "holes")
            drop_caches(top, files)
        threads, errors = readers(top, files, 4, 100)
        for thread in threads:
            thread.join(60)
        assert errors == []
        stats = world.pages.stats()
        assert stats.evicted_bytes >= 30 * MIB and stats.fetched_bytes > image.data_size


def test_eviction_of_what_was_complete_and_unmarked(make: Callable[..., World]) -> None:
    world = make(cache_bytes=8 * MIB, settle_s=0.3)
    small, large = random_files(6 * MIB, 4), random_files(8 * MIB, 4, seed=2)
    one, two = world.image(small), world.image(large, "two")
    with world.mounted(one) as top:
        read_all(top, small)
        time.sleep(0.5)  # no mark any more
        with world.mounted(two) as other:
            read_all(other, large)
            until(lambda: world.pages.stats().cached_bytes <= 8 * MIB, "evicted")
            drop_caches(top, small)
            drop_caches(other, large)
            read_all(top, small)
            read_all(other, large)


def test_eviction_by_a_server_that_was_restarted(make: Callable[..., World]) -> None:
    """Its descriptors are younger than the marks, so its own writes and holes raise events: it lets itself pass."""
    world = make(cache_bytes=8 * MIB, settle_s=0.3)
    files = random_files(16 * MIB, 10)
    image = world.image(files)
    with world.mounted(image) as top:
        (top / "f000").read_bytes()
        world.kill_server()
        for _ in range(3):
            read_all(top, files)
            until(lambda: world.pages.stats().cached_bytes <= 8 * MIB, "evicted")
            drop_caches(top, files)
        assert world.pages.stats().inherited


def test_image_without_data(world: World) -> None:
    image = world.image({"empty": b"", "zeros": bytes(70_000)})
    assert image.data_size == 0
    with world.mounted(image) as top:
        assert (top / "zeros").read_bytes() == bytes(70_000)


def test_group_kept_by_systemd(tmp_path: Path, world: World) -> None:
    """The server gives its group to the FD store and takes it from there; here the test is systemd."""
    content = os.urandom(3 * MIB)
    image = world.image({"a": content})
    world.config.run.mkdir()
    told = world.config.run / "config.json"
    told.write_bytes(msgspec.json.encode(world.config))
    target = tmp_path / "mnt"
    target.mkdir()

    def start(*fds: int) -> tuple[subprocess.Popen[bytes], list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(str(tmp_path / f"notify{len(fds)}"))
            systemd.settimeout(10)
            third = f"3<&{fds[0]}" if fds else ""
            given = {"LISTEN_FDNAMES": "fanotify"} if fds else {}
            process = subprocess.Popen(
                ["bash", "-c", f'LISTEN_PID=$$ exec "$@" {third}', "sh", sys.executable,
                 str(SERVER), str(told)],
                env=os.environ | {"NOTIFY_SOCKET": str(tmp_path / f"notify{len(fds)}")} | given, pass_fds=fds,
            )  # fmt: skip
            kept: list[int] = []
            while True:
                text, got, _, _ = socket.recv_fds(systemd, 4096, 4)
                kept += got
                if b"READY=1" in text:
                    return process, kept

    first, (group,) = start()
    world.pages._group = None
    path = world.pages.watch(watched(world, image))
    mount_erofs(str(world.images.meta_path(image)), [str(path)], target)
    try:
        with world.pages._lock:  # the daemon is busy: systemd is quicker
            first.kill()
            first.wait()
            reader = subprocess.Popen(["cat", target / "a"], stdout=subprocess.PIPE)
            second, kept = start(group)
            assert kept == []  # it is in the store already
            assert reader.communicate(timeout=20)[0] == content
        assert world.pages.stats().inherited
    finally:
        umount(target)
        world.pages.unwatch(image.digest)
        world.pages.close()
        second.wait(10)
        os.close(group)


class Ranged(http.server.BaseHTTPRequestHandler):
    """Blobs by ranges, and a count of connections."""

    protocol_version = "HTTP/1.1"
    top: Path
    connections = 0

    def setup(self) -> None:
        Ranged.connections += 1
        super().setup()

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        path = self.top / self.path.removeprefix("/blobs/")
        size = path.stat().st_size
        with path.open("rb") as file:
            data = os.pread(file.fileno(), last + 1 - first, first)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        pass


def test_over_http(make: Callable[..., World], tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ranged) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/blobs"
        world = make(stores={"far": StoreConfig(kind="http", url=url, insecure=True)})
        Ranged.top = world.far.path
        files = random_files(20 * MIB, 20)
        image = world.image(files)
        with world.mounted(image) as top:
            threads, errors = readers(top, files, 8, 20)
            for thread in threads:
                thread.join(60)
            assert errors == []
            read_all(top, files)
            assert Ranged.connections <= 8  # kept alive
        world.end()
        world.end = lambda: None  # type: ignore[method-assign]
        server.shutdown()
        serving.join()


def test_lost_for_one_image_and_not_for_another_on_the_same_data(world: World) -> None:
    files = random_files(6 * MIB, 6)
    one, two = world.image(files), world.image({**files, "empty": b""}, "two")
    assert one.data_digest == two.data_digest
    world.acquire(one)
    world.end_daemon()
    (pid,) = servers(world.top)
    os.kill(pid, 9)
    until(lambda: servers(world.top) == [], "dead")
    world.begin()
    read_all(Path(world.acquire(two).path), files)  # now all of the file is there; what `one` has read is not known
    with pytest.raises(DsecError, match="holes"):
        world.acquire(one)
    assert world.do(world.table.adopt()) == [one.hex[:12]]
    with world.mounted(one) as top:
        read_all(top, files)
    world.release(two)


def test_cache_survives_restarts(world: World) -> None:
    files = random_files(6 * MIB, 4)
    image = world.image(files)
    with world.mounted(image) as top:
        read_all(top, files)
    world.end_daemon()
    assert servers(world.top) == []
    for path in world.config.run.glob("*.map"):
        path.unlink()  # as after a boot
    world.begin()
    world.far.mood("down")
    with world.mounted(image) as top:
        read_all(top, files)


def test_shared_chunks_are_not_fetched_again(world: World) -> None:
    files = random_files(6 * MIB, 4)
    one = world.image(files)
    two = world.image({**files, "more": os.urandom(100)}, "two")
    with world.mounted(one) as top:
        read_all(top, files)
    asked = sum(size for _, _, size in world.far.requests())
    with world.mounted(two) as top:
        read_all(top, files)
        assert world.pages.stats().shared_bytes >= 5 * MIB
    assert sum(size for _, _, size in world.far.requests()) - asked <= 2 * SUM


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    image, top = tmp_path / "disk.img", tmp_path / "disk"
    with image.open("wb") as f:
        f.truncate(20 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", image], check=True)
    top.mkdir()
    subprocess.run(["mount", "-o", "loop", image, top], check=True)
    yield top
    subprocess.run(["umount", top], check=True)


def test_full_disk_makes_room(small_disk: Path, make: Callable[..., World]) -> None:
    world = make(cache_dir=str(small_disk / "cache"), settle_s=0.2)
    files = random_files(40 * MIB, 40)
    image = world.image(files)
    with world.mounted(image) as top:
        for name, content in files.items():
            for _ in range(50):  # what was just read stays; then reads fail, and may be tried again
                try:
                    assert (top / name).read_bytes() == content
                    break
                except OSError as exc:
                    assert exc.errno == errno.EIO
                    time.sleep(0.1)
            else:
                pytest.fail(f"{name} cannot be read")
    world.end()
    world.end = lambda: None  # type: ignore[method-assign]  # before the disk goes


def test_full_disk_without_room_is_said(small_disk: Path, make: Callable[..., World]) -> None:
    world = make(cache_dir=str(small_disk / "cache"), settle_s=600.0)
    files = random_files(40 * MIB, 40)
    image = world.image(files)
    with world.mounted(image) as top:
        failed = 0
        for name, content in files.items():
            try:
                assert (top / name).read_bytes() == content
            except OSError as exc:
                assert exc.errno == errno.EIO
                failed += 1
        assert failed
        trouble = world.stats(image).trouble
        assert trouble is not None and trouble.kind == "disk_full"
    world.end()
    world.end = lambda: None  # type: ignore[method-assign]


def test_trace_is_recorded_and_fetched_ahead(make: Callable[..., World], tmp_path: Path) -> None:
    world = make()
    files = random_files(30 * MIB, 30)
    image = world.image(files)
    touched = [name for n, name in enumerate(files) if n % 3 == 0]
    with world.mounted(image) as top:
        for name in touched:
            (top / name).read_bytes()
    cold = len(world.far.requests())
    shown = figures(world.images.meta_path(image).with_name("trace"), image.data_size)
    assert shown.runs == 1 and 0 < shown.touched_percent < 80
    world.end_daemon()
    subprocess.run(["rm", "-r", world.config.cache, world.config.run], check=True)
    world.begin()
    with world.mounted(image) as top:
        until(lambda: world.stats(image).cached_bytes >= shown.touched_bytes, "fetched ahead")
        time.sleep(0.2)
        before = world.pages.stats()
        for name in touched:
            assert (top / name).read_bytes() == files[name]
        after = world.pages.stats()
        assert after.hits - before.hits == after.events - before.events  # nobody waited
    warm = len(world.far.requests()) - cold
    assert warm < cold
    assert figures(world.images.meta_path(image).with_name("trace"), image.data_size).runs == 2


def test_daemon_restarts_and_the_server_does_not(world: World) -> None:
    files = random_files(10 * MIB, 10)
    image = world.image(files)
    world.acquire(image)
    pid = world.pages.stats().pid
    world.end_daemon()
    assert servers(world.top) == [pid]
    world.begin()
    mount = world.acquire(image)
    world.do(world.table.adopt())
    read_all(Path(mount.path), files)
    assert world.pages.stats().pid == pid
    world.release(image)


def test_group_is_lost(world: World) -> None:
    """Both die: what was mounted with holes is refused, unmounted, and fine again when it is mounted anew."""
    files = random_files(10 * MIB, 10)
    image, whole = world.image(files), world.image({"w": b"whole"}, "whole")
    world.acquire(image)
    (Path(world.acquire(whole).path) / "w").read_bytes()
    world.end_daemon()
    (pid,) = servers(world.top)
    os.kill(pid, 9)
    until(lambda: servers(world.top) == [], "dead")
    world.begin()
    for owner in ("a", "b"):  # both sandboxes
        with pytest.raises(DsecError) as caught:
            world.acquire(image, owner)
        assert caught.value.kind == "image" and "holes" in caught.value.message
    world.acquire(whole)
    assert world.do(world.table.adopt()) == [image.hex[:12]]
    with world.mounted(image) as top:
        read_all(top, files)
    world.release(whole)


def test_driver_is_chosen_by_the_store(world: World) -> None:
    from dsecd.erofs.drivers import Source
    from dsecd.erofs.lazy import lazy_drivers

    image = world.image({"a": b"x"})
    source = Source(metadata=Path("m"), data=Path("d"), manifest=image)
    assert [d.name for d in lazy_drivers(world.pages) if not d.unfit(source)] == ["fanotify", "fscache", "loop"]
    assert [p.driver for p in world.do(world.table.probe()) if p.usable] == ["file", "fanotify", "loop"]
