"""Project quotas of XFS and ext4, through quotactl_fd(2) and FS_IOC_FS[GS]ETXATTR: no device names, no quota tools."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dsecd.disk import linux

_NR_QUOTACTL_FD: Final = 443  # the same number on every architecture
_PRJQUOTA: Final = 2
_GETQUOTA, _SETQUOTA, _XGETQSTAT = 0x800007, 0x800008, ord("X") << 8 | 5
_DQBLK: Final = struct.Struct("<8QI4x")
_VALID_LIMITS: Final = 1 | 4
_BLOCK: Final = 1024  # limits are counted in these, usage in bytes
_PROJECT_ENFORCED: Final = 1 << 5
_FSGETXATTR, _FSSETXATTR = 0x801C581F, 0x401C5820
_FSXATTR: Final = struct.Struct("<IIIII8s")
_PROJINHERIT: Final = 0x200


def enforced(path: Path) -> bool:
    """Does the file system of `path` count projects and stop them at their limit?"""
    state = ctypes.create_string_buffer(128)  # struct fs_quota_stat, which is shorter
    try:
        _quotactl(path, _XGETQSTAT, 0, state)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ESRCH, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ENOTTY):
            return False
        raise
    flags: int = struct.unpack_from("<H", state, 2)[0]  # after the version byte and its padding
    return bool(flags & _PROJECT_ENFORCED)


def set_limits(path: Path, project: int, limit_bytes: int, limit_inodes: int) -> None:
    blocks = -(-limit_bytes // _BLOCK)
    raw = _DQBLK.pack(blocks, 0, 0, limit_inodes, 0, 0, 0, 0, _VALID_LIMITS)
    _quotactl(path, _SETQUOTA, project, ctypes.create_string_buffer(raw, len(raw)))


def clear_limits(path: Path, project: int) -> None:
    set_limits(path, project, 0, 0)


def usage(path: Path, project: int) -> tuple[int, int]:
    """(used, limit) bytes."""
    raw = ctypes.create_string_buffer(_DQBLK.size)
    _quotactl(path, _GETQUOTA, project, raw)
    hard, _, used, *_ = _DQBLK.unpack(raw.raw)
    return used, hard * _BLOCK


def get_project(path: Path) -> int:
    with _directory(path) as fd:
        project: int = _FSXATTR.unpack(_get(fd))[3]
        return project


def set_project(path: Path, project: int) -> None:
    """On an empty directory: what is made below inherits it. A tenant cannot change it (not from a user namespace)."""
    with _directory(path) as fd:
        xflags, extsize, nextents, _, cowextsize, pad = _FSXATTR.unpack(_get(fd))
        fcntl.ioctl(fd, _FSSETXATTR, _FSXATTR.pack(xflags | _PROJINHERIT, extsize, nextents, project, cowextsize, pad))


def _get(fd: int) -> bytes:
    return fcntl.ioctl(fd, _FSGETXATTR, bytes(_FSXATTR.size))


def _quotactl(path: Path, command: int, project: int, buffer: ctypes.Array[ctypes.c_char]) -> None:
    with _directory(path) as fd:
        linux.syscall(_NR_QUOTACTL_FD, fd, command << 8 | _PRJQUOTA, project, buffer)


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)
