"""What a container is given with its devices, resolved on this host and checked. No client has a word in it."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from dsecd.errors import DsecError

MAX_NODES: Final = 256  # as dsec-launch has it
MAX_BINDS: Final = 1024
HookName = Literal["prestart", "createRuntime", "createContainer", "poststart", "poststop"]


class Node(Struct, frozen=True):
    """A device node inside. type: c or b; mode: permission bits; uid, gid: inside; access: of r, w for the cgroup."""

    path: str
    type: str
    major: int
    minor: int
    mode: int
    uid: int
    gid: int
    access: str


class Bind(Struct, frozen=True):
    """A file or directory of the host that shows inside, read-only, without what is mounted below it."""

    source: str
    target: str
    noexec: bool


class Hook(Struct, frozen=True, omit_defaults=True):
    """A program of the host that the OCI runtime starts, as OCI has it."""

    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


class Grant(Struct, frozen=True):
    """All of it, for one container."""

    env: dict[str, str] = {}
    nodes: tuple[Node, ...] = ()
    binds: tuple[Bind, ...] = ()
    hooks: tuple[tuple[HookName, Hook], ...] = ()


def merged(grants: list[Grant]) -> Grant:
    """One of many. Devices of a kind share most of what they need; `unsupported`: two want one place differently."""
    env: dict[str, str] = {}
    nodes: dict[str, Node] = {}
    binds: dict[str, Bind] = {}
    hooks: dict[tuple[HookName, Hook], None] = {}
    for grant in grants:
        env |= grant.env
        hooks |= dict.fromkeys(grant.hooks)
        for node in grant.nodes:
            if nodes.setdefault(node.path, node) != node:
                raise DsecError("unsupported", f"two of the devices want to be {node.path}")
        for bind in grant.binds:
            if binds.setdefault(bind.target, bind) != bind:
                raise DsecError("unsupported", f"two of the devices want different files at {bind.target}")
    if both := sorted(nodes.keys() & binds.keys()):
        raise DsecError("unsupported", f"the devices want both a node and a file at {both[0]}")
    if len(nodes) > MAX_NODES or len(binds) > MAX_BINDS:
        raise DsecError("unsupported", f"the devices want more than {MAX_NODES} nodes or {MAX_BINDS} files")
    return Grant(env, tuple(nodes.values()), tuple(binds.values()), tuple(hooks))
