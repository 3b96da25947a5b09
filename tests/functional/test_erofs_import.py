"""Imports of every kind, good and bad, through the real importer process, the real kernel and real peers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from erofs_kit import (
    TRICKY,
    Tar,
    expected,
    import_now,
    imported,
    importers,
    input_of,
    leftovers,
    mounted_tree,
    processes,
    registry,
    tar_of_directory,
    tree_of,
)

from dsecd.erofs.drivers import FileDriver, LoopDriver
from dsecd.erofs.jobs import run_import
from dsecd.erofs.model import ImageConfig, ImportJob, Limits, Manifest, Progress
from dsecd.erofs.mount import MountTable
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


def assert_tricky(store: ImageStore, run_dir: Path, manifest: Manifest, **fields: Any) -> None:
    found = asyncio.run(mounted_tree(store, run_dir, manifest, **fields))
    want = expected()
    assert found["tree"].keys() == want["tree"].keys()
    for key, entry in want["tree"].items():
        assert found["tree"][key] == entry
    assert found["hardlinks"] == want["hardlinks"]


@pytest.mark.parametrize("driver", [FileDriver(), LoopDriver()], ids=lambda d: d.name)
def test_tricky_layout_equals_what_umoci_unpacks(store: ImageStore, run_dir: Path, driver: Any) -> None:
    """Cases 17 to 20: every entry, hard link group and xattr, through each driver."""
    manifest = import_now(store, tar_of_directory(TRICKY))
    assert manifest.config == ImageConfig(
        env={"PATH": "/bin:/usr/bin", "GREETING": "hi there"}, workdir="/dir1", user="0:0", cmd=("/bin/one",)
    )
    store.verify(manifest)
    assert_tricky(store, run_dir, manifest, drivers=[driver])


def test_tricky_again_is_the_same_image(store: ImageStore) -> None:
    first = import_now(store, tar_of_directory(TRICKY), name="a")
    second = import_now(store, tar_of_directory(TRICKY), name="b")
    assert second.digest == first.digest
    assert second.names == ("a", "b")
    assert len(store.list()) == 1


def skopeo(*args: str) -> None:
    subprocess.run(["skopeo", *args], check=True, capture_output=True)


@pytest.mark.parametrize("kind", ["docker-archive", "oci-archive"])
@pytest.mark.parametrize("declared", [True, False])
def test_archives_of_skopeo(store: ImageStore, run_dir: Path, tmp_path: Path, kind: str, declared: bool) -> None:
    archive = tmp_path / "archive.tar"
    skopeo("copy", f"oci:{TRICKY}:tricky", f"{kind}:{archive}:some/name:tag")
    declared_format = {"docker-archive": "docker", "oci-archive": "oci"}[kind] if declared else "auto"
    manifest = import_now(store, archive.read_bytes(), format=declared_format)
    assert manifest.config.env["GREETING"] == "hi there"
    assert_tricky(store, run_dir, manifest)


def test_layout_of_zstd_layers(store: ImageStore, run_dir: Path, tmp_path: Path) -> None:
    skopeo("copy", "--dest-compress-format=zstd", "--dest-compress", f"oci:{TRICKY}:tricky", f"dir:{tmp_path}/dir")
    skopeo("copy", "--dest-compress-format=zstd", "--dest-compress", f"oci:{TRICKY}:tricky", f"oci:{tmp_path}/z:t")
    media = {json.loads(p.read_bytes()).get("mediaType") for p in (tmp_path / "z/blobs/sha256").iterdir()
             if p.read_bytes()[:1] == b"{"}  # fmt: skip
    assert media
    assert_tricky(store, run_dir, import_now(store, tar_of_directory(tmp_path / "z")))


def fetch(store: ImageStore, reference: str, seen: list[Progress] | None = None, **fields: Any) -> Manifest:
    job = ImportJob(kind="base", name="fetched", origin="registry", reference=reference, **fields)
    notes = [] if seen is None else seen
    return asyncio.run(run_import(store, job, input_fd=None, progress=notes.append))


def test_registry(store: ImageStore, run_dir: Path, tmp_path: Path) -> None:
    with registry(tmp_path) as address:
        skopeo("copy", "--dest-tls-verify=false", f"oci:{TRICKY}:tricky", f"docker://{address}/team/tricky:1")
        seen: list[Progress] = []
        manifest = fetch(store, f"docker://{address}/team/tricky:1", seen)
        assert {"fetch", "unpack", "write", "commit"} <= {p.phase for p in seen}
        assert manifest.source == f"docker://{address}/team/tricky:1"
        assert_tricky(store, run_dir, manifest)
        with pytest.raises(DsecError) as e:
            fetch(store, f"docker://{address}/team/nothing:1")
        assert e.value.kind == "not_found"
    with pytest.raises(DsecError) as e:
        fetch(store, f"docker://{address}/team/tricky:1")
    assert e.value.kind == "network"
    assert len(store.list()) == 1


def test_registry_with_an_altered_blob(store: ImageStore, tmp_path: Path) -> None:
    with registry(tmp_path) as address:
        skopeo("copy", "--dest-tls-verify=false", f"oci:{TRICKY}:tricky", f"docker://{address}/tricky:1")
        for blob in (tmp_path / "registry").rglob("data"):
            data = bytearray(blob.read_bytes())
            if data[:2] == b"\x1f\x8b":
                data[len(data) // 2] ^= 1
                blob.write_bytes(data)
        with pytest.raises(DsecError) as e:
            fetch(store, f"docker://{address}/tricky:1")
    assert e.value.kind == "image"
    assert store.list() == []


@contextlib.contextmanager
def deaf_registry() -> Iterator[str]:
    """Accepts, and never says a word."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield f"docker://127.0.0.1:{s.getsockname()[1]}/a:1"


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_registry_that_never_answers(store: ImageStore, how: str) -> None:
    """skopeo is killed with its import (the fixture looks for it)."""

    async def run(reference: str) -> None:
        limits = Limits(deadline_s=1.5 if how == "deadline" else 60)
        job = ImportJob(kind="base", name="x", origin="registry", reference=reference)
        task = asyncio.create_task(run_import(store, job, input_fd=None, limits=limits))
        if how == "cancel":
            await asyncio.to_thread(wait_for, lambda: running(store, b"skopeo"))
            task.cancel()
        with pytest.raises((DsecError, asyncio.CancelledError)) as e:
            await task
        assert how == "cancel" or (isinstance(e.value, DsecError) and e.value.kind == "timeout")

    with deaf_registry() as reference:
        asyncio.run(run(reference))


