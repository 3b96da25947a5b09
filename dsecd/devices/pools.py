"""The device pools of this host: which devices of the CDI files belong to which, and leases of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec import Struct

from dsecd.deviceconfig import DevicePool
from dsecd.devices.catalog import Catalog, Device, Problem
from dsecd.devices.leases import Held, Leases
from dsecd.devices.model import Grant, merged
from dsecd.errors import DsecError


class Member(Struct, frozen=True):
    """A device of a pool. why: what keeps it from being leased; "" nothing."""

    device: Device
    why: str = ""


class DevicePools:
    """One per daemon. All of its own questions to the file system are asked in threads."""

    def __init__(self, directories: Sequence[Path], pools: Mapping[str, DevicePool]) -> None:
        self._catalog = Catalog(directories)
        self._pools = pools
        self._refreshing = asyncio.Lock()
        self.leases = Leases({name: pool.share for name, pool in pools.items()})
        self.members: dict[str, list[Member]] = {name: [] for name in pools}

    @property
    def problems(self) -> list[Problem]:
        """Of files, as the last look found them."""
        return self._catalog.problems

    async def refresh(self) -> None:
        """Look at the host again: files that changed, devices that came or went."""
        async with self._refreshing:
            self.members = await asyncio.to_thread(self._look)
            usable = {name: [m.device.name for m in found if not m.why] for name, found in self.members.items()}
            self.leases.set_members(usable)

    def check(self, wanted: Mapping[str, int]) -> None:
        """`not_found` for a pool that the configuration does not have: what `lease` would say, at once."""
        self.leases.check(wanted)

    async def lease(self, owner: str, wanted: Mapping[str, int], wait_s: float) -> tuple[Held, Grant]:
        """So many devices of each pool, waited for at most so long, and what they give a container.

        `not_found`: no such pool, or not so many devices in it at all. `capacity`: none became free in time. Whatever
        comes of it, `release` is called for the owner in the end.
        """
        await self.refresh()
        self._explain(wanted)
        held = await self.leases.take(owner, wanted, wait_s)
        names = [(self._pools[pool].hooks, device) for pool, devices in held.items() for device in devices]
        return held, await asyncio.to_thread(self._grant, names)

    def claim(self, owner: str, held: Held) -> None:
        """Of a container that outlived a daemon."""
        self.leases.claim(owner, held)

    def release(self, owner: str) -> None:
        """Its container is over. Nothing leased is no error."""
        self.leases.release(owner)

    def abandon(self, owner: str) -> None:
        """If it still waits, its `lease` fails with `conflict`; what it has it keeps."""
        self.leases.abandon(owner)

    def _explain(self, wanted: Mapping[str, int]) -> None:
        """Say why a pool has too few, where it is known, rather than how many there are."""
        for name, count in wanted.items():
            found = self.members.get(name, [])
            broken = [member.why for member in found if member.why]
            if broken and len(found) - len(broken) < count:
                raise DsecError("not_found", f"device pool {name} has too few usable devices: {broken[0]}")

    def _grant(self, names: Iterable[tuple[bool, str]]) -> Grant:
        found = self._catalog.devices
        try:
            return merged([found[name].grant(hooks=hooks) for hooks, name in names])
        except KeyError as exc:
            raise DsecError("not_found", f"{exc.args[0]} is gone: no CDI file describes it any more") from exc

    def _look(self) -> dict[str, list[Member]]:
        """Each device is in one pool: the first of the configuration that names it.

        One whose nodes are all part of another's is the same hardware under another name (`all`, a UUID beside an
        index): leased beside it, it would not be anybody's alone. Names come in order, so that the plain one stays.
        """
        self._catalog.refresh()
        taken: dict[str, list[tuple[str, Device]]] = {}  # by node of the host, or by name
        found: dict[str, list[Member]] = {}
        for pool, config in self._pools.items():
            found[pool] = []
            for name in sorted(self._catalog.devices):
                if not any(fnmatchcase(name, pattern) for pattern in config.match):
                    continue
                device = self._catalog.devices[name]
                keys = (name, *device.nodes)
                near = (entry for key in keys for entry in taken.get(key, ()))
                other = next(((p, d) for p, d in near if _same(d, device)), None)
                if other is not None:
                    why = f"{name} is the same device as {other[1].name} of pool {other[0]}, or has it in it"
                    found[pool].append(Member(device, why))
                    continue
                for key in keys:
                    taken.setdefault(key, []).append((pool, device))
                found[pool].append(Member(device, _obstacle(device, config)))
        return found


def _same(one: Device, other: Device) -> bool:
    return one.name == other.name or one.nodes <= other.nodes or other.nodes <= one.nodes


def _obstacle(device: Device, config: DevicePool) -> str:
    try:
        device.grant(hooks=config.hooks)
    except DsecError as exc:
        return exc.message
    return ""


def wanted(asked: Iterable[str]) -> dict[str, int]:
    """`["gpu:2", "fuse"]` as `{"gpu": 2, "fuse": 1}`; what is asked for twice is added up."""
    found: dict[str, int] = {}
    for one in asked:
        name, _, count = one.partition(":")
        found[name] = found.get(name, 0) + int(count or 1)
    return found
