"""The writable disk of a microVM: a sparse ext4 image in the sandbox's disk space."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from dsecd import proc
from dsecd.errors import DsecError
from dsecd.vmm import snapshot

MIB: Final = 1 << 20
_SETFLAGS: Final = 0x40086602  # FS_IOC_SETFLAGS
_NOCOW: Final = 0x00800000  # FS_NOCOW_FL
MKFS_S: Final = 60.0
# What the space that holds the image needs beyond it: the file's own extents, and copies while blocks are rewritten.
SLACK: Final = 64 * MIB
# No journal: a disk does not outlive its host's crash, and half of the writes go. No lazy initialisation thread.
_OPTIONS: Final = (
    "-q", "-F", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0",
)  # fmt: skip


async def make(path: Path, size: int, uid: int, templates: Path) -> None:
    """A formatted image of `size` bytes that belongs to uid. The first of each size is kept as a template."""
    template = templates / f"ext4-{size}"
    if not template.exists():
        await _format(template, size)
    await asyncio.to_thread(_place, template, path, uid)


async def _format(template: Path, size: int) -> None:
    template.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = template.with_name(f".{template.name}.{os.urandom(4).hex()}")
    try:
        with new.open("wb") as file:
            file.truncate(size)
        log = new.with_suffix(".log")
        with log.open("wb") as words:
            status = await proc.wait(
                proc.spawn(["/usr/sbin/mkfs.ext4", *_OPTIONS, str(new)], {1: words.fileno(), 2: words.fileno()}), MKFS_S
            )
        said = log.read_text(errors="replace").strip()[-300:]
        log.unlink()
        if status != 0:
            raise DsecError("internal", f"mkfs.ext4 failed: {said or status}")
        new.rename(template)
    except FileNotFoundError as exc:
        raise DsecError("unsupported", "mkfs.ext4 is not installed: apt-get install e2fsprogs") from exc
    finally:
        new.unlink(missing_ok=True)


def _place(template: Path, path: Path, uid: int) -> None:
    snapshot.copy_back(template, path, prepare=_in_place)
    os.chown(path, uid, uid)


def _in_place(fd: int) -> None:
    """On btrfs: write over, not beside. A guest's random writes would cost ever more extents, and checksums would undo
    direct I/O. Clones still share until they write. File systems that do not know the flag need not."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, _SETFLAGS, struct.pack("i", _NOCOW))
