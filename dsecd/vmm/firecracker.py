"""Machines under Firecracker, from release 1.14 on (the first with virtio-pmem), with its jailer.

A machine with a user of its own (`limits.uid`) is jailed; one without runs as root where it is, which is for tests and
for looking around. Devices are on PCI, so that a guest needs the same drivers as under QEMU.

Saving: the machine is paused, Firecracker writes devices and memory, and both are copied without zeros. Loading maps
the saved memory privately, for a clone and for a resumed machine alike: the files must stay as they are while it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from dsecd import proc
from dsecd.agent.address import AgentAddress
from dsecd.errors import DsecError
from dsecd.vmm import firecracker_api as api
from dsecd.vmm import launch, snapshot
from dsecd.vmm.firecracker_machine import FILES, MIB, FirecrackerMachine, agent_address
from dsecd.vmm.firecracker_process import Console, Watch
from dsecd.vmm.firecracker_root import API, VSOCK, Root
from dsecd.vmm.machine import Accel, DriverName, MachineSpec, Snapshot

OLDEST: Final = (1, 14)
START_S: Final = 20.0  # until the API answers: the jailer copies a program
BOOT_S: Final = 30.0
LOAD_S: Final = 60.0
END_S: Final = 30.0  # a vCPU of a guest of a guest was seen to take more than ten
VCPUS_MAX: Final = 32
_POLL_S: Final = 0.005
_GUEST_CID: Final = 3  # each machine has a vsock of its own, so all may have the same
# Firecracker ends when the guest resets through the keyboard controller; of that controller nothing else is needed.
_KERNEL: Final = (
    "console=ttyS0", "quiet", "reboot=k", "panic=-1", "random.trust_cpu=on", "i8042.noaux", "i8042.nomux",
    "i8042.dumbkbd", "swiotlb=noforce", "cryptomgr.notests", "dsec.off=reboot",
)  # fmt: skip
# A guest that reads its entropy device in a loop costs the host a page a millisecond, not a core.
_ENTROPY: Final = api.Entropy(api.RateLimiter(bandwidth=api.TokenBucket(size=65_536, refill_time=16)))


class FirecrackerDriver:
    """Firecracker of this host. Make one with `find`, where `kvm.usable` has found nothing wrong.

    version: of the snapshot format. release: of the program.
    """

    name: DriverName = "firecracker"
    accel: Accel = "kvm"

    def __init__(self, program: Path, jailer: Path | None, release: str, version: str) -> None:
        self.program, self.jailer, self.release, self.version = program, jailer, release, version
        # Puts a tap of that name where a VMM (pid, start time) lives, for its user, and away again once it is open.
        self.lend: Callable[[str, int, int, int], contextlib.AbstractAsyncContextManager[None]] = (
            lambda _tap, _pid, _started, _uid: contextlib.nullcontext()
        )
        self._machines: dict[str, FirecrackerMachine] = {}

    @classmethod
    def find(cls, program: str = "firecracker", jailer: str = "jailer") -> FirecrackerDriver:
        """Names on PATH, or paths. `unsupported` says what to install. Blocks for a moment.

        Without a jailer, machines that ask for a user of their own are refused.
        """
        path = shutil.which(program)
        if path is None:
            raise DsecError("unsupported", f"{program} is not installed: put a release of Firecracker on the PATH")
        release = _said(path, "--version", r"Firecracker v(\d+\.\d+\.\d+)")
        if tuple(int(part) for part in release.split(".")[:2]) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise DsecError("unsupported", f"Firecracker {release} has no virtio-pmem: install {oldest} or newer")
        version = _said(path, "--snapshot-version", r"v(\d+\.\d+\.\d+)")
        beside = shutil.which(jailer)
        if beside is not None:
            other = _said(beside, "--version", r"Jailer v(\d+\.\d+\.\d+)")
            if other != release:
                raise DsecError("unsupported", f"{beside} is of release {other}, Firecracker of {release}")
        return cls(Path(path).resolve(), Path(beside).resolve() if beside else None, release, version)

    async def start(self, spec: MachineSpec) -> FirecrackerMachine:
        self._check(spec)
        async with self._whole(spec):
            machine = await self._launch(Root(spec, self.program))
            async with self._taps(machine):
                await _configure(machine)
            self._claim(machine)
            await machine.api.put("/actions", api.Action("InstanceStart"), BOOT_S)
        return machine

    async def restore(self, spec: MachineSpec, saved: Snapshot, directory: Path, *, clone: bool) -> FirecrackerMachine:
        self._check(spec)
        if saved.driver == self.name and set(saved.files) != set(FILES):
            raise DsecError("vmm", f"the snapshot has {sorted(saved.files)}, not {sorted(FILES)}")
        await asyncio.to_thread(snapshot.check, saved, directory, self, spec.memory)
        async with self._whole(spec):
            machine = await self._launch(Root(spec, self.program, {name: directory / name for name in FILES}))
            taps = tuple(api.NetworkOverride(f"eth{number}", nic.tap) for number, nic in enumerate(spec.nics))
            load = api.SnapshotLoad("state", api.MemBackend("memory"), taps)
            async with self._taps(machine):
                await machine.api.put("/snapshot/load", load, LOAD_S)
            self._claim(machine)
            machine.loaded()
        return machine

    @contextlib.asynccontextmanager
    async def _taps(self, machine: FirecrackerMachine) -> AsyncIterator[None]:
        """Firecracker opens taps by their names, in its own network namespace, where there must be nothing else and
        nothing afterwards: its guest may break out."""
        async with contextlib.AsyncExitStack() as stack:
            for nic in machine.spec.nics:
                lent = self.lend(nic.tap, machine.pid, machine.started, machine.spec.limits.uid)
                await stack.enter_async_context(lent)
            yield

    @contextlib.asynccontextmanager
    async def _whole(self, spec: MachineSpec) -> AsyncIterator[None]:
        """All of it, or nothing is left."""
        try:
            yield
        except BaseException as exc:
            await self.end(spec)
            if isinstance(exc, OSError):
                raise DsecError("vmm", f"the machine cannot be prepared: {exc}") from exc
            raise

    def address(self, spec: MachineSpec) -> AgentAddress:
        return agent_address(spec)

    def alive(self, spec: MachineSpec) -> tuple[int, int] | None:
        try:
            pid, started = (int(word) for word in (spec.directory / "vmm.pid").read_text().split())
        except (FileNotFoundError, ValueError):
            return None
        return (pid, started) if proc.start_time(pid) == started else None

    async def adopt(self, spec: MachineSpec, pid: int, started: int) -> FirecrackerMachine:
        if proc.start_time(pid) != started:
            raise DsecError("sandbox_dead", "the VMM is gone")
        machine = self._machine(Root(spec, self.program), pid, started, Console(spec.directory / "console"))
        try:
            await machine.look()
        except BaseException:
            machine.close()
            raise
        return machine

    async def end(self, spec: MachineSpec) -> None:
        """No cancel stops it."""
        await asyncio.shield(self._end(spec))

    async def _end(self, spec: MachineSpec) -> None:
        machine = self._machines.pop(spec.id, None)
        found = self.alive(spec) if machine is None else (machine.pid, machine.started)
        if machine is not None:
            machine.close()
        if found is not None:
            pid, started = found
            now = proc.start_time(pid)
            if now == started:
                launch.kill(pid, started)
            # None: reaped already, or a zombie, which cannot be reaped before the last of its threads is gone.
            if now in (None, started) and not await launch.gone(pid, END_S):
                raise DsecError("internal", f"Firecracker {pid} does not die")
        await asyncio.to_thread(_empty, spec.directory)

    def _check(self, spec: MachineSpec) -> None:
        if spec.display or spec.kernel is None:
            raise DsecError("unsupported", "Firecracker has no screen and no firmware: full VMs need QEMU")
        if any(drive.format != "raw" for drive in spec.drives):
            raise DsecError("unsupported", "Firecracker takes raw disks only")
        if not 1 <= spec.vcpus <= VCPUS_MAX:
            raise DsecError("invalid", f"Firecracker gives a machine 1 to {VCPUS_MAX} vCPUs, not {spec.vcpus}")
        if spec.limits.uid and self.jailer is None:
            raise DsecError("unsupported", "a machine with a user of its own needs Firecracker's jailer on the PATH")

    async def _launch(self, root: Root) -> FirecrackerMachine:
        """Firecracker runs, and its API is at `api.sock`."""
        spec = root.spec
        console = Console(spec.directory / "console")
        try:
            command = root.command(self.jailer if spec.limits.uid else None)
            out = console.open_end()
            try:
                pid = proc.spawn(command, {1: out, 2: out})
            finally:
                os.close(out)
        except BaseException:
            console.close()
            raise
        started = proc.start_time(pid) or 0
        machine = self._machine(root, pid, started, console)
        (spec.directory / "vmm.pid").write_text(f"{pid} {started}\n")
        await self._listening(machine)
        return machine

    def _machine(self, root: Root, pid: int, started: int, console: Console) -> FirecrackerMachine:
        machine = FirecrackerMachine(root, (self.release, self.version), pid, started, Watch(pid), console)
        self._machines[root.spec.id] = machine
        return machine

    async def _listening(self, machine: FirecrackerMachine) -> None:
        path = machine.spec.directory / API
        deadline = time.monotonic() + START_S
        while not (path.exists() or machine.root.claim(API, path)) or not _answers(path):
            if machine.watch.ended.done():
                why = f"{machine.watch.ended.result()}; {machine.tty.last_line()}"
                raise DsecError("vmm", f"Firecracker did not start: {why}")
            if time.monotonic() > deadline:
                raise DsecError("vmm", f"Firecracker's API did not come up within {START_S:g} s")
            await asyncio.sleep(_POLL_S)

    def _claim(self, machine: FirecrackerMachine) -> None:
        if not machine.root.claim(VSOCK, machine.spec.directory / "agent.sock"):
            raise DsecError("vmm", "Firecracker made no socket for the guest's vsock")


async def _configure(machine: FirecrackerMachine) -> None:
    """All that comes before the start, one small call each."""
    spec, put = machine.spec, machine.api.put
    await put("/machine-config", api.MachineConfig(spec.vcpus, spec.memory // MIB))
    arguments = " ".join((*_KERNEL, *spec.cmdline))
    await put("/boot-source", api.BootSource("kernel", arguments, "initrd" if spec.initrd else None))
    for number, drive in enumerate(spec.drives):
        name = f"drive{number}"
        await put(f"/drives/{name}", api.DriveConfig(name, name, drive.read_only))
    for number in range(len(spec.pmem)):
        name = f"pmem{number}"
        await put(f"/pmem/{name}", api.PmemConfig(name, name))
    for number, nic in enumerate(spec.nics):
        name = f"eth{number}"
        await put(f"/network-interfaces/{name}", api.NetworkInterface(name, nic.tap, nic.mac))
    await put("/vsock", api.Vsock(_GUEST_CID, VSOCK))
    await put("/balloon", api.Balloon(0, deflate_on_oom=True, free_page_reporting=spec.reporting))
    await put("/entropy", _ENTROPY)


def _said(program: str, option: str, pattern: str) -> str:
    """What a program says of itself."""
    try:
        done = subprocess.run([program, option], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise DsecError("unsupported", f"{program} {option} does not run: {exc}") from exc
    found = re.search(pattern, done.stdout.decode("utf-8", "replace"))
    if found is None:
        raise DsecError("unsupported", f"{program} {option} does not say what it is")
    return found[1]


def _answers(path: Path) -> bool:
    """Bound and listening, too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(str(path)) == 0


def _empty(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
