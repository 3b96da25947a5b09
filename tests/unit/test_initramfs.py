"""The initramfs: what independent readers (libarchive's, GNU cpio's) see in it."""

from __future__ import annotations

import shutil
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from dsecd.vmm.initramfs import write_initramfs


def entries(data: bytes) -> list[tuple[str, int, bytes, tuple[int, int]]]:
    """(name, mode, bytes, device numbers) by a reader of our own, strict about alignment."""
    found = []
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name_end = at + 110 + fields[11]
        name = data[at + 110 : name_end]
        assert name.endswith(b"\0")
        assert b"\0" not in name[:-1]
        begin = -(-name_end // 4) * 4
        body = data[begin : begin + fields[6]]
        assert len(body) == fields[6]
        at = -(-(begin + fields[6]) // 4) * 4
        if name == b"TRAILER!!!\0":
            assert data[at:].strip(b"\0") == b""
            return found
        found.append((name[:-1].decode(), fields[1], body, (fields[9], fields[10])))


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, list[Path]]:
    init = tmp_path / "agent"
    init.write_bytes(b"\x7fELF agent " * 1000 + b"x")  # no multiple of four
    modules = []
    for number, name in enumerate(("virtio", "virtio_pmem", "erofs")):
        modules.append(tmp_path / f"{number:03}-{name}.ko")
        modules[-1].write_bytes(struct.pack("<I", number) * (100 + number) + b"y" * number)
    return init, modules


def made(tmp_path: Path, init: Path, modules: list[Path]) -> bytes:
    target = tmp_path / "initrd"
    with target.open("wb") as out:
        write_initramfs(out, init, modules)
    return target.read_bytes()


def test_what_is_in_it(tmp_path: Path, parts: tuple[Path, list[Path]]) -> None:
    init, modules = parts
    found = entries(made(tmp_path, init, modules))
    assert [(name, stat.filemode(mode)) for name, mode, _, _ in found] == [
        ("dev", "drwxr-xr-x"),
        ("dev/console", "crw-------"),
        ("init", "-rwxr-xr-x"),
        ("modules", "drwxr-xr-x"),
        ("modules/000-virtio.ko", "-rw-r--r--"),
        ("modules/001-virtio_pmem.ko", "-rw-r--r--"),
        ("modules/002-erofs.ko", "-rw-r--r--"),
    ]
    bodies = {name: body for name, _, body, _ in found}
    assert bodies["init"] == init.read_bytes()
    assert [bodies[f"modules/{path.name}"] for path in modules] == [path.read_bytes() for path in modules]
    assert {name: numbers for name, _, _, numbers in found if numbers != (0, 0)} == {"dev/console": (5, 1)}


def test_the_same_parts_make_the_same_bytes(tmp_path: Path, parts: tuple[Path, list[Path]]) -> None:
    init, modules = parts
    first = made(tmp_path, init, modules)
    init.touch()
    assert made(tmp_path, init, modules[::-1]) == first
    assert len(first) % 4096 == 0


def test_a_kernel_without_modules_gets_no_directory_for_them(tmp_path: Path, parts: tuple[Path, list[Path]]) -> None:
    assert [name for name, _, _, _ in entries(made(tmp_path, parts[0], []))] == ["dev", "dev/console", "init"]


@pytest.mark.parametrize("reader", ["cpio", "bsdtar", "busybox"])
def test_others_read_it(reader: str, tmp_path: Path, parts: tuple[Path, list[Path]]) -> None:
    if shutil.which(reader) is None:
        pytest.skip(f"{reader} is not installed")
    made(tmp_path, *parts)
    command = {"cpio": ["cpio", "-it"], "bsdtar": ["bsdtar", "-tf", "-"], "busybox": ["busybox", "cpio", "-t"]}[reader]
    with (tmp_path / "initrd").open("rb") as archive:
        listing = subprocess.run(command, stdin=archive, capture_output=True, text=True, check=True, timeout=20).stdout
    assert listing.split() == [
        "dev", "dev/console", "init", "modules", *(f"modules/{path.name}" for path in parts[1])
    ]  # fmt: skip
