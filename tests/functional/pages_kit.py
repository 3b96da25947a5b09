"""What the tests of lazy images share: a store that can be told to misbehave, images on it, mounts of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from erofs_kit import Tar, import_now
from leftovers import command_lines

from dsecd.erofs.lazy import lazy_drivers
from dsecd.erofs.model import CHUNK, Manifest
from dsecd.erofs.mount import Mount, MountTable
from dsecd.erofs.pages.client import Pages
from dsecd.erofs.pages.model import ImageStats, PagesConfig
from dsecd.erofs.store import ImageStore
from dsecd.erofs.stores import StoreConfig
from dsecd.erofs.sys import mounts_below, umount
from dsecd.errors import DsecError

SERVER = Path(__file__).with_name("pages_server.py")
T = TypeVar("T")


def random_files(total: int, number: int, seed: int = 1) -> dict[str, bytes]:
    """Files of very different sizes."""
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(total) for _ in range(number - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    return {f"f{n:03}": rng.randbytes(size) for n, size in enumerate(sizes)}


class Far:
    """A store at the end of a long line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.mood("ok")

    def mood(self, mode: str, **fields: Any) -> None:
        new = self.path / "behaviour.new"
        new.write_text(json.dumps({"mode": mode, **fields}))
        new.rename(self.path / "behaviour")

    def requests(self) -> list[tuple[str, int, int]]:
        log = self.path / "requests"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(blob, int(offset), int(size)) for blob, offset, size in (line.split() for line in lines)]


class World:
    """One host: images, cache, page server, mounts. The event loop of the mount table runs in a thread.

    there: a real shared directory, and then the page server is the real one, too; else a store that has moods. more:
    other stores.
    """

    def __init__(
        self, top: Path, there: Path | None = None, *, direct: bool = False,
        more: dict[str, StoreConfig] | None = None, **config: Any,
    ) -> None:  # fmt: skip
        self.top = top
        if there is None:
            self.far = Far(top / "far")
            there, self._program = self.far.path, (sys.executable, str(SERVER))
        else:
            self._program = ()
        stores = {"far": StoreConfig(kind="path", path=str(there), direct=direct), **(more or {})}
        self.images = ImageStore(top / "images", stores=stores, data_store="far", owner=top.name)
        fields: dict[str, Any] = {"cache_dir": str(top / "cache"), "deadline_s": 2.0, "stores": stores} | config
        self.config = PagesConfig(run_dir=str(top / "pages"), **fields)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._children: list[int] = []
        self.begin()

    def begin(self) -> None:
        """What a daemon does at its start."""
        self.pages = Pages(self.config, self._program)
        self.table = MountTable(self.top / "run", self.images, linger_s=0, drivers=lazy_drivers(self.pages))

    def image(self, files: dict[str, bytes], name: str = "x") -> Manifest:
        tar = Tar()
        for path, content in files.items():
            tar.file(path, content)
        return import_now(self.images, tar.done(), name=name)

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(60)

    def acquire(self, image: Manifest, owner: str = "a") -> Mount:
        return self.do(self.table.acquire(image.digest, owner))

    def release(self, image: Manifest, owner: str = "a") -> None:
        self.do(self.table.release(image.digest, owner))
        until(lambda: image.digest not in [mount.digest for mount in self.table.mounts()], "the image is unmounted")

    @contextlib.contextmanager
    def mounted(self, image: Manifest) -> Iterator[Path]:
        mount = self.acquire(image)
        assert mount.driver == "fanotify"
        try:
            yield Path(mount.path)
        finally:
            self.release(image)

    def stats(self, image: Manifest) -> ImageStats:
        return next(one for one in self.pages.stats().images if one.image == image.digest)

    def kill_server(self) -> int:
        pid = self.pages.stats().pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def data_file(self, image: Manifest) -> Path:
        return self.config.cache / f"{image.data_digest.removeprefix('sha256:')}.data"

    def end_daemon(self) -> None:
        """It stops; what is mounted stays."""
        self.do(self.table.close())
        self.pages.close()
        if self.pages._process is not None:
            self._children.append(self.pages._process.pid)

    def end(self) -> None:
        self.do(self.table.close())
        for mount in reversed(mounts_below(self.top / "run")):
            umount(mount.target)
        with contextlib.suppress(OSError, DsecError):
            self.pages.retain(())
        self.pages.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        until(lambda: servers(self.top) == [], "the page server ends")
        for pid in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        assert servers(self.top) == [], (self.config.run / "log").read_text()[-2000:]


@contextlib.contextmanager
def worlds(top: Path, kind: type[World] = World, **always: Any) -> Iterator[Callable[..., World]]:
    """Makes hosts, each in a directory of its own below `top`, and ends them all. always: what each is given."""
    made: list[World] = []

    def one(there: Path | None = None, **config: Any) -> World:
        directory = top / f"world{len(made)}"
        directory.mkdir()
        made.append(kind(directory, there, **always | config))
        return made[-1]

    yield one
    for world in made:
        world.end()


def falls_back(world: World, driver: str, why: str) -> None:
    """An image is mounted by loop, because `driver` cannot be used, and its probe says why."""
    content = os.urandom(1 << 20)
    image = world.image({"a": content})
    mount = world.acquire(image)
    assert mount.driver == "loop"
    assert (Path(mount.path) / "a").read_bytes() == content
    probes = {probe.driver: probe for probe in world.do(world.table.probe())}
    assert not probes[driver].usable and why in probes[driver].why
    world.release(image)


def servers(top: Path) -> list[int]:
    """Page servers of this test."""
    programs = (SERVER.name.encode(), b"dsecd.erofs.pages")
    found = ((pid, command) for pid, command in command_lines().items() if os.fsencode(top) in command)
    return [pid for pid, command in found if any(program in command for program in programs)]


def until(what: Callable[[], object], say: str, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < end, f"not within {timeout} s: {say}"
        time.sleep(0.02)


def eio(path: Path, offset: int = 0) -> None:
    """A read there is refused."""
    with path.open("rb", buffering=0) as f, pytest.raises(OSError) as caught:
        os.pread(f.fileno(), 4096, offset)
    assert caught.value.errno == errno.EIO


def drop_caches(top: Path, files: dict[str, bytes]) -> None:
    """The next read of these files asks for their data again."""
    for name in files:
        with (top / name).open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(top: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        assert (top / name).read_bytes() == content, f"{name} read back wrong"


def read_at_random(top: Path, files: dict[str, bytes], seed: int, times: int, errors: list[BaseException]) -> None:
    rng = random.Random(seed)
    names = [name for name, content in files.items() if content]
    try:
        for _ in range(times):
            name = rng.choice(names)
            content = files[name]
            at = rng.randrange(len(content))
            size = rng.choice((1, 4096, 100_000, 3 * CHUNK))
            with (top / name).open("rb", buffering=0) as f:
                found = os.pread(f.fileno(), size, at)
            assert found == content[at : at + size], f"{name} at {at}, {size} bytes: read wrong"
    except BaseException as exc:  # noqa: BLE001  the test's own thread tells of it
        errors.append(exc)


def readers(top: Path, files: dict[str, bytes], number: int, times: int) -> tuple[list[threading.Thread], list[Any]]:
    errors: list[BaseException] = []
    threads = [
        threading.Thread(target=read_at_random, args=(top, files, seed, times, errors), daemon=True)
        for seed in range(number)
    ]
    for thread in threads:
        thread.start()
    return threads, errors
