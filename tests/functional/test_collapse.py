"""A collapsed stack looks like the stack: seeded random layers and the corner cases of whiteouts, both mounted."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import stat
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from erofs_kit import Tar, assert_clean, import_now

from dsecd.erofs import read
from dsecd.erofs.drivers import LoopDriver, Source, probe_drivers
from dsecd.erofs.jobs import run_collapse
from dsecd.erofs.model import CHUNK, ImageConfig, Manifest, Progress
from dsecd.erofs.store import ImageStore
from dsecd.erofs.sys import mount_erofs, umount
from dsecd.errors import DsecError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts")

NAMES = ("a", "b", "c", "d")


class Stage:
    """Images mounted one over the other."""

    def __init__(self, store: ImageStore, top: Path) -> None:
        self.store, self.top = store, top
        self._mounts = contextlib.ExitStack()
        self._count = 0
        (store.root / "probe").mkdir()
        (top / "probe").mkdir(parents=True)
        probes = probe_drivers(store.root / "probe", top / "probe")
        self._loop = not next(p.usable for p in probes if p.driver == "file")

    def close(self) -> None:
        self._mounts.close()

    def stack(self, images: Sequence[Manifest]) -> Path:
        lowers = [self._one(image) for image in images]
        if len(lowers) == 1:
            lowers.append(self._empty())
        target = self._place()
        options = "ro,lowerdir=" + ":".join(map(str, lowers))
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", target], check=True)
        self._mounts.callback(umount, target)
        return target

    def _one(self, image: Manifest) -> Path:
        target = self._place()
        metadata, data = self.store.meta_path(image), self.store.data_path(image)
        if self._loop:
            LoopDriver().mount(Source(metadata=metadata, data=data), target)
        else:
            mount_erofs(str(metadata), [str(data)], target)
        self._mounts.callback(umount, target)
        return target

    def _empty(self) -> Path:
        return self._place()

    def _place(self) -> Path:
        self._count += 1
        target = self.top / f"m{self._count}"
        target.mkdir()
        return target


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(ImageStore(tmp_path / "images"), tmp_path / "mounts")
    yield made
    made.close()
    for place in made.top.iterdir():
        place.rmdir()
    assert_clean(made.store.root, made.top)


def walk(top: Path) -> dict[str, Any]:
    """Everything that a process can see, and which names are one inode."""
    found: dict[str, Any] = {".": looks(os.fsencode(top))}
    inodes: dict[tuple[int, int], list[str]] = {}
    for where, dirs, files in os.walk(os.fsencode(top)):
        for name in dirs + files:
            path = os.path.join(where, name)
            key = os.fsdecode(os.path.relpath(path, os.fsencode(top)))
            found[key] = looks(path)
            at = os.lstat(path)
            if not stat.S_ISDIR(at.st_mode):
                inodes.setdefault((at.st_dev, at.st_ino), []).append(key)
    return {"tree": found, "links": sorted(sorted(group) for group in inodes.values())}


def looks(path: bytes) -> tuple[Any, ...]:
    at = os.lstat(path)
    content: object = None
    if stat.S_ISREG(at.st_mode):
        content = Path(os.fsdecode(path)).read_bytes()
    elif stat.S_ISLNK(at.st_mode):
        content = os.readlink(path)
    names = sorted(os.listxattr(path, follow_symlinks=False))
    special = not (stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode))  # lists user.*, and does not show it
    xattrs = [(name, None if special else os.getxattr(path, name, follow_symlinks=False)) for name in names]
    rdev = at.st_rdev if stat.S_ISCHR(at.st_mode) or stat.S_ISBLK(at.st_mode) else 0
    size = 0 if stat.S_ISDIR(at.st_mode) else at.st_size
    return at.st_mode, at.st_uid, at.st_gid, at.st_mtime_ns, size, rdev, content, xattrs


def collapsed(store: ImageStore, images: Sequence[Manifest], name: str = "flat", **fields: Any) -> Manifest:
    return asyncio.run(run_collapse(store, name, [image.digest for image in images], **fields))


def check_same(stage: Stage, above: Sequence[Manifest], run: Sequence[Manifest], below: Sequence[Manifest]) -> Manifest:
    flat = collapsed(stage.store, run)
    stage.store.verify(flat)
    assert flat.kind == run[-1].kind
    for image in (flat, *run):  # what is read back is all that there is
        content = stage.store.meta_path(image).read_bytes()
        of = {"data_size": image.data_size, "data_digest": image.data_digest, "base": image.kind == "base"}
        read.checked(content, **of)
    expected = walk(stage.stack([*above, *run, *below]))
    assert walk(stage.stack([*above, flat, *below])) == expected
    assert expected["tree"].keys() != {"."}
    return flat


# -- random stacks -----------------------------------------------------------------------------------------------------
def random_layer(rng: random.Random, *, base: bool) -> bytes:
    tar = Tar()
    dirs, files = [""], []
    taken = {""}
    for _ in range(rng.randint(10, 40)):
        parent = rng.choice(dirs)
        name = rng.choice(NAMES)
        path = f"{parent}/{name}".lstrip("/")
        what = rng.choice(("dir", "dir", "file", "file", "link", "symlink", "fifo", "char", "whiteout", "opaque"))
        if what == "opaque" and not base and parent and f"{parent}/.wh..wh..opq" not in taken:
            tar.file(f"{parent}/.wh..wh..opq")
            taken.add(f"{parent}/.wh..wh..opq")
        if what == "opaque" or path in taken:
            continue
        if what == "whiteout":
            if not base:
                tar.file(f"{parent}/.wh.{name}".lstrip("/"))
                taken.add(path)
            continue
        taken.add(path)
        fields: dict[str, Any] = {
            "mtime": rng.randint(0, 2_000_000_000), "uid": rng.randint(0, 3), "gid": rng.randint(0, 3),
            "mode": rng.choice((0o755, 0o700, 0o1777, 0o4755)),
        }  # fmt: skip
        if rng.random() < 0.3:
            fields["xattrs"] = {f"user.{rng.choice(NAMES)}": str(rng.random()) * rng.choice((1, 50))}
        if what == "dir":
            tar.dir(path, **fields)
            dirs.append(path)
        elif what == "file":
            size = rng.choice((0, 1, 4096, 5000, CHUNK, CHUNK + 1, 2 * CHUNK + 4095))
            tar.file(path, random_bytes(rng, size), **fields)
            files.append(path)
        elif what == "link" and files:
            tar.link(path, rng.choice(files))
        elif what == "symlink":
            tar.symlink(path, "/" + rng.choice(NAMES) * 20)
        elif what in ("fifo", "char"):
            tar.add(what, path, devmajor=1, devminor=3, **fields)
    return tar.done()


def random_bytes(rng: random.Random, size: int) -> bytes:
    """Random, the same as somewhere else, or with holes."""
    kind = rng.randrange(3)
    if kind == 0:
        return rng.randbytes(size)
    if kind == 1:
        return (b"again " * (size // 6 + 1))[:size]
    return (bytes(CHUNK) + rng.randbytes(CHUNK) + bytes(CHUNK))[:size]


@pytest.mark.parametrize("seed", range(8))
def test_random_stacks(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    base = import_now(stage.store, random_layer(rng, base=True), name="base")
    layers = [
        import_now(stage.store, random_layer(rng, base=False), name=f"l{n}", kind="toolkit") for n in range(4)
    ]  # fmt: skip
    check_same(stage, [], [*layers, base], [])
    check_same(stage, [], layers[1:], [base])
    flat = check_same(stage, layers[:1], layers[1:3], [layers[3], base])
    check_same(stage, layers[:1], [flat, layers[3]], [base])  # a collapse of a collapse


# -- one case each -----------------------------------------------------------------------------------------------------
def layer(stage: Stage, tar: Tar, name: str, kind: str = "toolkit") -> Manifest:
    return import_now(stage.store, tar.done(), name=name, kind=kind)


CASES: dict[str, tuple[Tar, Tar, Tar]] = {  # top, middle, base
    "a whiteout hides a file": (Tar().file(".wh.f"), Tar().file("f", b"middle"), Tar().file("f", b"base").file("g")),
    "a whiteout hides a directory": (Tar().file("d/.wh.e"), Tar().dir("d").file("d/e/x"), Tar().file("d/e/y")),
    "a file over a directory": (Tar().file("d", b"now a file"), Tar().file("d/x"), Tar().file("d/y")),
    "a directory over a file": (Tar().file("d/x"), Tar().file("d", b"a file"), Tar().file("d/y")),
    "a directory over a whiteout": (Tar().file("d/x"), Tar().file(".wh.d"), Tar().file("d/y")),
    "an opaque directory": (Tar().file("d/.wh..wh..opq").file("d/x"), Tar().file("d/y"), Tar().file("d/z")),
    "opaque in the middle": (Tar().file("d/x"), Tar().file("d/.wh..wh..opq").file("d/y"), Tar().file("d/z")),
    "a file again over a whiteout": (Tar().file("f", b"new"), Tar().file(".wh.f"), Tar().file("f", b"old")),
    "a whiteout below a new directory": (Tar().file("n/.wh.x"), Tar().file("o"), Tar().file("n/x").file("n/y")),
    "a link to what another layer hides": (
        Tar().file(".wh.a"), Tar().file("a", b"1").link("b", "a").link("c", "a"), Tar().file("a", b"0")),
    "attributes of the topmost": (
        Tar().dir("d", mode=0o700, uid=7, mtime=1, xattrs={"user.t": "1"}),
        Tar().dir("d", mode=0o777, uid=8, mtime=2, xattrs={"user.m": "2"}).file("d/x"),
        Tar().dir("d", mode=0o755, uid=9, mtime=3, xattrs={"user.b": "3"}).file("d/y")),
    "a symlink over a directory": (Tar().symlink("d", "/e"), Tar().file("d/x"), Tar().file("d/y")),
    "an opaque root": (Tar().file(".wh..wh..opq").file("x"), Tar().file("y"), Tar().file("z")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_case(stage: Stage, case: str) -> None:
    tars = CASES[case]
    top = layer(stage, tars[0], "top")
    middle = layer(stage, tars[1], "middle", "workspace")
    base = layer(stage, tars[2], "base", "base")
    flat = check_same(stage, [], [top, middle], [base])
    assert flat.kind == "workspace"
    whole = check_same(stage, [], [top, middle, base], [])
    for node in read.read(stage.store.meta_path(whole).read_bytes()).nodes():
        assert not (node.fmt == stat.S_IFCHR and node.rdev == (0, 0))
        assert not any(name.startswith(b"trusted.") for name in node.xattrs or ())


def test_hidden_bytes_are_gone_and_equal_ones_are_once(stage: Stage) -> None:
    secret, shared = os.urandom(CHUNK), os.urandom(3 * CHUNK)
    base = layer(stage, Tar().file("secret", secret).file("one", shared), "base", "base")
    top = layer(stage, Tar().file(".wh.secret").file("two", shared), "top")
    flat = collapsed(stage.store, [top, base])
    assert flat.data_size == 3 * CHUNK
    assert secret[:4096] not in stage.store.data_path(flat).read_bytes()
    assert {m.name for m in stage.store.list()} == {"base", "top", "flat"}  # the layers stay


def test_sparse_and_empty(stage: Stage) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("sparse")
        info.pax_headers = {"GNU.sparse.map": f"{5 << 30},6", "GNU.sparse.size": str(6 << 30)}
        info.size = 6
        tar.addfile(info, io.BytesIO(b"middle"))
    base = import_now(stage.store, out.getvalue(), name="base")
    top = layer(stage, Tar().dir("d"), "top")
    flat = collapsed(stage.store, [top, base])
    assert flat.data_size == CHUNK
    with (stage.stack([flat]) / "sparse").open("rb") as f:
        assert os.fstat(f.fileno()).st_size == 6 << 30
        f.seek((5 << 30) - 1)
        assert f.read(8) == b"\0middle\0"
    empty = collapsed(stage.store, [top, layer(stage, Tar().file("f"), "bottom", "base")])
    assert empty.data_size == 0
    assert (stage.stack([empty]) / "f").read_bytes() == b""


def test_config_lies_over(stage: Stage) -> None:
    base = import_now(stage.store, Tar().file("a").done(), name="base", config=ImageConfig(env={"A": "1", "B": "1"}))
    top = import_now(
        stage.store, Tar().file("b").done(), name="top", kind="toolkit", config=ImageConfig(env={"B": "2"}, user="me")
    )
    seen: list[Progress] = []
    flat = collapsed(stage.store, [top, base], "flat:1", progress=seen.append)
    assert flat.config == ImageConfig(env={"A": "1", "B": "2"}, user="me")
    assert flat.names == ("flat:1",) and flat.source == "collapse of top base"
    assert [p.phase for p in seen][-1] == "commit"
    assert stage.store.resolve(collapsed(stage.store, [top, base]).digest).names == ("flat", "flat:1")


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_refusals(stage: Stage) -> None:
    base = layer(stage, Tar().file("a", b"x"), "base", "base")
    top = layer(stage, Tar().file("b", b"y" * 5000), "top")
    for refs, words in (
        (["top"], "two layers"), (["base", "top"], "name it last"), (["top", "top", "base"], "twice"),
    ):  # fmt: skip
        with pytest.raises(DsecError, match=words) as caught:
            asyncio.run(run_collapse(stage.store, "flat", refs))
        assert caught.value.kind == "invalid"
    with pytest.raises(DsecError, match=r"12288 bytes.*4096 at most"):
        collapsed(stage.store, [top, base], max_bytes=4096)
    with pytest.raises(DsecError, match="none that takes data"):
        collapsed(stage.store, [top, base], put_on="nowhere")
    with pytest.raises(DsecError, match="there is no image"):
        asyncio.run(run_collapse(stage.store, "flat", ["top", "nothing"]))
    assert {m.name for m in stage.store.list()} == {"base", "top"}


@pytest.mark.parametrize("what", ["data", "sums", "meta"])
def test_a_damaged_layer_makes_no_image(stage: Stage, what: str) -> None:
    base = layer(stage, Tar().file("a", os.urandom(2 * CHUNK)), "base", "base")
    top = layer(stage, Tar().file("b", b"y" * 5000), "top")
    path = {"data": stage.store.data_path, "sums": stage.store.sums_path, "meta": stage.store.meta_path}[what](base)
    at = path.stat().st_size - 100 if what != "sums" else 5
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DsecError, match=r"image base: its .* is altered") as caught:
        collapsed(stage.store, [top, base])
    assert caught.value.kind == "image" and caught.value.infra
    assert {m.name for m in stage.store.list()} == {"base", "top"}
