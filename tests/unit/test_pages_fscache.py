"""The fscache driver's parts that need neither root nor a kernel with cachefiles: its requests, files with holes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.erofs.model import SUM
from dsecd.erofs.pages import fscache
from dsecd.erofs.pages.fscache_file import OndemandFile
from dsecd.erofs.pages.fscache_server import META_WINDOW, Metadata
from dsecd.erofs.pages.model import Watched
from dsecd.erofs.sys import in_directory
from dsecd.errors import DsecError


def message(operation: int, body: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("=IIII", 7, operation, 16 + len(body) if length is None else length, 3) + body


def opening(volume: bytes = b"erofs,dsecd\0", blob: bytes = b"d-abc", fd: int = 9) -> bytes:
    return struct.pack("=IIII", len(volume), len(blob), fd, 0) + volume + blob


# -- requests ---------------------------------------------------------------------------------------------------------
def test_requests_as_the_kernel_writes_them() -> None:
    assert fscache.parse(message(0, opening())) == fscache.Open(7, 3, "erofs,dsecd", "d-abc", 9)
    assert fscache.parse(message(1, b"")) == fscache.Close(7, 3)
    assert fscache.parse(message(2, struct.pack("=QQ", 1 << 40, 65536))) == fscache.Read(7, 3, 1 << 40, 65536)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 15,
        message(1, b"", length=15),
        message(1, b"", length=1 << 31),
        message(0, b""),
        message(0, opening()[:15]),
        message(0, opening()[:-1]),
        message(0, opening() + b"x"),
        message(0, opening(volume=b"")),
        message(0, opening(blob=b"")),
        message(0, opening(fd=0xFFFF_FFFF)),
        message(0, struct.pack("=IIII", 0xFFFF_FFFF, 6, 9, 0) + b"hello"),
        message(2, b"\0" * 8),
        message(2, b"\0" * 24),
        message(2, struct.pack("=QQ", 0, 0)),
        message(2, struct.pack("=QQ", (1 << 64) - 1, 4096)),
        message(2, struct.pack("=QQ", 4096, (1 << 63) - 1)),
        message(3, b""),
    ],
)
def test_what_is_no_request(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        fscache.parse(raw)


def test_names_that_are_not_text_are_nobodys() -> None:
    found = fscache.parse(message(0, opening(volume=b"erofs,\xff\0", blob=b"\0\xff")))
    assert isinstance(found, fscache.Open)
    assert found.volume != fscache.VOLUME and not found.blob.startswith((fscache.META, fscache.DATA))


@given(st.binary(max_size=fscache.MESSAGE_MAX))
def test_garbage(raw: bytes) -> None:
    """It is understood, or it is a ValueError."""
    try:
        found = fscache.parse(raw)
    except ValueError:
        return
    assert isinstance(found, fscache.Open | fscache.Read | fscache.Close)


@given(st.integers(0, 2), st.binary(max_size=200))
def test_garbage_behind_a_good_head(operation: int, body: bytes) -> None:
    try:
        found = fscache.parse(message(operation, body))
    except ValueError:
        return
    if isinstance(found, fscache.Read):
        assert found.length > 0 and found.offset + found.length < 1 << 63
    if isinstance(found, fscache.Open):
        assert 0 <= found.fd < 1 << 31


def test_commands(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "device", os.O_RDWR | os.O_CREAT)
    device = fscache.Device(fd)
    device.opened(5, 4096)
    device.opened(6, -errno.ENOENT)
    device.restore()
    device.close()
    assert (tmp_path / "device").read_bytes() == b"copen 5,4096copen 6,-2restore"


def test_directory_that_no_command_can_name(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        fscache.Device.bind(tmp_path / "a b")
    assert caught.value.errno == errno.EOPNOTSUPP


# -- files with holes -------------------------------------------------------------------------------------------------
def sparse(path: Path, size: int) -> int:
    """What stands in for the kernel's descriptor: written and sought in, never read."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, size)
    return fd


def test_extents(tmp_path: Path) -> None:
    fd = sparse(tmp_path / "f", 4 * SUM)
    try:
        assert list(fscache.extents(fd, 4 * SUM)) == []
        assert fscache.hole(fd, 0, 4096)
        os.pwrite(fd, b"x" * SUM, SUM)
        assert list(fscache.extents(fd, 4 * SUM)) == [(SUM, 2 * SUM)]
        assert not fscache.hole(fd, SUM, SUM) and fscache.hole(fd, SUM, SUM + 1) and fscache.hole(fd, 0, SUM)
        os.pwrite(fd, b"x" * SUM, 3 * SUM)
        assert list(fscache.extents(fd, 4 * SUM)) == [(SUM, 2 * SUM), (3 * SUM, 4 * SUM)]
        assert not fscache.hole(fd, 3 * SUM, SUM)
    finally:
        os.close(fd)


def test_buffer_writes_whole_blocks(tmp_path: Path) -> None:
    fd = sparse(tmp_path / "f", 0)
    buffer = fscache.Buffer(8192)
    buffer.write(fd, b"a" * 20_000, 4096)
    buffer.write(fd, b"", 0)
    os.close(fd)
    buffer.close()
    found = (tmp_path / "f").read_bytes()
    assert found == bytes(4096) + b"a" * 20_000 + bytes(480)
    assert len(found) % fscache.ALIGN == 0


def ondemand(content: bytes, path: Path | None = None) -> OndemandFile:
    sums = b"".join(hashlib.sha256(content[at : at + SUM]).digest() for at in range(0, len(content), SUM))
    return OndemandFile(hashlib.sha256(sums).hexdigest(), sums, len(content), lambda: path)


