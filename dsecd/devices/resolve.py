"""From the words of CDI files to a Grant: looked up on this host, and held to what a hostile tenant may be given.

Nodes are made anew for each container (dsec-launch), with the numbers that the host's node has now; so tenants get the
right to a device, never the host's own file. What is bound is read-only, whatever the file says.
"""

from __future__ import annotations

import os
import posixpath
import stat
from pathlib import Path
from typing import Final, get_args

from dsecd.devices.cdi import Edits, HookEdit, MountEdit, NodeEdit
from dsecd.devices.model import Bind, Grant, Hook, HookName, Node
from dsecd.errors import DsecError

# Of the sandbox itself: what stands there is what confines it.
_KEPT: Final = ("/proc", "/sys", "/dev/.dsec-agent", "/dev/pts", "/dev/shm", "/dev/mqueue")
_BIND_TYPES: Final = ("", "bind", "none")
# What mounts may ask for. `ro` and the next two they get anyway; `rbind` is taken as `bind`, because OCI's `ro` makes
# only the topmost of a recursive one read-only.
_OPTIONS: Final = frozenset(
    {"ro", "nosuid", "nodev", "bind", "rbind", "noexec", "private", "rprivate", "slave", "rslave"}
)
_TYPES: Final = {"c": stat.S_ISCHR, "u": stat.S_ISCHR, "b": stat.S_ISBLK}


def resolve(name: str, edits: Edits, *, hooks: bool) -> Grant:
    """What `edits` of device `name` are here. `not_found`: something of it is gone; `unsupported`: dsecd refuses it."""
    for word, value in (("intelRdt", edits.intel_rdt), ("netDevices", edits.net_devices)):
        if value:
            raise DsecError("unsupported", f"{name} wants {word}, which dsecd does not do")
    return Grant(
        {entry.partition("=")[0]: entry.partition("=")[2] for entry in edits.env},
        tuple(_node(name, node, edits.additional_gids) for node in edits.device_nodes),
        tuple(_bind(name, mount) for mount in edits.mounts),
        tuple(_hook(name, hook, hooks) for hook in edits.hooks),
    )


def host_nodes(edits: Edits) -> frozenset[str]:
    """The host's nodes that these edits name."""
    return frozenset(node.host_path or node.path for node in edits.device_nodes)


def _node(name: str, edit: NodeEdit, groups: tuple[int, ...]) -> Node:
    """groups: additional ones that CDI wants processes to have, for the host's node's sake.

    Ours has no such group; so what that group may do, all users inside may: it is their sandbox's device.
    """
    source = edit.host_path or edit.path
    if not _inside(edit.path).startswith("/dev/") or not _absolute(source):
        raise DsecError("unsupported", f"{name} wants a node {edit.path}: nodes are below /dev")
    if edit.type and edit.type not in _TYPES:
        raise DsecError("unsupported", f"{name} wants a node of type {edit.type!r}: only c and b are given")
    try:
        found = Path(source).stat()
    except OSError as exc:
        raise DsecError("not_found", f"{name} is gone: {source}: {exc.strerror}") from exc
    kind = "c" if stat.S_ISCHR(found.st_mode) else "b" if stat.S_ISBLK(found.st_mode) else ""
    major, minor = os.major(found.st_rdev), os.minor(found.st_rdev)
    if not kind or (edit.type and not _TYPES[edit.type](found.st_mode)):
        raise DsecError("not_found", f"{name} is gone: {source} is no such device")
    if edit.major not in (None, major) or edit.minor not in (None, minor):
        asked = f"{edit.major if edit.major is not None else '*'}:{edit.minor if edit.minor is not None else '*'}"
        raise DsecError("not_found", f"{name} is gone: {source} is {major}:{minor} now, and not {asked}")
    mode = stat.S_IMODE(found.st_mode) & 0o777 if edit.file_mode is None else edit.file_mode
    if found.st_gid in groups:
        mode |= mode >> 3 & 0o7
    access = "".join(letter for letter in "rw" if letter in edit.permissions)
    return Node(edit.path, kind, major, minor, mode, _id(name, edit.uid), _id(name, edit.gid), access)


def _id(name: str, number: int | None) -> int:
    """Of the ids that every sandbox has (2^20); root when it says none."""
    if number is not None and number >= 1 << 20:
        raise DsecError("unsupported", f"{name} wants a node of id {number}: sandboxes have ids below {1 << 20}")
    return number or 0


def _bind(name: str, edit: MountEdit) -> Bind:
    what = f"{name} wants a mount of {edit.host_path}"
    if edit.type not in _BIND_TYPES:
        raise DsecError("unsupported", f"{what} of type {edit.type!r}: only bind mounts are made")
    if "rw" in edit.options:
        raise DsecError("unsupported", f"{what} to write to: what is shared with sandboxes is read-only")
    if strange := sorted(set(edit.options) - _OPTIONS):
        raise DsecError("unsupported", f"{what} with {strange[0][:40]!r}: that is not done")
    if not _absolute(edit.host_path):
        raise DsecError("unsupported", f"{what}: that is no absolute path")
    if not Path(edit.host_path).exists():
        raise DsecError("not_found", f"{name} is gone: {edit.host_path} is not there")
    return Bind(edit.host_path, _inside(edit.container_path), "noexec" in edit.options)


def _hook(name: str, edit: HookEdit, allowed: bool) -> tuple[HookName, Hook]:
    if not allowed:
        what = f"{name} wants the hook {edit.path}, a program that runs as the host's root"
        raise DsecError("unsupported", f"{what}: `hooks = true` of the pool allows it")
    # startContainer would run a program of the image, before anything confines it.
    known = next((known for known in get_args(HookName) if known == edit.hook_name), None)
    if known is None or not _absolute(edit.path):
        raise DsecError("unsupported", f"{name} wants a hook {edit.hook_name[:40]!r} of {edit.path}: that is not done")
    if not os.access(edit.path, os.X_OK):
        raise DsecError("not_found", f"{name} is gone: its hook {edit.path} is not there")
    return known, Hook(edit.path, edit.args, edit.env, edit.timeout)


def _absolute(path: str) -> bool:
    return path.startswith("/") and posixpath.normpath(path) == path and path != "/"


def _inside(path: str) -> str:
    if not _absolute(path) or path == "/dev" or any(path == kept or path.startswith(kept + "/") for kept in _KEPT):
        raise DsecError("unsupported", f"nothing may be put at {path!r} in a sandbox")
    return path
