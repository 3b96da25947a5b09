"""Images on a real network file system: sshfs over an sshd that is in another network namespace."""

from __future__ import annotations

import errno
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from erofs_kit import Tar, quick
from pages_kit import World, random_files, read_all, readers, until, worlds
from sshd_kit import FarHost, Sshd, sshfs

from dsecd.erofs.model import Manifest
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError

MIB = 1 << 20
DEADLINE_S = 3.0
PATIENCE_S = 2.0


@pytest.fixture
def host() -> Iterator[FarHost]:
    one = FarHost()
    yield one
    one.end()


@pytest.fixture
def sshd(host: FarHost, tmp_path: Path) -> Iterator[Sshd]:
    (tmp_path / "ssh").mkdir()
    one = Sshd(tmp_path / "ssh", host.address, host.within)
    yield one
    one.kill()


@pytest.fixture
def shared(sshd: Sshd, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The directory here; what is in it is at `tmp_path/there`. Its parameter: how long it waits for the far end."""
    (tmp_path / "there").mkdir()
    with sshfs(sshd, tmp_path / "there", tmp_path / "shared", getattr(request, "param", 2)):
        yield tmp_path / "shared"


@pytest.fixture
def make(shared: Path, tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path, deadline_s=DEADLINE_S) as one:
        yield functools.partial(one, shared)


def on_sshfs(world: World, image: Manifest) -> None:
    path = world.images.data_path(image)
    kinds = [line.split(" - ")[1].split()[0] for line in Path("/proc/self/mountinfo").read_text().splitlines()
             if line.split()[4] == str(path.parent)]  # fmt: skip
    assert kinds == ["fuse.sshfs"]


@pytest.mark.parametrize("direct", [False, True])
def test_eight_readers(make: Callable[..., World], direct: bool) -> None:
    """At random and then all of it, filled on demand and mounted straight from there."""
    world = make(direct=direct)
    files = random_files(24 * MIB, 40)
    image = world.image(files)
    on_sshfs(world, image)
    mount = world.acquire(image)
    try:
        assert mount.driver == ("file" if direct else "fanotify")
        threads, errors = readers(Path(mount.path), files, 8, 40)
        for thread in threads:
            thread.join(60)
        assert errors == []
        read_all(Path(mount.path), files)
        if not direct:
            assert world.pages.stats().fetched_bytes == image.data_size
    finally:
        world.release(image)


class Reader(threading.Thread):
    """Reads at random until told to stop. What it gets is right, or EIO within the deadline."""

    def __init__(self, top: Path, files: dict[str, bytes], seed: int) -> None:
        super().__init__(daemon=True)
        self._top, self._files, self._random = top, files, random.Random(seed)
        self.ended = False
        self.good = self.refused = 0
        self.wrong: list[str] = []
        self.longest = 0.0
        self.start()

    def run(self) -> None:
        names = [name for name, content in self._files.items() if content]
        while not self.ended:
            name = self._random.choice(names)
            content = self._files[name]
            at = self._random.randrange(len(content))
            began = time.monotonic()
            try:
                with (self._top / name).open("rb", buffering=0) as f:
                    found = os.pread(f.fileno(), 4096, at)
                if found == content[at : at + 4096]:
                    self.good += 1
                else:
                    self.wrong.append(f"{name} at {at}")
            except OSError as e:
                self.refused += e.errno == errno.EIO
                if e.errno != errno.EIO:
                    self.wrong.append(f"{name}: {e}")
            self.longest = max(self.longest, time.monotonic() - began)


@pytest.mark.parametrize("how", ["killed", "unplugged"])
def test_the_server_goes_and_comes_back(make: Callable[..., World], sshd: Sshd, host: FarHost, how: str) -> None:
    world = make()
    files = random_files(48 * MIB, 60)
    image = world.image(files)
    on_sshfs(world, image)
    with world.mounted(image) as top:
        eight = [Reader(top, files, seed) for seed in range(8)]
        try:
            until(lambda: all(one.good for one in eight), "all read")
            if how == "killed":
                sshd.kill()
            else:
                host.plug(plugged=False)
            until(lambda: all(one.refused for one in eight), "all are refused", 30)
            trouble = world.stats(image).trouble
            assert trouble is not None and trouble.kind == "image" and trouble.denied >= 8
            if how == "killed":
                sshd.start()
            else:
                host.plug(plugged=True)
            before = [one.good for one in eight]
            until(lambda: all(one.good > n + 3 for one, n in zip(eight, before, strict=True)), "all read again", 30)
        finally:
            for one in eight:
                one.ended = True
            for one in eight:
                one.join(20)
        assert [one.wrong for one in eight] == [[]] * 8
        assert max(one.longest for one in eight) < 2 * DEADLINE_S
        read_all(top, files)


@pytest.mark.parametrize("shared", [600], indirect=True)
def test_what_hangs_holds_up_nothing_else(sshd: Sshd, shared: Path, tmp_path: Path) -> None:
    """The far machine is there and does not answer. Images elsewhere come and go meanwhile as ever; what needs it ends
    with `image`, in time; and once it answers, nothing is left of any of that."""
    store = ImageStore(tmp_path / "images", stores={"far": shared}, owner="me", patience_s=PATIENCE_S)
    tar = Tar().file("a", os.urandom(MIB)).done()
    kept, removed = (quick(store, Tar().file("a", os.urandom(MIB)).done(), name, store_name="far")
                     for name in ("kept", "removed"))  # fmt: skip
    results: dict[str, object] = {}

    def run(name: str, what: Callable[[], object]) -> threading.Thread:
        def body() -> None:
            began = time.monotonic()
            try:
                what()
                results[name] = time.monotonic() - began
            except DsecError as exc:
                results[name] = exc

        thread = threading.Thread(target=body)
        thread.start()
        return thread

    sshd.freeze(frozen=True)
    try:
        work = [
            run("import", lambda: quick(store, tar, "there", store_name="far")),
            run("verify", lambda: store.verify(kept)),
            run("remove", lambda: store.remove("removed")),
            run("gc", store.gc),
            run("heartbeat", store.heartbeat),
        ]
        time.sleep(0.5)  # all of them hang in it by now
        for n in range(3):
            began = time.monotonic()
            here = quick(store, Tar().file("b", b"%d" % n).done(), "here")
            store.check(here)
            store.set_name("also", "here")
            store.remove(here.digest)
            assert time.monotonic() - began < 1.0
        assert any(thread.is_alive() for thread in work)
        for thread in work:
            thread.join(10 * PATIENCE_S)
            assert not thread.is_alive()
        began = time.monotonic()
        store.gc()  # not one patience for each thing that is to go
        assert time.monotonic() - began < PATIENCE_S
    finally:
        sshd.freeze(frozen=False)
    for name in ("import", "verify"):
        error = results[name]
        assert isinstance(error, DsecError) and error.kind == "image" and error.infra and error.retryable, results
    assert {name for name, took in results.items() if isinstance(took, float)} == {"remove", "gc", "heartbeat"}
    assert [image.name for image in store.list()] == ["kept"]
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("shared-")], "threads end", 20)
    store.verify(kept)
    store.gc()
    assert sorted(os.listdir(shared)) == [f"{kept.hex}.by-me", f"{kept.hex}.data"]
    assert removed.hex not in os.listdir(store.root)
