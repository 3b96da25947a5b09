"""Images that are filled on demand, in numbers and in size: hundreds of mounts, offsets beyond 4 GiB."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from erofs_kit import Tar, import_now, quick, sparse_tar
from pages_kit import World, until

from dsecd.erofs import meta
from dsecd.erofs.model import BLOCK, CHUNK, SUM, Built, ImageConfig, ImportJob, Manifest
from dsecd.erofs.tree import Node, Tree

GIB = 1 << 30


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path, deadline_s=10.0)
    yield one
    one.end()


def descriptors(world: World) -> int:
    """Open in the page server."""
    return len(os.listdir(f"/proc/{world.pages.stats().pid}/fd"))


def test_two_hundred_mounts_of_one_image(world: World) -> None:
    content = os.urandom(70_000)
    image = quick(world.images, Tar().file("a", content).done(), "one")
    with world.mounted(image) as top:
        assert (top / "a").read_bytes() == content
    before = descriptors(world)
    for _ in range(200):
        with world.mounted(image) as top:
            assert (top / "a").read_bytes() == content
    assert world.pages.stats().images == () and descriptors(world) <= before
    assert len(world.far.requests()) == 1  # the cache outlives the mounts


def test_two_hundred_images(world: World) -> None:
    """All mounted at once, eight at a time, read, and unmounted."""
    contents = [b"%d" % n + os.urandom(5000) for n in range(200)]
    images = [quick(world.images, Tar().file("a", content).done(), f"n{n}") for n, content in enumerate(contents)]
    turn = asyncio.Semaphore(8)

    async def mount_and_read(n: int) -> None:
        async with turn:
            mount = await world.table.acquire(images[n].digest, f"s{n}")
            assert mount.driver == "fanotify"
            assert await asyncio.to_thread((Path(mount.path) / "a").read_bytes) == contents[n]

    async def all_of_them() -> None:
        await asyncio.gather(*map(mount_and_read, range(200)))

    world.do(all_of_them())
    assert len(world.pages.stats().images) == len(world.table.mounts()) == 200
    for n, image in enumerate(images):
        world.do(world.table.release(image.digest, f"s{n}"))
    until(lambda: not world.table.mounts(), "all are unmounted", 60)
    assert world.pages.stats().images == ()


def test_sparse_file_beyond_4_gib(world: World, tmp_path: Path) -> None:
    size, marks, archive = sparse_tar(tmp_path)
    image = import_now(world.images, archive)
    assert image.data_size < 8 << 20
    with world.mounted(image) as top, (top / "big").open("rb", buffering=0) as f:
        assert os.fstat(f.fileno()).st_size == size
        for at, mark in reversed(marks.items()):
            assert os.pread(f.fileno(), len(mark) + 2, at) == mark + b"\0\0"


def large_image(world: World, marks: dict[int, bytes], size: int) -> Manifest:
    """Of one file, whose data is a sparse file on the store: `size` bytes, all zero but for the marks."""
    data = world.far.path / "large.data"
    with data.open("wb") as f:
        for at, mark in marks.items():
            f.seek(at)
            f.write(mark)
        f.truncate(size)
    zeros = hashlib.sha256(bytes(SUM)).digest()
    sums = [zeros] * (size // SUM)
    with data.open("rb") as f:
        for at, mark in marks.items():
            for number in range(at // SUM, (at + len(mark) - 1) // SUM + 1):
                sums[number] = hashlib.sha256(os.pread(f.fileno(), SUM, number * SUM)).digest()
    digest = "sha256:" + hashlib.sha256(b"".join(sums)).hexdigest()
    tree = Tree()
    node = tree.root.children[b"large"] = Node(stat.S_IFREG)
    node.size, node.chunks = size, array("I", range(0, size // BLOCK, CHUNK // BLOCK))
    made = meta.Image(tree, data_size=size, data_digest=digest)
    with world.images.workspace() as work:
        data.rename(world.far.path / f"{work.path.name}.data")  # as if it had been copied, which takes half a minute
        (work.path / "meta.erofs").write_bytes(made.content)
        (work.path / "data.sums").write_bytes(b"".join(sums))
        built = Built(
            config=ImageConfig(), files=made.files, meta_size=len(made.content), meta_digest=made.digest,
            data_size=size, data_digest=digest, data_file="", source="",
        )  # fmt: skip
        return world.images.commit(work, built, ImportJob(kind="base", name="large", store="far"))


def test_data_beyond_4_gib(world: World) -> None:
    """Offsets of more than 32 bits all the way: events, requests to the store, chunks of the cache, its map."""
    size = 5 * GIB
    marks = {0: b"start", 4 * GIB - 5: b"across four gibibytes", 4 * GIB + 3 * SUM - 2: b"two sums", size - 3: b"end"}
    image = large_image(world, marks, size)
    with world.mounted(image) as top, (top / "large").open("rb", buffering=0) as f:
        for at, mark in reversed(marks.items()):
            assert os.pread(f.fileno(), len(mark) + 2, at) == (mark + b"\0\0")[: size - at]
        stats = world.stats(image)
        assert stats.data_size == size and 0 < stats.cached_bytes < 64 << 20
        assert world.data_file(image).stat().st_blocks * 512 < 64 << 20
    assert max(offset for _, offset, _ in world.far.requests()) > 4 * GIB
