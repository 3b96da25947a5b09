"""System calls that Python lacks, for this room only: the new mount API, umount2, prctl, loop devices.

Thin: one function per call, OSError on failure. The new mount API rather than mount(2), because its options are not one
comma-separated string (a store's path may hold a comma) and because it says in words why a mount failed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

PR_SET_PDEATHSIG: Final = 1
PR_SET_NO_NEW_PRIVS: Final = 38
CAP_DAC_READ_SEARCH: Final = 2
CAP_SYS_ADMIN: Final = 21
CLONE_FS: Final = 0x200
UMOUNT_NOFOLLOW: Final = 8
CLONE_NEWNET: Final = 0x40000000
CLONE_NEWIPC: Final = 0x08000000

_PR_CAPBSET_DROP: Final = 24
_CAP_VERSION_3: Final = 0x20080522
_SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 429, 430, 431, 432  # the same on every architecture
_FSOPEN_CLOEXEC: Final = 1
_FSMOUNT_CLOEXEC: Final = 1
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_MOUNT_ATTRS: Final = 0x1 | 0x2 | 0x4  # RDONLY, NOSUID, NODEV
_AT_FDCWD: Final = -100

_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LO_FLAGS_READ_ONLY, _LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 1, 4, 16
# struct loop_config: fd, block_size, struct loop_info64 (232 bytes), 8 reserved words
_LOOP_CONFIG: Final = struct.Struct("<II8x8x8x8x8xIIII64s64s32x16x64x")

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.capset.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def unshare(flags: int) -> None:
    """Leave namespaces: CLONE_NEW… of sched.h."""
    if _libc.unshare(flags) < 0:
        raise _error("unshare")


def prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) < 0:
        raise _error("prctl")


def keep_caps(*numbers: int) -> None:
    """Of this process's capabilities, these stay; none is passed on by an exec."""
    for number in range(64):
        if number not in numbers and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            break  # EINVAL: this kernel has no more; EPERM: they were dropped before
    mask = sum(1 << number for number in numbers)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    head = struct.pack("<Ii", _CAP_VERSION_3, 0)
    if _libc.capset(head, struct.pack("<6I", low, low, 0, high, high, 0)) < 0:
        raise _error("capset")


def in_directory(directory: Path, work: Callable[[], None]) -> None:
    """Run `work` with another working directory than the rest of the process has, for system calls that take a name
    there. In a thread of its own, as only a thread can leave what all share. Raises what `work` raises."""
    failed: list[OSError] = []

    def run() -> None:
        try:
            if _libc.unshare(CLONE_FS) < 0:
                raise _error("unshare")
            os.chdir(directory)
            work()
        except OSError as exc:
            failed.append(exc)

    thread = threading.Thread(target=run, name="in-directory")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def mount_erofs(source: str, devices: list[str], target: Path, *, fsid: str = "", domain: str = "") -> None:
    """Mount read-only, nodev and nosuid; the error's text is the kernel's.

    fsid: read through fscache (cachefiles on demand) instead of from `source`: the name of the blob that holds the
    metadata; `devices` are then names of blobs, too, and those of one `domain` are shared by all mounts in it.

    An overlay looks at its own flags alone, so setuid programs work in sandboxes and nowhere else on the host.
    """
    fs = _call("fsopen", _SYS_FSOPEN, b"erofs", _FSOPEN_CLOEXEC)
    try:
        _fsconfig(fs, _SET_STRING, b"source", os.fsencode(source))
        for key, value in ((b"fsid", fsid), (b"domain_id", domain)):
            if value:
                _fsconfig(fs, _SET_STRING, key, value.encode())
        for device in devices:
            _fsconfig(fs, _SET_STRING, b"device", os.fsencode(device))
        _fsconfig(fs, _SET_FLAG, b"ro", None)
        _fsconfig(fs, _CMD_CREATE, None, None)
        mount = _call("fsmount", _SYS_FSMOUNT, fs, _FSMOUNT_CLOEXEC, _MOUNT_ATTRS)
    except OSError as e:
        raise OSError(e.errno, f"{e.strerror}{_said(fs)}") from e
    finally:
        os.close(fs)
    try:
        _call("move_mount", _SYS_MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(mount)


def umount(target: Path, flags: int = UMOUNT_NOFOLLOW) -> None:
    if _libc.umount2(os.fsencode(target), flags) < 0:
        raise _error("umount", str(target))


class Mounted(NamedTuple):
    """One line of mountinfo."""

    target: Path
    fstype: str
    source: str


def mounts_below(directory: Path) -> list[Mounted]:
    """In the order they were mounted."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        target = Path(_unescape(left.split(" ")[4]))
        if target.parent == directory:
            fstype, source = right.split(" ")[:2]
            found.append(Mounted(target, fstype, _unescape(source)))
    return found


def attach_loop(path: Path) -> tuple[int, str]:
    """A read-only loop device that goes away with its last user. Hold the descriptor until it is mounted."""
    flags = _LO_FLAGS_READ_ONLY | _LO_FLAGS_AUTOCLEAR
    backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            # Somebody else may take the free device between the two calls; then there is another.
            for _ in range(64):
                device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
                loop = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
                if _configure_loop(loop, backing, path, flags):
                    return loop, device
                os.close(loop)
        finally:
            os.close(control)
    finally:
        os.close(backing)
    raise OSError(errno.EBUSY, "no loop device stayed free long enough")


def _configure_loop(loop: int, backing: int, path: Path, flags: int) -> bool:
    """False: the device was taken. Direct I/O keeps pages from being cached twice, where the file system has it."""
    name = os.fsencode(path)[-63:]
    for extra in (_LO_FLAGS_DIRECT_IO, 0):
        config = _LOOP_CONFIG.pack(backing, 4096 if extra else 512, 0, 0, 0, flags | extra, name, b"")
        try:
            fcntl.ioctl(loop, _LOOP_CONFIGURE, config)
        except OSError as e:
            if e.errno == errno.EBUSY:
                return False
            if not extra:
                os.close(loop)
                raise
        else:
            return True
    raise AssertionError("unreachable")


def _fsconfig(fs: int, command: int, key: bytes | None, value: bytes | None) -> None:
    _call("fsconfig", _SYS_FSCONFIG, fs, command, key, value, 0)


def _said(fs: int) -> str:
    """The kernel's own words about a mount that failed: one message per read."""
    words = []
    while True:
        try:
            words.append(os.read(fs, 1024).decode("utf-8", "replace")[2:].strip())
        except OSError:
            return ": " + "; ".join(words) if words else ""


def _call(name: str, number: int, *args: int | bytes | None) -> int:
    plain = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in args]
    result: int = _libc.syscall(ctypes.c_long(number), *plain)
    if result < 0:
        raise _error(name)
    return result


def _error(call: str, path: str | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}", path)


def _unescape(field: str) -> str:
    """mountinfo writes space, tab, newline and backslash as octal."""
    for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, plain)
    return field