def test_file_follows_the_kernels(tmp_path: Path) -> None:
    content = os.urandom(2 * SUM + 8192)
    file = ondemand(content, tmp_path / "f")
    assert file.chunks == 3 and not file.in_use()
    with pytest.raises(OSError) as caught:
        file.write(0, content[:SUM])
    assert caught.value.errno == errno.EBADF
    file.bind(4, sparse(tmp_path / "f", len(content)))
    assert file.in_use() and file.look() == []
    file.write(2, content[2 * SUM :])
    assert file.look() == [2]
    file.set(2)
    file.set(1)  # the kernel knows better
    assert file.gone(SUM, SUM + 8192) == [1]
    assert file.gone(0, 4096) == []  # nobody thought it was there
    file.clear(1)
    assert file.count == 1 and file.cached_bytes <= len(content) and not file.complete
    assert file.read(2) == content[2 * SUM :]
    file.unbind(3)  # of an earlier object
    assert file.in_use()
    file.unbind(4)
    assert not file.in_use() and file.count == 0 and 2 not in file
    file.close()


def test_another_object_begins_empty(tmp_path: Path) -> None:
    file = ondemand(os.urandom(SUM))
    file.bind(1, sparse(tmp_path / "a", SUM))
    file.set(0)
    file.looked = True
    file.bind(2, sparse(tmp_path / "b", SUM))
    assert 0 not in file and not file.looked
    with pytest.raises(FileNotFoundError):
        file.read(0)
    file.close()


def test_descriptor_is_not_another_files_while_it_is_written(tmp_path: Path) -> None:
    """An object ends and its descriptor's number is given to another file: what is being written never lands there."""
    content = os.urandom(SUM)
    file = ondemand(content)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            try:
                file.write(0, content)
            except OSError as exc:
                assert exc.errno == errno.EBADF

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(1, 200):
            file.bind(number, sparse(tmp_path / "blob", SUM))
            file.unbind(number)
            other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.close(other)
    finally:
        ended.set()
        writer.join()
    assert (tmp_path / "other").stat().st_size == 0


@pytest.mark.parametrize("size", [SUM + 4096, SUM - 1, 0, 5000])
def test_sums_that_do_not_fit(size: int) -> None:
    sums = hashlib.sha256(b"x").digest()
    with pytest.raises(DsecError) as caught:
        OndemandFile(hashlib.sha256(sums).hexdigest(), sums, size, lambda: None)
    assert caught.value.kind == "image"
    with pytest.raises(DsecError):
        OndemandFile("0" * 64, sums, SUM, lambda: None)


def test_the_same_data_both_ways_is_two_files() -> None:
    plain = Watched(image="sha256:a", data_digest="sha256:b", data_size=1, sums="", store="s", blob="")
    through = Watched(image="sha256:a", data_digest="sha256:b", data_size=1, sums="", store="s", blob="", metadata="/m")
    assert (plain.key, through.key) == ("b", "d-b")


def test_metadata_is_copied_around_what_is_asked_for(tmp_path: Path) -> None:
    content = os.urandom(2 * META_WINDOW + 3 * 4096)
    (tmp_path / "meta").write_bytes(content)
    blob = Metadata(sparse(tmp_path / "blob", len(content)), tmp_path / "meta")
    buffer = fscache.Buffer(META_WINDOW)
    blob.read(fscache.Read(1, 1, META_WINDOW + 4096, 4096), buffer)
    assert list(fscache.extents(blob.fd, len(content))) == [(META_WINDOW, 2 * META_WINDOW)]
    blob.read(fscache.Read(2, 1, 2 * META_WINDOW - 4096, 4096 * 4), buffer)  # over a border, to the end
    blob.read(fscache.Read(3, 1, 4 * META_WINDOW, 4096), buffer)  # nothing is there
    assert (tmp_path / "blob").read_bytes() == bytes(META_WINDOW) + content[META_WINDOW:]
    (tmp_path / "meta").unlink()
    with pytest.raises(FileNotFoundError):
        blob.read(fscache.Read(4, 1, 0, 4096), buffer)
    blob.close()
    buffer.close()


def test_where_cachefiles_keeps_a_blob(tmp_path: Path) -> None:
    assert fscache.find(tmp_path, "d-b") is None
    (tmp_path / "cache/Ierofs,dsecd/@7f").mkdir(parents=True)
    (tmp_path / "cache/Ierofs,dsecd/@7f/Dd-b").touch()
    assert fscache.find(tmp_path, "d-b") == tmp_path / "cache/Ierofs,dsecd/@7f/Dd-b"


# -- a directory of one's own -----------------------------------------------------------------------------------------
def test_in_directory(tmp_path: Path) -> None:
    before = Path.cwd()
    seen: list[Path] = []
    in_directory(tmp_path, lambda: seen.append(Path.cwd()))
    assert seen == [tmp_path] and Path.cwd() == before
    with pytest.raises(FileNotFoundError):
        in_directory(tmp_path / "none", lambda: None)


def test_complete_is_the_kernels_request() -> None:
    """_IOW(0x98, 1, int); a descriptor that is none of cachefiles' refuses it, and nobody waits there."""
    assert (1 << 30 | struct.calcsize("i") << 16 | 0x98 << 8 | 1) == fscache._READ_COMPLETE
    fd = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(OSError):
            fcntl.ioctl(fd, fscache._READ_COMPLETE, 1)
        assert fscache.complete(fd, 1) is False
    finally:
        os.close(fd)
