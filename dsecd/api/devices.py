"""device.*"""

from __future__ import annotations

from dsecd.errors import DsecError
from dsecd.sandbox.manager import Manager
from dsecd.wire import devices as wire
from dsecd.wire.access import ROOT, within
from dsecd.wire.call import Call

Strings = list[str]  # `list` is a method below


class DeviceApi:
    """What there is, and who has it."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._devices = manager.rooms.devices

    async def list(self, call: Call, params: wire.ListDevices) -> wire.DevicePools:
        found, project = self._devices, call.peer.project
        await found.refresh()
        return wire.DevicePools(
            pools=[
                wire.DevicePool(
                    name=name,
                    share=pool.share,
                    devices=[
                        wire.Device(
                            m.device.name,
                            str(m.device.file),
                            self._seen(found.leases.users(m.device.name), project),
                            m.why,
                        )
                        for m in found.members[name]
                    ],
                    waiting=found.leases.waiting(name),
                )
                for name, pool in found.leases.pools.items()
            ],
            problems=[wire.FileProblem(str(one.file), one.text) for one in found.problems],
        )

    def _seen(self, users: Strings, project: str) -> Strings:
        """Those of the caller's subtree; places of calls, which have no record, are the root project's to see."""
        return [one for one in users if within(self._project(one), project)]

    def _project(self, ident: str) -> str:
        try:
            return self._manager.record(ident).owner.project
        except DsecError:
            return ROOT
