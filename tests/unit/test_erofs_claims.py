"""A directory that hosts share: whose data it is, whatever dies and in whatever order things happen."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import time
from array import array
from collections.abc import Iterable
from pathlib import Path

import pytest

from dsecd.erofs import meta
from dsecd.erofs.claims import DAY_S, Claims, Gone, host_owner
from dsecd.erofs.model import BLOCK, Built, ImageConfig, ImportJob, Manifest
from dsecd.erofs.store import ImageStore
from dsecd.erofs.tree import Node, Tree
from dsecd.errors import DsecError

X, Y = "a" * 64, "b" * 64


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def put(claims: Claims, root: Path, hexa: str) -> None:
    """As a commit does."""
    temporary = root / f"tmp-{os.urandom(4).hex()}.data"
    temporary.write_bytes(b"data")
    claims.claim(hexa)
    temporary.rename(root / f"{hexa}.data")


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def swept(gone: Iterable[Gone]) -> list[str]:
    return [one.name for one in gone]


def never(_word: str) -> bool | None:
    return None


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages by mtime alone: no test can turn back a ctime."""
    monkeypatch.setattr(
        "dsecd.erofs.claims._age_base", lambda path, now: path.stat().st_mtime if path.exists() else now
    )


def test_the_last_claim_takes_the_data_along(tmp_path: Path) -> None:
    a, b = Claims(tmp_path, "a"), Claims(tmp_path, "b")
    put(a, tmp_path, X)
    put(b, tmp_path, X)
    assert not a.release(X)
    assert not a.release(X)
    assert names(tmp_path) == [f"{X}.by-b", f"{X}.data"]
    assert b.release(X)
    assert names(tmp_path) == []


def test_a_sweep_spares_what_others_have(tmp_path: Path) -> None:
    a, b = Claims(tmp_path, "a"), Claims(tmp_path, "b")
    put(a, tmp_path, X)
    put(b, tmp_path, Y)
    (tmp_path / "tmp-beef.data").touch()  # b is importing
    (tmp_path / "somebody's file").touch()
    assert swept(a.sweep([X], [X], never)) == []
    assert swept(a.sweep([], [], never)) == [f"{X}.data"]
    assert names(tmp_path) == [f"{Y}.by-b", f"{Y}.data", "somebody's file", "tmp-beef.data"]


def test_a_host_that_is_gone_loses_its_claims(tmp_path: Path, old: None) -> None:
    a, b = Claims(tmp_path, "a", lease_s=100), Claims(tmp_path, "b", lease_s=100)
    put(a, tmp_path, X)
    put(b, tmp_path, X)
    put(b, tmp_path, Y)
    age(tmp_path / f"{X}.by-b", 200)
    age(tmp_path / f"{Y}.by-b", 50)
    assert swept(a.sweep([X], [X], never)) == [f"{X}.by-b"]
    age(tmp_path / f"{Y}.by-b", 200)
    assert swept(a.sweep([X], [X], never)) == [f"{Y}.by-b", f"{Y}.data"]
    assert names(tmp_path) == [f"{X}.by-a", f"{X}.data"]


def test_a_heartbeat_renews_and_a_damaged_image_is_not_given_up(tmp_path: Path, old: None) -> None:
    a, b = Claims(tmp_path, "a", lease_s=100), Claims(tmp_path, "b", lease_s=100)
    put(b, tmp_path, X)
    put(b, tmp_path, Y)
    age(tmp_path / f"{X}.by-b", 200)
    assert swept(b.sweep([X], [X, Y], never)) == []
    assert swept(a.sweep([], [], never)) == []
    assert names(tmp_path) == [f"{X}.by-b", f"{X}.data", f"{Y}.by-b", f"{Y}.data"]


def test_what_the_dead_left(tmp_path: Path, old: None) -> None:
    a, b = Claims(tmp_path, "a"), Claims(tmp_path, "b")
    put(a, tmp_path, X)
    (tmp_path / f"{X}.by-a").unlink()  # killed between claim and data
    (tmp_path / f"gone-a-{Y}.data").write_bytes(b"data")  # killed between the two looks, and b has it
    b.claim(Y)
    for word in ("dead", "live", "f0e1"):
        (tmp_path / f"tmp-{word}.data".replace("live", "11fe")).touch()
    making = {"dead": False, "11fe": True}.get
    assert swept(b.sweep([], [X, Y], making)) == ["tmp-dead.data"]
    for name in names(tmp_path):
        age(tmp_path / name, 2 * DAY_S)
    b.claim(Y)
    assert swept(b.sweep([Y], [Y], making)) == ["tmp-f0e1.data", f"{X}.data"]
    assert names(tmp_path) == [f"{Y}.by-b", f"{Y}.data", "tmp-11fe.data"]


