"""The seccomp filter of commands: containers-common's profile, compiled once at start.

The OCI runtime gets no filter, because the agent must still mount and enter namespaces; the agent loads this one into
itself as soon as it has done so, and every command inherits it. clone3 alone is allowed here (the agent starts commands
with CLONE_INTO_CGROUP) and is taken away again in each child: its flags cannot be seen by a filter.
"""

from __future__ import annotations

import errno
import platform
import socket
from pathlib import Path
from typing import Any, Final

import msgspec

from dsecd._native import ffi, lib
from dsecd.errors import DsecError

PROFILES: Final = (Path("/usr/share/containers/seccomp.json"), Path("/etc/containers/seccomp.json"))
MAX_PROGRAM: Final = 64 << 10

CAP_BITS: Final = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4, "CAP_KILL": 5, "CAP_SETGID": 6,
    "CAP_SETUID": 7, "CAP_SETPCAP": 8, "CAP_NET_BIND_SERVICE": 10, "CAP_NET_RAW": 13, "CAP_SYS_CHROOT": 18,
    "CAP_SYS_ADMIN": 21, "CAP_MKNOD": 27, "CAP_AUDIT_WRITE": 29, "CAP_SETFCAP": 31,
}  # fmt: skip
# What containers get by default (containers.conf); enough for apt, git and package builds as root.
COMMAND_CAPS: Final = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETFCAP",
    "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
)  # fmt: skip

# The profile is made for nested containers too: it leaves namespaces, mounts and keyrings to capabilities, and root of
# a user namespace of its own has them all. No sandbox needs one inside, and most holes of the kernel do.
_DENIED: Final = frozenset(
    {"unshare", "setns", "mount", "umount", "umount2", "pivot_root", "move_mount", "open_tree", "fsopen", "fsconfig",
     "fsmount", "fspick", "mount_setattr", "keyctl", "add_key", "request_key"}
)  # fmt: skip
_NEW_NAMESPACES: Final = 0x7E02_0000  # CLONE_NEW* of clone(2)

# The profile allows every family. A network namespace does not hold all of them (vsock reaches the hypervisor and other
# guests, from any), and to ask for the rare ones loads their modules into the host's kernel.
_FAMILIES: Final = frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_PACKET})
_NETLINK_AUDIT: Final = 9

_ACTIONS: Final = {
    "SCMP_ACT_ALLOW": 0x7FFF_0000, "SCMP_ACT_ERRNO": 0x0005_0000, "SCMP_ACT_KILL": 0, "SCMP_ACT_KILL_THREAD": 0,
    "SCMP_ACT_KILL_PROCESS": 0x8000_0000, "SCMP_ACT_LOG": 0x7FFC_0000,
}  # fmt: skip
_OPS: Final = {
    "SCMP_CMP_NE": 1, "SCMP_CMP_LT": 2, "SCMP_CMP_LE": 3, "SCMP_CMP_EQ": 4, "SCMP_CMP_GE": 5, "SCMP_CMP_GT": 6,
    "SCMP_CMP_MASKED_EQ": 7,
}  # fmt: skip


def caps_mask(names: tuple[str, ...] = COMMAND_CAPS) -> int:
    """Capability names as the kernel's bit mask."""
    return sum(1 << CAP_BITS[name] for name in names)


def command_filter(profile: Path | None = None) -> bytes:
    """The BPF program for commands. `unsupported` when the host has no profile or it cannot be compiled."""
    path = profile or next((p for p in PROFILES if p.exists()), None)
    if path is None:
        raise DsecError("unsupported", "no seccomp profile: install golang-github-containers-common")
    try:
        document = msgspec.json.decode(path.read_bytes())
        return _compile(document)
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as exc:
        raise DsecError("unsupported", f"the seccomp profile {path} cannot be used: {exc}") from exc


