"""The store without mounts: names, references, removal, gc, stores elsewhere; composing; words of fetchers. No root."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_erofs_tar import archive, member

from dsecd.erofs import fetch
from dsecd.erofs.compose import compose
from dsecd.erofs.jobs import run_import
from dsecd.erofs.model import Built, ImageConfig, ImportJob, Manifest
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError


def put(store: ImageStore, content: bytes, name: str, **fields: Any) -> Manifest:
    with tempfile.TemporaryFile() as f:
        f.write(archive([member("a", content)]))
        f.seek(0)
        job = msgspec.convert({"kind": "base", "name": name} | fields, ImportJob)
        return asyncio.run(run_import(store, job, input_fd=f.fileno()))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def kind_of(call: Any, *args: Any) -> str:
    with pytest.raises(DsecError) as e:
        call(*args)
    return e.value.kind


def test_resolve(store: ImageStore) -> None:
    one, two = put(store, b"1", "debian:12"), put(store, b"2", "team/tool:3")
    assert {m.digest for m in store.list()} == {one.digest, two.digest}
    for ref in ("debian:12", one.digest, one.hex, one.hex[:8], f"sha256:{one.hex[:20]}"):
        assert store.resolve(ref).digest == one.digest
    for ref in ("debian:13", "", one.hex[:7], "0" * 64, "../" + one.hex, "sha256:", "/etc/passwd", "a\0b", "*"):
        assert kind_of(store.resolve, ref) == "not_found"
    assert ImageStore(store.root).resolve("debian:12") == one


def test_a_name_moves_and_a_digest_does_not(store: ImageStore) -> None:
    old, new = put(store, b"old", "x:1"), put(store, b"new", "x:1")
    assert store.resolve("x:1").digest == new.digest
    assert store.resolve(old.digest).names == ()
    assert store.resolve(old.digest).name == ""
    store.set_name("x:old", old.digest)
    assert store.resolve("x:old").digest == old.digest
    assert kind_of(store.set_name, "Not A Name", old.digest) == "invalid"
    assert kind_of(store.set_name, "x", "nothing") == "not_found"


def test_remove(store: ImageStore) -> None:
    image = put(store, b"1", "a")
    store.set_name("b", "a")
    store.remove("b", in_use=[image.digest])  # only the name goes
    assert store.resolve("a").names == ("a",)
    assert kind_of(store.remove, "a", [image.digest]) == "conflict"
    assert store.resolve("a").digest == image.digest
    store.remove("a")
    assert kind_of(store.resolve, "a") == "not_found"
    assert kind_of(store.remove, "a") == "not_found"
    assert sorted(os.listdir(store.root)) == ["lock", "names.json"]
    again = put(store, b"1", "a")
    assert again.digest == image.digest
    store.remove(again.digest)
    assert store.list() == []


def test_other_config_or_kind_is_another_image(store: ImageStore) -> None:
    plain = put(store, b"1", "a")
    config = put(store, b"1", "b", config=ImageConfig(env={"A": "1"}))
    kind = put(store, b"1", "c", kind="toolkit")
    assert len({plain.digest, config.digest, kind.digest}) == 3
    assert plain.meta_digest == config.meta_digest == kind.meta_digest


def test_gc(store: ImageStore) -> None:
    old, used, new = put(store, b"1", "x"), put(store, b"2", "x"), put(store, b"3", "x")
    (store.root / "tmp-dead").mkdir()
    (store.root / "tmp-dead" / "data").write_bytes(b"x" * 10_000)
    (store.root / "trash-1234").mkdir()
    with store.workspace() as work:
        assert store.gc(min_age_s=1000).images == ()
        (store.root / "tmp-dead2").mkdir()
        report = store.gc(in_use=[used.digest])
        assert report.images == (old.digest,)
        assert report.leftovers == ("tmp-dead2",)
        assert work.path.exists()
    assert not work.path.exists()
    assert {m.digest for m in store.list()} == {used.digest, new.digest}
    assert store.gc(in_use=[used.digest]).freed_bytes == 0


def test_gc_counts_what_it_frees_on_a_store(tmp_path: Path) -> None:
    """Data of images that go, data that a crash left, and none that another host claims, too."""
    shared = tmp_path / "shared"
    shared.mkdir()
    ours = ImageStore(tmp_path / "a", stores={"nfs": shared}, data_store="nfs", owner="a")
    theirs = ImageStore(tmp_path / "b", stores={"nfs": shared}, data_store="nfs", owner="b")
    size = 1 << 20
    gone, crashed, both = (put(ours, os.urandom(size), name) for name in ("gone", "crashed", "both"))
    put(theirs, _content(ours, both), "both")
    (ours.root / crashed.hex).rename(tmp_path / "crashed")
    (ours.root / "names.json").unlink()
    report = ours.gc()
    assert set(report.images) == {gone.digest, both.digest} and report.orphans == (f"{crashed.hex}.data",)
    assert 2 * size <= report.freed_bytes < 2 * size + (1 << 19)
    assert ours.gc().freed_bytes == 0
    assert sorted(p.name for p in shared.iterdir()) == sorted([f"{both.hex}.by-b", f"{both.hex}.data"])
    theirs.verify(theirs.resolve("both"))


def _content(store: ImageStore, image: Manifest) -> bytes:
    """Of the one file of an image that `put` made of whole blocks."""
    return store.data_path(image).read_bytes()


@pytest.mark.parametrize("change", [
    {"blob": "../../../etc/shadow"}, {"blob": "/etc/shadow"}, {"blob": ".."}, {"blob": "a/b"}, {"blob": "a\0b"},
    {"chunk_size": 0}, {"sum_size": 0}, {"sum_size": -1}, {"sum_size": 1 << 20}, {"data_size": -4096},
    {"meta_size": 0}, {"format": 1}, {"store": 7}, {"data_size": "x"},
])  # fmt: skip
def test_manifests_that_lie(tmp_path: Path, change: dict[str, Any]) -> None:
    """Refused before anything is opened by what they say; the other images are as before."""
    shared = tmp_path / "shared"
    shared.mkdir()
    stores = {"nfs": shared}
    store = ImageStore(tmp_path / "a", stores=stores, data_store="nfs")
    good, bad = put(store, b"1", "good"), put(store, b"2", "bad")
    path = store.root / bad.hex / "manifest.json"
    document = msgspec.json.decode(path.read_bytes()) | change
    path.unlink()
    path.write_bytes(msgspec.json.encode(document))
    later = ImageStore(store.root, stores=stores)
    assert kind_of(later.resolve, "bad") == "image"
    assert [m.digest for m in later.list()] == [good.digest]
    later.gc()
    assert (shared / f"{bad.hex}.data").exists(), "nobody can tell whose it is"
    later.remove("bad")
    assert not (shared / f"{bad.hex}.data").exists()
    later.verify(good)


def test_gc_against_imports_at_once(store: ImageStore) -> None:
    stop = threading.Event()
    problems: list[Exception] = []

    def collect() -> None:
        while not stop.is_set():
            try:
                store.gc(min_age_s=60)
            except Exception as e:  # noqa: BLE001 (whatever it is, the test is to show it)
                problems.append(e)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        images = [put(store, str(n).encode(), f"n{n}") for n in range(8)]
    finally:
        stop.set()
        thread.join()
    assert problems == []
    assert {m.digest for m in store.list()} == {m.digest for m in images}


def test_a_commit_that_crashed_between_its_steps(tmp_path: Path) -> None:
    """Data on another store is there and the image is not: gc finds it, and spares what another host claims."""
    shared = tmp_path / "shared"
    shared.mkdir()
    ours = ImageStore(tmp_path / "a", stores={"nfs": shared}, data_store="nfs", owner="a")
    theirs = ImageStore(tmp_path / "b", stores={"nfs": shared}, data_store="nfs", owner="b")
    one, two = put(ours, b"1", "one"), put(ours, b"2", "two")
    put(theirs, b"2", "two")
    assert ours.data_path(one) == shared / f"{one.hex}.data"
    ours.verify(one)
    for image in (one, two):  # as if the rename of the directory had not happened
        (ours.root / image.hex).rename(tmp_path / image.hex)
    (ours.root / "names.json").unlink()
    assert ours.gc().orphans == (f"{one.hex}.data",)
    assert sorted(p.name for p in shared.iterdir()) == sorted([f"{two.hex}.data", f"{two.hex}.by-b"])
    theirs.verify(theirs.resolve("two"))
    theirs.remove("two")
    assert list(shared.iterdir()) == []


def test_a_store_that_left_the_config(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    image = put(ImageStore(tmp_path / "a", stores={"nfs": shared}, data_store="nfs"), b"1", "x")
    later = ImageStore(tmp_path / "a")
    assert later.resolve("x").store == "nfs"
    assert kind_of(later.check, image) == "image"
    assert kind_of(later.data_path, image) == "image"
    assert kind_of(lambda: ImageStore(tmp_path / "a", data_store="nfs")) == "invalid"


def test_commit_is_not_seen_before_it_is_whole(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sync of a commit fails in turn: the image is there whole and named, or the store is as it was."""
    image = put(store, b"1", "x")
    before = sorted(os.listdir(store.root))
    for step in range(12):
        calls = 0
        real = os.fsync

        def failing(fd: int, step: int = step) -> None:
            nonlocal calls
            calls += 1
            if calls > step:
                raise OSError(28, "No space left on device")
            real(fd)  # noqa: B023

        monkeypatch.setattr(os, "fsync", failing)
        try:
            put(store, b"2", "y")
        except DsecError as e:
            assert e.kind == "disk_full"
        monkeypatch.setattr(os, "fsync", real)
        for found in store.list():
            store.verify(found)
        if calls <= step:
            break
        store.gc()
        if len(store.list()) == 2:
            store.remove("y")
        assert sorted(os.listdir(store.root)) == before
    else:
        raise AssertionError("a commit never went through")
    assert store.resolve("x").digest == image.digest


