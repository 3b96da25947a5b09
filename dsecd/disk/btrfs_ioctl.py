"""btrfs through ioctls, one function per ioctl, all on open directory descriptors. Numbers: <linux/btrfs.h>.

No policy here, no paths, no child processes: `btrfs subvolume create` costs 3 ms of fork and exec for 0.1 ms of work.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import uuid
from collections.abc import Iterator
from typing import Final

_MAGIC: Final = 0x94
_NAME_MAX: Final = 255  # the kernel takes 4039 here, but a directory entry no more than this


def _ioc(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | _MAGIC << 8 | number


_W, _R, _WR = 1, 2, 3
_IOC_RESIZE: Final = _ioc(_W, 3, 4096)
_IOC_TREE_SEARCH_V2: Final = _ioc(_WR, 17, 112)
_IOC_INO_LOOKUP: Final = _ioc(_WR, 18, 4096)
_IOC_SNAP_CREATE_V2: Final = _ioc(_W, 23, 4096)
_IOC_SUBVOL_CREATE_V2: Final = _ioc(_W, 24, 4096)
_IOC_FS_INFO: Final = _ioc(_R, 31, 1024)
_IOC_QUOTA_CTL: Final = _ioc(_WR, 40, 16)
_IOC_QGROUP_CREATE: Final = _ioc(_W, 42, 16)
_IOC_QGROUP_LIMIT: Final = _ioc(_R, 43, 48)
_IOC_SNAP_DESTROY_V2: Final = _ioc(_W, 63, 4096)

TOP_LEVEL: Final = 5  # the file system's own tree; it has a qgroup too
SUBVOLUME_INODE: Final = 256  # the inode number of every subvolume's top directory
_QUOTA_ENABLE, _QUOTA_ENABLE_SIMPLE = 1, 4
_SUBVOL_QGROUP_INHERIT: Final = 1 << 2
_INHERIT_SET_LIMITS: Final = 1 << 0
_LIMIT_MAX_RFER: Final = 1 << 0
_ROOT_TREE, _QUOTA_TREE = 1, 8
_ROOT_ITEM_KEY, _QGROUP_INFO_KEY = 132, 242
_FIRST_SUBVOLUME, _LAST_SUBVOLUME = 256, (1 << 64) - 256
_U64: Final = (1 << 64) - 1


def _volume_args(fd: int, flags: int, size: int, pointer: int, name: str) -> bytearray:
    """struct btrfs_ioctl_vol_args_v2; mutable because fcntl copies immutable arguments into 1 KiB only."""
    raw = os.fsencode(name)
    if len(raw) > _NAME_MAX:
        raise ValueError(f"subvolume name of {len(raw)} bytes")
    return bytearray(struct.pack("<qQQQQQQ4040s", fd, 0, flags, size, pointer, 0, 0, raw))


def _limit(limit: int) -> bytes:
    return struct.pack("<QQQQQ", _LIMIT_MAX_RFER, limit, 0, 0, 0)


def create_subvolume(parent: int, name: str, limit: int) -> None:
    """The limit is part of the same transaction: there is no instant without one."""
    _create(_IOC_SUBVOL_CREATE_V2, parent, 0, name, limit)


def snapshot(parent: int, name: str, source: int, limit: int) -> None:
    """Commits a transaction, so it takes as long as the disk needs for that (milliseconds)."""
    _create(_IOC_SNAP_CREATE_V2, parent, source, name, limit)


def _create(request: int, parent: int, source: int, name: str, limit: int) -> None:
    inherit = ctypes.create_string_buffer(struct.pack("<QQQQ", _INHERIT_SET_LIMITS, 0, 0, 0) + _limit(limit), 72)
    args = _volume_args(source, _SUBVOL_QGROUP_INHERIT, 72, ctypes.addressof(inherit), name)
    fcntl.ioctl(parent, request, args)


def destroy_subvolume(parent: int, name: str) -> None:
    """The name goes now; the kernel's cleaner frees the rest, also after a crash (it is an orphan item on disk)."""
    fcntl.ioctl(parent, _IOC_SNAP_DESTROY_V2, _volume_args(0, 0, 0, 0, name))


def subvolume_id(fd: int) -> int:
    args = bytearray(4096)
    struct.pack_into("<QQ", args, 0, 0, SUBVOLUME_INODE)
    fcntl.ioctl(fd, _IOC_INO_LOOKUP, args)
    found: int = struct.unpack_from("<Q", args)[0]
    return found


def enable_quota(fd: int, *, simple: bool) -> None:
    fcntl.ioctl(fd, _IOC_QUOTA_CTL, bytearray(struct.pack("<QQ", _QUOTA_ENABLE_SIMPLE if simple else _QUOTA_ENABLE, 0)))


def set_limit(fd: int, qgroup: int, limit: int) -> None:
    fcntl.ioctl(fd, _IOC_QGROUP_LIMIT, struct.pack("<Q", qgroup) + _limit(limit))


def remove_qgroup(fd: int, qgroup: int) -> None:
    """EBUSY while something is still charged to it."""
    fcntl.ioctl(fd, _IOC_QGROUP_CREATE, struct.pack("<QQ", 0, qgroup))


def fsid(fd: int) -> str:
    args = bytearray(1024)
    fcntl.ioctl(fd, _IOC_FS_INFO, args)
    return str(uuid.UUID(bytes=bytes(args[16:32])))


def resize_to_device(fd: int) -> None:
    fcntl.ioctl(fd, _IOC_RESIZE, bytearray(struct.pack("<q4088s", 0, b"max")))


def qgroups(fd: int) -> set[int]:
    """Ids of all level-0 qgroups."""
    return {offset for _, offset in _search(fd, _QUOTA_TREE, (0, 0), _QGROUP_INFO_KEY, (0, (1 << 48) - 1))}


def subvolumes(fd: int) -> set[int]:
    """Ids of all subvolumes, those that the cleaner has not finished with included."""
    span = (_FIRST_SUBVOLUME, _LAST_SUBVOLUME)
    return {object_id for object_id, _ in _search(fd, _ROOT_TREE, span, _ROOT_ITEM_KEY, (0, _U64))}


def _search(
    fd: int, tree: int, objects: tuple[int, int], kind: int, offsets: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """(object id, offset) of each item of one type; the kernel hands out a buffer's worth at a time."""
    room = 1 << 16
    low = (objects[0], kind, offsets[0])
    while True:
        args = bytearray(112 + room)
        struct.pack_into(
            "<QQQQQQQIIII4QQ", args, 0, tree, low[0], objects[1], low[2], offsets[1], 0, _U64, low[1], kind,
            0xFFFFFFFF, 0, 0, 0, 0, 0, room,
        )  # fmt: skip
        fcntl.ioctl(fd, _IOC_TREE_SEARCH_V2, args)
        count = struct.unpack_from("<I", args, 64)[0]
        if count == 0:
            return
        at = 112
        for _ in range(count):
            _, object_id, offset, item_kind, size = struct.unpack_from("<QQQII", args, at)
            at += 32 + size
            if item_kind == kind and objects[0] <= object_id <= objects[1] and offsets[0] <= offset <= offsets[1]:
                yield object_id, offset
        low = (object_id, item_kind, offset + 1) if offset < _U64 else (object_id, item_kind + 1, 0)
