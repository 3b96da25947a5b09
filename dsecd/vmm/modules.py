"""Which modules of a distribution's kernel a guest needs, and in which order they can be loaded.

A package has no modules.dep (depmod makes it where a kernel is installed), so the order comes from what modpost wrote
into each module: `depends=` and `softdep=` of its .modinfo section. Trusts the package: apt has checked its signature.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from dsecd.erofs.streams import FdSource, decompressed
from dsecd.errors import DsecError

MAX_MODULE: Final = 64 << 20

# What microVMs boot with, by the file names of modules. A kernel may have any of them built in, or not at all: what it
# cannot do without is told from its configuration (dsecd.vmm.features).
WANTED: Final = (
    "virtio_pci", "virtio_mmio", "virtio_console", "virtio_blk", "virtio_net", "virtio_rng", "virtio_balloon",
    "virtio_mem", "virtio_pmem", "nd_pmem", "vmw_vsock_virtio_transport", "erofs", "overlay", "ext4", "fuse", "loop",
    "af_packet",
)  # fmt: skip


class ModuleTree:
    """The modules below `lib/modules/<release>` of an unpacked package."""

    def __init__(self, root: Path) -> None:
        self._files = {_name(path): path for path in sorted(root.rglob("*.ko*"))}
        builtin = root / "modules.builtin"
        lines = builtin.read_text().splitlines() if builtin.exists() else []
        self.builtin = {_name(Path(line)) for line in lines}

    def load_order(self, wanted: Iterable[str] = WANTED) -> list[tuple[str, bytes]]:
        """(name, plain bytes) of the wanted ones that are modules here, each behind all that it depends on."""
        done: dict[str, bytes] = {}
        for name in wanted:
            self._add(name, done, ())
        return list(done.items())

    def _add(self, name: str, done: dict[str, bytes], above: tuple[str, ...]) -> None:
        if name in done or name in self.builtin or name not in self._files:
            return
        if name in above:
            raise DsecError("image", f"the kernel's modules depend on each other in a circle: {' '.join(above)} {name}")
        content = read_module(self._files[name])
        hard, soft = dependencies(content)
        for other in soft:
            self._add(other, done, (*above, name))
        for other in hard:
            if other not in self.builtin and other not in self._files:
                raise DsecError("image", f"module {name} needs {other}, which the kernel's package does not have")
            self._add(other, done, (*above, name))
        done[name] = content


def _name(path: Path) -> str:
    return path.name.partition(".ko")[0].replace("-", "_")


def read_module(path: Path) -> bytes:
    """Its plain bytes; the file may be .ko, .ko.xz, .ko.gz or .ko.zst."""
    with path.open("rb") as file:
        source = decompressed(FdSource(file.fileno()), MAX_MODULE)
        return read_all(source.read)


def read_all(read: Callable[[int], bytes]) -> bytes:
    out = io.BytesIO()
    while data := read(1 << 20):
        out.write(data)
    return out.getvalue()


def dependencies(module: bytes) -> tuple[list[str], list[str]]:
    """Modules that must be there first, and those that should be (`softdep=pre:`)."""
    hard: list[str] = []
    soft: list[str] = []
    for line in modinfo(module).split(b"\0"):
        key, _, value = line.decode("utf-8", "replace").partition("=")
        if key == "depends":
            hard += [one.replace("-", "_") for one in value.split(",") if one]
        elif key == "softdep" and value.startswith("pre:"):
            soft += [one.replace("-", "_") for one in value[4:].partition("post:")[0].split()]
    return hard, soft


def modinfo(module: bytes) -> bytes:
    """The .modinfo section of a 64-bit little-endian ELF file. DsecError `image` if it is none."""
    try:
        if module[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no 64-bit ELF file")
        (offset,) = struct.unpack_from("<Q", module, 40)  # e_shoff
        size, count, names_index = struct.unpack_from("<HHH", module, 58)  # e_shentsize, e_shnum, e_shstrndx

        def section(index: int) -> tuple[int, int, int]:
            at = offset + index * size
            (name,) = struct.unpack_from("<I", module, at)
            start, length = struct.unpack_from("<QQ", module, at + 24)  # sh_offset, sh_size
            return name, start, length

        _, names, _ = section(names_index)
        for index in range(count):
            name, start, length = section(index)
            end = module.index(b"\0", names + name)
            if module[names + name : end] == b".modinfo":
                return module[start : start + length]
    except (struct.error, ValueError) as exc:
        raise DsecError("image", f"a module of the kernel cannot be read: {exc}") from exc
    raise DsecError("image", "a module of the kernel has no .modinfo")
