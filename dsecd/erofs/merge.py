"""Merges the trees of consecutive layers into one that a stack shows in their place, by overlayfs's rules.

Overlayfs and not OCI: the layers are stacked by the kernel when they are not merged, and nobody may see a difference.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from typing import Final

from dsecd.erofs.tree import Node, Tree

_OVERLAY: Final = b"trusted.overlay."
_OPAQUE: Final = b"trusted.overlay.opaque"
_ORIGIN: Final = b"trusted.overlay.origin"


def merge(layers: Sequence[Tree], *, base: bool) -> Tree:
    """layers: topmost first; their nodes become the result's. base: nothing is below, so whiteouts and marks go.

    A directory is a new node with the topmost one's attributes; anything else is the topmost layer's own node, so that
    its hard links hold together.
    """
    merged = Tree()
    merged.root = _directory(layers[0].root)
    # No opaque mark counts on a root: overlayfs stacks the roots without looking at them.
    queue = [(merged.root, [layer.root for layer in layers], False)]
    for target, sources, opaque in queue:
        hidden = False
        for name in dict.fromkeys(name for source in sources for name in source.children):
            found = [source.children[name] for source in sources if name in source.children]
            top = found[0]
            if is_whiteout(top):
                if not base and not opaque:
                    target.children[name] = top
                    hidden = True
            elif top.is_dir:
                child = target.children[name] = _directory(top)
                seen, ends = _same_directory(found)
                if ends and not base:
                    child.xattrs = (child.xattrs or {}) | {_OPAQUE: b"y"}
                queue.append((child, seen, ends))
            else:
                target.children[name] = top
        if hidden:
            # Tells overlayfs to filter the listing even where no other layer has this directory.
            target.xattrs = (target.xattrs or {}) | {_ORIGIN: b""}
    return merged


def is_whiteout(node: Node) -> bool:
    return node.fmt == stat.S_IFCHR and node.rdev == (0, 0)


def _same_directory(found: Sequence[Node]) -> tuple[list[Node], bool]:
    """The directories that show through each other, and whether something ends them before the bottom layer."""
    seen: list[Node] = []
    for node in found:
        if not node.is_dir:
            return seen, True
        seen.append(node)
        if (node.xattrs or {}).get(_OPAQUE) == b"y":
            return seen, True
    return seen, False


def _directory(node: Node) -> Node:
    copy = Node(stat.S_IFDIR)
    copy.mode, copy.uid, copy.gid, copy.mtime_ns = node.mode, node.uid, node.gid, node.mtime_ns
    copy.xattrs = {k: v for k, v in (node.xattrs or {}).items() if not k.startswith(_OVERLAY)} or None
    return copy