@pytest.mark.parametrize("origin", ["registry", pytest.param("bootstrap", marks=pytest.mark.network)])
def test_killed_daemon_takes_fetchers_down(store: ImageStore, tmp_path: Path, origin: str) -> None:
    """SIGKILL to the daemon: importer, skopeo or mmdebstrap with its chroot's mounts, all gone; gc does the rest."""
    with deaf_registry() as reference:
        fields = {"registry": {"reference": reference}, "bootstrap": {"suite": "bookworm"}}[origin]
        job = {"kind": "base", "name": "x", "origin": origin} | fields
        process = daemon(store, job, Path("/dev/null"))
        wait_for(lambda: running(store, {"registry": b"skopeo", "bootstrap": b"mmdebstrap"}[origin]))
        time.sleep(0.5 if origin == "registry" else 10)
        process.kill()
        process.communicate()
        wait_for(lambda: not processes(store.root))
    wait_for(lambda: collected(store, tmp_path))
    assert store.list() == []


def collected(store: ImageStore, tmp_path: Path) -> bool:
    """gc leaves nothing; tried again, because a process loses its command line before it loses its locks."""
    store.gc(in_use=[m.digest for m in store.list()])
    return leftovers(store.root, tmp_path / "run") == []


def running(store: ImageStore, name: bytes) -> bool:
    return any(name in command for _, command in processes(store.root))


def wait_for(what: Callable[[], bool]) -> None:
    for _ in range(1000):
        if what():
            return
        time.sleep(0.02)
    raise AssertionError("not within twenty seconds")


