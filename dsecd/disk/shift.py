"""What a copied space needs before another sandbox may use it: a fresh workdir, and its own owner's ids.

Sandboxes have disjoint ranges of 2^20 host ids, and an idmapped overlay upper does not work (lab.md), so the ids in a
copy are rewritten. chown clears set-id bits and file capabilities even for root; both are put back. This is the slow
part of a clone (about 10 µs an inode), and is skipped when source and copy have the same owner.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
from pathlib import Path
from typing import Final

ID_COUNT: Final = 1 << 20
_CAPABILITY: Final = "security.capability"
_ACLS: Final = ("system.posix_acl_access", "system.posix_acl_default")
_CAP_REVISION_3: Final = 0x03000000
_ACL_USER, _ACL_GROUP = 0x02, 0x08


def prepare_copy(space: Path, owner_uid: int) -> None:
    """Make `space`, a fresh copy, the property of `owner_uid`, whoever had it before."""
    # Overlayfs leaves work/work, and work/incompat/volatile, which would refuse the next mount.
    if (space / "work").is_dir():  # a driver may have copied the upper half alone
        shutil.rmtree(space / "work")
    source_uid = (space / "upper").lstat().st_uid
    if source_uid != owner_uid:
        shift_tree(space / "upper", source_uid, owner_uid)


def shift_tree(top: Path, source: int, target: int) -> None:
    """Move each id in [source, source + 2^20) to the same place in target's range. A hard link met twice moves once."""
    shift_inode(os.fspath(top), source, target)
    for directory, subdirectories, files in os.walk(top):
        for name in subdirectories + files:
            shift_inode(f"{directory}/{name}", source, target)


def shift_inode(path: str, source: int, target: int) -> None:
    info = os.lstat(path)
    uid, gid = _moved(info.st_uid, source, target), _moved(info.st_gid, source, target)
    if stat.S_ISLNK(info.st_mode):
        os.lchown(path, uid, gid)
        return
    names = os.listxattr(path, follow_symlinks=False)
    capability = os.getxattr(path, _CAPABILITY, follow_symlinks=False) if _CAPABILITY in names else b""
    if (uid, gid) != (info.st_uid, info.st_gid):
        os.lchown(path, uid, gid)
        if info.st_mode & (stat.S_ISUID | stat.S_ISGID):
            os.chmod(path, stat.S_IMODE(info.st_mode))  # noqa: PTH101 (a str, for speed)
    if capability:
        os.setxattr(path, _CAPABILITY, shifted_capability(capability, source, target), follow_symlinks=False)
    for name in _ACLS:
        if name in names:
            _shift_acl(path, name, source, target)


def shifted_capability(value: bytes, source: int, target: int) -> bytes:
    """A version 3 file capability names the host id of the root it counts for; older ones name none."""
    if struct.unpack_from("<I", value)[0] & 0xFF000000 != _CAP_REVISION_3 or len(value) != 24:
        return value
    return value[:20] + struct.pack("<I", _moved(struct.unpack_from("<I", value, 20)[0], source, target))


def shifted_acl(value: bytes, source: int, target: int) -> bytes:
    """struct posix_acl_xattr_header, then (tag, perm, id) entries; only named users and groups carry an id."""
    out = bytearray(value)
    for at in range(4, len(value) - 7, 8):
        tag, _, number = struct.unpack_from("<HHI", value, at)
        if tag in (_ACL_USER, _ACL_GROUP):
            struct.pack_into("<I", out, at + 4, _moved(number, source, target))
    return bytes(out)


def _shift_acl(path: str, name: str, source: int, target: int) -> None:
    try:
        os.setxattr(path, name, shifted_acl(os.getxattr(path, name), source, target))
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise


def _moved(number: int, source: int, target: int) -> int:
    return number - source + target if source <= number < source + ID_COUNT else number
