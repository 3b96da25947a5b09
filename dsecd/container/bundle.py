"""What the OCI runtime is told: one config.json per sandbox, written from a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from dsecd.container.seccomp import COMMAND_CAPS
from dsecd.devices.model import Bind, Grant

ID_COUNT: Final = 1 << 20  # ids of one sandbox: every uid an image plausibly holds (case 20 has 197609)
AGENT_PATH: Final = "/dev/.dsec-agent"  # below a tmpfs, so that no mount point is left in the writable layer
AGENT_FDS: Final = 2  # 3: the listening socket; 4: the sandbox's cgroup directory

# The agent mounts /proc for the inner PID namespace, enters it, and loads the filter; commands get COMMAND_CAPS.
_AGENT_CAPS: Final = [*COMMAND_CAPS, "CAP_SYS_ADMIN", "CAP_MKNOD", "CAP_NET_ADMIN"]


class Plan(msgspec.Struct, frozen=True):
    """Everything the container backend needs. Paths are the host's; lowers are topmost first.

    memory and disk in bytes, cpu in cores. devices: nodes, files and hooks of its devices; their env is the commands'.
    calls: the agent runs calls and nothing else.
    """

    id: str
    lowers: tuple[str, ...]
    scratch: str
    id_base: int
    hostname: str
    memory: int
    pids: int
    cpu: float
    devices: Grant = Grant()
    calls: bool = False


# A port that a call used must be free for the next one at once, and nothing else of its connections may stay.
_CALL_SYSCTLS: Final = {"net.ipv4.tcp_max_tw_buckets": "0", "net.ipv4.tcp_fin_timeout": "1"}
_NS: Final = [{"type": t} for t in ("pid", "ipc", "uts", "mount", "network", "user", "cgroup")]


def _mounts(agent: Path) -> list[dict[str, Any]]:
    quiet = ["nosuid", "noexec", "nodev"]
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {
            "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
            "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
        },
        {
            "destination": "/dev/pts", "type": "devpts", "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        },
        {
            "destination": "/dev/shm", "type": "tmpfs", "source": "shm",
            "options": [*quiet, "mode=1777", "size=65536k"],
        },
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": quiet},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*quiet, "ro"]},
        {"destination": AGENT_PATH, "type": "bind", "source": str(agent), "options": ["bind", "ro", "nosuid", "nodev"]},
    ]  # fmt: skip


def _device_mounts(devices: Grant, stage: str) -> list[dict[str, Any]]:
    """Nodes as dsec-launch made them (its `<stage>/n/0`, ...), and files of the host."""
    nodes = [
        {
            "destination": node.path, "type": "bind", "source": f"{stage}/n/{number}",
            "options": ["bind", "nosuid", "noexec"],
        }
        for number, node in enumerate(devices.nodes)
    ]  # fmt: skip
    return nodes + [
        {"destination": bind.target, "type": "bind", "source": bind.source, "options": _options(bind)}
        for bind in devices.binds
    ]


def _options(bind: Bind) -> list[str]:
    return ["bind", "ro", "nosuid", "nodev", *(["noexec"] if bind.noexec else [])]


def _device_rules(devices: Grant) -> list[dict[str, Any]]:
    return [
        {"allow": True, "type": node.type, "major": node.major, "minor": node.minor, "access": node.access}
        for node in devices.nodes
    ]


def _hooks(devices: Grant) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, hook in devices.hooks:
        found.setdefault(name, []).append(hook)
    return found


def config(plan: Plan, stage: str, agent: Path, cgroup_path: str, resources: dict[str, Any]) -> bytes:
    """config.json for `plan`. stage: where dsec-launch mounts the overlay (`root`) and makes device nodes (`n`)."""
    ids = [{"containerID": 0, "hostID": plan.id_base, "size": ID_COUNT}]
    document: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [AGENT_PATH, "calls"] if plan.calls else [AGENT_PATH],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _AGENT_CAPS),
            "noNewPrivileges": False,
        },
        "root": {"path": f"{stage}/root"},
        "hostname": plan.hostname,
        "mounts": _mounts(agent) + _device_mounts(plan.devices, stage),
        "linux": {
            "uidMappings": ids,
            "gidMappings": ids,
            "namespaces": _NS,
            "cgroupsPath": cgroup_path,
            "resources": {**resources, "devices": [*resources["devices"], *_device_rules(plan.devices)]},
            "sysctl": _CALL_SYSCTLS if plan.calls else {},
        },
    }
    if plan.devices.hooks:
        document["hooks"] = _hooks(plan.devices)
    return msgspec.json.encode(document)
