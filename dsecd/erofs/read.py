"""Reads back the metadata that `meta` writes: from bytes to the tree they were made of.

Only our own layout, and nothing is believed: a pulled image's metadata was written by a stranger. `checked` accepts
exactly what `meta.Image` would have written for the same tree, so a stranger's metadata shows the kernel nothing that
an import of our own could not show it.
"""

from __future__ import annotations

import stat
import struct
from array import array
from typing import Final

from dsecd.erofs import meta
from dsecd.erofs.model import BLOCK, CHUNK
from dsecd.erofs.tar import bad
from dsecd.erofs.tree import HOLE, KEPT_XATTRS, MAX_NAME, Node, Tree

Buffer = bytes | bytearray

_CHUNK_WORD: Final = 1 << 16  # no advice, device 1
_TYPES: Final = frozenset(meta.DIRENT_TYPES)
_PREFIXES: Final = {index: prefix for prefix, index in meta.XATTR_PREFIXES}


def checked(content: Buffer, *, data_size: int, data_digest: str, base: bool) -> Tree:
    """The tree of foreign metadata, if it is byte for byte what an import would have made; else DsecError `image`."""
    tree = read(content)
    for node in tree.nodes():
        _check(node, data_size, base)
    if meta.Image(tree, data_size=data_size, data_digest=data_digest).content != content:
        raise bad("the metadata is not as an import writes it")
    return tree


def read(content: Buffer) -> Tree:
    """The tree. Every length is held against the file's own, so that a broken one costs no more than it weighs."""
    return _Reader(content).tree()


def _check(node: Node, data_size: int, base: bool) -> None:
    if max(node.uid, node.gid) > 0xFFFFFFFE:
        raise bad("the metadata has an owner beyond 32 bits")
    for name, value in (node.xattrs or {}).items():
        marks = (b"trusted.overlay.opaque", b"y"), (b"trusted.overlay.origin", b"")
        ours = not base and node.is_dir and (name, value) in marks
        if not (ours or name.startswith(b"user.") or name in KEPT_XATTRS):
            raise bad(f"the metadata has the xattr {name[:64]!r}, which an image may not set")
    for index, block in enumerate(node.chunks or ()):
        if block != HOLE and block * BLOCK + min(CHUNK, node.size - index * CHUNK) > data_size:
            raise bad("the metadata refers to what is beyond the end of the data")


class _Reader:
    def __init__(self, content: Buffer) -> None:
        self._in = content
        self._known: dict[int, Node] = {}
        # What nodes may take together: overlapping inodes must not multiply what a small file unpacks to.
        self._budget = 2 * len(content) + BLOCK

    def tree(self) -> Tree:
        found = meta.Superblock(bytes(self._in[:BLOCK]))
        if found.blocks * BLOCK != len(self._in):
            raise bad("the metadata is truncated")
        tree = Tree()
        tree.root = self._node(found.root)
        if not tree.root.is_dir:
            raise bad("the metadata's root is not a directory")
        queue, parents = [(tree.root, found.root)], {found.root}
        for directory, nid in queue:
            for name, child_nid in self._entries(nid):
                child = self._known.get(child_nid) or self._node(child_nid)
                if child.is_dir:
                    if child_nid in parents:
                        raise bad("the metadata has a directory in two places")
                    parents.add(child_nid)
                    queue.append((child, child_nid))
                directory.children[name] = child
        return tree

    def _bytes(self, at: int, size: int) -> bytes:
        self._budget -= size
        if at < 0 or size < 0 or at + size > len(self._in) or self._budget < 0:
            raise bad("the metadata is altered: it points outside itself")
        return bytes(self._in[at : at + size])

    def _node(self, nid: int) -> Node:
        at = nid * 32
        fields = meta.INODE.unpack(self._bytes(at, meta.INODE.size))
        form, count, mode, _, size, word, _, uid, gid, seconds, ns, _ = fields
        fmt = stat.S_IFMT(mode)
        if not form & 1 or fmt not in _TYPES:
            raise bad("the metadata has an inode of unknown form")
        node = self._known[nid] = Node(fmt)
        node.mode, node.uid, node.gid = stat.S_IMODE(mode), uid, gid
        node.mtime_ns = seconds * 10**9 + ns
        after = at + meta.INODE.size
        if count:
            length = 12 + (count - 1) * 4
            node.xattrs = _xattrs(self._bytes(after, length))
            after += length
        if node.is_file:
            node.size = size
            if size:
                node.chunks = self._chunks(after + -after % 8, -(-size // CHUNK))
        elif fmt == stat.S_IFLNK:
            node.target = self._tail(size, form >> 1, word, after)
            node.size = size
        elif fmt in (stat.S_IFCHR, stat.S_IFBLK):
            node.rdev = (word >> 8 & 0xFFF, word & 0xFF | word >> 12 & 0xFFF00)
        return node

    def _chunks(self, at: int, count: int) -> array[int]:
        words = array("I", self._bytes(at, 8 * count))
        if words[::2].count(_CHUNK_WORD) != count:
            raise bad("the metadata has a chunk of an unknown device")
        return words[1::2]

    def _tail(self, size: int, layout: int, block: int, inline_at: int) -> bytes:
        inline = size % BLOCK if layout == meta.INLINE else 0
        outside = self._bytes(block * BLOCK, size - inline) if size > inline else b""
        return outside + self._bytes(inline_at, inline)

    def _entries(self, nid: int) -> list[tuple[bytes, int]]:
        """(name, nid) of a directory's children."""
        at = nid * 32
        form, count, _, _, size, word, *_ = meta.INODE.unpack(self._bytes(at, meta.INODE.size))
        after = at + meta.INODE.size + (12 + (count - 1) * 4 if count else 0)
        tail = self._tail(size, form >> 1, word, after)
        found: dict[bytes, int] = {}
        for start in range(0, len(tail), BLOCK):
            for name, child in _block(tail[start : start + BLOCK]):
                if not 0 < len(name) <= MAX_NAME or b"/" in name or b"\0" in name or name in found:
                    raise bad("the metadata has a name that no file has")
                found[name] = child
        found.pop(b".", None)
        found.pop(b"..", None)
        return list(found.items())


def _block(block: bytes) -> list[tuple[bytes, int]]:
    size = meta.DIRENT.size
    try:
        first = meta.DIRENT.unpack_from(block)[1]
        entries = [meta.DIRENT.unpack_from(block, at) for at in range(0, first, size)]
    except struct.error:
        entries = []
    if not entries:
        raise bad("the metadata has a broken directory")
    ends = [*(offset for _, offset, _ in entries[1:]), len(block)]
    names = [block[offset:end] for (_, offset, _), end in zip(entries, ends, strict=True)]
    names[-1] = names[-1].rstrip(b"\0")  # what is left of a block that is not the last
    return [(name, nid) for name, (nid, _, _) in zip(names, entries, strict=True)]


def _xattrs(packed: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    at = 12
    while at + 4 <= len(packed):
        length, index, size = struct.unpack_from("<BBH", packed, at)
        prefix = _PREFIXES.get(index)
        value_at = at + 4 + length
        end = value_at + size
        if prefix is None or end > len(packed):
            raise bad("the metadata has a broken xattr")
        found[prefix + packed[at + 4 : value_at]] = packed[value_at:end]
        at = end + -end % 4
    return found
