"""Cases 14 to 16: files and trees, and what a hostile sandbox makes of them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemonkit import Clock, Daemon, asynchronous, names_running, patience, sandbox_of

from dsecd.client import DsecError

KIB, MIB = 1 << 10, 1 << 20
SIZES = [0, 1, 18 * KIB, 64 * KIB, 96 * KIB, 128 * KIB, MIB, 10 * MIB, 100 * MIB]
# Runs in the sandbox until it is killed: /t/d is now a directory, now a link to a directory of the host.
SWAPPER = """
import itertools, os
count = itertools.count()
def move(a, b):
    while True:
        try:
            return os.rename(a, b)
        except OSError:  # an upload made a directory in the gap
            os.rename(b, "/t/" + str(next(count)))
os.mkdir("/t/d"); os.symlink({target!r}, "/t/link")
open("/t/d/secret", "w").write("inside")
open("/t/ready", "w").close()
while True:
    move("/t/d", "/t/dir"); move("/t/link", "/t/d")
    move("/t/d", "/t/link"); move("/t/dir", "/t/d")
"""


def content(size: int) -> bytes:
    """Bytes that are not the same from place to place."""
    block = os.urandom(min(size, MIB) or 1)
    return (block * (size // len(block) + 1))[:size]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def canary() -> Iterator[Path]:
    """A directory of the host that anybody could read and write, if they came here."""
    directory = Path(tempfile.mkdtemp(prefix="dsecd-canary", dir="/tmp"))
    directory.chmod(0o777)
    (directory / "secret").write_text("host secret")
    (directory / "secret").chmod(0o666)
    yield directory
    shutil.rmtree(directory)


def untouched(canary: Path) -> bool:
    return os.listdir(canary) == ["secret"] and (canary / "secret").read_text() == "host secret"


@pytest.mark.parametrize("size", SIZES)
@asynchronous
async def test_case_14_round_trip_by_file_call(daemon: Daemon, backend: str, size: int) -> None:
    """What is written by the file call has the same sha256 inside and when it is read back."""
    data = content(size)
    async with sandbox_of(daemon, backend) as sandbox:
        assert await sandbox.write_file("/data/file", data, mode=0o640) == size
        assert (await sandbox.exec(["sha256sum", "/data/file"])).stdout.split()[0] == sha(data)
        assert sha(await sandbox.read_file("/data/file")) == sha(data)
        found = await sandbox.stat("/data/file")
        assert (found.type, found.size, found.mode, found.uid, found.gid) == ("file", size, 0o640, 0, 0)


@asynchronous
async def test_case_14_round_trip_by_tree_call(daemon: Daemon, backend: str, tmp_path: Path) -> None:
    """The same sizes as one tree: sha256 of each inside, and of each that comes back."""
    source = tmp_path / "source/deep/er"
    source.mkdir(parents=True)
    sums = {}
    for size in SIZES:
        (source / str(size)).write_bytes(data := content(size))
        sums[f"deep/er/{size}"] = sha(data)
    async with sandbox_of(daemon, backend) as sandbox:
        report = await sandbox.upload(tmp_path / "source", "/in")
        assert report.issues == []
        listed = await sandbox.run_shell("cd /in && find . -type f -exec sha256sum {} +")
        inside = {line.split()[1].removeprefix("./"): line.split()[0] for line in listed.stdout.splitlines()}
        assert inside == sums
        report = await sandbox.download("/in", tmp_path / "back")
        assert report.issues == []
    back = {str(p.relative_to(tmp_path / "back")): p for p in (tmp_path / "back").rglob("*") if p.is_file()}
    assert {name: sha(path.read_bytes()) for name, path in back.items()} == sums


@asynchronous
async def test_case_14_parts_and_appends(daemon: Daemon, backend: str) -> None:
    """A part of a file is exactly that part; append adds; exclusive refuses what is there."""
    data = content(3 * MIB)
    async with sandbox_of(daemon, backend) as sandbox:
        await sandbox.write_file("/f", data)
        for offset, size in ((0, 1), (MIB - 1, 2), (3 * MIB - 1, 10), (3 * MIB, 1), (4 * MIB, 1), (5, 2 * MIB)):
            assert await sandbox.read_file("/f", offset=offset, size=size) == data[offset : offset + size]
        await sandbox.write_file("/f", b"more", append=True)
        assert await sandbox.read_file("/f", offset=3 * MIB) == b"more"
        with pytest.raises(DsecError) as caught:
            await sandbox.write_file("/f", b"x", exclusive=True)
        assert caught.value.kind == "conflict"


@pytest.mark.parametrize("planted", ["file", "parent"])
@asynchronous
async def test_case_15_planted_link(daemon: Daemon, backend: str, planted: str, canary: Path, tmp_path: Path) -> None:
    """A link to a host's path, as the file or as its parent, leads nowhere but into the sandbox, by any call."""
    async with sandbox_of(daemon, backend) as sandbox:
        await sandbox.mkdir("/t")
        if planted == "file":
            await sandbox.exec(["ln", "-s", f"{canary}/secret", "/t/secret"])
            path = "/t/secret"
        else:
            await sandbox.exec(["ln", "-s", str(canary), "/t/d"])
            path = "/t/d/secret"
        for call in (sandbox.read_file(path), sandbox.download(path, tmp_path / "a"), sandbox.stat(path)):
            with pytest.raises(DsecError) as caught:
                await call
            assert caught.value.kind in ("not_found", "invalid")
        await sandbox.download("/t", tmp_path / "b")
        assert [p for p in (tmp_path / "b").rglob("*") if p.is_file()] == [], "no link to the host was followed here"
        await sandbox.mkdir(str(canary))  # now the link leads somewhere: inside
        await sandbox.write_file(path, "inside")
        (tmp_path / "up").mkdir()
        (tmp_path / "up/secret").write_text("uploaded")
        await sandbox.upload(tmp_path / "up", f"{path.removesuffix('/secret')}")
        assert await sandbox.read_file(path) == b"uploaded"
        await sandbox.remove(path)
    assert untouched(canary)