@pytest.mark.parametrize(
    "reference", ["docker://", "docker:///etc", "oci:/etc", "docker://a b", "docker://--help x", "dir:/"]
)
def test_reference_that_is_none(store: ImageStore, reference: str) -> None:
    with pytest.raises(DsecError) as e:
        fetch(store, reference)
    assert e.value.kind == "invalid"


# -- plain tars ------------------------------------------------------------------------------------------------------


def random_tree(top: Path, rng: random.Random) -> None:
    """Files around every block and chunk edge, sparse ones, big directories, links, odd modes and owners."""
    top.mkdir()
    for size in (0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 * (1 << 20) + 17):
        (top / f"size-{size}").write_bytes(rng.randbytes(size))
    (top / "zeros").write_bytes(bytes(2_500_000))
    (top / "same").write_bytes((top / "size-4097").read_bytes())
    with (top / "sparse").open("wb") as f:
        for at in (3 << 20, (7 << 20) + 5000, 40 << 20):
            f.seek(at)
            f.write(rng.randbytes(10_000))
        f.truncate(50 << 20)
    with (top / "all-hole").open("wb") as f:
        f.truncate(5 << 20)
    for count in (1, 40, 170, 3000):
        directory = top / f"dir-{count}"
        directory.mkdir()
        for i in range(count):
            (directory / f"{i:03}{'n' * rng.randrange(200)}").write_bytes(rng.randbytes(rng.randrange(50)))
    for length in (1, 100, 4000):
        (top / f"link-{length}").symlink_to("t" * length)
    os.link(top / "size-1", top / "dir-1" / "hard")
    os.chown(top / "size-1", 4_000_000_000, 12345)
    os.mkfifo(top / "fifo")
    os.mknod(top / "dev", 0o600 | 0o060000, os.makedev(259, 300_000))
    for i, size in enumerate((0, 10, 3000)):
        os.setxattr(top / "zeros", f"user.x{i}", rng.randbytes(size))
    os.setxattr(top / "dir-40", "user.dir", b"d" * 900)
    (top / "dir-40").chmod(0o3777)
    for n, path in enumerate(below(top)):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + n * 10**9), follow_symlinks=False)


def below(top: Path) -> list[Path]:
    """Not rglob: Python 3.11.2's follows every symlink, and one of ours is too long for that."""
    return [Path(where) / name for where, dirs, files in os.walk(top) for name in dirs + files]


def with_times(top: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(top)): (p.lstat().st_mtime_ns, p.lstat().st_nlink) for p in below(top)}


@pytest.mark.parametrize("sparse", ["", "0.0", "0.1", "1.0", "gnu"])
def test_tree_through_gnu_tar_reads_back_equal(store: ImageStore, run_dir: Path, tmp_path: Path, sparse: str) -> None:
    """Random content, every sparse format that GNU tar writes; compared with the source by reading both."""
    source = tmp_path / "source"
    random_tree(source, random.Random(7))
    form = ["--format=gnu", "--sparse"] if sparse == "gnu" else ["--format=pax", "--xattrs"]
    form += ["--sparse", f"--sparse-version={sparse}"] if sparse not in ("", "gnu") else []
    archive = subprocess.run(["tar", "-C", source, *form, "-cf", "-", "."], check=True, capture_output=True).stdout
    manifest = import_now(store, archive)

    async def compare() -> None:
        table = MountTable(run_dir, store, linger_s=0)
        async with table.hold(manifest.digest) as path:
            want, found = tree_of(source), tree_of(path)
            if sparse == "gnu":  # carries neither xattrs nor nanoseconds
                for entry in want["tree"].values():
                    entry.pop("xattrs", None)
            assert found == want
            if sparse != "gnu":
                assert with_times(path) == with_times(source)
        await table.close()

    asyncio.run(compare())
    assert manifest.data_size < 24_000_000  # whole holes, zeros and the repeated file take nothing


