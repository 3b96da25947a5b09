"""Metadata read back: what was written, all of it; altered anyhow, one error and never another exception or a hang."""

from __future__ import annotations

import random
import stat
import struct
from array import array

import pytest

from dsecd.erofs import meta, read
from dsecd.erofs.model import BLOCK, CHUNK
from dsecd.erofs.tree import HOLE, Node, Tree
from dsecd.errors import DsecError

DIGEST = "sha256:" + "ab" * 32
SIZE = 64 * CHUNK


def node(fmt: int, **fields: object) -> Node:
    made = Node(fmt)
    for key, value in fields.items():
        setattr(made, key, value)
    return made


def random_tree(rng: random.Random, count: int) -> Tree:
    tree = Tree()
    dirs, others = [tree.root], []
    for _ in range(count):
        name = rng.randbytes(rng.choice((1, 3, 20, 255))).replace(b"/", b"_").replace(b"\0", b"_").strip(b".") or b"x"
        fields = {
            "mode": rng.randrange(0o10000), "uid": rng.randrange(1 << 31), "gid": rng.randrange(9),
            "mtime_ns": rng.randrange(-(10**18), 10**19 // 2),
        }  # fmt: skip
        what = rng.choice((stat.S_IFREG, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, 0))
        child = rng.choice(others) if what == 0 and others else node(what or stat.S_IFREG, **fields)
        if child.is_dir:
            dirs.append(child)
        else:
            others.append(child)
        if child.is_file and child.chunks is None:
            child.size = rng.choice((0, 1, 4096, CHUNK, 3 * CHUNK + 1, 700 * CHUNK))
            blocks = [rng.choice((HOLE, rng.randrange(32 * 256))) for _ in range(-(-child.size // CHUNK))]
            child.chunks = array("I", blocks)
        if child.fmt == stat.S_IFLNK and not child.target:
            child.target = b"t" * rng.choice((1, 100, 4000, 4095))
            child.size = len(child.target)
        if child.fmt == stat.S_IFCHR:
            child.rdev = (rng.randrange(1 << 12), rng.randrange(1 << 20))
        if rng.random() < 0.2:
            child.xattrs = {b"user." + rng.randbytes(3).replace(b"\0", b"_"): rng.randbytes(rng.choice((0, 7, 5000)))}
        rng.choice(dirs).children[name] = child
    return tree


def written(tree: Tree) -> bytes:
    return bytes(meta.Image(tree, data_size=SIZE, data_digest=DIGEST).content)


@pytest.mark.parametrize("seed", range(20))
def test_round_trip(seed: int) -> None:
    content = written(random_tree(random.Random(seed), 10 << seed % 6))
    tree = read.checked(content, data_size=SIZE, data_digest=DIGEST, base=True)
    assert written(tree) == content


def resealed(content: bytearray) -> bytes:
    struct.pack_into("<I", content, meta.SUPERBLOCK + 4, 0)
    struct.pack_into("<I", content, meta.SUPERBLOCK + 4, meta.crc32c(content[meta.SUPERBLOCK : meta.BLOCK]))
    return bytes(content)


def test_altered() -> None:
    """A stranger can make the checksum right, so it is made right."""
    rng = random.Random(1)
    content = written(random_tree(rng, 60))
    for _ in range(1500):
        altered = bytearray(content)
        for _ in range(rng.choice((1, 1, 1, 4))):
            at = rng.randrange(meta.SUPERBLOCK, min(len(content), 3 * BLOCK))
            altered[at] = rng.choice((0, 0xFF, 0x80, altered[at] ^ 1 << rng.randrange(8)))
        sealed = resealed(altered)
        if sealed == content:
            continue
        with pytest.raises(DsecError) as caught:
            read.checked(sealed, data_size=SIZE, data_digest=DIGEST, base=True)
        assert caught.value.kind == "image"


def test_truncated() -> None:
    content = written(random_tree(random.Random(2), 100))
    for size in (0, 1000, BLOCK, len(content) - BLOCK, len(content) - 1):
        with pytest.raises(DsecError):
            read.read(content[:size])


@pytest.mark.parametrize(("name", "value", "base", "good"), [
    (b"user.a", b"1", True, True), (b"security.capability", b"1", True, True), (b"security.selinux", b"1", True, False),
    (b"trusted.overlay.opaque", b"y", False, True), (b"trusted.overlay.opaque", b"y", True, False),
    (b"trusted.overlay.redirect", b"/", False, False), (b"trusted.overlay.metacopy", b"", False, False),
    (b"trusted.overlay.origin", b"", False, True), (b"trusted.overlay.origin", b"handle", False, False),
])  # fmt: skip
def test_xattrs_that_speak_to_the_kernel(name: bytes, value: bytes, base: bool, good: bool) -> None:
    tree = Tree()
    tree.root.children[b"d"] = node(stat.S_IFDIR, xattrs={name: value})
    content = written(tree)
    if good:
        read.checked(content, data_size=SIZE, data_digest=DIGEST, base=base)
    else:
        with pytest.raises(DsecError, match="may not set"):
            read.checked(content, data_size=SIZE, data_digest=DIGEST, base=base)


def test_data_beyond_the_end() -> None:
    tree = Tree()
    tree.root.children[b"f"] = node(stat.S_IFREG, size=5, chunks=array("I", [SIZE // BLOCK]))
    with pytest.raises(DsecError, match="beyond the end"):
        read.checked(written(tree), data_size=SIZE, data_digest=DIGEST, base=True)


def test_a_loop_and_a_bomb_are_refused_at_once() -> None:
    tree = Tree()
    loop = tree.root.children[b"d"] = node(stat.S_IFDIR)
    image = meta.Image(tree, data_size=SIZE, data_digest=DIGEST)
    content = bytearray(image.content)
    at = content.index(struct.pack("<Q", loop.nid), tree.root.nid * 32)
    struct.pack_into("<Q", content, at, tree.root.nid)
    with pytest.raises(DsecError, match="two places"):
        read.read(resealed(content))
