"""vm.* and screen.*"""

from __future__ import annotations

from dsecd.errors import DsecError
from dsecd.sandbox.manager import Manager
from dsecd.vmm import live_disks, screen
from dsecd.vmm.backend import Vm
from dsecd.vmm.fullvm import FullVm
from dsecd.wire import base
from dsecd.wire import screen as screen_wire
from dsecd.wire import vms as wire
from dsecd.wire.call import Call


class VmApi:
    """Calls that make sense for virtual machines only."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def console(self, call: Call, params: wire.ConsoleParams) -> wire.Console:
        body = (await self._manager.running(params.id)).body
        if not isinstance(body, Vm | FullVm):
            raise DsecError("unsupported", "a container has no console: see `dsecctl logs`")
        return wire.Console(data=await body.console())

    async def _full(self, ident: str) -> FullVm:
        body = (await self._manager.running(ident)).body
        if not isinstance(body, FullVm):
            raise DsecError("unsupported", "only full VMs have that: create one with backend fullvm")
        return body

    async def snapshots(self, call: Call, params: wire.SnapshotsParams) -> wire.Snapshots:
        return wire.Snapshots(names=list(await live_disks.snapshots((await self._full(params.id)).qmp)))

    async def snapshot(self, call: Call, params: wire.SnapshotParams) -> base.Empty:
        await (await self._full(params.id)).snapshot(params.name)
        return base.Empty()

    async def drop(self, call: Call, params: wire.SnapshotParams) -> base.Empty:
        await live_disks.drop((await self._full(params.id)).qmp, params.name)
        return base.Empty()

    async def revert(self, call: Call, params: wire.SnapshotParams) -> base.Empty:
        vm = await self._full(params.id)
        live = await self._manager.running(params.id)

        async def move() -> None:
            async with live.lock:
                await vm.revert(params.name)

        await self._manager.carry(move())
        return base.Empty()

    async def capture(self, call: Call, params: screen_wire.Capture) -> screen_wire.Picture:
        found = await screen.capture((await self._full(params.id)).qmp)
        return screen_wire.Picture(png=found.png, width=found.width, height=found.height)

    async def input(self, call: Call, params: screen_wire.Input) -> base.Empty:
        if (params.x is None) != (params.y is None):
            raise DsecError("invalid", "give both x and y, or neither")
        qmp = (await self._full(params.id)).qmp
        if params.x is not None and params.y is not None:
            seen = await screen.capture(qmp)
            await screen.move(qmp, params.x, params.y, seen.width, seen.height)
        if params.button is not None:
            await screen.click(qmp, params.button, params.clicks)
        if params.text:
            await screen.type_text(qmp, params.text)
        if params.keys:
            await screen.press(qmp, params.keys)
        return base.Empty()
