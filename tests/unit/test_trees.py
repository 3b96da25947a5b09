"""Tar streams at the client's end: whatever a hostile sandbox sends, nothing is written outside the target."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.trees import pack, unpack_stream

Entry = tuple[str, str, str]  # kind, name, content or target
KINDS = {
    "file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "sym": tarfile.SYMTYPE, "link": tarfile.LNKTYPE,
    "fifo": tarfile.FIFOTYPE, "char": tarfile.CHRTYPE, "block": tarfile.BLKTYPE,
}  # fmt: skip


def tar_of(entries: list[Entry], **fields: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for kind, name, text in entries:
            info = tarfile.TarInfo(name)
            info.type = KINDS[kind]
            info.mode = fields.get("mode", 0o755)
            if kind in ("sym", "link"):
                info.linkname = text
                tar.addfile(info)
            else:
                data = text.encode() if kind == "file" else b""
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


class Source:
    """A stream in small pieces."""

    def __init__(self, data: bytes, piece: int = 700) -> None:
        self.pieces = [data[i : i + piece] for i in range(0, len(data), piece)]

    async def take(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


def unpack(data: bytes, target: Path) -> list[str]:
    return asyncio.run(unpack_stream(Source(data), target))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A target beside a file that must not change."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    (tmp_path / "target").mkdir()
    return tmp_path


def outside(place: Path) -> dict[str, str]:
    """Everything that is not below the target."""
    found = {}
    for directory, _, names in os.walk(place):
        if "target" not in Path(directory).relative_to(place).parts:
            found |= {os.path.relpath(os.path.join(directory, n), place): Path(directory, n).read_text() for n in names}
    return found


ATTACKS: dict[str, list[Entry]] = {
    "dots": [("file", "../outside/secret", "x"), ("file", "a/../../outside/new", "x"), ("file", "..", "x")],
    "absolute": [("file", "{top}/outside/secret", "x"), ("file", "/{top}/outside/new", "x")],
    "absolute link": [("sym", "l", "{top}/outside"), ("file", "l/secret", "x")],
    "relative link": [("sym", "l", "../outside"), ("file", "l/secret", "x"), ("file", "l/new", "x")],
    "link to file": [("sym", "l", "../outside/secret"), ("file", "l", "x")],
    "link in link": [("dir", "a/b", ""), ("sym", "a/b/up", "../.."), ("sym", "l", "a/b/up/../outside"),
                     ("file", "l/secret", "x")],
    "dir over link": [("sym", "d", "../outside"), ("dir", "d", ""), ("file", "d/new", "x")],
    "hard link out": [("link", "h", "../outside/secret"), ("file", "h", "x")],
    "hard link absolute": [("link", "h", "{top}/outside/secret"), ("file", "h", "x")],
    "hard link to link": [("sym", "s", "../outside/secret"), ("link", "h", "s"), ("file", "h", "x")],
    "hard link through link": [("sym", "s", "../outside"), ("link", "h", "s/secret"), ("file", "h", "x")],
    "rename of dir": [("dir", "d", ""), ("sym", "d/up", ".."), ("sym", "e", "d/up/../outside"), ("file", "e/new", "x")],
    "self": [("sym", ".", "../outside"), ("file", "new", "x")],
    "loop": [("sym", "a", "b"), ("sym", "b", "a"), ("file", "a/x", "x")],
    "deep": [*(("dir", "/".join(["d" * 200] * n), "") for n in range(1, 22)),
             ("sym", "/".join(["d" * 200] * 20) + "/l", "../" * 20 + "../outside"),
             ("file", "/".join(["d" * 200] * 20) + "/l/new", "x")],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_nothing_is_written_outside(place: Path, name: str) -> None:
    """Links, dots and absolute names in every combination: what is outside stays as it was, the rest is reported."""
    entries = [(k, n.replace("{top}", str(place)), t.replace("{top}", str(place))) for k, n, t in ATTACKS[name]]
    before = outside(place)
    issues = unpack(tar_of([*entries, ("file", "good", "good")]), place / "target")
    assert outside(place) == before
    assert (place / "target/good").read_text() == "good", issues
    for directory, names, files in os.walk(place / "target"):
        for one in names + files:
            path = Path(directory, one)
            if path.is_symlink():
                assert Path(os.path.realpath(path)).is_relative_to(place / "target"), f"{path} leads out"


def test_devices_and_dangerous_modes(place: Path) -> None:
    """Special files are reported, setuid and write bits for others are dropped."""
    entries: list[Entry] = [
        ("fifo", "f", ""),
        ("char", "c", ""),
        ("block", "b", ""),
        ("file", "suid", "x"),
        ("dir", "d", ""),
    ]
    issues = unpack(tar_of(entries, mode=0o6777), place / "target")
    assert sorted(issue.split(":")[0] for issue in issues) == ["b", "c", "f"]
    assert stat.S_IMODE((place / "target/suid").stat().st_mode) == 0o755
    assert stat.S_IMODE((place / "target/d").stat().st_mode) == 0o755
    assert (place / "target/suid").stat().st_uid == os.geteuid()


@pytest.mark.parametrize("cut", [0, 1, 100, 511, 512, 513, 1024, 1500])
def test_truncated_stream(place: Path, cut: int) -> None:
    """A stream that breaks off raises or reports; it never hangs and never writes elsewhere."""
    data = tar_of([("file", "a", "x" * 600), ("file", "b", "y" * 600)])[:cut]
    try:
        unpack(data, place / "target")
    except (tarfile.TarError, EOFError, OSError):
        pass
    assert outside(place) == {"outside/secret": "secret"}


names = st.sampled_from(
    ["a", "b", "a/b", "a/b/c", "l", "l/a", "../outside", "../outside/secret", "..", ".", "a/..", "b/l"]
)
entries_of = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), names, names), max_size=8)


@given(entries_of, st.integers(200, 3000))
@settings(max_examples=200, deadline=None)
def test_random_archives(tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], piece: int) -> None:
    """No combination of a few names, links and files gets out."""
    place = tmp_path_factory.mktemp("t")
    (place / "outside").mkdir()
    (place / "outside/secret").write_text("secret")
    asyncio.run(unpack_stream(Source(tar_of(entries), piece), place / "target"))
    assert outside(place) == {"outside/secret": "secret"}
    assert os.listdir(place / "outside") == ["secret"]


@given(st.binary(max_size=2000))
@settings(max_examples=300, deadline=None)
def test_random_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    place = tmp_path_factory.mktemp("t")
    try:
        asyncio.run(unpack_stream(Source(data), place / "target"))
    except (tarfile.TarError, EOFError, OSError):
        pass
    assert {p.name for p in place.iterdir()} <= {"target"}


def test_pack_and_unpack(place: Path) -> None:
    """A tree comes back as it was; a file that cannot be read and a socket are reported."""
    source = place / "source"
    (source / "d/e").mkdir(parents=True)
    (source / "d/file").write_bytes(os.urandom(3_000_000))
    os.link(source / "d/file", source / "hard")
    (source / "soft").symlink_to("d/file")
    (source / "d/empty").write_text("")
    os.mkfifo(source / "pipe")
    issues: list[str] = []

    async def packed() -> bytes:
        return b"".join([piece async for piece in pack(source, issues)])

    data = asyncio.run(packed())
    assert issues == []
    left = unpack(data, place / "target")
    assert [issue.split(":")[0] for issue in left] == ["pipe"]
    assert (place / "target/d/file").read_bytes() == (source / "d/file").read_bytes()
    assert (place / "target/hard").stat().st_ino == (place / "target/d/file").stat().st_ino
    assert (place / "target/soft").readlink() == Path("d/file")
    assert (place / "target/d/e").is_dir()
    assert (place / "target/d/empty").read_bytes() == b""


def test_pack_of_what_changes(place: Path) -> None:
    """A file that shrinks while it is packed gives a tar that is whole."""
    source = place / "source"
    source.mkdir()
    (source / "a").write_bytes(b"x" * 5_000_000)

    async def packed() -> bytes:
        out = b""
        async for piece in pack(source, []):
            if not out:
                os.truncate(source / "a", 10)
            out += piece
        return out

    with tarfile.open(fileobj=io.BytesIO(asyncio.run(packed()))) as tar:
        (member,) = [m for m in tar if m.isreg()]
        assert member.size == 5_000_000