@pytest.mark.parametrize("broken", ["manifest", "data", "meta"])
def test_a_damaged_image_is_in_nobodys_way(store: ImageStore, broken: str) -> None:
    good, bad = put(store, b"good", "good"), put(store, b"bad", "bad")

    def damage() -> None:
        path = {"manifest": store.root / bad.hex / "manifest.json", "data": store.data_path(bad),
                "meta": store.meta_path(bad)}[broken]  # fmt: skip
        path.unlink()
        path.write_bytes(b"{}")

    damage()
    later = ImageStore(store.root)
    assert good.digest in {m.digest for m in later.list()}
    assert kind_of(lambda: later.check(later.resolve("bad"))) == "image"
    assert put(later, b"bad", "bad").digest == bad.digest  # importing it again heals it
    later.verify(later.resolve("bad"))
    damage()
    later = ImageStore(store.root)
    later.remove("bad")
    assert [m.name for m in later.list()] == ["good"]
    assert sorted(os.listdir(store.root)) == sorted([good.hex, "lock", "names.json"])


def test_compose(store: ImageStore) -> None:
    put(store, b"b", "base", config=ImageConfig(env={"A": "1", "B": "1"}, user="u", workdir="/b", cmd=("sh",)))
    put(store, b"w", "work", kind="workspace", config=ImageConfig(env={"B": "2"}, workdir="/w"))
    put(store, b"t", "t1", kind="toolkit", config=ImageConfig(env={"B": "3", "C": "3"}))
    put(store, b"s", "t2", kind="toolkit", config=ImageConfig(env={"C": "4"}))
    stack = compose(store, "base", "work", ["t1", "t2"])
    assert [m.name for m in stack.lowers] == ["t1", "t2", "work", "base"]
    assert stack.config == ImageConfig(env={"A": "1", "B": "3", "C": "3"}, user="u", workdir="/w", cmd=("sh",))
    assert len(compose(store, "base").lowers) == 1
    for bad in (("work",), ("t1",), ("base", "t1"), ("base", "base"), ("base", None, ["work"]),
                ("base", None, ["t1", "t1"]), ("base", None, ["t1"] * 63)):  # fmt: skip
        assert kind_of(compose, store, *bad) == "invalid"
    assert kind_of(compose, store, "base", None, ["none"]) == "not_found"


