"""A machine under Firecracker: pause, snapshot, balloon, console."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from pathlib import Path
from typing import Final, Literal

from dsecd.agent.address import AgentAddress
from dsecd.cgroup.groups import is_frozen, set_frozen
from dsecd.errors import DsecError
from dsecd.vmm import snapshot
from dsecd.vmm.firecracker_api import Api, BalloonUpdate, InstanceInfo, SnapshotCreate, VmState
from dsecd.vmm.firecracker_process import Console, Watch
from dsecd.vmm.firecracker_root import SAVE, Root
from dsecd.vmm.machine import Accel, DriverName, MachineSpec, Snapshot

MIB: Final = 1 << 20
AGENT_PORT: Final = 1024
FILES: Final = ("state", "memory")  # of a snapshot
_FREEZE_S: Final = 5.0
_STATE_MAX: Final = 64 * MIB
_SAVE_S: Final = 30.0
_SAVE_BYTES_A_SECOND: Final = 32 << 20  # a slow disk
# After a plain pause and resume these releases hand no more vsock connections to the guest (issue 6100 there): a gate
# stays closed which only the guest's answer to a snapshot's reset opens.
_VSOCK_GATE: Final = frozenset({"1.16.0", "1.16.1"})


class FirecrackerMachine:
    """One Firecracker process, with the API up."""

    driver: DriverName = "firecracker"
    accel: Accel = "kvm"

    def __init__(
        self, root: Root, versions: tuple[str, str], pid: int, started: int, watch: Watch, console: Console
    ) -> None:
        self.spec: MachineSpec = root.spec
        self.pid, self.started = pid, started
        self.root, self.watch, self.tty = root, watch, console
        self.release_name, self.version = versions
        self.api = Api(root.spec.directory / "api.sock", watch.ended)
        self._held: Literal["", "paused", "frozen"] = ""

    @property
    def agent(self) -> AgentAddress:
        return agent_address(self.spec)

    def loaded(self) -> None:
        """A snapshot is in it, and its vCPUs wait."""
        self._held = "paused"

    @property
    def _save_s(self) -> float:
        return _SAVE_S + self.spec.memory / _SAVE_BYTES_A_SECOND

    def _group(self) -> Path | None:
        """Its cgroup in the hierarchy that freezes."""
        return next((path for path in self.spec.limits.groups if (path / "cgroup.freeze").exists()), None)

    def _refuse_frozen(self, what: str) -> None:
        if self.watch.ended.done():
            raise DsecError("sandbox_dead", f"Firecracker is gone: {self.watch.ended.result()}")
        if self._held == "frozen":
            raise DsecError("vmm", f"a frozen machine cannot {what}: resume it before")

    async def look(self) -> None:
        """Find out whether it is held: after an earlier daemon."""
        group = self._group()
        if group is not None and is_frozen(group):
            self._held = "frozen"
            return
        info = await self.api.get("/", InstanceInfo, self._save_s)  # a save of that daemon's may still be under way
        if info.state == "Not started":
            raise DsecError("sandbox_dead", "the machine never started")
        self._held = "paused" if info.state == "Paused" else ""

    async def pause(self) -> None:
        if self._held:
            return
        if self.release_name not in _VSOCK_GATE:
            await self.api.patch("/vm", VmState("Paused"))
            self._held = "paused"
            return
        group = self._group()
        if group is None:
            raise DsecError(
                "vmm",
                f"Firecracker {self.release_name} loses its vsock when it is resumed: give the machine a cgroup, which "
                "can be frozen instead, or install 1.15.1 or 1.17",
            )
        self._refuse_frozen("pause")
        await asyncio.to_thread(set_frozen, group, True, _FREEZE_S)
        self._held = "frozen"

    async def resume(self) -> None:
        if self._held == "frozen":
            group = self._group()
            if group is not None:  # else it ended with its process
                await asyncio.to_thread(set_frozen, group, False, _FREEZE_S)
            self._held = ""
            self._refuse_frozen("resume")
        elif self._held:
            await self.api.patch("/vm", VmState("Resumed"))
            self._held = ""

    async def snapshot(self, directory: Path) -> Snapshot:
        """As the contract says. A frozen machine runs for a moment before it is paused for this: copy disks after."""
        if not self._held:
            raise DsecError("vmm", "pause the machine before you save it")
        if self._held == "frozen":
            await self.resume()
            await self.api.patch("/vm", VmState("Paused"))
            self._held = "paused"
        save = self.root.make_save()
        try:
            body = SnapshotCreate(f"{SAVE}/state", f"{SAVE}/memory")
            await self.api.put("/snapshot/create", body, self._save_s)
            files = {
                "state": await asyncio.to_thread(_take, save, "state", None, directory),
                "memory": await asyncio.to_thread(_take, save, "memory", self.spec.memory, directory),
            }
        finally:
            await asyncio.to_thread(shutil.rmtree, save, True)
        return Snapshot(
            driver="firecracker", version=self.version, accel="kvm", cpu=snapshot.cpu_model(),
            memory=self.spec.memory, files=files,
        )  # fmt: skip

    async def set_balloon(self, target: int) -> None:
        self._refuse_frozen("change its balloon")
        await self.api.patch("/balloon", BalloonUpdate(max(0, self.spec.memory - target) // MIB))

    async def console(self) -> bytes:
        return self.tty.text()

    async def release(self) -> None:
        self.tty.keep()
        self.close()

    def close(self) -> None:
        """Stop watching. Twice is fine."""
        self.tty.close()
        self.watch.close()


def agent_address(spec: MachineSpec) -> AgentAddress:
    return AgentAddress(spec.directory / "agent.sock", vsock_port=AGENT_PORT)


def _take(save: Path, name: str, size: int | None, directory: Path) -> str:
    """Copy what Firecracker saved into a file of ours; its digest. size: exactly, None: something small.

    What it saved is believed to be nothing: a guest that broke out may have put a link, a pipe or a flood there.
    """
    try:
        fd = os.open(save, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        finally:
            os.close(fd)
    except OSError as exc:
        raise DsecError("vmm", f"Firecracker saved no {name}: {exc.strerror}") from exc
    try:
        found = os.fstat(file)
        fits = found.st_size == size if size is not None else 0 < found.st_size <= _STATE_MAX
        if not stat.S_ISREG(found.st_mode) or not fits:
            raise DsecError("vmm", f"Firecracker saved no {name}: what it wrote is no such file")
        target = directory / name
        digest = snapshot.copy(Path(f"/proc/self/fd/{file}"), target)
        target.chmod(0o444)  # a jailed machine maps it as another user; who reaches it, the directory decides
        return digest
    finally:
        os.close(file)