@asynchronous
async def test_case_15_swapped_link(daemon: Daemon, backend: str, canary: Path, tmp_path: Path) -> None:
    """A directory that is swapped for a link to the host's all the time: no call ever sees or touches the host."""
    async with sandbox_of(daemon, backend) as sandbox:
        await sandbox.mkdir("/t")
        swapper = await sandbox.start(["python3", "-c", SWAPPER.format(target=str(canary))])
        async with asyncio.timeout(5 * patience(backend)):
            while "ready" not in [entry.name for entry in await sandbox.list_dir("/t")]:
                await asyncio.sleep(0.01)
        seen = set()
        (tmp_path / "up").mkdir()
        (tmp_path / "up/new").write_text("x")
        for n in range(150):
            try:
                seen.add(await sandbox.read_file("/t/d/secret"))
                await sandbox.write_file("/t/d/new", b"x")
            except DsecError as error:
                assert error.kind in ("not_found", "invalid", "conflict"), error
            if n % 15 == 0:
                try:
                    await sandbox.upload(tmp_path / "up", "/t/d")
                    await sandbox.download("/t/d", tmp_path / f"down{n}")
                except DsecError as error:
                    assert error.kind in ("not_found", "invalid", "conflict"), error
        assert await names_running(sandbox) == ["init", "python3"], "the swapper still runs"
        await swapper.signal(9)
        assert seen == {b"inside"}, "the loop must have met the directory too"
    assert untouched(canary)
    downloaded = {path.read_text() for path in tmp_path.glob("down*/secret")}
    assert downloaded <= {"inside"}


@asynchronous
async def test_case_15_download_over_an_earlier_one(daemon: Daemon, backend: str, canary: Path, tmp_path: Path) -> None:
    """A link that an earlier download left is replaced by the next one, not written through."""
    async with sandbox_of(daemon, backend) as sandbox:
        await sandbox.run_shell("mkdir /t; echo 1 > /t/target; ln -s target /t/x; ln -s .. /t/up; ln -s / /t/top")
        await sandbox.download("/t", tmp_path / "local")
        assert (tmp_path / "local/x").readlink() == Path("target")
        assert not (tmp_path / "local/up").is_symlink()
        assert not (tmp_path / "local/top").is_symlink()
        (tmp_path / "local/y").symlink_to(canary / "secret")  # the caller's own
        (tmp_path / "local/z").symlink_to(canary)
        await sandbox.run_shell("rm /t/x; echo 2 > /t/x; echo 3 > /t/y; mkdir /t/z; echo 4 > /t/z/secret")
        await sandbox.download("/t", tmp_path / "local")
        assert (tmp_path / "local/target").read_text() == "1\n"
        assert (tmp_path / "local/x").read_text() == "2\n"
    assert untouched(canary)


