"""The file tree of an image while it is put together, in memory; layers go onto it in order.

No host file system is involved: a member of a hostile archive can only become a node of this tree, and all that a name
can do wrong is refused here (`..`, absolute names, paths through symlinks). The layer rules are OCI's: a whiteout and
an opaque mark hide what *lower* layers put there, wherever in the layer they stand.
"""

from __future__ import annotations

import stat
from array import array
from collections.abc import Iterator
from typing import Final

from dsecd.erofs.tar import Entry, bad

WHITEOUT: Final = b".wh."
OPAQUE: Final = b".wh..wh..opq"
MAX_PATH: Final = 4095  # PATH_MAX less its NUL
MAX_NAME: Final = 255
HOLE: Final = 0xFFFFFFFF

_FORMATS: Final = {
    "file": stat.S_IFREG, "dir": stat.S_IFDIR, "symlink": stat.S_IFLNK, "char": stat.S_IFCHR, "block": stat.S_IFBLK,
    "fifo": stat.S_IFIFO,
}  # fmt: skip


class Node:
    """One inode. A hard link is the same node under two names.

    touched: of a directory, the last layer that put a name into it or below it; fresh: the names in it that this
    layer put there (names and not nodes, because a layer may link a lower layer's file under a new name).
    chunks: of a file, the block in the data file where each 1 MiB begins, or HOLE.
    """

    __slots__ = (
        "children", "chunks", "fmt", "fresh", "gid", "links", "mode", "mtime_ns", "nid", "rdev", "size", "target",
        "touched", "uid", "xattrs",
    )  # fmt: skip

    def __init__(self, fmt: int) -> None:
        self.fmt = fmt
        self.mode = 0o755
        self.uid = self.gid = self.size = self.mtime_ns = 0
        self.touched = -1
        self.links = self.nid = 0
        self.rdev = (0, 0)
        self.target = b""
        self.xattrs: dict[bytes, bytes] | None = None
        self.children: dict[bytes, Node] = {} if fmt == stat.S_IFDIR else _NO_CHILDREN
        self.fresh: set[bytes] = _NOTHING
        self.chunks: array[int] | None = None

    def add_chunk(self, block: int) -> None:
        if self.chunks is None:
            self.chunks = array("I")
        self.chunks.append(block)

    @property
    def is_dir(self) -> bool:
        return self.fmt == stat.S_IFDIR

    @property
    def is_file(self) -> bool:
        return self.fmt == stat.S_IFREG


_NO_CHILDREN: Final[dict[bytes, Node]] = {}
_NOTHING: Final[set[bytes]] = set()


