"""What every driver shares: names, commit by rename, recovery, the collector; on a driver of plain directories."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.disk import linux
from dsecd.disk import pool as pool_module
from dsecd.disk.pool import DiskPool, PoolConfig
from dsecd.disk.select import open_pool, probe
from dsecd.errors import DsecError

MIB = 1 << 20
UID = os.getuid()


class PlainPool(DiskPool):
    """Directories without limits; `fail` names the step that breaks."""

    driver = "plain"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fail: int = 0
        self.swept = threading.Event()
        self.sweeps = 0
        self._recover()

    def _make(self, path: Path, limit_bytes: int, source: Path | None) -> None:
        if source is not None:
            shutil.copytree(source, path, symlinks=True)
        else:
            path.mkdir()
        if self.fail:
            raise OSError(self.fail, os.strerror(self.fail))

    def _limit(self, path: Path, limit_bytes: int) -> None: ...

    def _usage(self, path: Path) -> tuple[int, int]:
        return 0, MIB

    def _discard(self, path: Path) -> None:
        shutil.rmtree(path)

    def _sweep(self) -> bool:
        self.sweeps += 1
        self.swept.set()
        return self.sweeps > 1

    def free(self) -> tuple[int, int]:
        return 0, 0


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainPool]:
    monkeypatch.setattr(pool_module, "COLLECT_DELAY_S", 0.01)
    pool = PlainPool(tmp_path)
    yield pool
    pool.close()


def kind_of(caught: pytest.ExceptionInfo[DsecError]) -> str:
    return caught.value.kind


def test_create_open_list_destroy(pool: PlainPool) -> None:
    space = pool.create("h1-01ABC", MIB, UID)
    assert space.upper.is_dir() and space.work.is_dir()
    assert pool.list() == ["h1-01ABC"] and pool.open("h1-01ABC") == space
    pool.destroy("h1-01ABC")
    pool.destroy("h1-01ABC")
    assert pool.list() == []


@pytest.mark.parametrize("bad", ["", ".", "..", ".new-x", "a/b", "../a", "a\0b", "a" * 201, "ä", "a\n"])
def test_ids_are_file_names_and_nothing_else(pool: PlainPool, bad: str) -> None:
    for call in (pool.open, pool.usage, pool.destroy):
        with pytest.raises(DsecError) as caught:
            call(bad)
        assert kind_of(caught) == "invalid"


@pytest.mark.parametrize("limit", [0, -1, 1 << 60])
def test_limits_out_of_range(pool: PlainPool, limit: int) -> None:
    with pytest.raises(DsecError) as caught:
        pool.create("a", limit, UID)
    assert kind_of(caught) == "invalid" and pool.list() == []


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, "capacity"), (errno.EIO, "internal")])
def test_a_failed_create_leaves_nothing(pool: PlainPool, number: int, kind: str) -> None:
    pool.fail = number
    with pytest.raises(DsecError) as caught:
        pool.create("a", MIB, UID)
    assert kind_of(caught) == kind and caught.value.infra
    assert os.listdir(pool.root) == []


def test_a_half_made_space_is_not_listed_and_goes_at_open(tmp_path: Path) -> None:
    for name in (".new-a", ".trash-b.1", "whole"):
        (tmp_path / name).mkdir()
    pool = PlainPool(tmp_path)
    assert os.listdir(tmp_path) == ["whole"] == pool.list()
    pool.close()


def test_clone_copies_and_renews_the_workdir(pool: PlainPool) -> None:
    source = pool.create("a", MIB, UID)
    (source.upper / "f").write_text("f")
    (source.work / "work/incompat").mkdir(parents=True)
    copy = pool.clone("a", "b", MIB, UID)
    assert (copy.upper / "f").read_text() == "f" and os.listdir(copy.work) == []


def test_collector_runs_until_nothing_is_left_then_sleeps(pool: PlainPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.create("a", MIB, UID)
    pool.destroy("a")
    assert pool.swept.wait(5)
    pool.close()
    assert not any(thread.name == "dsecd-disk-collector" for thread in threading.enumerate())


def test_mountinfo_with_spaces_and_stacked_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        "2 1 0:9 / /with\\040space rw - tmpfs tmpfs rw,size=1k\n"
        "3 1 0:9 /sub /with\\040space rw master:1 - btrfs /dev/loop0 rw\n"
    )
    found = linux.mounts(table)
    monkeypatch.setattr(linux, "mounts", lambda: found)
    top = linux.mounted_at(Path("/with space"))
    assert top is not None and (top.fstype, top.source, top.root) == ("btrfs", "/dev/loop0", "/sub")
    assert linux.mount_of(Path("/with space/below")) == top
    assert linux.mount_of(Path("/elsewhere")).fstype == "ext4"


def test_an_unknown_driver_is_named(tmp_path: Path) -> None:
    with pytest.raises(DsecError, match="loop-btrfs") as caught:
        open_pool(tmp_path, PoolConfig(driver="zfs"))
    assert kind_of(caught) == "invalid"


def test_no_driver_at_all_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsecd.disk.select._missing", lambda driver, state: f"no {driver} here")
    assert probe(tmp_path).driver is None
    with pytest.raises(DsecError, match="no prjquota here") as caught:
        open_pool(tmp_path)
    assert kind_of(caught) == "unsupported"


def test_an_existing_image_stays_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody switches project quota on: the sandboxes are still in the image."""
    monkeypatch.setattr("dsecd.disk.select._missing", lambda driver, state: None)
    assert probe(tmp_path).driver == "btrfs"
    (tmp_path / "pool.img").touch()
    assert probe(tmp_path).driver == "loop-btrfs"
