"""Mounts: counted, shared, found again, refused; stacks of layers through a real overlay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest
from erofs_kit import TRICKY, Tar, import_now, leftovers, quick, sparse_tar, tar_of_directory

from dsecd.erofs import sys as erofs_sys
from dsecd.erofs.compose import Stack, compose
from dsecd.erofs.drivers import DRIVERS, FileDriver, LoopDriver
from dsecd.erofs.model import BLOCK, Manifest
from dsecd.erofs.mount import MountTable
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


@pytest.fixture
def image(store: ImageStore) -> Manifest:
    return import_now(store, Tar().dir("bin").file("bin/su", b"x", mode=0o4755).file("a", os.urandom(3_000_000)).done())


def mounted(run_dir: Path) -> list[str]:
    return [m.target.name for m in erofs_sys.mounts_below(run_dir)]


def test_mounted_once_and_counted(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    async def run() -> None:
        table = MountTable(run_dir, store, linger_s=0.3)
        mounts = await asyncio.gather(*(table.acquire(image.digest, f"s{i}") for i in range(20)))
        assert len(set(mounts)) == 1
        assert mounted(run_dir) == [image.hex[:12]]
        assert table.in_use() == {image.digest}
        await table.acquire(image.digest, "s0")  # twice under one name is once
        for i in range(20):
            assert mounted(run_dir) == [image.hex[:12]]
            await table.release(image.digest, f"s{i}")
            await table.release(image.digest, f"s{i}")
        assert table.in_use() == frozenset()
        assert mounted(run_dir) == [image.hex[:12]]  # lingers
        assert await table.acquire(image.digest, "late") == mounts[0]
        await asyncio.sleep(0.5)
        assert mounted(run_dir) == [image.hex[:12]]
        await table.release(image.digest, "late")
        await asyncio.sleep(0.6)
        assert mounted(run_dir) == []
        assert table.mounts() == []
        await table.close()

    asyncio.run(run())


def test_mount_is_read_only_and_gives_setuid_programs_to_nobody_on_the_host(
    store: ImageStore, run_dir: Path, image: Manifest
) -> None:
    async def run() -> None:
        table = MountTable(run_dir, store, linger_s=0)
        async with table.hold(image.digest) as path:
            options = next(
                line.split()[5] for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(path) in line
            ).split(",")
            assert {"ro", "nodev", "nosuid"} <= set(options)
            with pytest.raises(OSError, match="Read-only"):
                (path / "new").touch()
            # Whoever may import may import a setuid shell.
            assert run_dir.stat().st_mode & 0o777 == 0o700
        await table.close()

    asyncio.run(run())


def test_acquire_and_release_in_a_storm(store: ImageStore, run_dir: Path) -> None:
    images = [import_now(store, Tar().file("n", str(n).encode()).done(), name=f"n{n}") for n in range(4)]

    async def run() -> None:
        table = MountTable(run_dir, store, linger_s=0.001)

        async def use(worker: int) -> None:
            for turn in range(40):
                n = (worker * 7 + turn * 3) % 4
                async with table.hold(images[n].digest) as path:
                    assert (path / "n").read_bytes() == str(n).encode()
                    await asyncio.sleep(0.001 * (turn % 3))

        await asyncio.gather(*map(use, range(12)))
        await asyncio.sleep(0.1)
        await table.close()
        assert mounted(run_dir) == []

    asyncio.run(run())


def test_cancelled_acquire_holds_nothing(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    async def run() -> None:
        table = MountTable(run_dir, store, linger_s=0)
        for delay in (0, 0.0005, 0.002, 0.01, 0.05):
            task = asyncio.create_task(table.acquire(image.digest, "gone"))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            await table.release(image.digest, "gone")
            assert table.in_use() == frozenset()
        await asyncio.sleep(0.1)
        await table.close()

    asyncio.run(run())


def test_busy_mount_is_tried_again(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    async def run() -> None:
        table = MountTable(run_dir, store, linger_s=0.05)
        async with table.hold(image.digest) as path:
            held = (path / "a").open("rb")
        await asyncio.sleep(0.3)
        assert mounted(run_dir) == [image.hex[:12]]
        held.close()
        await asyncio.sleep(0.3)
        assert mounted(run_dir) == []
        await table.close()

    asyncio.run(run())


def test_restarted_daemon_finds_and_sweeps(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    """Mounts outlive the daemon; what a living sandbox holds stays, untouched, and the rest goes."""
    other = import_now(store, Tar().file("o", b"other").done(), name="other")

    async def first() -> None:
        table = MountTable(run_dir, store)
        await table.acquire(image.digest, "alive")
        await table.acquire(other.digest, "dead")
        await table.close()

    async def second() -> None:
        (run_dir / "0123456789ab").mkdir()  # from a mount that never came to be
        before = erofs_sys.mounts_below(run_dir)
        assert len(before) == 2
        table = MountTable(run_dir, store, linger_s=0, drivers=[LoopDriver()])
        mount = await table.acquire(image.digest, "alive")
        assert mount.driver == "file"  # as it was, not as it would be now
        assert sorted(await table.adopt()) == sorted(["0123456789ab", other.hex[:12]])
        assert mounted(run_dir) == [image.hex[:12]]
        assert await table.adopt() == []
        await table.release(image.digest, "alive")
        await asyncio.sleep(0.1)
        await table.close()

    asyncio.run(first())
    asyncio.run(second())


def test_drivers_are_probed(store: ImageStore, run_dir: Path) -> None:
    async def run() -> None:
        table = MountTable(run_dir, store)
        probes = await table.probe()
        assert [p.driver for p in probes] == ["file", "loop"]
        assert all(p.usable for p in probes), probes
        await table.close()

    asyncio.run(run())


def test_store_on_overlay_falls_back_to_loop(tmp_path: Path, run_dir: Path) -> None:
    """EROFS refuses files of an overlay (its stacking limit); whichever way is found, the image is readable."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, tmp_path / "merged"], check=True)
    try:
        store = ImageStore(tmp_path / "merged" / "images")
        image = import_now(store, Tar().file("a", b"hello").done())

        async def run() -> None:
            table = MountTable(run_dir, store, linger_s=0)
            async with table.hold(image.digest) as path:
                assert (path / "a").read_bytes() == b"hello"
                print(await table.probe(), table.mounts())
            await table.close()

        asyncio.run(run())
    finally:
        for _ in range(50):  # the loop devices let go of the files a moment after the mount
            if subprocess.run(["umount", tmp_path / "merged"], capture_output=True, check=False).returncode == 0:
                break
            time.sleep(0.05)
    assert leftovers(tmp_path / "merged", run_dir) == []