@asynchronous
async def test_case_15_upload_does_not_follow_links(daemon: Daemon, backend: str, canary: Path, tmp_path: Path) -> None:
    """Links of the local tree arrive as links."""
    (tmp_path / "up").mkdir()
    (tmp_path / "up/file").symlink_to(canary / "secret")
    (tmp_path / "up/dir").symlink_to(canary)
    async with sandbox_of(daemon, backend) as sandbox:
        await sandbox.upload(tmp_path / "up", "/up")
        assert {e.name: (e.type, e.target) for e in await sandbox.list_dir("/up")} == {
            "file": ("symlink", f"{canary}/secret"), "dir": ("symlink", str(canary)),
        }  # fmt: skip


ODD_NAMES = [
    b"new\nline",
    b"-rf",
    b" two  spaces ",
    b"n" * 255,
    b"\xff\xfe not text \x80",
    "ünïcode".encode(),
    b"*?[a]",
]


@asynchronous
async def test_case_16_odd_names_up_and_down(daemon: Daemon, backend: str, tmp_path: Path) -> None:
    """Names with a newline, a dash, spaces, 255 bytes or not UTF-8 come through both calls as they are."""
    top = os.fsencode(tmp_path / "odd")
    for name in ODD_NAMES:
        os.makedirs(os.path.join(top, b"dir " + name[:200]))
        for path in (os.path.join(top, name), os.path.join(top, b"dir " + name[:200], name)):
            with open(path, "wb") as file:
                file.write(b"content of " + name)
    async with asyncio.timeout(30 * patience(backend)), sandbox_of(daemon, backend) as sandbox:
        assert (await sandbox.upload(tmp_path / "odd", "/odd")).issues == []
        listed = {e.name_raw or e.name.encode(): e.type for e in await sandbox.list_dir("/odd")}
        assert listed == dict.fromkeys(ODD_NAMES, "file") | {b"dir " + name[:200]: "dir" for name in ODD_NAMES}
        for name in ODD_NAMES:
            assert await sandbox.read_file(b"/odd/" + name) == b"content of " + name
            await sandbox.write_file(b"/odd/" + name, b"again " + name)
            await sandbox.rename(b"/odd/" + name, b"/odd/renamed")
            await sandbox.rename(b"/odd/renamed", b"/odd/" + name)
            assert (await sandbox.stat(b"/odd/" + name)).size == len(name) + 6
        assert (await sandbox.download("/odd", tmp_path / "back")).issues == []
    back = os.fsencode(tmp_path / "back")
    assert sorted(os.listdir(back)) == sorted(listed)
    for name in ODD_NAMES:
        with open(os.path.join(back, name), "rb") as file:
            assert file.read() == b"again " + name
        with open(os.path.join(back, b"dir " + name[:200], name), "rb") as file:
            assert file.read() == b"content of " + name


@asynchronous
async def test_case_16_special_files_are_reported(daemon: Daemon, backend: str, tmp_path: Path) -> None:
    """A FIFO and a socket are transferred or reported one by one, up and down; nothing hangs, the rest arrives."""
    up = tmp_path / "up"
    up.mkdir()
    os.mkfifo(up / "fifo")
    (up / "plain").write_text("plain")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(up / "sock")[-100:] if len(str(up)) > 90 else str(up / "sock"))
        async with asyncio.timeout(20 * patience(backend)), sandbox_of(daemon, backend) as sandbox:
            with Clock() as clock:
                report = await sandbox.upload(up, "/up")
            assert clock.took < 5 * patience(backend)
            here = {entry.name: entry.type for entry in await sandbox.list_dir("/up")}
            assert here["plain"] == "file"
            for name in ("fifo", "sock"):
                assert name in here or any(name in issue for issue in report.issues), (here, report.issues)
            make = "import os, socket; os.mkfifo('/t/fifo'); socket.socket(socket.AF_UNIX).bind('/t/sock')"
            made = await sandbox.run_shell(f'mkdir /t; echo x > /t/plain; python3 -c "{make}"')
            assert made.exit_code == 0, made.stderr
            report = await sandbox.download("/t", tmp_path / "down")
            there = os.listdir(tmp_path / "down")
            assert "plain" in there
            for name in ("fifo", "sock"):
                assert name in there or any(name in issue for issue in report.issues), (there, report.issues)
            for name in ("fifo", "sock"):
                with pytest.raises(DsecError) as caught:
                    await sandbox.read_file(f"/t/{name}")
                assert caught.value.kind == "invalid"
            with pytest.raises(DsecError) as caught:
                await sandbox.write_file("/t/fifo", b"nobody reads it")
            assert caught.value.kind == "invalid"
