"""Writes the metadata of an EROFS image: superblock, device table, inodes with xattrs, directories, chunk indexes.

The layout (the kernel's fs/erofs/erofs_fs.h), in blocks of 4 KiB:

    0          1024         1152              1280
    | nothing  | superblock | one device slot | inodes, packed ... | directory and symlink blocks |

Files are chunk-based with 8-byte indexes into device 1, the data file. Directories and symlinks end inline behind
their inode where they fit. The image is a function of the tree alone: no clock, no random UUID. Regular files take no
space here, so this is small enough to be always local.

The device slot also says where the data file would start if it were appended to this file (at the next 2 MiB): the
kernel then needs no second device, which is how a VM gets an image as one disk.
"""

from __future__ import annotations

import hashlib
import stat
import struct
import uuid
from typing import Final

from dsecd.erofs.model import BLOCK, CHUNK
from dsecd.erofs.tar import bad
from dsecd.erofs.tree import Node, Tree

MAGIC: Final = 0xE0F5E1E2
SUPERBLOCK: Final = 1024
_SLOT: Final = SUPERBLOCK + 128
_INODES: Final = _SLOT + 128
_COMPAT: Final = 0x1 | 0x2  # superblock checksum, mtimes
_INCOMPAT: Final = 0x4 | 0x8  # chunk-based files, device table
_ALIGN_DATA: Final = (2 << 20) // BLOCK

