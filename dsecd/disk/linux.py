"""The few system calls that Python lacks: mount(2), umount2(2), and what is mounted where."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOATIME: Final = 1024
MNT_DETACH: Final = 2

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    target: Path
    fstype: str
    source: str
    root: str
    options: str


def mount(source: str, target: Path, fstype: str, flags: int, options: str) -> None:
    if _libc.mount(source.encode(), os.fsencode(target), fstype.encode(), flags, options.encode()) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} ({fstype}, {options}): {os.strerror(number)}", str(target))


def umount(target: Path, flags: int = 0) -> None:
    if _libc.umount2(os.fsencode(target), flags) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"umount: {os.strerror(number)}", str(target))


def syscall(number: int, *arguments: int | ctypes.Array[ctypes.c_char]) -> int:
    """A raw system call; every integer is passed as a long."""
    result: int = _libc.syscall(
        ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def mounts(table: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    found = []
    for line in table.read_text(errors="surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        found.append(Mount(Path(_unescape(before[4])), after[0], _unescape(after[1]), _unescape(before[3]), after[2]))
    return found


def mounted_at(path: Path) -> Mount | None:
    """The mount whose root is `path` (the topmost one), if any."""
    real = path.resolve()
    return next((m for m in reversed(mounts()) if m.target == real), None)


def mount_of(path: Path) -> Mount:
    """The mount that `path` lies on."""
    real = path.resolve()
    candidates = [m for m in mounts() if real.is_relative_to(m.target)]
    return max(reversed(candidates), key=lambda m: len(m.target.parts))


def _unescape(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text
