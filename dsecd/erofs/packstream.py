"""A layer from the agent's stream of a microVM's upper directory (UPPER): a tar that says all that a layer holds.

What comes is a tenant's tree told by a machine of the tenant's: names lead nowhere here, sizes are held against the
rules before their bytes are read, and an archive that is not what the agent makes ends the pack.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from typing import Final

from dsecd.erofs.blob import DataFile, store_file
from dsecd.erofs.importer import Reporter
from dsecd.erofs.packnode import Judge, inside, kept_xattr, packed_xattr, whiteout
from dsecd.erofs.packrules import shown
from dsecd.erofs.tar import Entry, Source, TarReader, bad
from dsecd.erofs.tree import MAX_PATH, Node, Tree, split_path

_FORMATS: Final = {
    "file": stat.S_IFREG, "dir": stat.S_IFDIR, "symlink": stat.S_IFLNK, "char": stat.S_IFCHR, "block": stat.S_IFBLK,
    "fifo": stat.S_IFIFO,
}  # fmt: skip
_XATTR_NAME, _XATTR_VALUE, _XATTRS = 255, 65535, 200_000


class SearchedData(DataFile):
    """Shows the first piece of each file to whoever asked for it."""

    look: Callable[[bytes], None] | None = None

    def append(self, chunk: bytes) -> int:
        if self.look is not None:
            look, self.look = self.look, None
            look(chunk)
        return super().append(chunk)


class StreamScan:
    """Reads one stream; `tree` then has its data in `data`, and perhaps bytes that nothing names (of files that were
    left out, but might have had another name)."""

    def __init__(self, judge: Judge, data: SearchedData, reporter: Reporter) -> None:
        self.judge = judge
        self._data, self._reporter = data, reporter
        self._names: dict[bytes, Node] = {}  # of what is not a directory
        self._skipped = b""  # a directory that was left out, with a slash

    def tree(self, source: Source) -> Tree:
        tree, reader, names = Tree(), TarReader(source, need_end=True), 0
        while (entry := reader.next()) is not None:
            names += 1
            self._add(tree, entry, reader)
            self._reporter.progress("pack", self._data.size)
        reader.drain()
        self._reporter.progress("scan", names, names, force=True)
        return tree

    def _add(self, tree: Tree, entry: Entry, reader: TarReader) -> None:
        parts = split_path(entry.name)
        path = b"/".join(parts)
        if not parts:
            if entry.type != "dir":
                raise bad("the upper directory is none")
            self._dress(tree.root, path, entry)
            return
        if self._skipped and path.startswith(self._skipped):
            self._unseen(path, entry, reader)
            return
        self._skipped = b""
        parent = tree.root
        for part in parts[:-1]:
            found = parent.children.get(part)
            if found is None or not found.is_dir:
                raise bad(f"{shown(path)} is in no directory")
            parent = found
        if parts[-1] in parent.children:
            raise bad(f"{shown(path)} is there twice")
        node = self._node(parent, path, entry, reader)
        if node is not None:
            parent.children[parts[-1]] = node

    def _node(self, parent: Node, path: bytes, entry: Entry, reader: TarReader) -> Node | None:
        if entry.type == "char" and entry.rdev == (0, 0):
            self.judge.checker.count(path)
            return whiteout(parent)
        twin = self._names.get(b"/".join(split_path(entry.link))) if entry.type == "hardlink" else None
        if entry.type == "hardlink" and twin is None:
            raise bad(f"{shown(path)} is another name of nothing")
        if not self.judge.takes(path, twin.fmt if twin is not None else _FORMATS[entry.type]):
            if entry.type == "dir":
                self._skipped = path + b"/"
            self._unseen(path, entry, reader)
            return None
        if twin is not None:
            self._names[path] = twin
            return twin
        return self._made(path, entry, reader)

    def _made(self, path: bytes, entry: Entry, reader: TarReader) -> Node:
        node = Node(_FORMATS[entry.type])
        self._dress(node, path, entry)
        if not node.is_dir:
            self._names[path] = node
        if node.is_file:
            checker = self.judge.checker
            extents = entry.extents
            checker.size(path, entry.size if extents is None else sum(n for _, n in extents), entry.size)
            search = entry.size <= checker.search_below
            self._data.look = (lambda piece: checker.content(path, piece)) if search else None
            store_file(self._data, reader, node, entry.size, extents)
            self._data.look = None
        return node

    def _unseen(self, path: bytes, entry: Entry, reader: TarReader) -> None:
        """A name that is left out, of a file that has others: they may be kept, and the data comes with the first."""
        twin = self._names.get(b"/".join(split_path(entry.link))) if entry.type == "hardlink" else None
        if twin is not None:
            self._names[path] = twin
        elif entry.links > 1 and entry.type in _FORMATS and entry.type != "dir":
            self.judge.checker.count(path)
            self._made(path, entry, reader)

    def _dress(self, node: Node, path: bytes, entry: Entry) -> None:
        node.mode = 0o777 if node.fmt == stat.S_IFLNK else entry.mode
        node.uid, node.gid = inside(entry.uid, 0), inside(entry.gid, 0)
        node.mtime_ns, node.rdev = entry.mtime_ns, entry.rdev
        if node.fmt == stat.S_IFLNK:
            if not 0 < len(entry.link) <= MAX_PATH or b"\0" in entry.link:
                raise bad(f"{shown(path)}: a symlink to nothing, or to something too long")
            node.target, node.size = entry.link, len(entry.link)
            return
        kept: dict[bytes, bytes] = {}
        for name, value in entry.xattrs.items():
            if kept_xattr(node, path, name):
                packed = packed_xattr(name, value, 0)
                if packed is not None:
                    kept[name] = packed
        if any(len(name) > _XATTR_NAME or len(value) > _XATTR_VALUE for name, value in kept.items()):
            raise bad(f"{shown(path)}: an xattr that no file system takes")
        if sum(len(name) + len(value) for name, value in kept.items()) > _XATTRS:
            raise bad(f"{shown(path)}: more than {_XATTRS} bytes of xattrs")
        node.xattrs = kept or None
