"""The initramfs of virtual machines: a newc cpio with the agent as `/init` and the kernel's modules in load order.

Uncompressed: the VMM maps it into the guest as it is, and unpacking under emulation costs more than reading. The same
input gives the same bytes, so that it is made once per agent and kernel. Format: the kernel's
Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

MAGIC: Final = b"070701"
TRAILER: Final = "TRAILER!!!"
ALIGN: Final = 4
CONSOLE: Final = (5, 1)  # /dev/console: what init's first descriptors are opened on, before anything is mounted


class CpioWriter:
    """Entries in the order of the calls; `close` writes the end. Files are streamed, never held."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._ino = 0
        self._at = 0

    def directory(self, name: str, mode: int = 0o755) -> None:
        self._head(name, stat.S_IFDIR | mode, links=2)

    def device(self, name: str, numbers: tuple[int, int], mode: int = 0o600) -> None:
        """A character device."""
        self._head(name, stat.S_IFCHR | mode, numbers=numbers)

    def file(self, name: str, source: Path, mode: int) -> None:
        """A regular file with the bytes of `source`."""
        with source.open("rb") as data:
            size = os.fstat(data.fileno()).st_size
            self._head(name, stat.S_IFREG | mode, size=size)
            began = self._out.tell()
            shutil.copyfileobj(data, self._out, 1 << 20)
            if self._out.tell() - began != size:
                raise OSError(f"{source} changed its size while it was read")
        self._at += size
        self._pad()

    def close(self) -> None:
        """The end mark, and zeros to a whole page: loaders place another archive behind it, or read whole pages."""
        self._ino = -1  # so that the mark's number is 0
        self._head(TRAILER, 0)
        self._pad(4096)

    def _head(self, name: str, mode: int, *, size: int = 0, links: int = 1, numbers: tuple[int, int] = (0, 0)) -> None:
        self._ino += 1
        path = os.fsencode(name) + b"\0"
        # ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
        fields = (self._ino, mode, 0, 0, links, 0, size, 0, 0, *numbers, len(path), 0)
        self._write(MAGIC + b"".join(b"%08x" % field for field in fields) + path)
        self._pad()

    def _pad(self, to: int = ALIGN) -> None:
        self._write(bytes(-self._at % to))

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._at += len(data)


def write_initramfs(out: BinaryIO, init: Path, modules: Sequence[Path] = ()) -> None:
    """All of it. modules: files NNN-name.ko, not compressed; they go to /modules by their own names, sorted by them."""
    cpio = CpioWriter(out)
    cpio.directory("dev")
    cpio.device("dev/console", CONSOLE)
    cpio.file("init", init, 0o755)
    if modules:
        cpio.directory("modules")
        for module in sorted(modules, key=lambda path: path.name):
            cpio.file(f"modules/{module.name}", module, 0o644)
    cpio.close()
