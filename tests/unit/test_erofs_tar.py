"""The tar reader and the layer rules, on archives made in memory; no root, no disk."""

from __future__ import annotations

import io
import random
import stat
import tarfile
import time
from typing import Any

import pytest

from dsecd.erofs import meta
from dsecd.erofs.streams import decompressed
from dsecd.erofs.tar import Entry, TarReader
from dsecd.erofs.tree import Node, Tree, split_path
from dsecd.errors import DsecError


def archive(members: list[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


class Dribble:
    """A source that gives as little as it may."""

    def __init__(self, data: bytes, most: int = 1 << 20) -> None:
        self._data, self._at, self._most = data, 0, most

    def read(self, n: int) -> bytes:
        data = self._data[self._at : self._at + min(n, self._most)]
        self._at += len(data)
        return data


def read_all(data: bytes, most: int = 1 << 20, need_end: bool = True) -> list[tuple[Entry, bytes]]:
    tar = TarReader(Dribble(data, most), need_end=need_end)
    found = []
    while (entry := tar.next()) is not None:
        content = tar.read(entry.size) if entry.type == "file" and entry.extents is None else b""
        found.append((entry, content))
    return found


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("most", [1, 100, 512, 1 << 20])
def test_reads_what_tarfile_writes(form: int, most: int) -> None:
    members = [
        member("plain", b"hello", mode=0o6755, uid=12, gid=34, mtime=1_600_000_000),
        member("d" * 90 + "/" + "n" * 90, b"x" * 513),
        member("dir", type=tarfile.DIRTYPE, mode=0o1777),
        member("link", type=tarfile.SYMTYPE, linkname="t" * 99),
        member("hard", type=tarfile.LNKTYPE, linkname="plain"),
        member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("empty"),
    ]
    if form != tarfile.USTAR_FORMAT:
        members += [member("l" * 300, b"long"), member("big", uid=3_000_000_000, gid=2_097_152),
                    member("s", type=tarfile.SYMTYPE, linkname="t" * 4000)]  # fmt: skip
    found = read_all(archive(members, form), most)
    assert len(found) == len(members)
    for (info, data), (entry, content) in zip(members, found, strict=True):
        assert entry.name.rstrip(b"/") == info.name.encode()
        assert content == data
        assert (entry.mode, entry.uid, entry.gid) == (info.mode, info.uid, info.gid)
        assert entry.mtime_ns == info.mtime * 10**9
        assert entry.link == info.linkname.encode()
    assert found[5][0].rdev == (1, 3)


def test_names_and_xattrs_are_bytes() -> None:
    info = tarfile.TarInfo("bad\udcff\n-name")
    info.pax_headers = {"SCHILY.xattr.user.b": "v\udcfe\n=1", "LIBARCHIVE.xattr.user.c%20d": "aGk"}
    ((entry, _),) = read_all(archive([(info, b"")]))
    assert entry.name == b"bad\xff\n-name"
    assert entry.xattrs == {b"user.b": b"v\xfe\n=1", b"user.c d": b"hi"}


def test_times_before_1970_and_below_a_second() -> None:
    found = read_all(archive([member("a", mtime=-1.25), member("b", mtime=1234567890.123456789)]))
    assert found[0][0].mtime_ns == -1_250_000_000
    assert abs(found[1][0].mtime_ns - 1234567890_123456789) < 1000


def test_archive_without_an_end_is_truncated_unless_a_digest_tells() -> None:
    data = archive([member("a", b"x" * 512)])[:1536]
    assert len(read_all(data[:1024], need_end=False)) == 1
    for cut in (512, 700, 1023, 1024):
        with pytest.raises(DsecError, match="truncated"):
            read_all(data[:cut])


@pytest.mark.parametrize("key", ["size", "uid", "mtime", "GNU.sparse.realsize"])
@pytest.mark.parametrize("value", ["-1", "x", "1e9", "9" * 30, "NaN", " 1"])
def test_pax_numbers_that_are_none(key: str, value: str) -> None:
    info = tarfile.TarInfo("a")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", key: value}
    if (key, value) == ("mtime", "-1"):
        return
    with pytest.raises(DsecError) as e:
        read_all(archive([(info, b"")]))
    assert e.value.kind == "image"


def header(**change: bytes) -> bytes:
    """A header block with fields replaced and its checksum right."""
    at = {"name": 0, "mode": 100, "uid": 108, "size": 124, "mtime": 136, "type": 156, "link": 157, "devmajor": 329}
    block = bytearray(archive([member("a")])[:512])
    for key, value in change.items():
        block[at[key] : at[key] + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize("change", [
    {"size": b"\xff" * 12}, {"size": b"\x80" + b"\xff" * 11}, {"size": b"77777777777\0"}, {"size": b"8\0"},
    {"type": b"x", "size": b"77777777777\0"}, {"type": b"L", "size": b"00010000000\0"}, {"type": b"M"}, {"type": b"?"},
    {"uid": b"\x80\0\0\1\0\0\0\0"}, {"type": b"3", "devmajor": b"7777777\0"}, {"name": b"\0" * 100, "type": b"0"},
    {"type": b"K"}, {"type": b"S", "size": b"00000001000\0"},
])  # fmt: skip
def test_headers_that_lie(change: dict[str, bytes]) -> None:
    with pytest.raises(DsecError) as e:
        tree = Tree()
        for entry, _ in read_all(header(**change) + bytes(1024)):
            tree.add(entry)
    assert e.value.kind == "image"


def test_mutated_archives_end_soon_and_only_as_image_errors() -> None:
    """Bytes flipped, blocks dropped, doubled and cut: a parse, or one DsecError of kind image."""
    rng = random.Random(11)
    sparse = tarfile.TarInfo("sparse")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9000"}
    seed = archive([
        member("dir", type=tarfile.DIRTYPE), member("dir/f", b"x" * 3000), member("n" * 400, b"y"),
        member("l", type=tarfile.SYMTYPE, linkname="m" * 300), member("h", type=tarfile.LNKTYPE, linkname="dir/f"),
        (sparse, b"1\n0\n512\n".ljust(512, b"\0") + b"z" * 512), member("dir/.wh.f"), member("dir/.wh..wh..opq"),
    ])  # fmt: skip
    started = time.monotonic()
    refused = 0
    for _ in range(3000):
        data = bytearray(seed)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at // 512 * 512 : at // 512 * 512 + 512]
                case 2:
                    data[at:at] = data[at // 512 * 512 : at // 512 * 512 + 512]
                case 3:
                    block = data[at // 512 * 512 : at // 512 * 512 + 512]
                    if len(block) == 512:  # a right checksum gets it past the first check
                        block[rng.randrange(148)] = rng.choice(b"\0\x80\xff 7x/.")
                        block[148:156] = b" " * 8
                        block[148:156] = b"%06o\0 " % (sum(block) & 0o777777)
                        data[at // 512 * 512 : at // 512 * 512 + 512] = block
        try:
            tree = Tree(keep_whiteouts=True)
            tree.begin_layer()
            tar = TarReader(Dribble(bytes(data)), need_end=True)
            while (entry := tar.next()) is not None:
                tree.add(entry)
            tree.end_layer()
            meta.Image(tree, data_size=0, data_digest="sha256:" + "0" * 64)
        except DsecError as e:
            assert e.kind == "image"
            refused += 1
    assert refused > 1000
    assert time.monotonic() - started < 60


def test_mutated_streams_of_every_compression() -> None:
    import bz2
    import lzma
    import zlib

    rng = random.Random(13)
    plain = archive([member("a", rng.randbytes(5000) + bytes(50_000))])
    gzipped = zlib.compressobj(wbits=31)
    seeds = [gzipped.compress(plain) + gzipped.flush(), bz2.compress(plain), lzma.compress(plain)]
    for _ in range(400):
        data = bytearray(rng.choice(seeds))
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            source = decompressed(Dribble(bytes(data), 777), 1 << 20)
            while source.read(1000):
                pass
        except DsecError as e:
            assert e.kind == "image"


def test_gzip_of_several_members_and_padding() -> None:
    import gzip

    data = gzip.compress(b"one") + gzip.compress(b"two") + bytes(1000)
    source = decompressed(Dribble(data, 7), 100)
    found = b""
    while piece := source.read(2):
        found += piece
    assert found == b"onetwo"


@pytest.mark.parametrize("path", [b"..", b"a/..", b"a/../b", b"/a", b"//a", b"a\0b", b"a/" * 3000, b"n" * 256])
def test_paths_that_lead_out(path: bytes) -> None:
    with pytest.raises(DsecError):
        split_path(path)


@pytest.mark.parametrize("path", [b"a/b", b"./a/b", b"a//b/", b"./a/./b"])
def test_paths_that_do_not(path: bytes) -> None:
    assert split_path(path) == [b"a", b"b"]
    assert split_path(b"/") == split_path(b".") == split_path(b"./") == []


# -- layers ----------------------------------------------------------------------------------------------------------


def entry(name: str, kind: str = "file", link: str = "") -> Entry:
    made = Entry(name.encode(), kind)  # type: ignore[arg-type]
    made.link = link.encode()
    made.mode = 0o755
    return made


def stacked(*layers: list[str], keep: bool = False) -> Tree:
    """Layers of `name` (a file), `name/` (a directory), `name=target` (a hard link)."""
    tree = Tree(keep_whiteouts=keep)
    for layer in layers:
        tree.begin_layer()
        for name in layer:
            if "=" in name:
                tree.add(entry(*name.split("=")[:1], "hardlink", name.split("=")[1]))
            else:
                tree.add(entry(name.rstrip("/"), "dir" if name.endswith("/") else "file"))
        tree.end_layer()
    return tree


def paths(tree: Tree) -> set[str]:
    found: set[str] = set()

    def walk(node: Node, prefix: str) -> None:
        for name, child in node.children.items():
            white = child.fmt == stat.S_IFCHR and child.rdev == (0, 0)
            opaque = child.is_dir and b"trusted.overlay.opaque" in (child.xattrs or {})
            found.add(prefix + name.decode() + ("/" if child.is_dir else "") + "!" * (white or opaque))
            walk(child, prefix + name.decode() + "/")

    walk(tree.root, "")
    return found


@pytest.mark.parametrize(("layers", "want"), [
    ([["a/", "a/b"], [".wh.a"]], set()),
    ([["a/", "a/b"], [".wh.a", "a/", "a/c"]], {"a/", "a/c"}),
    ([["a/", "a/b"], ["a/", "a/c", ".wh.a"]], {"a/", "a/c"}),
    ([["a/", "a/b"], ["a/c", ".wh.a"]], {"a/", "a/c"}),
    ([["a/", "a/b"], ["a/", "a/c", "a/.wh..wh..opq"]], {"a/", "a/c"}),
    ([["a/", "a/b", "a/d/", "a/d/e"], ["a/.wh..wh..opq", "a/d/f"]], {"a/", "a/d/", "a/d/f"}),
    ([["a/", "a/b", "a/d/", "a/d/e"], ["a/d/f", "a/.wh..wh..opq"]], {"a/", "a/d/", "a/d/f"}),
    ([["a/", "a/b"], ["a"]], {"a"}),
    ([["a"], ["a/", "a/b"]], {"a/", "a/b"}),
    ([["a"], [".wh.a", "a"]], {"a"}),
    ([["a"], ["a", ".wh.a"]], {"a"}),
    ([["a"], [".wh.b"]], {"a"}),
    ([["a/", "a/b"], ["a/.wh.b"], ["a/b"]], {"a/", "a/b"}),
    ([["a"], ["new=a", ".wh.a"]], {"new"}),
    ([["a"], [".wh..wh.aufs", ".wh..wh.plnk/"]], {"a"}),
    ([["a/b/c/d"], ["a/b/x", ".wh.a"]], {"a/", "a/b/", "a/b/x"}),
    ([[".wh.a", "a"], ["b"]], {"a", "b"}),
])  # fmt: skip
def test_layer_rules(layers: list[list[str]], want: set[str]) -> None:
    assert paths(stacked(*layers)) == want


@pytest.mark.parametrize(("layer", "want"), [
    ([".wh.a"], {"a!"}),
    (["d/", "d/.wh.a"], {"d/", "d/a!"}),
    (["d/.wh.a", "d/a"], {"d/", "d/a"}),
    (["d/a", "d/.wh.a"], {"d/", "d/a"}),
    (["d/", "d/x", ".wh.d"], {"d/!", "d/x"}),
    ([".wh.d", "d/", "d/x"], {"d/!", "d/x"}),
    (["d/.wh..wh..opq", "d/x"], {"d/!", "d/x"}),
    (["d/x", "d/.wh..wh..opq", "d/"], {"d/!", "d/x"}),
])  # fmt: skip
def test_whiteouts_kept_for_the_layers_below(layer: list[str], want: set[str]) -> None:
    assert paths(stacked(layer, keep=True)) == want


def test_hard_link_into_a_lower_layer_is_one_inode() -> None:
    tree = stacked(["a"], ["b=a"], ["a"])
    assert tree.root.children[b"a"] is not tree.root.children[b"b"]
    tree = stacked(["a"], ["b=a"])
    assert tree.root.children[b"a"] is tree.root.children[b"b"]


def test_a_deep_tree_is_no_deep_recursion() -> None:
    name = "/".join(["d"] * 2000)
    tree = stacked([name + "/f"], [".wh.d"])
    assert paths(tree) == set()
    tree = stacked([name + "/f"])
    assert meta.Image(tree, data_size=0, data_digest="sha256:" + "0" * 64).files == 2002


def test_crc32c() -> None:
    assert crc_of(b"123456789") == 0xE3069283


def crc_of(data: bytes) -> int:
    return meta.crc32c(data) ^ 0xFFFFFFFF