def test_image_is_sound_to_fsck(store: ImageStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    random_tree(source, random.Random(3))
    manifest = import_now(store, tar_of_directory(source))
    command = ["fsck.erofs", f"--device={store.data_path(manifest)}", "--extract", store.meta_path(manifest)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_image_in_one_file_mounts_without_a_second_device(store: ImageStore, run_dir: Path, tmp_path: Path) -> None:
    """Metadata, padding to 2 MiB, data: what a VM gets as one disk."""
    from dsecd.erofs.meta import Superblock
    from dsecd.erofs.sys import mount_erofs, umount

    manifest = import_now(store, tar_of_directory(TRICKY))
    metadata = store.meta_path(manifest).read_bytes()
    start = Superblock(metadata[:4096]).uniaddr * 4096
    assert start % (2 << 20) == 0
    one = tmp_path / "one.erofs"
    one.write_bytes(metadata.ljust(start, b"\0") + store.data_path(manifest).read_bytes())
    target = tmp_path / "mnt"
    target.mkdir()
    mount_erofs(str(one), [], target)
    try:
        assert tree_of(target) == expected()
    finally:
        umount(target)


def test_same_tar_makes_the_same_bytes(tmp_path: Path) -> None:
    stores = [ImageStore(tmp_path / "a"), ImageStore(tmp_path / "b")]
    first, second = (import_now(store, tar_of_directory(TRICKY)) for store in stores)
    assert first.digest == second.digest
    assert stores[0].meta_path(first).read_bytes() == stores[1].meta_path(second).read_bytes()


@pytest.mark.parametrize("program", ["gzip", "xz", "bzip2", "zstd"])
def test_compressed_tar(store: ImageStore, program: str) -> None:
    plain = Tar().file("a", os.urandom(3_000_000)).done()
    packed = subprocess.run([program, "-c"], input=plain, check=True, capture_output=True).stdout
    whole = import_now(store, plain, name="plain")
    assert import_now(store, packed, name="packed").digest == whole.digest
    with pytest.raises(DsecError) as e:
        import_now(store, packed[:-1000], name="cut")
    assert e.value.kind == "image"


def test_pipe_as_input(store: ImageStore) -> None:
    """A stream that is not seekable, written slowly, non-blocking as a client may have made it."""
    data = Tar().file("a", os.urandom(300_000)).done()

    async def run() -> Manifest:
        read, write = os.pipe()
        os.set_blocking(read, False)

        def feed() -> None:
            for at in range(0, len(data), 50_000):
                time.sleep(0.02)
                os.write(write, data[at : at + 50_000])
            os.close(write)

        feeding = asyncio.to_thread(feed)
        job = ImportJob(kind="workspace", name="piped")
        try:
            manifest, _ = await asyncio.gather(run_import(store, job, input_fd=read), feeding)
        finally:
            os.close(read)
        return manifest

    assert asyncio.run(run()).files == 2


def test_prefix_puts_a_workspace_below_a_directory(store: ImageStore, run_dir: Path) -> None:
    data = Tar().file("a", b"1").link("b", "a").done()
    manifest = import_now(store, data, kind="workspace", prefix="srv/work")
    tree = asyncio.run(mounted_tree(store, run_dir, manifest))
    assert {bytes.fromhex(k) for k in tree["tree"]} == {b"srv", b"srv/work", b"srv/work/a", b"srv/work/b"}
    assert len(tree["hardlinks"]) == 1


# -- what must be refused --------------------------------------------------------------------------------------------

SLIPS = {
    "dotdot": Tar().file("../evil", b"x"),
    "dotdot in the middle": Tar().dir("a").file("a/../../evil", b"x"),
    "absolute": Tar().file("/etc/evil", b"x"),
    "through a symlink": Tar().symlink("a", "/etc").file("a/evil", b"x"),
    "through a relative symlink": Tar().symlink("a", "..").file("a/evil", b"x"),
    "through a symlink to itself": Tar().symlink("a", "a").file("a/b", b"x"),
    "hard link out": Tar().link("a", "../../etc/passwd"),
    "hard link to an absolute path": Tar().link("a", "/etc/passwd"),
    "hard link through a symlink": Tar().symlink("s", "/etc").link("a", "s/passwd"),
    "hard link to nothing": Tar().link("a", "b"),
    "hard link to a directory": Tar().dir("d").link("a", "d"),
    "whiteout of dotdot": Tar().file(".wh...", b""),
    "file as root": Tar().file(".", b"x"),
    "child of a file": Tar().file("a", b"x").file("a/b", b"x"),
    "trusted xattr": Tar().dir("a", xattrs={"trusted.overlay.opaque": "y"}),
    "trusted xattr of redirects": Tar().dir("a", xattrs={"trusted.overlay.redirect": "/etc"}),
    "name too long": Tar().file("n" * 256, b"x"),
    "path too long": Tar().file("/".join(["n" * 200] * 21), b"x"),
}
SLIP_BYTES = {name: tar.done() for name, tar in SLIPS.items()}


@pytest.mark.parametrize("name", SLIP_BYTES)
@pytest.mark.parametrize("kind", ["base", "workspace"])
def test_slip_is_refused(store: ImageStore, name: str, kind: str) -> None:
    with pytest.raises(DsecError) as e:
        import_now(store, SLIP_BYTES[name], kind=kind)
    assert e.value.kind == "image"
    assert "\n" not in e.value.message
    assert store.list() == []


def layout(tmp_path: Path, layers: list[bytes], **change: Any) -> Path:
    """An OCI layout of plain layers; `change` replaces fields of the layers' descriptors."""
    top = tmp_path / f"layout-{random.random()}"
    blobs = top / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    media = {"mediaType": "application/vnd.oci.image.layer.v1.tar"}
    config = {"rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(d).hexdigest()}" for d in layers]}}
    manifest = {
        "schemaVersion": 2,
        "config": put(json.dumps(config).encode()) | {"mediaType": "application/vnd.oci.image.config.v1+json"},
        "layers": [put(data) | media | change for data in layers],
    }
    described = put(json.dumps(manifest).encode()) | {"mediaType": "application/vnd.oci.image.manifest.v1+json"}
    (top / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (top / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return top


def test_slip_through_a_lower_layers_symlink_is_refused(store: ImageStore, tmp_path: Path) -> None:
    lower, upper = Tar().symlink("a", "/etc").done(), Tar().file("a/evil", b"x").done()
    with pytest.raises(DsecError) as e:
        import_now(store, tar_of_directory(layout(tmp_path, [lower, upper])))
    assert e.value.kind == "image"
    assert "symlink" in e.value.message


def altered(change: Callable[[Path], None]) -> Callable[[Path], bytes]:
    def make(tmp_path: Path) -> bytes:
        top = tmp_path / "altered"
        shutil.copytree(TRICKY, top)
        change(top)
        return tar_of_directory(top)

    return make


def a_layer(top: Path) -> Path:
    return max((top / "blobs/sha256").iterdir(), key=lambda p: p.stat().st_size)


def truncate_layer(top: Path) -> None:
    os.truncate(a_layer(top), 700)


def flip_layer(top: Path) -> None:
    data = bytearray(a_layer(top).read_bytes())
    data[500] ^= 0x10
    a_layer(top).write_bytes(data)


def flip_config(top: Path) -> None:
    for path in (top / "blobs/sha256").iterdir():
        if b"GREETING" in path.read_bytes():
            path.write_bytes(path.read_bytes().replace(b"GREETING", b"GREETINX"))


def rewrite(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda top: (top / name).write_bytes(data) and None  # type: ignore[func-returns-value]


OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def index_of(digest: str, media_type: str) -> bytes:
    return json.dumps({"manifests": [{"digest": digest, "size": 1, "mediaType": media_type}]}).encode()


BAD_LAYOUTS: dict[str, Callable[[Path], bytes]] = {
    "truncated layer": altered(truncate_layer),
    "flipped bit in a layer": altered(flip_layer),
    "missing layer": altered(lambda top: a_layer(top).unlink()),
    "altered config": altered(flip_config),
    "index is not JSON": altered(rewrite("index.json", b"not json")),
    "index is deep": altered(rewrite("index.json", b"[" * 100_000)),
    "index without images": altered(rewrite("index.json", b'{"manifests": []}')),
    "digest with a path": altered(rewrite("index.json", index_of("sha256:../../../etc/passwd", OCI_MANIFEST))),
    "unknown manifest": altered(rewrite("index.json", index_of("sha256:" + "0" * 64, "application/x-what"))),
    "unknown layer type": lambda p: tar_of_directory(layout(p, [Tar().done()], mediaType="application/x-squashfs")),
    "wrong size": lambda p: tar_of_directory(layout(p, [Tar().done()], size=5)),
    "wrong digest": lambda p: tar_of_directory(layout(p, [Tar().done()], digest="md5:00")),
    "layer is not a tar": lambda p: tar_of_directory(layout(p, [b"no tar at all" * 100])),
    "no index": altered(lambda top: (top / "index.json").unlink()),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_bad_layout_is_refused(store: ImageStore, tmp_path: Path, name: str) -> None:
    """Case 21."""
    with pytest.raises(DsecError) as e:
        import_now(store, BAD_LAYOUTS[name](tmp_path), format="oci")
    assert e.value.kind == "image"
    assert "\n" not in e.value.message and len(e.value.message) < 400
    assert store.list() == []


NOT_IMAGES = {
    "nothing": b"",
    "text": b"hello, I am not an image\n" * 1000,
    "zeros": bytes(511),
    "noise": random.Random(1).randbytes(1 << 20),
    "an ELF": Path("/bin/true").read_bytes(),
    "cut tar": Tar().file("a", b"x" * 100_000).done()[:50_000],
    "cut between members": Tar().file("a", b"x" * 512).done()[:1024],
    "empty gzip": gzip.compress(b""),
    "gzip of noise": gzip.compress(random.Random(2).randbytes(100_000)),
}


@pytest.mark.parametrize("name", NOT_IMAGES)
@pytest.mark.parametrize("form", ["auto", "tar", "oci", "docker"])
def test_what_is_not_an_image_is_refused(store: ImageStore, name: str, form: str) -> None:
    with pytest.raises(DsecError) as e:
        import_now(store, NOT_IMAGES[name], format=form)
    assert e.value.kind == "image"
    assert store.list() == []


def test_directory_as_input_is_invalid(store: ImageStore, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(DsecError) as e:
            asyncio.run(run_import(store, ImportJob(kind="base", name="x"), input_fd=fd))
    finally:
        os.close(fd)
    assert e.value.kind == "invalid"


def test_limits(store: ImageStore) -> None:
    many = Tar()
    for i in range(200):
        many.file(f"f{i}", b"x")
    bomb = gzip.compress(Tar().file("a", bytes(50_000_000)).done())
    cases = [
        (many.done(), Limits(max_entries=100)),
        (Tar().file("a", os.urandom(100_000)).done(), Limits(max_bytes=50_000)),
        (bomb, Limits(max_bytes=10_000_000)),
        (Tar().file("a", b"", xattrs={"user.x": "v" * 60_000}).done(), Limits(max_names_bytes=50_000)),
    ]
    for data, limits in cases:
        with pytest.raises(DsecError) as e:
            import_now(store, data, limits=limits)
        assert e.value.kind == "image"
        assert "more than" in e.value.message


# -- interruptions ---------------------------------------------------------------------------------------------------


def test_full_disk(tmp_path: Path) -> None:
    """disk_full, nothing left, and the store works again when there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M,nr_inodes=200", "tmpfs", disk], check=True)
    try:
        store = ImageStore(disk / "images")
        data = Tar().file("a", os.urandom(3_000_000)).file("b", os.urandom(3_000_000)).done()
        for form in ("tar", "auto"):
            with pytest.raises(DsecError) as e:
                import_now(store, data, format=form)
            assert e.value.kind == "disk_full"
            assert [p.name for p in store.root.iterdir()] == ["lock"]
        with pytest.raises(DsecError) as e:
            import_now(store, tar_of_directory(layout(tmp_path, [data])))
        assert e.value.kind == "disk_full"
        assert [p.name for p in store.root.iterdir()] == ["lock"]
        store.verify(import_now(store, Tar().file("a", os.urandom(1_000_000)).done()))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_no_inodes(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M,nr_inodes=6", "tmpfs", disk], check=True)
    try:
        store = ImageStore(disk / "images")
        with pytest.raises(DsecError) as e:
            import_now(store, Tar().file("a", b"1").done())
        assert e.value.kind == "disk_full"
        assert [p.name for p in store.root.iterdir()] == ["lock"]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_cancel_kills_the_importer(store: ImageStore) -> None:
    async def run() -> None:
        read, write = os.pipe()  # never written, never closed: the import waits for ever
        try:
            task = asyncio.create_task(run_import(store, ImportJob(kind="base", name="x"), input_fd=read))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            os.close(read)
            os.close(write)

    asyncio.run(run())


def test_deadline(store: ImageStore) -> None:
    async def run() -> None:
        read, write = os.pipe()
        try:
            with pytest.raises(DsecError) as e:
                await run_import(store, ImportJob(kind="base", name="x"), input_fd=read, limits=Limits(deadline_s=0.5))
            assert e.value.kind == "timeout"
        finally:
            os.close(read)
            os.close(write)

    asyncio.run(run())


DAEMON = """
import asyncio, os, sys
from pathlib import Path
import msgspec
from dsecd.erofs.jobs import run_import
from dsecd.erofs.model import ImportJob
from dsecd.erofs.store import ImageStore
store = ImageStore(Path(sys.argv[1]))
job = msgspec.json.decode(sys.argv[2], type=ImportJob)
fd = os.open(sys.argv[3], os.O_RDONLY) if job.origin == "stream" else None
asyncio.run(run_import(store, job, input_fd=fd))
print("done", flush=True)
"""


def daemon(store: ImageStore, job: dict[str, Any], archive: Path) -> subprocess.Popen[bytes]:
    """A daemon whose whole life is one import."""
    command = [sys.executable, "-c", DAEMON, str(store.root), msgspec.json.encode(job).decode(), str(archive)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


def test_killed_at_random_moments_leaves_nothing_that_gc_does_not_find(store: ImageStore, tmp_path: Path) -> None:
    """The daemon and its importer get SIGKILL anywhere between start and commit; then a new daemon's gc runs."""
    archive = tmp_path / "a.tar"
    big = Tar()
    rng = random.Random(5)
    for i in range(2000):
        big.file(f"d{i % 50}/f{i}", rng.randbytes(20_000))
    archive.write_bytes(big.done())
    job = {"kind": "base", "name": "killed"}
    started = time.monotonic()
    out, _ = daemon(store, job, archive).communicate()
    assert b"done" in out
    whole = time.monotonic() - started
    good = store.resolve("killed")
    killed = 0
    for _ in range(14):
        if store.list():
            store.remove(good.digest)
        process = daemon(store, job, archive)
        time.sleep(rng.random() * whole)
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
        killed += b"done" not in out
        wait_for(lambda: not processes(store.root))  # they go down with the daemon
        # Whole or not at all, whatever the moment.
        for manifest in store.list():
            store.verify(manifest)
        wait_for(lambda: collected(store, tmp_path))
        assert {p.name for p in store.root.iterdir()} <= {"lock", "names.json", good.hex}
    assert killed >= 5


def test_importer_killed_alone(store: ImageStore, tmp_path: Path) -> None:
    async def run() -> None:
        read, write = os.pipe()
        try:
            task = asyncio.create_task(run_import(store, ImportJob(kind="base", name="x"), input_fd=read))
            await asyncio.sleep(0.5)
            (pid,) = importers(store.root)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(DsecError) as e:
                await task
            assert e.value.kind == "internal" and e.value.infra
        finally:
            os.close(read)
            os.close(write)

    asyncio.run(run())


def in_read(pid: int, fd: int) -> bool:
    """Whether it is in read(2), which is call 0 on x86-64, of that descriptor."""
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    return words[:1] == ["0"] and int(words[1], 16) == fd


def test_importer_has_given_up_root_when_it_parses(store: ImageStore, tmp_path: Path) -> None:
    async def run() -> None:
        read, write = os.pipe()
        try:
            task = asyncio.create_task(run_import(store, ImportJob(kind="base", name="x"), input_fd=read))
            # It waits for its input, in the kernel: parsing begins with a read.
            await asyncio.to_thread(wait_for, lambda: any(in_read(pid, read) for pid in importers(store.root)))
            (pid,) = importers(store.root)
            status = Path(f"/proc/{pid}/status").read_text()
            assert "Uid:\t65534\t65534\t65534\t65534" in status
            assert "CapEff:\t0000000000000000" in status and "CapPrm:\t0000000000000000" in status
            assert "NoNewPrivs:\t1" in status
            task.cancel()
            await asyncio.wait([task])
        finally:
            os.close(read)
            os.close(write)

    asyncio.run(run())


def test_a_new_name_takes_none_from_another_image(store: ImageStore) -> None:
    """What was free when it was asked for may be taken when it comes to it."""

    def named(content: bytes, name: str, new: bool = True) -> Manifest:
        return import_now(store, Tar().file("f", content).done(), name=name, limits=Limits(new_name=new))

    first = named(b"1", "x")
    assert named(b"1", "x").digest == first.digest
    with pytest.raises(DsecError, match="the name x is taken") as caught:
        named(b"2", "x")
    assert caught.value.kind == "denied"
    assert [image.digest for image in store.list()] == [first.digest]
    assert named(b"2", "y").names == ("y",)
    assert store.resolve("x").digest == first.digest
    assert named(b"3", "x", new=False).names == ("x",)


def test_same_content_at_once_is_one_image(store: ImageStore) -> None:
    data = Tar().file("a", os.urandom(2_000_000)).done()

    async def run() -> list[Manifest]:
        return await asyncio.gather(*(imported(store, data, name=f"n{i}") for i in range(6)))

    found = asyncio.run(run())
    assert len({m.digest for m in found}) == 1
    assert len(store.list()) == 1
    assert set(store.list()[0].names) == {f"n{i}" for i in range(6)}


@pytest.mark.network
@pytest.mark.slow
def test_bootstrap_debian(store: ImageStore, run_dir: Path) -> None:
    job = ImportJob(kind="base", name="debian:12", origin="bootstrap", suite="bookworm", packages=("python3-minimal",))
    seen: list[Progress] = []
    started = time.monotonic()
    manifest = asyncio.run(run_import(store, job, input_fd=None, progress=seen.append))
    print(f"bootstrap: {time.monotonic() - started:.1f} s, {manifest.files} files, {manifest.data_size >> 20} MiB")
    tree = asyncio.run(mounted_tree(store, run_dir, manifest))["tree"]
    assert tree[b"usr/bin/passwd".hex()]["mode"] == "0o4755"
    assert b"usr/bin/python3".hex() in tree
    assert "bootstrap" in {p.phase for p in seen}


@pytest.mark.parametrize("fields", [{"suite": "Book worm"}, {"suite": "x", "packages": ("-o=evil",)}, {"suite": "--x"}])
def test_bootstrap_of_what_no_suite_or_package_is_called(store: ImageStore, fields: dict[str, Any]) -> None:
    job = ImportJob(kind="base", name="x", origin="bootstrap", **fields)
    with pytest.raises(DsecError) as e:
        asyncio.run(run_import(store, job, input_fd=None))
    assert e.value.kind == "invalid"


def test_input_must_fit_the_origin(store: ImageStore) -> None:
    with pytest.raises(DsecError):
        asyncio.run(run_import(store, ImportJob(kind="base", name="x"), input_fd=None))
    with input_of(b"") as fd, pytest.raises(DsecError):
        job = ImportJob(kind="base", name="x", origin="registry", reference="docker://a/b")
        asyncio.run(run_import(store, job, input_fd=fd))
