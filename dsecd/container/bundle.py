"""What the OCI runtime is told: one config.json per sandbox, written from a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from dsecd.container.seccomp import COMMAND_CAPS

ID_COUNT: Final = 1 << 20  # ids of one sandbox: every uid an image plausibly holds (case 20 has 197609)
AGENT_PATH: Final = "/dev/.dsec-agent"  # below a tmpfs, so that no mount point is left in the writable layer
AGENT_FDS: Final = 2  # 3: the listening socket; 4: the sandbox's cgroup directory

# The agent mounts /proc for the inner PID namespace, enters it, and loads the filter; commands get COMMAND_CAPS.
_AGENT_CAPS: Final = [*COMMAND_CAPS, "CAP_SYS_ADMIN", "CAP_MKNOD", "CAP_NET_ADMIN"]


class Plan(msgspec.Struct, frozen=True):
    """Everything the container backend needs. Paths are the host's; lowers are topmost first.

    memory and disk in bytes, cpu in cores.
    """

    id: str
    lowers: tuple[str, ...]
    scratch: str
    id_base: int
    hostname: str
    memory: int
    pids: int
    cpu: float


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


def config(plan: Plan, root: str, agent: Path, cgroup_path: str, resources: dict[str, Any]) -> bytes:
    """config.json for `plan`. root: the overlay that dsec-launch mounts."""
    ids = [{"containerID": 0, "hostID": plan.id_base, "size": ID_COUNT}]
    document = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [AGENT_PATH],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _AGENT_CAPS),
            "noNewPrivileges": False,
        },
        "root": {"path": root},
        "hostname": plan.hostname,
        "mounts": _mounts(agent),
        "linux": {
            "uidMappings": ids,
            "gidMappings": ids,
            "namespaces": _NS,
            "cgroupsPath": cgroup_path,
            "resources": resources,
        },
    }
    return msgspec.json.encode(document)
