"""`dsecctl doctor`: what this host can do, found by probing, and what to install or change."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from dsecd.devices.pools import DevicePools
from dsecd.disk import linux
from dsecd.errors import DsecError
from dsecd.net import router
from dsecd.sandbox import brake
from dsecd.sandbox.live import Rooms
from dsecd.vmm import kvm
from dsecd.wire.daemon import Check
from dsecd.zram import swap


async def examine(rooms: Rooms) -> list[Check]:
    """All checks. They change nothing on the host."""
    checks = [await asyncio.to_thread(check, rooms) for check in _CHECKS]
    checks.append(await _devices(rooms.devices))
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


def _copies(rooms: Rooms) -> Check:
    if why := rooms.pool.why_no_copies():
        return Check(
            "forks and packs",
            "warn",
            f"not of containers: {why}",
            "state_dir on btrfs or XFS, or disk_driver = loop-btrfs",
        )
    return Check("forks and packs", "ok", f"{rooms.pool.driver} copies on write")


def _seccomp(_rooms: Rooms) -> Check:
    return Check("seccomp", "ok", "the containers-common profile is compiled and loaded by the agent")


def _apparmor(_rooms: Rooms) -> Check:
    enabled = Path("/sys/module/apparmor/parameters/enabled")
    if not enabled.exists() or enabled.read_text().strip() != "Y":
        return Check("AppArmor", "warn", "not on this kernel; seccomp and namespaces hold without it")
    return Check("AppArmor", "ok", "enabled")


def _kvm(_rooms: Rooms) -> Check:
    if why := kvm.usable():
        return Check("KVM", "warn", f"{why}; microVMs run emulated, which is slow", "enable virtualisation")
    return Check("KVM", "ok", "runs guests")


def _vmm(rooms: Rooms) -> Check:
    try:
        driver = rooms.vms.host().driver
    except DsecError as exc:
        return Check("microVMs", "warn", exc.message, "apt-get install qemu-system-x86")
    return Check("microVMs", "ok", f"{driver.name} {driver.version} ({driver.accel})")


def _guest_kernel(rooms: Rooms) -> Check:
    try:
        kernel = rooms.vms.kernels.default(rooms.vms.kernel)
    except DsecError as exc:
        return Check("guest kernel", "warn", exc.message, "dsecctl kernel import-deb")
    return Check("guest kernel", "ok", f"{kernel.name}: {kernel.release}")


def _guest_memory(rooms: Rooms) -> Check:
    memory = rooms.vms.memory_dir
    if linux.mount_of(memory).fstype != "tmpfs":
        return Check("guest memory", "warn", f"{memory} is not on tmpfs: guests' writes would go to disk",
                     "set vm_memory_dir to a directory on tmpfs")  # fmt: skip
    return Check("guest memory", "ok", f"{memory} is on tmpfs")


def _swap(_rooms: Rooms) -> Check:
    found = swap()
    if not found.devices:
        return Check(
            "swap", "warn", "none: pausing a container gives back its page cache, and keeps its other memory",
            "dsecctl doctor --fix zram, as root",
        )  # fmt: skip
    text = f"{found.free >> 20} of {found.total >> 20} MiB free on {', '.join(found.devices)}: pausing can use it"
    return Check("swap", "ok" if found.free > found.total // 10 else "warn", text, "stop paused sandboxes, or add swap")


def _pressure(_rooms: Rooms) -> Check:
    if brake.measured():
        return Check("pressure", "ok", "measured: a host that its sandboxes wait for takes no new ones")
    return Check("pressure", "warn", "this kernel does not measure it: creates are not held off when a host is busy",
                 "a kernel with CONFIG_PSI, and psi=1 on its command line")  # fmt: skip


def _network(rooms: Rooms) -> Check:
    if (why := router.obstacle()) is not None:
        return Check("networks", "warn", f"none for sandboxes: {why[0]}", why[1])
    versions = "IPv4 and IPv6" if router.forwards(6) else "IPv4 (net.ipv6.conf.all.forwarding is off)"
    return Check("networks", "ok", f"{versions}; {len(rooms.network.services)} services in the configuration")


async def _devices(devices: DevicePools) -> Check:
    await devices.refresh()
    problems = [one.text for one in devices.problems]
    problems += [one.why for members in devices.members.values() for one in members if one.why]
    problems += [f"pool {name} has no device" for name, members in devices.members.items() if not members]
    usable = sum(not one.why for members in devices.members.values() for one in members)
    text = f"{usable} in {len(devices.members)} pools"
    if not problems:
        return Check("devices", "ok", text if devices.members else "no pools in the configuration")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Check("devices", "warn", f"{text}; {problems[0]}{more}", "dsecctl devices shows all; docs/devices.md")


def _tools(_rooms: Rooms) -> Check:
    missing = [tool for tool in ("skopeo", "mmdebstrap", "zstd") if shutil.which(tool) is None]
    if missing:
        return Check("import tools", "warn", f"missing: {', '.join(missing)}", f"apt-get install {' '.join(missing)}")
    return Check("import tools", "ok", "skopeo, mmdebstrap, zstd")


_CHECKS: tuple[Callable[[Rooms], Check], ...] = (
    _runtime, _cgroups, _disk, _copies, _seccomp, _apparmor, _kvm, _vmm, _guest_kernel, _guest_memory, _swap, _pressure,
    _network, _tools,
)  # fmt: skip