# -- images that are not well (case 21) ------------------------------------------------------------------------------


def damage(path: Path, at: int, data: bytes) -> None:
    path.chmod(0o644)
    with path.open("r+b") as f:
        f.seek(at)
        f.write(data)


def refused(store: ImageStore, run_dir: Path, digest: str) -> str:
    async def run() -> str:
        table = MountTable(run_dir, store, linger_s=0)
        try:
            with pytest.raises(DsecError) as e:
                await table.acquire(digest, "x")
        finally:
            await table.close()
        assert e.value.kind == "image", e.value
        assert e.value.infra
        assert table.in_use() == frozenset()
        return e.value.message

    return asyncio.run(run())


def test_truncated_data(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    os.truncate(store.data_path(image), image.data_size - 4096)
    assert "truncated" in refused(store, run_dir, image.digest)


def test_missing_data(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    store.data_path(image).unlink()
    assert "not there any more" in refused(store, run_dir, image.digest)


def test_missing_metadata(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    store.meta_path(image).unlink()
    assert "not there any more" in refused(store, run_dir, image.digest)


def test_altered_superblock(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    damage(store.meta_path(image), 1024 + 36, b"\xff")
    assert "altered" in refused(store, run_dir, image.digest)


def test_another_images_metadata(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    other = import_now(store, Tar().dir("bin").file("bin/su", b"y").file("a", os.urandom(3_000_000)).done(), name="y")
    metadata = store.meta_path(other).read_bytes()
    assert len(metadata) == image.meta_size
    damage(store.meta_path(image), 0, metadata)
    assert "another image's" in refused(store, run_dir, image.digest)


def test_altered_manifest(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    damage(store.root / image.hex / "manifest.json", 0, b"nonsense")
    assert "altered" in refused(ImageStore(store.root), run_dir, image.digest)


@pytest.mark.parametrize("name", ["data", "meta.erofs", "data.sums"])
def test_verify_finds_one_altered_byte(store: ImageStore, image: Manifest, name: str) -> None:
    path = store.root / image.hex / name
    store.verify(image)
    old = path.read_bytes()[path.stat().st_size - 10]
    damage(path, path.stat().st_size - 10, bytes([old ^ 1]))
    with pytest.raises(DsecError) as e:
        store.verify(image)
    assert e.value.kind == "image" and "altered" in e.value.message


def test_image_that_is_gone(store: ImageStore, run_dir: Path, image: Manifest) -> None:
    store.remove(image.digest)

    async def run() -> None:
        table = MountTable(run_dir, store, linger_s=0)
        with pytest.raises(DsecError) as e:
            await table.acquire(image.digest, "x")
        assert e.value.kind == "not_found"
        await table.close()

    asyncio.run(run())


# -- stacks ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def overlaid(table: MountTable, stack: Stack, top: Path):  # type: ignore[no-untyped-def]
    """The stack as a sandbox gets it: an overlay with a writable upper."""
    async with contextlib.AsyncExitStack() as holds:
        lowers = [await holds.enter_async_context(table.hold(digest)) for digest in stack.digests]
        for name in ("upper", "work", "merged"):
            (top / name).mkdir(parents=True)
        # mount(2) takes a page of options: 64 lowers fit only by short names. (fsconfig takes them one by one.)
        options = f"lowerdir={':'.join(p.name for p in lowers)},upperdir={top}/upper,workdir={top}/work"
        command = ["mount", "-t", "overlay", "overlay", "-o", options, top / "merged"]
        subprocess.run(command, check=True, cwd=lowers[0].parent)
        try:
            yield top / "merged"
        finally:
            subprocess.run(["umount", top / "merged"], check=True)


BASE = (
    Tar().dir("etc").file("etc/old", b"old").file("etc/keep", b"keep").dir("opt").dir("opt/pkg")
    .file("opt/pkg/v1", b"1").dir("gone").file("gone/x", b"x").dir("turn").file("turn/in", b"in")
    .file("flat", b"flat").dir("home").dir("re").file("re/a", b"a").done()
)  # fmt: skip
WORKSPACE = (
    Tar().file("etc/.wh.old").dir("opt").dir("opt/pkg").file("opt/pkg/.wh..wh..opq").file("opt/pkg/v2", b"2")
    .file(".wh.gone").file(".wh.turn").file("turn", b"now a file").file(".wh.flat").dir("flat").file("flat/f", b"f")
    .file(".wh.re").dir("re").file("re/b", b"b").dir("only").file("only/.wh.nothing").file("only/here", b"h")
    .file("srv/code", b"code").done()
)  # fmt: skip
TOOLKIT = Tar().file("opt/tool/bin", b"t").file("srv/.wh.code").file("etc/keep", b"changed").done()


def test_whiteouts_of_upper_layers_hide_the_lower_ones(store: ImageStore, run_dir: Path, tmp_path: Path) -> None:
    import_now(store, BASE, name="base:1", config={"env": {"A": "base", "B": "base"}, "workdir": "/", "user": "root"})
    import_now(store, WORKSPACE, name="work:1", kind="workspace", config={"env": {"B": "work"}, "workdir": "/srv"})
    import_now(store, TOOLKIT, name="tool:1", kind="toolkit", config={"env": {"C": "tool"}})
    stack = compose(store, "base:1", "work:1", ["tool:1"])
    assert [m.name for m in stack.lowers] == ["tool:1", "work:1", "base:1"]
    assert stack.config.env == {"A": "base", "B": "work", "C": "tool"}
    assert (stack.config.workdir, stack.config.user) == ("/srv", "root")

    async def run() -> None:
        table = MountTable(run_dir, store, linger_s=0)
        async with overlaid(table, stack, tmp_path / "box") as top:
            found = {str(p.relative_to(top)) for p in top.rglob("*")}
            assert found == {
                "etc", "etc/keep", "opt", "opt/pkg", "opt/pkg/v2", "opt/tool", "opt/tool/bin", "turn", "flat",
                "flat/f", "home", "re", "re/b", "only", "only/here", "srv",
            }  # fmt: skip
            assert (top / "etc/keep").read_bytes() == b"changed"
            assert (top / "turn").read_bytes() == b"now a file"
            (top / "etc/keep").write_bytes(b"written")
            (top / "opt/pkg/v2").unlink()
            (top / "re/b").rename(top / "re/c")
            assert sorted(os.listdir(top / "re")) == ["c"]
        async with table.hold(stack.digests[0]) as path:
            assert (path / "etc/keep").read_bytes() == b"changed"
        await table.close()

    asyncio.run(run())


def test_setuid_and_capabilities_work_on_the_overlay(store: ImageStore, run_dir: Path, tmp_path: Path) -> None:
    import_now(store, tar_of_directory(TRICKY), name="tricky")

    async def run() -> None:
        table = MountTable(run_dir, store, linger_s=0)
        async with overlaid(table, compose(store, "tricky"), tmp_path / "box") as top:
            assert os.getxattr(top / "bin/ping", "security.capability").hex().startswith("0100000200200000")
            assert (top / "bin/suid").stat().st_mode & 0o7777 == 0o4755
            assert (top / "bigid").stat().st_uid == 197609
            assert (top / "bin/one").stat().st_nlink == 2
        await table.close()

    asyncio.run(run())


def test_sixty_four_layers(store: ImageStore, run_dir: Path, tmp_path: Path) -> None:
    import_now(store, Tar().file("base", b"b").done(), name="base")
    for n in range(63):
        quick(store, Tar().file(f"t{n}", b"t").file("top", str(n).encode()).done(), f"t{n}", "toolkit")

    async def run() -> None:
        table = MountTable(run_dir, store, linger_s=0)
        stack = compose(store, "base", None, [f"t{n}" for n in range(62)])
        async with overlaid(table, stack, tmp_path / "box") as top:
            assert len(os.listdir(top)) == 64
            assert (top / "top").read_bytes() == b"0"
        await asyncio.sleep(0.2)
        await table.close()

    asyncio.run(run())
    with pytest.raises(DsecError) as e:
        compose(store, "base", "work", [f"t{n}" for n in range(63)])
    assert e.value.kind == "invalid"


def test_large_file_beyond_4_gib_with_holes(store: ImageStore, run_dir: Path, tmp_path: Path) -> None:
    size, marks, archive = sparse_tar(tmp_path)
    image = import_now(store, archive)
    assert image.data_size < 8 << 20
    assert image.data_size % BLOCK == 0

    async def run() -> None:
        table = MountTable(run_dir, store, linger_s=0)
        async with table.hold(image.digest) as path, _opened(path / "big") as fd:
            assert os.fstat(fd).st_size == size
            for at, mark in marks.items():
                assert os.pread(fd, len(mark) + 2, at) == mark + b"\0\0"
        await table.close()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def _opened(path: Path):  # type: ignore[no-untyped-def]
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_both_drivers_in_order() -> None:
    assert [type(d) for d in DRIVERS] == [FileDriver, LoopDriver]