def test_manifest_round_trip() -> None:
    built = Built(config=ImageConfig(env={"A": "b"}), files=1, meta_size=1, meta_digest="m", data_size=1,
                  data_digest="d", data_file="data", source="s")  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(built), type=Built) == built


SOURCES = """Types: deb
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main

Types: deb
URIs: http://third.example/party
Suites: nodistro
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""


def test_apt_sources_follow_the_suite() -> None:
    (stanza,) = fetch._stanzas(SOURCES, "bookworm", "trixie")
    assert "Suites: trixie trixie-updates\n" in stanza and "mirror.example" in stanza
    (stanza,) = fetch._stanzas(SOURCES, "bookworm", "sid")
    assert "Suites: sid\n" in stanza
    lines = "deb [signed-by=/k.gpg] http://m.example/debian bookworm main\n# deb http://x y z\ndeb-src http://m b c\n"
    assert fetch._one_lines(lines, "bookworm", "trixie") == [
        "deb [signed-by=/k.gpg] http://m.example/debian trixie main"
    ]


@pytest.mark.parametrize(("log", "kind"), [
    (b"Building dependency tree...\nE: Unable to locate package nope\nE: setup failed: E: apt-get", "not_found"),
    (b"Err:1 http://m x InRelease\n  Could not resolve 'm'\nE: Failed to fetch\nE: setup failed", "network"),
    (b"tar: ./usr/lib/x: No space left on device\nE: mmdebstrap failed to run", "disk_full"),
    (b"E: mmdebstrap failed to run", "image"),
])  # fmt: skip
def test_words_of_mmdebstrap(tmp_path: Path, log: bytes, kind: str) -> None:
    """As it said them; what the sentence quotes is the line that explains."""
    (tmp_path / "log").write_bytes(log)
    ended, end = os.pipe()
    os.write(end, b"1")
    fd = os.open(tmp_path / "log", os.O_RDONLY)
    try:
        with pytest.raises(DsecError) as e:
            fetch.check_bootstrap(fetch.Bootstrap(-1, ended, fd))
    finally:
        for each in (fd, ended, end):
            os.close(each)
    assert e.value.kind == kind
    assert "setup failed" not in e.value.message and "\n" not in e.value.message


@pytest.mark.parametrize(("reference", "plain"), [
    ("docker://127.0.0.1:5000/a", True), ("docker://localhost/a", True), ("docker://localhost.evil.example/a", False),
    ("docker://registry.example/127.0.0.1", False), ("docker://lan:5000/a", True), ("docker://lan:5001/a", False),
    ("docker://127.evil.example/a", False),
])  # fmt: skip
def test_plain_http_is_for_loopback_and_what_the_config_names(reference: str, plain: bool) -> None:
    assert fetch.plain_http(reference, ("lan:5000",)) is plain


@pytest.mark.parametrize("fields", [
    {"name": "Upper"}, {"name": ""}, {"name": "a" * 129}, {"name": "../x"}, {"name": "a\nb"},
    {"prefix": "x", "format": "oci"}, {"origin": "bootstrap", "suite": "x", "kind": "toolkit"},
    {"origin": "bootstrap", "suite": "book;worm"}, {"origin": "bootstrap", "suite": "sid", "packages": ("a b",)},
    {"origin": "registry", "reference": "http://x"}, {"source": "s" * 5000},
])  # fmt: skip
def test_jobs_that_nobody_can_do(fields: dict[str, Any]) -> None:
    job = msgspec.convert({"kind": "base", "name": "x"} | fields, ImportJob)
    assert kind_of(job.check) == "invalid"
