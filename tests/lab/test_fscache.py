"""Images on demand through cachefiles, which the host's kernel lacks: real mounts, and what can go wrong on the way.

The fanotify driver's own tests are tests/functional/test_pages.py; their kit is used here, on another kernel.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))
from pages_kit import T, World, falls_back, random_files, read_all, readers, until, worlds

from dsecd.erofs.fscache import FscacheDriver
from dsecd.erofs.model import SUM, Manifest
from dsecd.erofs.pages.fscache import DEVICE, Device
from dsecd.errors import DsecError

pytestmark = pytest.mark.lab
MIB = 1 << 20
SLOW = 60.0  # everything is ten times slower under emulation


class SlowWorld(World):
    """Under emulation, beside other work, a Python process takes ten seconds to start."""

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(5 * SLOW)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr("dsecd.erofs.pages.client.START_S", 2 * SLOW)
    with worlds(tmp_path, SlowWorld, deadline_s=20.0) as one:
        yield one


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


@contextmanager
def mounted(world: World, image: Manifest, owner: str = "a") -> Iterator[Path]:
    mount = world.acquire(image, owner)
    assert mount.driver == "fscache", [f"{probe.driver}: {probe.why}" for probe in world.do(world.table.probe())]
    try:
        yield Path(mount.path)
    finally:
        world.release(image, owner)


def refused(path: Path, at: int = 0, *errors: int) -> None:
    with path.open("rb", buffering=0) as f, pytest.raises(OSError) as caught:
        os.pread(f.fileno(), 4096, at)
    assert caught.value.errno in (errors or (errno.EIO,))


def blobs(world: World) -> dict[str, int]:
    """What the kernel's cache holds on disk."""
    root = world.config.cache / "fscache"
    return {path.name[1:]: path.stat().st_blocks * 512 for path in root.glob("cache/*/*/*")}


def test_probes_say_why(world: World) -> None:
    probes = {probe.driver: probe for probe in world.do(world.table.probe())}
    assert probes["fscache"].usable and probes["fscache"].why == "a test image was mounted and read"
    assert not probes["fanotify"].usable and "pre-content" in probes["fanotify"].why
    assert not world.pages.running()  # nothing but the probe had the device
    assert [path.name for path in world.config.cache.iterdir()] == []


def test_eight_readers(world: World) -> None:
    files = random_files(24 * MIB, 60)
    image = world.image(files)
    with mounted(world, image) as top:
        threads, errors = readers(top, files, 8, 40)
        for thread in threads:
            thread.join(SLOW)
        assert errors == [] and not any(thread.is_alive() for thread in threads)
        read_all(top, files)
        stats = world.pages.stats()
        assert stats.device and stats.denied == 0
        assert stats.fetched_bytes == image.data_size  # nothing twice
        assert world.stats(image).complete
    assert world.pages.stats().images == ()


def test_server_killed_under_load(world: World) -> None:
    """Readers only wait, and read what is right; the next server is given what the last one had not answered."""
    files = random_files(24 * MIB, 60)
    image = world.image(files)
    world.far.mood("ok", delay_s=0.2)
    with mounted(world, image) as top:
        threads, errors = readers(top, files, 8, 40)
        killed = set()
        while any(thread.is_alive() for thread in threads) and len(killed) < 5:
            until(lambda: world.stats(image).waiting, "somebody waits", SLOW)
            killed.add(world.kill_server())
        for thread in threads:
            thread.join(2 * SLOW)
        assert errors == [] and not any(thread.is_alive() for thread in threads)
        assert len(killed) >= 3
        read_all(top, files)
        last = world.pages.stats()
        assert last.inherited and last.device and last.pid not in killed and last.denied == 0


def test_store_away_and_back(make: Callable[..., World]) -> None:
    world = make(deadline_s=4.0)
    image = world.image({"a": os.urandom(3 * MIB)})
    with mounted(world, image) as top:
        world.far.mood("down")
        began = time.monotonic()
        refused(top / "a")
        assert 3.9 < time.monotonic() - began < 12
        trouble = world.do(_trouble(world, image))
        assert trouble is not None and trouble.kind == "image" and trouble.denied >= 1
        assert "connection refused" in trouble.why
        world.far.mood("ok")
        assert len((top / "a").read_bytes()) == 3 * MIB


async def _trouble(world: World, image: Manifest) -> Any:
    return world.table.trouble(image.digest)


@pytest.mark.parametrize("mode", ["lying", "truncated"])
def test_store_that_gives_wrong_bytes(make: Callable[..., World], mode: str) -> None:
    """EIO, never those bytes; when it is honest again the same read works."""
    world = make(deadline_s=6.0)
    content = os.urandom(MIB)
    image = world.image({"a": content})
    with mounted(world, image) as top:
        world.far.mood(mode)
        refused(top / "a")
        trouble = world.stats(image).trouble
        assert trouble is not None and trouble.kind == "image"
        assert ("not what the image says" if mode == "lying" else "instead of") in trouble.why
        world.far.mood("ok")
        assert (top / "a").read_bytes() == content


