"""The page server's parts that need neither root nor a kernel with pre-content events."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from pathlib import Path

import pytest

from dsecd.erofs.model import SUM
from dsecd.erofs.pages import __main__ as process
from dsecd.erofs.pages import fan
from dsecd.erofs.pages.cachefile import CacheFile
from dsecd.erofs.pages.journal import SLOTS, Journal
from dsecd.erofs.pages.model import PagesConfig
from dsecd.erofs.pages.trace import GRAIN, MAX_RUNS, Trace, figures, load
from dsecd.errors import DsecError

EVENT = struct.pack("=IBBHQiiBBHIQQ", 48, 3, 0, 24, fan.FAN_PRE_ACCESS, 17, 4711, 6, 0, 24, 0, 65536, 4096)


# -- journal ----------------------------------------------------------------------------------------------------------
def test_journal_outlives_its_process(tmp_path: Path) -> None:
    r, w = os.pipe()
    first = Journal(tmp_path / "journal")
    os.write(w, EVENT)
    found = first.read(r)
    assert found is not None
    assert found[1] == fan.Event(17, 4711, 65536, 4096)
    (pending,) = Journal(tmp_path / "journal").pending()
    assert pending.ino == 0  # nobody knows the file yet
    first.name(found[0], 99)
    second = Journal(tmp_path / "journal")
    (pending,) = second.pending()
    assert (pending.ino, pending.event.fd) == (99, 17)
    second.clear(pending.slot)
    assert list(Journal(tmp_path / "journal").pending()) == []
    os.close(r)
    os.close(w)


def test_journal_is_full(tmp_path: Path) -> None:
    """The rest waits in the kernel."""
    r, w = os.pipe()
    os.set_blocking(r, False)
    journal = Journal(tmp_path / "journal")
    slots = []
    for _ in range(SLOTS):
        os.write(w, EVENT + bytes(16))  # a pipe gives 64 bytes where the group gives one event
        found = journal.read(r)
        assert found is not None
        slots.append(found[0])
    assert len(set(slots)) == SLOTS
    assert journal.read(r) is None
    journal.clear(slots[5])
    with pytest.raises(BlockingIOError):
        journal.read(r)
    journal.clear_all()
    assert list(journal.pending()) == []
    os.close(r)
    os.close(w)


# -- cache files ------------------------------------------------------------------------------------------------------
class Cache:
    def __init__(self, top: Path, chunks: int = 4) -> None:
        self.cache, self.run = top / "cache", top / "run"
        self.cache.mkdir()
        self.run.mkdir()
        self.data = [os.urandom(SUM) for _ in range(chunks - 1)] + [b"tail" * 1024]
        self.sums = b"".join(hashlib.sha256(one).digest() for one in self.data)
        self.size = sum(map(len, self.data))
        self.hex = hashlib.sha256(self.sums).hexdigest()

    def open(self) -> CacheFile:
        file = CacheFile(self.cache, self.run, self.hex, self.sums)
        file.open(self.size)
        return file

    def reboot(self) -> None:
        for path in self.run.iterdir():
            path.unlink()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def fill(file: CacheFile, cache: Cache, *chunks: int) -> None:
    for chunk in chunks:
        file.write(chunk, cache.data[chunk])
        file.set(chunk)


def test_killed_server_loses_nothing(cache: Cache) -> None:
    file = cache.open()
    fill(file, cache, 0, 3)
    again = cache.open()
    assert [chunk in again for chunk in range(4)] == [True, False, False, True]
    assert again.read(3) == cache.data[3] and again.length(3) == 4096
    assert again.cached_bytes == 2 * SUM
    file.close()
    again.close()


def test_power_cut_loses_what_was_not_saved(cache: Cache) -> None:
    file = cache.open()
    fill(file, cache, 0)
    file.save()
    fill(file, cache, 1)
    file.close()
    cache.reboot()
    again = cache.open()
    assert [chunk in again for chunk in range(4)] == [True, False, False, False]
    again.close()


def test_hole_is_known_before_it_is_there(cache: Cache) -> None:
    file = cache.open()
    fill(file, cache, 0, 1)
    file.save()
    file.clear(0)
    file.punch([0])
    assert file.read(0) == bytes(SUM)
    file.close()
    cache.reboot()
    again = cache.open()
    assert 0 not in again and 1 in again
    assert again.path.stat().st_blocks * 512 <= 2 * SUM
    again.close()


@pytest.mark.parametrize("harm", ["truncated", "replaced", "map of another size", "garbage"])
def test_maps_of_another_file_count_for_nothing(cache: Cache, harm: str) -> None:
    file = cache.open()
    fill(file, cache, 0, 1, 2, 3)
    file.save()
    file.close()
    maps = [*cache.run.glob("*.map"), *cache.cache.glob("*.saved")]
    match harm:
        case "truncated":
            os.truncate(file.path, SUM)
        case "replaced":
            file.path.rename(cache.cache / "old")
            file.path.touch()
        case "map of another size":
            for path in maps:
                path.write_bytes(path.read_bytes()[:-1])
        case "garbage":
            for path in maps:
                path.write_bytes(os.urandom(path.stat().st_size))
    again = cache.open()
    assert again.count == 0 and again.path.stat().st_size == cache.size
    again.close()


def test_sums_must_be_the_digests(cache: Cache) -> None:
    with pytest.raises(DsecError, match="sums is altered"):
        CacheFile(cache.cache, cache.run, cache.hex, cache.sums[:-1] + b"x")
    file = CacheFile(cache.cache, cache.run, cache.hex, cache.sums)
    with pytest.raises(DsecError, match="sums for"):
        file.open(cache.size + SUM)
    file.close()


def test_lease_tells_whether_it_is_open_elsewhere(cache: Cache) -> None:
    file = cache.open()
    assert not file.in_use()
    with file.path.open("rb"):
        assert file.in_use()
    assert not file.in_use()
    file.close()


def test_removed_file_leaves_nothing(cache: Cache) -> None:
    file = cache.open()
    fill(file, cache, 0)
    file.save()
    file.remove()
    assert [*cache.cache.iterdir(), *cache.run.iterdir()] == []


# -- traces -----------------------------------------------------------------------------------------------------------
def run_of(path: Path, *offsets: int, chunks: int = 10) -> None:
    trace = Trace(path, chunks)
    for offset in offsets:
        trace.touch(offset, GRAIN, False)
    kept = trace.taken()
    if kept is not None:
        trace.save(kept)


def test_first_touches_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    run_of(path, 5 * SUM, SUM, 5 * SUM, 0)
    assert Trace(path, 10).ahead == [5, 1, 0]
    run_of(path, SUM, 7 * SUM)
    assert Trace(path, 10).ahead == [5, 1, 0, 7]
    shown = figures(path, 10 * SUM)
    assert (shown.runs, shown.touched_bytes, shown.touched_percent) == (2, 4 * GRAIN, 10.0)
    assert shown.hit_rate == 0.0


def test_order_is_learned_from_the_first_runs_only(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for n in range(MAX_RUNS + 1):
        run_of(path, n * SUM)
    assert Trace(path, 10).ahead == list(range(MAX_RUNS))
    assert load(path).runs == MAX_RUNS + 1


@pytest.mark.parametrize("content", [b"", b"{", b'{"chunks": [99, -1]}', b"\xff" * 100])
def test_bad_trace_is_no_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    assert Trace(path, 10).ahead == []
    run_of(path, 0)
    assert figures(path, SUM).touched_bytes == GRAIN


def test_trace_of_an_image_that_is_gone(tmp_path: Path) -> None:
    run_of(tmp_path / "removed" / "trace", 0)
    assert figures(tmp_path / "removed" / "trace", SUM).runs == 0
    assert list(tmp_path.iterdir()) == []


# -- the process ------------------------------------------------------------------------------------------------------
def test_group_from_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "set_inheritable", lambda *_: None)
    assert process.inherited() is None
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDNAMES", "other:fanotify")
    assert process.inherited() == 4
    monkeypatch.setenv("LISTEN_PID", "1")
    assert process.inherited() is None


def test_group_is_given_to_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        process.tell_systemd("FDSTORE=1\nFDNAME=fanotify", [systemd.fileno()])
        text, fds, _, _ = socket.recv_fds(systemd, 4096, 4)
        assert text == b"FDSTORE=1\nFDNAME=fanotify" and len(fds) == 1
        os.close(fds[0])


def test_config_from_the_daemons(tmp_path: Path) -> None:
    toml = tmp_path / "dsecd.toml"
    toml.write_text(
        f'state_dir = "{tmp_path}/s"\nrun_dir = "{tmp_path}/r"\nimage_cache_mb = 100\n'
        '[stores.nfs]\nkind = "path"\npath = "/mnt"\ndirect = true\n'
    )
    config = process.read_config(toml)
    assert config.cache == tmp_path / "s/cache" and config.run == tmp_path / "r/pages"
    assert config.cache_bytes == 100 << 20 and config.stores["nfs"].direct
    json = tmp_path / "x.json"
    json.write_bytes(b'{"run_dir": "a", "cache_dir": "b"}')
    assert process.read_config(json) == PagesConfig(run_dir="a", cache_dir="b")
    json.write_bytes(b'{"run_dir": "a"}')
    with pytest.raises(DsecError):
        process.read_config(json)
