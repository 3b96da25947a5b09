"""What a name of an upper directory becomes in a layer, wherever it was read: the judgement, marks, owners, xattrs."""

from __future__ import annotations

import re
import stat
from typing import Final

from dsecd.erofs.packrules import Checker, shown
from dsecd.erofs.tar import bad
from dsecd.erofs.tree import KEPT_XATTRS, Node
from dsecd.idshift import ID_COUNT, plain_capability, shifted_acl, shifted_capability

NOBODY: Final = 65534
_OVERLAY: Final = b"trusted.overlay."
OPAQUE: Final = _OVERLAY + b"opaque"
_ORIGIN: Final = _OVERLAY + b"origin"
_UNREADABLE: Final = {_OVERLAY + b"metacopy": "its data is in a lower layer", _OVERLAY + b"redirect": "it was renamed"}


class Judge:
    """Which names are packed. left_out: how many were residue or answers. Raises what the rules forbid."""

    def __init__(self, checker: Checker, answers: re.Pattern[bytes] | None) -> None:
        self.checker, self.answers = checker, answers
        self.left_out = 0

    def takes(self, path: bytes, fmt: int) -> bool:
        if self.answers is not None and self.answers.match(path):
            self.left_out += 1  # what is below shows it no more, either: `pack.hide`
            return False
        if self.checker.residue(path):
            self.left_out += 1
            return False
        if fmt == stat.S_IFSOCK:
            return False  # the name of a process that listens
        self.checker.name(path)
        return True


def inside(ident: int, base: int) -> int:
    """An owner as the sandbox sees it; base: the host's id of its root."""
    return ident - base if base <= ident < base + ID_COUNT else NOBODY


def kept_xattr(node: Node, path: bytes, name: bytes) -> bool:
    """Whether the layer has it. One that says that this is not all: an error."""
    if name in _UNREADABLE:
        raise bad(f"{shown(path)}: overlayfs says that {_UNREADABLE[name]}, which no layer can hold alone")
    ours = name.startswith(b"user.") and not name.startswith(b"user.overlay.")
    return ours or name in KEPT_XATTRS or (name == OPAQUE and node.is_dir)


def packed_xattr(name: bytes, value: bytes, base: int) -> bytes | None:
    """Its value in the layer; None: it says nothing."""
    if name == OPAQUE:
        return value if value == b"y" else None
    if name == b"security.capability":
        return plain_capability(shifted_capability(value, base, 0))
    return shifted_acl(value, base, 0) if name in KEPT_XATTRS else value


def whiteout(directory: Node) -> Node:
    """A name of `directory` that hides what lower layers have by it."""
    node = Node(stat.S_IFCHR)
    node.mode = 0
    # Tells overlayfs to filter the listing even where no other layer has this directory.
    directory.xattrs = (directory.xattrs or {}) | {_ORIGIN: b""}
    return node
