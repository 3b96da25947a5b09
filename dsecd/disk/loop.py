"""Loop devices through ioctls: attach, grow, say what is behind. Numbers: <linux/loop.h>.

Every device is autoclear: it lives as long as something holds it open (us, then the mount), so a daemon that is killed
between attaching and mounting leaves none behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path
from typing import Final

_CONTROL: Final = Path("/dev/loop-control")
_LOOP_MAJOR: Final = 7
_GET_FREE, _CONFIGURE, _SET_CAPACITY, _STATUS = 0x4C82, 0x4C0A, 0x4C07, 0x4C05
_STATUS_SIZE: Final = 232  # struct loop_info64
_AUTOCLEAR, _DIRECT_IO = 4, 16
_TRIES: Final = 64


def available() -> bool:
    return _CONTROL.exists()


def attach(image: Path) -> tuple[int, Path]:
    """(descriptor, device path). Close the descriptor once the device is mounted.

    The device that is there already, if there is one: with its mount gone from our namespace, another one may have it
    still. Of a second device btrfs would make a second file system (temp_fsid, Linux 6.7), on the same bytes.
    Direct I/O where the file system below has it: else every page is cached twice, the second time on nobody's account.
    """
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        if (there := _attached(backing)) is not None:
            return there
        control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _attach(control, backing, image)
        finally:
            os.close(control)
    finally:
        os.close(backing)


def _attached(backing: int) -> tuple[int, Path] | None:
    """A device of that file. Held open, it does not go away any more."""
    wanted = os.fstat(backing)
    for entry in Path("/sys/block").glob("loop*/loop"):
        device = _node(int(entry.parent.name.removeprefix("loop")))
        try:
            held = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            status = fcntl.ioctl(held, _STATUS, bytes(_STATUS_SIZE))
        except OSError:  # gone meanwhile
            os.close(held)
            continue
        if struct.unpack_from("<QQ", status) == (wanted.st_dev, wanted.st_ino):
            return held, device
        os.close(held)
    return None


def _attach(control: int, backing: int, image: Path) -> tuple[int, Path]:
    for _ in range(_TRIES):
        number = fcntl.ioctl(control, _GET_FREE)
        device = _node(number)
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            _configure(fd, backing, image)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EBUSY:  # somebody else took this number between the two calls
                raise
            continue
        # Hardened kernels (BLK_DEV_WRITE_MOUNTED=n) mount no device that somebody holds open for writing.
        held = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        os.close(fd)
        return held, device
    raise OSError(errno.EBUSY, "no free loop device", str(_CONTROL))


def _configure(fd: int, backing: int, image: Path) -> None:
    for flags in (_AUTOCLEAR | _DIRECT_IO, _AUTOCLEAR):
        # struct loop_config: fd, block size, struct loop_info64 (232 bytes), 8 reserved words
        info = struct.pack("<QQQQQIIII64s64s32sQQ", *[0] * 8, flags, os.fsencode(image)[-63:], b"", b"", 0, 0)
        try:
            fcntl.ioctl(fd, _CONFIGURE, struct.pack("<II", backing, 4096) + info + bytes(64))
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & _DIRECT_IO:
                raise
        else:
            return


def _node(number: int) -> Path:
    """Where nothing populates /dev (no devtmpfs, no udev) the node is ours to make."""
    device = Path(f"/dev/loop{number}")
    try:
        os.mknod(device, 0o600 | stat.S_IFBLK, os.makedev(_LOOP_MAJOR, number))
    except FileExistsError:
        pass
    return device


def grow(device: Path) -> None:
    """Tell the device that its backing file has become longer."""
    fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _SET_CAPACITY)
    finally:
        os.close(fd)
