"""Snapshots of a disk that a running QEMU has open, inside its qcow2 file. Of other disks: `dsecd.vmm.disks`."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from dsecd.errors import DsecError
from dsecd.vmm.disks import MAX_SNAPSHOTS, check_snapshot
from dsecd.vmm.qga import GuestAgent
from dsecd.vmm.qmp import Qmp

SNAPSHOT_S: Final = 60.0
NODE: Final = "disk0"  # the first disk, as dsecd.vmm.qemu_args calls it


async def snapshots(qmp: Qmp, node: str = NODE) -> tuple[str, ...]:
    """Names, oldest first."""
    found = await qmp.run("query-named-block-nodes", flat=True)
    nodes = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    disk: dict[str, Any] = next((one for one in nodes if one.get("node-name") == node), {})
    image = disk.get("image")
    listed = image.get("snapshots", []) if isinstance(image, dict) else []
    return tuple(str(one["name"]) for one in listed if isinstance(one, dict) and "name" in one)


async def take(qmp: Qmp, name: str, agent: GuestAgent | None = None, node: str = NODE) -> None:
    """Of the disk as it is now. agent: flushes the guest's file systems and holds them still for the moment.

    Without one it is what a power cut would leave, which journals are made for.
    """
    check_snapshot(name)
    have = await snapshots(qmp, node)
    if name in have:
        raise DsecError("conflict", f"the disk has a snapshot {name!r} already")
    if len(have) >= MAX_SNAPSHOTS:
        raise DsecError("quota", f"the disk has {MAX_SNAPSHOTS} snapshots, and that is the limit")
    async with contextlib.AsyncExitStack() as stack:
        if agent is not None:
            stack.push_async_callback(agent.thaw)  # also after a freeze that was not answered in time
            await agent.freeze()
        await qmp.run("blockdev-snapshot-internal-sync", SNAPSHOT_S, device=node, name=name)


async def drop(qmp: Qmp, name: str, node: str = NODE) -> None:
    """Forget one."""
    check_snapshot(name)
    if name not in await snapshots(qmp, node):
        raise DsecError("not_found", f"the disk has no snapshot {name!r}")
    await qmp.run("blockdev-snapshot-delete-internal-sync", SNAPSHOT_S, device=node, name=name)
