"""The btrfs driver's bytes and figures, without a btrfs: struct layouts, tree search paging, quota mode, accounting."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from pathlib import Path

import pytest

from dsecd.disk import btrfs_ioctl as ioctl
from dsecd.disk.btrfs import quota_mode


def test_request_numbers_are_those_of_the_header() -> None:
    """From a C program that printed them."""
    assert ioctl._IOC_SUBVOL_CREATE_V2 == 0x50009418
    assert ioctl._IOC_SNAP_CREATE_V2 == 0x50009417
    assert ioctl._IOC_SNAP_DESTROY_V2 == 0x5000943F
    assert ioctl._IOC_QGROUP_LIMIT == 0x8030942B
    assert ioctl._IOC_QGROUP_CREATE == 0x4010942A
    assert ioctl._IOC_QUOTA_CTL == 0xC0109428
    assert ioctl._IOC_TREE_SEARCH_V2 == 0xC0709411
    assert ioctl._IOC_INO_LOOKUP == 0xD0009412
    assert ioctl._IOC_FS_INFO == 0x8400941F
    assert ioctl._IOC_RESIZE == 0x50009403


def test_create_passes_the_limit_in_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def fake(fd: int, request: int, args: bytearray) -> int:
        assert len(args) == 4096
        source, _, flags, size, pointer = struct.unpack_from("<qQQQQ", args)
        seen.update(request=request, source=source, flags=flags, name=bytes(args[56:]).rstrip(b"\0"))
        seen["inherit"] = struct.unpack("<9Q", ctypes.string_at(pointer, size))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", fake)
    ioctl.snapshot(3, "copy", 7, 123)
    assert seen == {
        "request": ioctl._IOC_SNAP_CREATE_V2, "source": 7, "flags": 4, "name": b"copy",
        "inherit": (1, 0, 0, 0, 1, 123, 0, 0, 0),
    }  # fmt: skip


def test_names_that_no_directory_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="256"):
        ioctl.destroy_subvolume(3, "x" * 256)


def test_tree_search_goes_on_where_the_last_buffer_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = [(0, ioctl._QGROUP_INFO_KEY, n) for n in range(256, 300)]
    tree += [(0, ioctl._QGROUP_INFO_KEY + 2, n) for n in range(256, 300)]  # limit items: not asked for

    def fake(fd: int, request: int, args: bytearray) -> int:
        object_id, offset, kind = (struct.unpack_from(f, args, at)[0] for f, at in (("<Q", 8), ("<Q", 24), ("<I", 56)))
        found = [key for key in tree if key >= (object_id, kind, offset)][:10]
        struct.pack_into("<I", args, 64, len(found))
        at = 112
        for key_object, key_kind, key_offset in found:
            struct.pack_into("<QQQII", args, at, 1, key_object, key_offset, key_kind, 40)
            at += 32 + 40
        return 0

    monkeypatch.setattr(fcntl, "ioctl", fake)
    assert ioctl.qgroups(3) == set(range(256, 300))


@pytest.mark.parametrize(
    ("files", "mode"),
    [
        ({}, None),
        ({"enabled": "0\n", "mode": "qgroup\n"}, None),
        ({"enabled": "1\n", "mode": "squota\n"}, "squota"),
        ({"inconsistent": "0\n"}, "qgroup"),
    ],
    ids=["off", "switched-off", "simple", "before-6.7"],
)
def test_quota_mode(tmp_path: Path, files: dict[str, str], mode: str | None) -> None:
    for name, text in files.items():
        (tmp_path / "qgroups").mkdir(exist_ok=True)
        (tmp_path / "qgroups" / name).write_text(text)
    assert quota_mode(tmp_path) == mode
    assert os.listdir(tmp_path) == (["qgroups"] if files else [])