class Tree:
    """Put layers onto it one after the other: `begin_layer`, then `add` for each member, then `end_layer`.

    keep_whiteouts: this is not the bottom of a stack, so a whiteout that hides nothing here is meant for lower layers
    and becomes overlayfs's: a character device 0:0, or `trusted.overlay.opaque` on the directory.
    """

    def __init__(self, *, keep_whiteouts: bool = False, prefix: bytes = b"") -> None:
        self.root = Node(stat.S_IFDIR)
        self._layer = 0
        self._keep = keep_whiteouts
        self._prefix = split_path(prefix)
        self._kept: list[tuple[Node, bytes]] = []

    def begin_layer(self) -> None:
        self._layer += 1

    def add(self, entry: Entry) -> Node | None:
        """The node that the member became, its data still to come; None for a whiteout or an opaque mark."""
        parts = self._prefix + split_path(entry.name)
        if not parts:
            if entry.type != "dir":
                raise bad(f"tar: {entry.shown}: the root of the tree is not a directory")
            self._dress(self.root, entry)
            return self.root
        parent = self._directory(parts[:-1], entry)
        name = parts[-1]
        if name == OPAQUE:
            self._purge(parent)
            if self._keep:
                _set_overlay(parent, b"opaque", b"y")
            return None
        if name.startswith(WHITEOUT):
            self._whiteout(parent, name[len(WHITEOUT) :], entry)
            return None
        return self._put(parent, name, entry)

    def end_layer(self) -> None:
        """Make overlayfs whiteouts of those that are meant for lower layers and that nothing replaced."""
        for parent, name in self._kept:
            child = parent.children.get(name)
            if child is None:
                node = Node(stat.S_IFCHR)
                node.mode = 0
                node.mtime_ns = parent.mtime_ns
                parent.children[name] = node
                # Tells overlayfs to filter the listing even where no other layer has this directory.
                _set_overlay(parent, b"origin", b"")
            elif child.is_dir:
                _set_overlay(child, b"opaque", b"y")
        self._kept.clear()

    def nodes(self) -> Iterator[Node]:
        """Every node once, parents before children, names in byte order. Counts links and numbers nothing."""
        seen: set[int] = {id(self.root)}
        queue = [self.root]
        for directory in queue:
            yield directory
            for _, node in sorted(directory.children.items()):
                if id(node) not in seen:
                    seen.add(id(node))
                    if node.is_dir:
                        queue.append(node)
                    else:
                        yield node

    def _directory(self, parts: list[bytes], entry: Entry) -> Node:
        node = self.root
        self._touch(node)
        for part in parts:
            child = node.children.get(part)
            if child is None:
                child = Node(stat.S_IFDIR)
                child.mtime_ns = entry.mtime_ns
                node.children[part] = child
                node.fresh.add(part)
            elif not child.is_dir:
                what = "a symlink" if child.fmt == stat.S_IFLNK else "not a directory"
                raise bad(f"tar: {entry.shown}: its path leads through {part!r}, which is {what}")
            self._touch(child)
            node = child
        return node

    def _touch(self, directory: Node) -> None:
        if directory.touched != self._layer:
            directory.touched = self._layer
            directory.fresh = set()

    def _is_fresh(self, parent: Node, name: bytes) -> bool:
        return parent.touched == self._layer and name in parent.fresh

    def _put(self, parent: Node, name: bytes, entry: Entry) -> Node:
        old = parent.children.get(name)
        parent.fresh.add(name)
        if entry.type == "hardlink":
            target = parent.children[name] = self._lookup(entry)
            return target
        if entry.type == "dir" and old is not None and old.is_dir:
            node = old
        else:
            node = parent.children[name] = Node(_FORMATS[entry.type])
        self._dress(node, entry)
        return node

    def _dress(self, node: Node, entry: Entry) -> None:
        node.mode = 0o777 if entry.type == "symlink" else entry.mode
        node.uid, node.gid, node.mtime_ns = entry.uid, entry.gid, entry.mtime_ns
        overlay = {k: v for k, v in (node.xattrs or {}).items() if k.startswith(b"trusted.overlay.")}
        node.xattrs = (overlay | _accepted(entry)) or None
        node.rdev = entry.rdev
        if entry.type == "symlink":
            if not 0 < len(entry.link) <= MAX_PATH or b"\0" in entry.link:
                raise bad(f"tar: {entry.shown}: a symlink's target is empty or too long")
            node.target, node.size = entry.link, len(entry.link)

    def _lookup(self, entry: Entry) -> Node:
        """The target of a hard link: a name in this tree, under the same rules as a member's own."""
        parts = self._prefix + split_path(entry.link)
        node: Node | None = self.root
        for part in parts:
            if node is None or not node.is_dir:
                raise bad(f"tar: {entry.shown}: a hard link through what is not a directory")
            node = node.children.get(part)
        if node is None:
            raise bad(f"tar: {entry.shown}: a hard link to {entry.link[:200]!r}, which is not there")
        if node.is_dir:
            raise bad(f"tar: {entry.shown}: a hard link to a directory")
        return node

    def _whiteout(self, parent: Node, name: bytes, entry: Entry) -> None:
        if name.startswith(WHITEOUT):
            return  # .wh..wh.aufs, .wh..wh.plnk and friends: AUFS's own housekeeping
        if name in (b"", b".", b".."):
            raise bad(f"tar: {entry.shown}: a whiteout of nothing")
        child = parent.children.get(name)
        if child is not None:
            self._hide(parent, name, child)
        if self._keep:
            self._kept.append((parent, name))

    def _purge(self, top: Node) -> None:
        """Drop what lower layers put below a directory, and keep what this one did."""
        queue = [top]
        for directory in queue:
            for name, child in list(directory.children.items()):
                if self._hide(directory, name, child, recurse=False):
                    queue.append(child)

    def _hide(self, parent: Node, name: bytes, child: Node, *, recurse: bool = True) -> bool:
        """Hide what lower layers know by this name. True: a directory stays, for its own contents are to be purged."""
        fresh = self._is_fresh(parent, name)
        if child.is_dir and (fresh or child.touched == self._layer):
            if recurse:
                self._purge(child)
            return True
        if not fresh:
            del parent.children[name]
        return False


def split_path(path: bytes) -> list[bytes]:
    """The names of a relative path, or a DsecError of kind image. `.` and the root alone are the empty list."""
    if len(path) > MAX_PATH or b"\0" in path:
        raise bad(f"tar: {path[:64]!r}: a name that is longer than {MAX_PATH} bytes or has a NUL")
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts or (parts and path.startswith(b"/")):
        raise bad(f"tar: {path[:200]!r} leads out of the tree")
    if any(len(part) > MAX_NAME for part in parts):
        raise bad(f"tar: {path[:64]!r}: a name longer than {MAX_NAME} bytes")
    return parts


def _accepted(entry: Entry) -> dict[bytes, bytes]:
    """The xattrs that an image may bring. trusted.* would speak to overlayfs; labels of the build host mean nothing."""
    accepted = {}
    for name, value in entry.xattrs.items():
        if name.startswith(b"trusted."):
            raise bad(f"tar: {entry.shown}: an image may not set the xattr {name[:64]!r}")
        if name.startswith(b"user.") or name in KEPT_XATTRS:
            if len(name) > MAX_NAME or len(value) > 65535 or name == b"user." or b"\0" in name:
                raise bad(f"tar: {entry.shown}: an xattr that no file system takes")
            accepted[name] = value
    if sum(len(name) + len(value) + 8 for name, value in accepted.items()) > 200_000:
        raise bad(f"tar: {entry.shown}: more than 200 kB of xattrs")
    return accepted


KEPT_XATTRS: Final = frozenset({b"security.capability", b"system.posix_acl_access", b"system.posix_acl_default"})


def _set_overlay(node: Node, key: bytes, value: bytes) -> None:
    node.xattrs = (node.xattrs or {}) | {b"trusted.overlay." + key: value}
