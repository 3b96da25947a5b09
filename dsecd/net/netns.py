"""Network namespaces: make one that stays, enter one for a moment, take what is in it.

Only a thread can be elsewhere than the rest of the process, so whatever must happen inside happens in a thread of its
own that ends with it. Sockets that it makes stay where they were made.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

CLONE_FS: Final = 0x200
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWNET: Final = 0x40000000
MS_BIND: Final = 0x1000
MNT_DETACH: Final = 2
_AT_FDCWD: Final = -100
_TUNSETIFF: Final = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT = 428, 429  # the same on every architecture
_OPEN_TREE_CLONE: Final = 1
_MOVE_MOUNT_EMPTY_PATH, _MOVE_MOUNT_T_SYMLINKS = 0x4, 0x10

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def inside(namespace: int, work: Callable[[], T], kind: int = CLONE_NEWNET) -> T:
    """What `work` returns or raises, done in that namespace (an open /proc/…/ns/… file). Blocks: not for the loop."""

    def entered() -> T:
        if kind == CLONE_NEWNS:
            _check(_libc.unshare(CLONE_FS), "unshare")
        _check(_libc.setns(namespace, kind), "setns")
        return work()

    return _apart(entered)


def make(pin: Path) -> None:
    """A new network namespace that lives as long as it is mounted at `pin`."""
    pin.touch(mode=0o600)

    def made() -> None:
        _check(_libc.unshare(CLONE_NEWNET), "unshare")
        source = f"/proc/self/task/{threading.get_native_id()}/ns/net"
        _check(_libc.mount(source.encode(), os.fsencode(pin), None, MS_BIND, None), "mount")

    _apart(made)


def unmake(pin: Path) -> None:
    """It goes with the last process and interface that is in it. Nothing there is fine."""
    if pin.exists():
        _libc.umount2(os.fsencode(pin), MNT_DETACH)
        pin.unlink()


def open_pinned(pin: Path) -> int | None:
    """The namespace that `make` left there; None: there is none (any more)."""
    try:
        fd = os.open(pin, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    # Only files of nsfs have no name of their own directory's file system.
    if os.fstat(fd).st_dev == pin.parent.stat().st_dev:
        os.close(fd)
        return None
    return fd


def open_tap(name: str) -> int:
    """A descriptor of a tap device of the namespace that this is called in; one machine has it at a time."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    except BaseException:
        os.close(fd)
        raise
    return fd


def cover(mount_namespace: int, source: Path, target: str) -> None:
    """Bind the host's file `source`, read-only to whoever may not write it, over `target` in that mount namespace.

    `target` is walked from that namespace's root: what a tenant made of the way there leads to its own files only.
    """
    tree = _check(
        _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC), "open_tree"
    )

    def attach() -> None:
        flags = _MOVE_MOUNT_EMPTY_PATH | _MOVE_MOUNT_T_SYMLINKS
        _check(_libc.syscall(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), flags), "move_mount")

    try:
        inside(mount_namespace, attach, CLONE_NEWNS)
    finally:
        os.close(tree)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _apart(work: Callable[[], T]) -> T:
    results: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as exc:  # noqa: BLE001 - handed on to whoever waits for this thread
            failed.append(exc)

    thread = threading.Thread(target=run, name="namespace")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return results[0]