def test_hanging_store_and_killed_reader(make: Callable[..., World]) -> None:
    """Who waits may be killed, and is gone; the others go on when the store is back."""
    world = make()
    content = os.urandom(MIB)
    image = world.image({"a": content})
    with mounted(world, image) as top:
        world.far.mood("down")
        one, other = (subprocess.Popen(["cat", top / "a"], stdout=subprocess.PIPE) for _ in range(2))
        until(lambda: world.stats(image).waiting, "they wait", SLOW)
        one.kill()
        one.wait(10)
        assert one.stdout is not None
        one.stdout.close()
        world.far.mood("ok")
        assert other.communicate(timeout=SLOW)[0] == content


def test_cold_and_warm(world: World) -> None:
    """What was read stays in the kernel's cache over an unmount and over the server's end."""
    files = random_files(6 * MIB, 5)
    image = world.image(files)
    with mounted(world, image) as top:
        read_all(top, files)
    until(lambda: image.data_digest.removeprefix("sha256:") in str(blobs(world)), "its blob has a name")
    world.end_daemon()
    world.begin()
    with mounted(world, image) as top:
        read_all(top, files)
        until(lambda: world.stats(image).complete, "the server knows what is there")
        assert world.pages.stats().fetched_bytes == 0


def test_trace_is_fetched_ahead(world: World) -> None:
    content = os.urandom(8 * MIB)
    image = world.image({"a": content})

    def touch(top: Path) -> None:
        with (top / "a").open("rb", buffering=0) as f:
            for at in (6 * MIB, 0, 3 * MIB):
                assert os.pread(f.fileno(), 4096, at) == content[at : at + 4096]

    with mounted(world, image) as top:
        touch(top)
    evict_all(world)
    before = len(world.far.requests())
    with mounted(world, image) as top:
        until(lambda: world.stats(image).cached_bytes >= 3 * SUM, "the trace was fetched", SLOW)
        time.sleep(0.5)
        fetched = len(world.far.requests())
        assert fetched > before
        touch(top)
        assert len(world.far.requests()) == fetched


def evict_all(world: World) -> None:
    """As if the cache were full of others: the daemon's next server has a bound of nothing."""
    config = world.config
    world.end_daemon()
    world.config = structs.replace(config, cache_bytes=0)
    world.begin()
    image = world.image({"other": os.urandom(5000)}, "other")
    with mounted(world, image):
        until(lambda: len(blobs(world)) == 0, "all is evicted", SLOW)
    world.end_daemon()
    world.config = config
    world.begin()


def test_bound_takes_the_oldest_and_nothing_mounted(make: Callable[..., World]) -> None:
    world = make(cache_bytes=7 * MIB)
    images = [world.image({"a": os.urandom(3 * MIB)}, f"i{n}") for n in range(3)]
    contents = []
    for image in images[:2]:
        with mounted(world, image) as top:
            contents.append((top / "a").read_bytes())
        time.sleep(1.1)  # times of files have steps
    with mounted(world, images[2]) as top:
        content = (top / "a").read_bytes()
        until(lambda: _data(images[0]) not in blobs(world), "the oldest is evicted", SLOW)
        assert _data(images[1]) in blobs(world)
        assert (top / "a").read_bytes() == content
    assert world.pages.stats().evicted_bytes >= 3 * MIB
    with mounted(world, images[0]) as top:
        assert (top / "a").read_bytes() == contents[0]


def _data(image: Manifest) -> str:
    return f"d-{image.data_digest.removeprefix('sha256:')}"


def test_images_with_the_same_data_share_it(world: World) -> None:
    content = os.urandom(2 * MIB)
    one, other = world.image({"a": content}, "one"), world.image({"b": content}, "other")
    assert one.data_digest == other.data_digest and one.digest != other.digest
    with mounted(world, one) as first, mounted(world, other) as second:
        assert (first / "a").read_bytes() == content
        assert (second / "b").read_bytes() == content
        assert world.pages.stats().fetched_bytes == one.data_size


def test_an_old_mount_that_does_not_go(world: World) -> None:
    """A mount that a dying process still has keeps its name; the next mount of the image does not mind."""
    content = os.urandom(MIB)
    image = world.image({"a": content})
    with mounted(world, image) as top:
        held = os.open(top, os.O_RDONLY)
        ctypes.CDLL(None).umount2(os.fsencode(top), 2)  # MNT_DETACH, as the end of a namespace with users does
    try:
        with mounted(world, image) as top:
            assert (top / "a").read_bytes() == content
            with open(f"/proc/self/fd/{held}/a", "rb") as f:
                assert f.read() == content
    finally:
        os.close(held)


