"""Disks of full VMs: reading a qcow2 header without QEMU, and qemu-img where it is needed, with nothing to lose.

A disk that somebody gives us may name other files (a backing file, an external data file), which QEMU would open. So
its header is read here first, and formats are never guessed. Format: QEMU's docs/interop/qcow2.rst.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.vmm.launch import wrapped
from dsecd.vmm.machine import Limits

DiskFormat = Literal["raw", "qcow2"]

MAGIC: Final = b"QFI\xfb"
SECTOR: Final = 512
TOOL_S: Final = 60.0
# Incompatible features that change nothing outside the file: dirty, corrupt, compression type, extended L2 entries.
_HARMLESS: Final = 1 | 2 | 8 | 16
_DATA_FILE: Final = 4
# What other formats begin with: a disk that was meant to be one of them would be garbage as a raw one.
_OTHERS: Final[Mapping[bytes, str]] = {
    b"KDMV": "vmdk", b"# Disk DescriptorFile": "vmdk", b"vhdxfile": "vhdx", b"conectix": "vpc", b"<<< ": "vdi",
    b"QED\0": "qed", b"WithoutFreeSpace": "parallels", b"WithouFreSpacExt": "parallels", b"LUKS\xba\xbe": "luks",
}  # fmt: skip


class Header(Struct, frozen=True):
    """What a disk's first sector says. size: virtual, in bytes."""

    format: DiskFormat
    size: int


def read_header(head: bytes, length: int) -> Header:
    """head: the first 4096 bytes of a file that is `length` long. DsecError `image` for what must not be opened."""
    if not head:
        raise DsecError("image", "the disk image is empty")
    for magic, name in _OTHERS.items():
        if head.startswith(magic):
            raise DsecError("image", f"the disk image is {name}: convert it with `qemu-img convert -O qcow2`")
    if not head.startswith(MAGIC):
        return Header("raw", -(-length // SECTOR) * SECTOR)
    try:
        version, backing, _, bits, size, crypt = struct.unpack_from(">IQIIQI", head, 4)
        (snapshots,) = struct.unpack_from(">I", head, 60)
        incompatible = struct.unpack_from(">Q", head, 72)[0] if version >= 3 else 0
    except struct.error as exc:
        raise DsecError("image", "the qcow2 image is truncated") from exc
    if version not in (2, 3):
        raise DsecError("image", f"the qcow2 image is of version {version}")
    if backing:
        raise DsecError("image", "the qcow2 image has a backing file: flatten it with `qemu-img convert -O qcow2`")
    if incompatible & _DATA_FILE:
        raise DsecError("image", "the qcow2 image keeps its data in another file: `qemu-img convert` makes it whole")
    if incompatible & ~_HARMLESS:
        raise DsecError("image", f"the qcow2 image has unknown features ({incompatible:#x})")
    if crypt:
        raise DsecError("image", "the qcow2 image is encrypted")
    if not 9 <= bits <= 21:
        raise DsecError("image", f"the qcow2 image has clusters of 2^{bits} bytes")
    if snapshots > 65_536:
        raise DsecError("image", f"the qcow2 image says that it has {snapshots} snapshots")
    return Header("qcow2", size)


def tool(
    words: Sequence[str], limits: Limits, *, fds: Sequence[int] = (), seconds: float = TOOL_S, what: str = "the disk"
) -> str:
    """Run qemu-img without a network, as that user, and give its output. Blocks. DsecError `image` in its words.

    It may eat a core and a gigabyte for `seconds`, and no more. Files are its user's, or named by descriptors.
    """
    command = ["prlimit", "--as=2147483648", f"--cpu={int(seconds) + 1}", "--core=0", "--", "qemu-img", *words]
    try:
        done = subprocess.run(
            wrapped(command, limits), stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False,
            cwd="/", pass_fds=fds, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise DsecError("image", f"{what} took qemu-img more than {seconds:g} s") from exc
    return result(done, what)


def result(done: subprocess.CompletedProcess[bytes], what: str) -> str:
    """Its output, or the error it stands for."""
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        if done.returncode == 127 or any("qemu-img: not found" in line or "No such file" in line for line in said):
            raise DsecError("unsupported", "qemu-img cannot be run: apt-get install qemu-utils")
        reason = said[-1] if said else f"status {done.returncode}"
        raise DsecError("image", f"{what} is refused by qemu-img: {reason[-300:]}")
    return done.stdout.decode("utf-8", "replace")


def alone(path: Path) -> str:
    """A disk for qemu-img by itself, whatever its header says about a file below it."""
    node = {"driver": "qcow2", "file": {"driver": "file", "filename": str(path)}, "backing": None}
    return "json:" + msgspec.json.encode(node).decode()