@pytest.mark.parametrize("brings", [False, True])
def test_a_claim_between_the_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brings: bool) -> None:
    a, b = Claims(tmp_path, "a"), Claims(tmp_path, "b")
    put(a, tmp_path, X)
    rename = Path.rename

    def slow(self: Path, target: Path) -> Path:
        done = rename(self, target)
        if self.name == f"{X}.data":
            monkeypatch.undo()
            if brings:
                put(b, tmp_path, X)
            else:
                b.claim(X)  # its data is still to come
        return done

    monkeypatch.setattr(Path, "rename", slow)
    assert not a.release(X)
    assert names(tmp_path) == [f"{X}.by-b", f"{X}.data"]


def test_two_hosts_at_once(tmp_path: Path) -> None:
    """One commits and removes the same image again and again, the other sweeps: a committed image has its data."""
    a, b = Claims(tmp_path, "a"), Claims(tmp_path, "b")
    stop = threading.Event()
    trouble: list[BaseException] = []

    def sweeping() -> None:
        try:
            while not stop.is_set():
                put(a, tmp_path, X)
                swept(a.sweep([], [], never))
        except BaseException as exc:  # noqa: BLE001 (told below)
            trouble.append(exc)

    thread = threading.Thread(target=sweeping)
    thread.start()
    until = time.monotonic() + 3
    while time.monotonic() < until and not trouble:
        put(b, tmp_path, X)
        assert _appears(tmp_path / f"{X}.data")
        b.release(X)
    stop.set()
    thread.join()
    assert trouble == []
    swept(a.sweep([], [], never))
    assert names(tmp_path) == []


def _appears(path: Path) -> bool:
    """Away for the moment between the looks at most."""
    for _ in range(100):
        if path.exists():
            return True
        time.sleep(0.005)
    return False


def test_one_host_collects_while_the_other_imports(tmp_path: Path) -> None:
    """The same images on both, coming and going: what a store lists has its data, right to the byte."""
    (tmp_path / "shared").mkdir()
    stores = {"nfs": tmp_path / "shared"}
    a, b = (ImageStore(tmp_path / name, stores=stores, data_store="nfs", owner=name) for name in "ab")
    stop = threading.Event()
    trouble: list[BaseException] = []

    def collecting() -> None:
        try:
            while not stop.is_set():
                a.gc()
                for image in a.list():
                    a.remove(image.digest)
        except BaseException as exc:  # noqa: BLE001 (told below)
            trouble.append(exc)

    thread = threading.Thread(target=collecting)
    thread.start()
    try:
        for number in range(60):
            with contextlib.suppress(DsecError):  # removed before its maker has looked at it
                commit(a, b"%d" % (number % 2), f"n{number % 2}")
            image = commit(b, b"%d" % (number % 2), f"n{number % 2}")
            assert _appears(b.data_path(image))
            b.verify(image)
            b.heartbeat()
            if number % 3 == 0:
                b.remove(image.digest)
    finally:
        stop.set()
        thread.join()
    assert trouble == []
    for image in b.list():
        b.verify(image)
        b.remove(image.digest)
    for store in (a, b):
        for image in store.list():
            store.remove(image.digest)
        store.gc()
    assert names(tmp_path / "shared") == []


def commit(store: ImageStore, content: bytes, name: str) -> Manifest:
    """An import without the importer: quick, so that there are many."""
    data = content.ljust(BLOCK, b"\0")
    tree = Tree()
    file = tree.root.children[b"f"] = Node(stat.S_IFREG)
    file.size, file.chunks = len(data), array("I", [0])
    sums = hashlib.sha256(data).digest()
    digest = "sha256:" + hashlib.sha256(sums).hexdigest()
    image = meta.Image(tree, data_size=len(data), data_digest=digest)
    with store.workspace() as work:
        for file_name, what in (("meta.erofs", image.content), ("data", data), ("data.sums", sums)):
            (work.path / file_name).write_bytes(what)
        built = Built(
            config=ImageConfig(), files=image.files, meta_size=len(image.content), meta_digest=image.digest,
            data_size=len(data), data_digest=digest, data_file="data", source="",
        )  # fmt: skip
        return store.commit(work, built, ImportJob(kind="base", name=name))


def test_owners() -> None:
    assert host_owner("h1").startswith("h1-") and host_owner("h1") == host_owner("h1") != host_owner("h2")
