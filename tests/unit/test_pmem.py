"""Backing files: padding, one copy per digest, nothing altered; DAX fitness of real images; what it all costs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest
from dsecd._native import lib

from dsecd.errors import DsecError
from dsecd.pmem import account, backing, fit
from dsecd.pmem.backing import ALIGN, Backing, padded

KEY = "ab" * 32
MKFS = pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs (erofs-utils) is not installed")


@pytest.fixture
def pmem(tmp_path: Path) -> Backing:
    made = Backing(tmp_path / "pmem")
    made.open()
    return made


def source_of(tmp_path: Path, size: int, name: str = "data") -> Path:
    path = tmp_path / name
    path.write_bytes(random.Random(size).randbytes(size))
    return path


@pytest.mark.parametrize("size", [1, 4096, ALIGN - 1, ALIGN + 4096])
def test_a_copy_is_the_bytes_and_zeros(tmp_path: Path, pmem: Backing, size: int) -> None:
    source = source_of(tmp_path, size)
    before = (source.stat().st_mtime_ns, source.read_bytes())
    got = asyncio.run(pmem.get(source, KEY))
    assert (got.size, got.content) == (padded(size), size)
    assert got.path.read_bytes() == before[1] + bytes(padded(size) - size)
    assert (source.stat().st_mtime_ns, source.read_bytes()) == before
    assert got.path.stat().st_mode & 0o777 == 0o444


def test_an_aligned_file_is_used_as_it_is(tmp_path: Path, pmem: Backing) -> None:
    source = source_of(tmp_path, 2 * ALIGN)
    assert asyncio.run(pmem.get(source, KEY)).path == source
    assert list(pmem.directory.iterdir()) == []


def test_an_image_without_data_still_has_its_device(tmp_path: Path, pmem: Backing) -> None:
    source = source_of(tmp_path, 0)
    got = asyncio.run(pmem.get(source, KEY))
    assert (got.size, got.content, got.path.stat().st_size) == (ALIGN, 0, ALIGN)


def test_holes_stay_holes_and_cost_nothing(tmp_path: Path, pmem: Backing) -> None:
    """512 MiB with two pages in it."""
    source = tmp_path / "sparse"
    with source.open("wb") as f:
        os.pwrite(f.fileno(), b"a" * 4096, 100 << 20)
        os.pwrite(f.fileno(), b"b" * 100, (512 << 20) - 5)
    got = asyncio.run(pmem.get(source, KEY))
    with got.path.open("rb") as f:
        assert os.pread(f.fileno(), 4097, 100 << 20) == b"a" * 4096 + b"\0"
        assert os.pread(f.fileno(), 200, (512 << 20) - 6) == b"\0" + b"b" * 100 + bytes(99)
    assert got.path.stat().st_blocks * 512 < 1 << 20


def test_twenty_at_once_make_one_copy(tmp_path: Path, pmem: Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    real = backing._copy
    monkeypatch.setattr(backing, "_copy", lambda *args: (copies.append(1), real(*args)))
    source = source_of(tmp_path, 3_000_000)

    async def many() -> set[int]:
        found = await asyncio.gather(*(pmem.get(source, KEY) for _ in range(20)))
        return {file.path.stat().st_ino for file in found}

    assert len(asyncio.run(many())) == 1
    assert len(copies) == 1


def test_a_copy_that_was_touched_or_cut_is_made_anew_and_old_mappings_keep_theirs(
    tmp_path: Path, pmem: Backing
) -> None:
    source = source_of(tmp_path, 5000)
    got = asyncio.run(pmem.get(source, KEY))
    with got.path.open("rb") as held:
        for harm in (lambda p: os.truncate(p, 4096), lambda p: p.write_bytes(b"x" * ALIGN), lambda p: p.chmod(0o644)):
            harm(got.path)
            inode = got.path.stat().st_ino
            again = asyncio.run(pmem.get(source, KEY))
            assert again.path.read_bytes() == source.read_bytes() + bytes(ALIGN - 5000)
            assert again.path.stat().st_ino != inode
        inode = os.fstat(held.fileno()).st_ino
        assert pmem.keep([]) > 0
        assert os.fstat(held.fileno()).st_ino == inode
    assert list(pmem.directory.iterdir()) == []


def test_whole_seconds_are_time_enough(tmp_path: Path, pmem: Backing) -> None:
    """A file system that keeps no fractions does not make every start copy again."""
    source = source_of(tmp_path, 5000)
    os.utime(source, ns=(1_700_000_000_123_456_789,) * 2)
    got = asyncio.run(pmem.get(source, KEY))
    os.utime(got.path, ns=(1_700_000_000_000_000_000,) * 2)
    inode = got.path.stat().st_ino
    assert asyncio.run(pmem.get(source, KEY)).path.stat().st_ino == inode


def test_a_planted_link_is_not_followed(tmp_path: Path, pmem: Backing) -> None:
    victim = source_of(tmp_path, 100, "victim")
    (pmem.directory / f"{KEY}.pmem").symlink_to(victim)
    got = asyncio.run(pmem.get(source_of(tmp_path, 5000), KEY))
    assert not got.path.is_symlink()
    assert victim.stat().st_size == 100


def test_keep_removes_the_others_and_open_what_is_half_made(tmp_path: Path, pmem: Backing) -> None:
    for key in (KEY, "cd" * 32):
        asyncio.run(pmem.get(source_of(tmp_path, 5000), key))
    (pmem.directory / ".making-x").write_bytes(b"x")
    pmem.open()
    pmem.keep([KEY])
    assert [p.name for p in pmem.directory.iterdir()] == [f"{KEY}.pmem"]


def test_bad_sources_are_one_sentence(tmp_path: Path, pmem: Backing) -> None:
    with pytest.raises(DsecError) as missing:
        asyncio.run(pmem.get(tmp_path / "none", KEY))
    assert missing.value.kind == "image"
    with pytest.raises(DsecError):
        asyncio.run(pmem.get(source_of(tmp_path, 10), "../../etc"))
    assert list(pmem.directory.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, pmem: Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full answers ENOSPC as a full file system would."""

    def full(_source: int, _target: int, *_rest: object) -> None:
        with Path("/dev/full").open("wb", buffering=0) as f:
            f.write(b"x")

    monkeypatch.setattr(backing, "_copy", full)
    with pytest.raises(DsecError) as refused:
        asyncio.run(pmem.get(source_of(tmp_path, 5000), KEY))
    assert refused.value.kind == "disk_full"
    assert list(pmem.directory.iterdir()) == []