_PLAIN, INLINE, _CHUNKED = 0, 2, 4
_CHUNK_FORMAT: Final = 0x20 | (CHUNK // BLOCK).bit_length() - 1

_SB: Final = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQ24x")
_DEVICE: Final = struct.Struct("<64sII56x")
INODE: Final = struct.Struct("<HHHHQIIIIqII16x")
DIRENT: Final = struct.Struct("<QHBx")

DIRENT_TYPES: Final = {
    stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4, stat.S_IFIFO: 5, stat.S_IFLNK: 7,
}  # fmt: skip
XATTR_PREFIXES: Final = (
    (b"user.", 1), (b"system.posix_acl_access", 2), (b"system.posix_acl_default", 3), (b"trusted.", 4),
    (b"security.", 6),
)  # fmt: skip


class Image:
    """The metadata file of a tree, as bytes. `files`: inodes in it."""

    def __init__(self, tree: Tree, *, data_size: int, data_digest: str) -> None:
        self._tree = tree
        self._data_blocks = data_size // BLOCK
        self._data_digest = data_digest.removeprefix("sha256:")
        self._nodes = list(tree.nodes())
        self.files = len(self._nodes)
        self._count_links()
        self._inode_end, self._tail_blocks = self._place()
        first_tail = -(-self._inode_end // BLOCK)
        self._blocks = first_tail + self._tail_blocks
        self._next_tail = first_tail
        self._out = bytearray(self._blocks * BLOCK)
        self._emit()

    @property
    def content(self) -> bytearray:
        return self._out

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self._out).hexdigest()

    def _count_links(self) -> None:
        for node in self._nodes:
            node.links = 2 if node.is_dir else 0
        for node in self._nodes:
            for child in node.children.values():
                if child.is_dir:
                    node.links += 1
                else:
                    child.links += 1

    def _place(self) -> tuple[int, int]:
        """Give every node its nid. (end of the inode area, blocks of tails that do not fit inline)"""
        at, blocks = _INODES, 0
        for node in self._nodes:
            node.nid, at, more = _place_one(node, at)
            blocks += more
        return at, blocks

    def _emit(self) -> None:
        parents = {id(self._tree.root): self._tree.root.nid}
        for number, node in enumerate(self._nodes, 1):
            for child in node.children.values():
                if child.is_dir:
                    parents[id(child)] = node.nid
            self._emit_inode(node, number, parents.get(id(node), 0))
        self._emit_superblock()

    def _emit_inode(self, node: Node, number: int, parent_nid: int) -> None:
        at = node.nid * 32
        xattrs = _pack_xattrs(node)
        layout, word, size = _PLAIN, 0, node.size
        after = at + INODE.size + len(xattrs)
        if node.is_file and node.size:
            layout, word = _CHUNKED, _CHUNK_FORMAT
            self._emit_chunks(node, after + -after % 8)
        elif node.is_dir or node.target:
            tail = _pack_directory(node, parent_nid) if node.is_dir else node.target
            inline = _inline_length(len(tail), at, after - at)
            layout, word, size = *self._emit_tail(tail, inline, after), len(tail)
        elif node.fmt in (stat.S_IFCHR, stat.S_IFBLK):
            major, minor = node.rdev
            word = (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)
        seconds, ns = divmod(node.mtime_ns, 10**9)
        count = (len(xattrs) - 12) // 4 + 1 if xattrs else 0
        INODE.pack_into(
            self._out, at, 1 | layout << 1, count, node.fmt | node.mode, 0, size, word, number, node.uid, node.gid,
            seconds, ns, node.links,
        )  # fmt: skip
        self._out[at + INODE.size : after] = xattrs

    def _emit_chunks(self, node: Node, at: int) -> None:
        assert node.chunks is not None
        # {advise u16, device u16, block u32}; device 1 is the data file, a HOLE is one whatever the device.
        packed = b"".join([b"\0\0\1\0" + block.to_bytes(4, "little") for block in node.chunks])
        self._out[at : at + len(packed)] = packed

    def _emit_tail(self, tail: bytes, inline: int, inline_at: int) -> tuple[int, int]:
        """Write a directory or a symlink; (layout, first block of what is not inline)."""
        outside = len(tail) - inline
        first = self._next_tail
        self._out[first * BLOCK : first * BLOCK + outside] = tail[:outside]
        self._out[inline_at : inline_at + inline] = tail[outside:]
        self._next_tail += -(-outside // BLOCK)
        return (INLINE if inline else _PLAIN), first if outside else 0

    def _emit_superblock(self) -> None:
        name = hashlib.sha256(self._data_digest.encode() + self._out).digest()[:16]
        uniaddr = self._blocks + -self._blocks % _ALIGN_DATA
        _DEVICE.pack_into(self._out, _SLOT, self._data_digest.encode(), self._data_blocks, uniaddr)
        _SB.pack_into(
            self._out, SUPERBLOCK, MAGIC, 0, _COMPAT, BLOCK.bit_length() - 1, 0, self._tree.root.nid, self.files, 0, 0,
            self._blocks, 0, 0, uuid.UUID(bytes=name, version=4).bytes, b"dsecd", _INCOMPAT, 0, 1, _SLOT // 128, 0, 0,
            0, 0,
        )  # fmt: skip
        struct.pack_into("<I", self._out, SUPERBLOCK + 4, crc32c(self._out[SUPERBLOCK:BLOCK]))


def _place_one(node: Node, at: int) -> tuple[int, int, int]:
    """(nid, where the next inode may start, blocks needed outside)"""
    if at % BLOCK + INODE.size > BLOCK:
        at += -at % BLOCK  # an inode in two blocks is legal and slow
    fixed = INODE.size + _xattr_size(node)
    tail = outside = 0
    if node.is_file:
        fixed += -fixed % 8 + 8 * len(node.chunks or ())
    elif node.is_dir or node.target:
        length = _directory_size(node) if node.is_dir else node.size
        if fixed + length % BLOCK <= BLOCK < at % BLOCK + fixed + length % BLOCK:
            at += -at % BLOCK
        tail = _inline_length(length, at, fixed)
        outside = -(-(length - tail) // BLOCK)
    end = at + fixed + tail
    return at // 32, end + -end % 32, outside


def _inline_length(length: int, at: int, fixed: int) -> int:
    """How much of a tail lies inline behind an inode: its last part block, if that ends in the block of the inode."""
    part = length % BLOCK
    return part if at % BLOCK + fixed + part <= BLOCK else 0


def _names(node: Node) -> list[bytes]:
    return sorted([b".", b"..", *node.children])


def _dirent_blocks(names: list[bytes]) -> list[list[bytes]]:
    """Cut a directory's sorted names into blocks; each holds its entries first and then their names."""
    blocks: list[list[bytes]] = []
    room = 0
    for name in names:
        need = DIRENT.size + len(name)
        if need > room:
            blocks.append([])
            room = BLOCK
        blocks[-1].append(name)
        room -= need
    return blocks


def _directory_size(node: Node) -> int:
    blocks = _dirent_blocks(_names(node))
    return (len(blocks) - 1) * BLOCK + sum(DIRENT.size + len(name) for name in blocks[-1])


def _pack_directory(node: Node, parent_nid: int) -> bytes:
    out = bytearray()
    for names in _dirent_blocks(_names(node)):
        out += bytes(-len(out) % BLOCK)
        offset = DIRENT.size * len(names)
        for name in names:
            if name in (b".", b".."):
                nid, kind = (node.nid if name == b"." else parent_nid), DIRENT_TYPES[stat.S_IFDIR]
            else:
                child = node.children[name]
                nid, kind = child.nid, DIRENT_TYPES[child.fmt]
            out += DIRENT.pack(nid, offset, kind)
            offset += len(name)
        out += b"".join(names)
    return bytes(out)


def _xattr_size(node: Node) -> int:
    return len(_pack_xattrs(node)) if node.xattrs else 0


def _pack_xattrs(node: Node) -> bytes:
    if not node.xattrs:
        return b""
    out = bytearray(12)
    for name, value in sorted(node.xattrs.items()):
        prefix, index = next((p, i) for p, i in XATTR_PREFIXES if name.startswith(p))
        rest = name[len(prefix) :]
        out += struct.pack("<BBH", len(rest), index, len(value)) + rest + value
        out += bytes(-len(out) % 4)
    if len(out) > 0xFFFF * 4:
        raise bad("more xattrs on one file than EROFS can hold")
    return bytes(out)


def _crc_table() -> list[int]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    return table


_CRC_TABLE: Final = _crc_table()


def crc32c(data: bytes | bytearray) -> int:
    """The superblock's checksum: Castagnoli, from ~0 and not inverted at the end."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc


class Superblock:
    """What a mount can check cheaply about a metadata file: is it ours, whole, and of this data file?"""

    def __init__(self, head: bytes) -> None:
        if len(head) < BLOCK:
            raise bad("the metadata is truncated")
        fields = _SB.unpack_from(head, SUPERBLOCK)
        self.root: int = fields[5]
        self.blocks: int = fields[9]
        zeroed = bytearray(head[SUPERBLOCK:BLOCK])
        zeroed[4:8] = bytes(4)
        if fields[0] != MAGIC:
            raise bad("the metadata is not an EROFS image")
        if fields[1] != crc32c(zeroed):
            raise bad("the metadata's superblock is altered (its checksum is wrong)")
        tag, self.data_blocks, self.uniaddr = _DEVICE.unpack_from(head, _SLOT)
        self.data_digest = "sha256:" + tag.decode("ascii", "replace")
