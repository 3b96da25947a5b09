"""What microVMs and full VMs have in common once they are made: a machine, or none while it is saved."""

from __future__ import annotations

import asyncio

from dsecd.errors import DsecError
from dsecd.vmm.host import VmHost
from dsecd.vmm.machine import Machine, MachineSpec


class VmBody:
    """A running or saved VM. `machine` is None while it is saved; then no process of it is left."""

    def __init__(self, host: VmHost, spec: MachineSpec, machine: Machine | None) -> None:
        self.id = spec.id
        self.spec = spec
        self.machine = machine
        self._host = host
        self._cgroup = host.cgroups.sandbox(spec.id)
        self._given = 0

    @property
    def pid(self) -> int:
        return self.machine.pid if self.machine is not None else 0

    @property
    def started(self) -> int:
        return self.machine.started if self.machine is not None else 0

    def running(self) -> Machine:
        """`conflict` while it is saved."""
        if self.machine is None:
            raise DsecError("conflict", f"sandbox {self.id} is paused", sandbox_id=self.id)
        return self.machine

    def kill(self) -> None:
        self._cgroup.kill()

    async def console(self) -> bytes:
        """The last 64 KiB of its serial console: a stranger's bytes."""
        return await self.running().console()

    async def memory(self) -> tuple[int, int]:
        """Of its VMM."""
        return await asyncio.to_thread(self._cgroup.memory)

    async def give_back(self) -> int | None:
        """All of it went with the VMM."""
        return self._given or None

    async def _end_machine(self, machine: Machine) -> None:
        """It is saved: its process goes, and what it held."""
        self._given = (await self.memory())[0]
        self.machine = None
        await machine.release()
        await self._host.end_machine(self.spec)