def _compile(document: dict[str, Any]) -> bytes:
    rules = [rule for entry in document["syscalls"] if _applies(entry) for rule in _rules(entry)]
    rules += _rules({"names": _DENIED, "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}, frozenset())
    same_namespaces = {"index": 0, "op": "SCMP_CMP_MASKED_EQ", "value": _NEW_NAMESPACES, "valueTwo": 0}
    rules.append((lib.dsec_syscall_number(b"clone"), _ACTIONS["SCMP_ACT_ALLOW"], [same_namespaces]))
    rules.append((lib.dsec_syscall_number(b"clone3"), _ACTIONS["SCMP_ACT_ALLOW"], []))
    rules += _socket_rules()
    array = ffi.new("struct dsec_rule[]", len(rules))
    for slot, (number, action, args) in zip(array, rules, strict=True):
        slot.syscall, slot.action, slot.n_args = number, action, len(args)
        for out, arg in zip(slot.args, args, strict=False):
            out.index, out.op = arg["index"], _OPS[arg["op"]]
            out.a, out.b = arg["value"], arg.get("valueTwo") or 0
    default = _action(document["defaultAction"], document.get("defaultErrnoRet"))
    buffer = ffi.new("unsigned char[]", MAX_PROGRAM)
    size = lib.dsec_seccomp_program(default, array, len(rules), buffer, MAX_PROGRAM)
    if size < 0:
        raise DsecError("unsupported", f"libseccomp cannot compile the profile: {errno.errorcode.get(-size, size)}")
    return bytes(ffi.buffer(buffer, size))


def _rules(
    entry: dict[str, Any], leave_out: frozenset[str] = _DENIED | {"clone", "clone3", "socket"}
) -> list[tuple[int, int, list[dict[str, Any]]]]:
    action = _action(entry["action"], entry.get("errnoRet"))
    args = entry.get("args") or []
    numbers = [lib.dsec_syscall_number(name.encode()) for name in entry["names"] if name not in leave_out]
    return [(number, action, args) for number in numbers if number != -1]


def _socket_rules() -> list[tuple[int, int, list[dict[str, Any]]]]:
    """socket(2), by family: rules that exclude each other, since libseccomp does not say which of two wins."""
    number, allow = lib.dsec_syscall_number(b"socket"), _ACTIONS["SCMP_ACT_ALLOW"]
    unknown = _action("SCMP_ACT_ERRNO", errno.EAFNOSUPPORT)

    def family(op: str, value: int) -> dict[str, Any]:
        return {"index": 0, "op": op, "value": value}

    netlink = family("SCMP_CMP_EQ", socket.AF_NETLINK)
    known = range(socket.AF_PACKET + 1)
    rules = [
        (number, allow if one in _FAMILIES else unknown, [family("SCMP_CMP_EQ", one)])
        for one in known
        if one != socket.AF_NETLINK
    ]
    for op, action in (("SCMP_CMP_NE", allow), ("SCMP_CMP_EQ", _action("SCMP_ACT_ERRNO", errno.EPERM))):
        rules.append((number, action, [netlink, {"index": 2, "op": op, "value": _NETLINK_AUDIT}]))
    return [*rules, (number, unknown, [family("SCMP_CMP_GT", known[-1])])]


def _applies(entry: dict[str, Any]) -> bool:
    """Whether an entry's conditions hold for our capabilities and this machine."""
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    includes, excludes = entry.get("includes") or {}, entry.get("excludes") or {}
    if any(cap not in COMMAND_CAPS for cap in includes.get("caps") or []):
        return False
    if includes.get("arches") and arch not in includes["arches"]:
        return False
    if arch in (excludes.get("arches") or []):
        return False
    return not any(cap in COMMAND_CAPS for cap in excludes.get("caps") or [])


def _action(name: str, errno_value: int | None) -> int:
    base = _ACTIONS[name]
    return base | ((errno_value if errno_value is not None else errno.EPERM) if name == "SCMP_ACT_ERRNO" else 0)
