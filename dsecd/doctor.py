"""`dsecctl doctor`: what this host can do, found by probing, and what to install or change."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dsecd.sandbox.live import Rooms
from dsecd.wire.daemon import Check


async def examine(rooms: Rooms) -> list[Check]:
    """All checks. They change nothing on the host."""
    checks = [await asyncio.to_thread(check, rooms) for check in _CHECKS]
    for probe in await rooms.mounts.probe():
        level = "ok" if probe.usable else "warn"
        checks.append(Check(f"image mounts: {probe.driver}", level, probe.why or "usable"))
    return checks


def _runtime(rooms: Rooms) -> Check:
    obstacle = rooms.containers.cgroups.obstacle()
    if obstacle and Path(rooms.containers.runtime.program).name == "crun":
        return Check("OCI runtime", "fail", obstacle, "make setup does this")
    return Check("OCI runtime", "ok", rooms.containers.runtime.program)


def _cgroups(rooms: Rooms) -> Check:
    cgroups = rooms.containers.cgroups
    if cgroups.layout == "hybrid":
        return Check(
            "cgroups", "warn", "hybrid: limits work; memory.reclaim and swap control do not",
            "boot with systemd.unified_cgroup_hierarchy=1",
        )  # fmt: skip
    return Check("cgroups", "ok", f"v2, sandboxes below {cgroups.base}")


def _disk(rooms: Rooms) -> Check:
    free, total = rooms.pool.free()
    text = f"{rooms.pool.driver}: {free >> 20} of {total >> 20} MiB free"
    return Check("writable disks", "ok" if free > total // 20 else "warn", text)


def _seccomp(_rooms: Rooms) -> Check:
    return Check("seccomp", "ok", "the containers-common profile is compiled and loaded by the agent")


def _apparmor(_rooms: Rooms) -> Check:
    enabled = Path("/sys/module/apparmor/parameters/enabled")
    if not enabled.exists() or enabled.read_text().strip() != "Y":
        return Check("AppArmor", "warn", "not on this kernel; seccomp and namespaces hold without it")
    return Check("AppArmor", "ok", "enabled")


def _kvm(_rooms: Rooms) -> Check:
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Check("KVM", "warn", "no usable /dev/kvm: containers only", "enable virtualisation for microVMs")
    return Check("KVM", "ok", "/dev/kvm opens")


def _swap(_rooms: Rooms) -> Check:
    lines = Path("/proc/swaps").read_text().splitlines()
    if len(lines) < 2:
        return Check("swap", "warn", "none: paused sandboxes keep their memory", "set up zram")
    return Check("swap", "ok", f"{len(lines) - 1} device(s)")


def _tools(_rooms: Rooms) -> Check:
    missing = [tool for tool in ("skopeo", "mmdebstrap", "zstd") if shutil.which(tool) is None]
    if missing:
        return Check("import tools", "warn", f"missing: {', '.join(missing)}", f"apt-get install {' '.join(missing)}")
    return Check("import tools", "ok", "skopeo, mmdebstrap, zstd")


_CHECKS: tuple[Callable[[Rooms], Check], ...] = (
    _runtime, _cgroups, _disk, _seccomp, _apparmor, _kvm, _swap, _tools,
)  # fmt: skip