def test_server_and_daemon_killed_at_once(world: World) -> None:
    """The device is lost: reads fail and never give zeros; the mount is refused, and the next one is fine.

    The kernel has withdrawn the cache by then, which it calls ENOBUFS; a reader who waited before that gets EIO.
    """
    content = os.urandom(2 * MIB)
    image = world.image({"a": content})
    world.acquire(image)
    top = world.top / "run" / image.hex[:12]
    with (top / "a").open("rb", buffering=0) as f:
        assert f.read(10) == content[:10]
    pid = world.pages.stats().pid
    with world.pages._lock:
        assert world.pages._device is not None and world.pages._group is not None
        os.close(world.pages._device)
        os.close(world.pages._group)
        world.pages._device = world.pages._group = None
        os.kill(pid, signal.SIGKILL)
        assert world.pages._process is not None
        world.pages._process.wait(SLOW)
        refused(top / "a", MIB + 4096, errno.EIO, errno.ENOBUFS)
    lost: list[str] = []
    world.end_daemon()
    world.begin()
    world.pages.on_lost = lost.extend
    with pytest.raises(DsecError) as caught:
        world.acquire(image)
    assert caught.value.kind == "image" and "lost" in caught.value.message
    assert lost == [image.digest]
    world.do(world.table.adopt())
    with mounted(world, image) as again:
        assert (again / "a").read_bytes() == content


def test_daemon_restarts_and_resumes(world: World) -> None:
    files = random_files(4 * MIB, 8)
    image = world.image(files)
    mount = world.acquire(image)
    server = world.pages.stats().pid
    world.end_daemon()
    world.begin()
    again = world.acquire(image)
    assert again == mount
    assert world.pages.stats().pid == server
    world.do(world.table.adopt())
    read_all(Path(mount.path), files)
    world.kill_server()  # the daemon that resumed has a copy of the device, too
    with open(Path(mount.path) / "f000", "rb") as f:
        assert f.read() == files["f000"]
    assert world.pages.stats().device
    world.release(image)


def test_somebody_else_has_the_device(world: World, tmp_path: Path) -> None:
    """cachefilesd, say: the probe says so, and images are mounted another way."""
    root = tmp_path / "cachefilesd"
    root.mkdir()
    device = Device.bind(root)
    try:
        falls_back(world, "fscache", "another process")
    finally:
        device.close()


def test_the_device_is_taken_after_the_probe(world: World, tmp_path: Path) -> None:
    assert next(probe for probe in world.do(world.table.probe()) if probe.driver == "fscache").usable
    root = tmp_path / "cachefilesd"
    root.mkdir()
    device = Device.bind(root)
    try:
        image = world.image({"a": b"x" * 5000})
        assert world.acquire(image).driver == "loop"
        world.release(image)
    finally:
        device.close()


def test_full_disk_under_the_cache(make: Callable[..., World], tmp_path: Path) -> None:
    """EIO and `disk_full`; with room again the same read works."""
    small, disk = tmp_path / "small", tmp_path / "disk"
    small.mkdir()
    with disk.open("wb") as f:
        f.truncate(24 * MIB)
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    subprocess.run(["mount", "-o", "loop", disk, small], check=True)
    try:
        world = make(cache_dir=str(small / "cache"), deadline_s=6.0)
        content = os.urandom(8 * MIB)
        image = world.image({"a": content})
        with mounted(world, image) as top:
            with pytest.raises(OSError), (small / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(MIB))
                    filler.flush()
            refused(top / "a", 4 * MIB)
            trouble = world.stats(image).trouble
            assert trouble is not None and trouble.kind == "disk_full"
            (small / "filler").unlink()
            assert (top / "a").read_bytes() == content
        world.end_daemon()
        world.begin()
    finally:
        subprocess.run(["umount", small], check=True)


def test_no_device_is_said_plainly(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsecd.erofs.pages.fscache.DEVICE", tmp_path / "cachefiles")
    mounts = tmp_path / "mounts"
    mounts.mkdir()
    probe = FscacheDriver(world.pages).probe(tmp_path, mounts)
    assert not probe.usable and "CONFIG_CACHEFILES_ONDEMAND" in probe.why


def test_empty_files_and_a_large_directory(world: World) -> None:
    """Metadata of more than one window, no data at all for some."""
    files = {f"{n:05}" * 50: b"" if n % 3 else b"%d" % n for n in range(3600)}
    image = world.image(files)
    assert image.meta_size > MIB
    with mounted(world, image) as top:
        assert sorted(path.name for path in top.iterdir()) == sorted(files)
        assert (top / ("00003" * 50)).read_bytes() == b"3"
    nothing = world.image({"empty": b""}, "nothing")
    with mounted(world, nothing) as top:
        assert (top / "empty").read_bytes() == b""


def test_the_device_is_there() -> None:
    assert DEVICE.is_char_device()