def test_a_cancelled_copy_stops_and_leaves_nothing(
    tmp_path: Path, pmem: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(tmp_path, 40 * 4096 + 1)
    monkeypatch.setattr(backing, "_STEP", 4096)
    steps = []
    real = backing._copy_some

    def slow(*args: int) -> int:
        steps.append(1)
        time.sleep(0.02)
        return real(*args)

    monkeypatch.setattr(backing, "_copy_some", slow)
    monkeypatch.setattr(backing, "_FICLONE", 0)  # also where the file system could

    async def life() -> None:
        call = asyncio.create_task(pmem.get(source, KEY))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(life())
    assert 0 < len(steps) < 40
    assert list(pmem.directory.iterdir()) == []
    asyncio.run(pmem.get(source, KEY))  # and the next one is not stuck


def test_copies_where_the_kernel_cannot(tmp_path: Path, pmem: Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between file systems: /dev/shm and here."""

    def refuses(*_: object) -> int:
        raise OSError(18, "EXDEV")

    monkeypatch.setattr(os, "copy_file_range", refuses)
    monkeypatch.setattr(fcntl, "ioctl", refuses)
    source = source_of(tmp_path, 3 * ALIGN + 77)
    got = asyncio.run(pmem.get(source, KEY))
    assert got.path.read_bytes()[: got.content] == source.read_bytes()


# What a guest pays, what the host holds.


def test_guest_cost_is_a_sixty_fourth_in_whole_2_mib() -> None:
    assert account.guest_cost([1 << 30]) == 16 << 20
    assert account.guest_cost([ALIGN, (128 << 20) + ALIGN]) == (2 << 20) + (4 << 20)
    assert account.guest_cost([]) == 0


def test_too_little_memory_names_both_numbers() -> None:
    account.require_memory(128 << 20, [8 << 30])
    with pytest.raises(DsecError, match=r"127 MiB of memory are too little: its images take 128 MiB") as caught:
        account.require_memory(127 << 20, [8 << 30])
    assert (caught.value.kind, caught.value.infra) == ("invalid", False)


def test_cached_pages_are_counted_once_and_asking_reads_nothing(tmp_path: Path) -> None:
    one, two = source_of(tmp_path, 8 << 20, "one"), tmp_path / "two"
    two.hardlink_to(one)
    os.sync()
    with one.open("rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        empty = account.cached_bytes(f.fileno())
        assert empty < 1 << 20
        assert account.cached_bytes(f.fileno()) == empty
        os.pread(f.fileno(), 4 << 20, 0)
        assert 4 << 20 <= account.cached_bytes(f.fileno()) <= 8 << 20
        deadline = time.monotonic() + 10
        while True:  # what is still being read ahead is in the cache for one of them only
            ways = lib.dsec_cached_by_cachestat(f.fileno()), lib.dsec_cached_by_mincore(f.fileno())
            if ways[1] in (ways[0], -1) or ways[0] == -38 or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        assert ways[1] in (ways[0], -1) or ways[0] == -38
        found = asyncio.run(account.page_cache([one, two, tmp_path / "gone", one]))
    assert (found.files, found.bytes) == (1, 8 << 20)
    assert found.cached_bytes == ways[1]


# Fitness, on images of the real mkfs.erofs.


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    for number in range(300):
        (top / f"d{number % 7}").mkdir(parents=True, exist_ok=True)
        (top / f"d{number % 7}/f{number}").write_bytes(random.Random(number).randbytes(number * 40) + b"z" * 9000)
    (top / "link").symlink_to("d1")
    os.mkfifo(top / "fifo")
    return top


def mkfs(tree: Path, *options: str | Path) -> Path:
    image = tree.parent / "image.erofs"
    subprocess.run(["mkfs.erofs", "-d0", *options, image, tree], check=True, capture_output=True)
    return image


@MKFS
def test_the_default_layout_is_not_fit_and_says_why(tree: Path) -> None:
    found = fit.examine(mkfs(tree))
    assert not found.fit
    assert found.files == 300
    assert 250 < found.unfit_files <= 300
    with pytest.raises(
        DsecError, match=r"image box is not fit for DAX: \d+ of its 300 files have their end inline"
    ) as e:
        fit.require(mkfs(tree), "box")
    assert e.value.kind == "image"


@MKFS
def test_noinline_and_chunks_are_fit(tree: Path) -> None:
    assert fit.examine(mkfs(tree, "-Enoinline_data")) == fit.Fitness(300, 0)
    blob = tree.parent / "blob"
    assert fit.examine(mkfs(tree, "--chunksize=1048576", f"--blobdev={blob}")) == fit.Fitness(300, 0)
    fit.require(mkfs(tree, "-Enoinline_data"), "box")


@MKFS
def test_compression_is_not_fit(tree: Path) -> None:
    found = fit.examine(mkfs(tree, "-zlz4"))
    assert "compressed" in found.why
    assert found.files == 300


@MKFS
def test_hostile_images_end_in_an_error_or_an_answer(tree: Path) -> None:
    """400 images with a few bytes changed: never another exception, never long."""
    good = mkfs(tree, "-Enoinline_data").read_bytes()
    chance = random.Random(7)
    broken = tree.parent / "broken"
    deadline = time.monotonic() + 60
    errors = 0
    for _ in range(400):
        image = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            at = chance.choice((1024 + chance.randrange(128), chance.randrange(min(len(image), 65536))))
            image[at] = chance.randrange(256)
        broken.write_bytes(image[: chance.choice((len(image), chance.randrange(len(image))))])
        try:
            fit.examine(broken)
        except DsecError as e:
            assert e.kind == "image"
            errors += 1
        assert time.monotonic() < deadline
    assert errors > 100


@MKFS
def test_directories_that_contain_each_other_are_walked_once(tree: Path) -> None:
    """Every entry of the root is made to lead back to the root."""
    image = bytearray(mkfs(tree, "-Enoinline_data").read_bytes())
    root = struct.unpack_from("<H", image, 1024 + 14)[0]
    meta = struct.unpack_from("<I", image, 1024 + 40)[0] * 4096
    at = meta + root * 32
    inline = at + (64 if image[at] & 1 else 32)
    for number in range(struct.unpack_from("<H", image, inline + 8)[0] // 12):
        struct.pack_into("<Q", image, inline + number * 12, root)
    loop = tree.parent / "loop.erofs"
    loop.write_bytes(image)
    assert fit.examine(loop).files == 0


def test_what_is_no_image_at_all(tmp_path: Path) -> None:
    for content in (b"", b"x" * 100, bytes(8192)):
        path = tmp_path / "no"
        path.write_bytes(content)
        with pytest.raises(DsecError) as e:
            fit.examine(path)
        assert e.value.kind == "image"
    with pytest.raises(DsecError):
        fit.examine(tmp_path / "none")
