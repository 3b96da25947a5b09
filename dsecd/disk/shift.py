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
from pathlib import Path

from dsecd.idshift import ACLS, CAPABILITY, moved, shifted_acl, shifted_capability


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
    uid, gid = moved(info.st_uid, source, target), moved(info.st_gid, source, target)
    if stat.S_ISLNK(info.st_mode):
        os.lchown(path, uid, gid)
        return
    names = os.listxattr(path, follow_symlinks=False)
    capability = os.getxattr(path, CAPABILITY, follow_symlinks=False) if CAPABILITY in names else b""
    if (uid, gid) != (info.st_uid, info.st_gid):
        os.lchown(path, uid, gid)
        if info.st_mode & (stat.S_ISUID | stat.S_ISGID):
            os.chmod(path, stat.S_IMODE(info.st_mode))  # noqa: PTH101 (a str, for speed)
    if capability:
        os.setxattr(path, CAPABILITY, shifted_capability(capability, source, target), follow_symlinks=False)
    for name in ACLS:
        if name in names:
            _shift_acl(path, name, source, target)


def _shift_acl(path: str, name: str, source: int, target: int) -> None:
    try:
        os.setxattr(path, name, shifted_acl(os.getxattr(path, name), source, target))
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
