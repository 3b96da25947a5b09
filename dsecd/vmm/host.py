"""What every kind of VM has on the host: a VMM, directories, a cgroup, its saved memory; started, saved, loaded, ended.

<run>/<id>/          sockets and pid of the VMM, this boot's
<state>/<id>/        machine.json: what it is made from; saved/: its memory while it is paused
<memory>/<id>.ram    guest RAM, a file on tmpfs (QEMU)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from dsecd import proc
from dsecd.cgroup.groups import Cgroups, SandboxCgroup
from dsecd.damon.host import HostDamon
from dsecd.errors import DsecError, kind_of_errno
from dsecd.vmm.machine import Driver, Limits, Machine, MachineSpec, Snapshot

log = logging.getLogger("dsecd.vmm")

MIB: Final = 1 << 20
SAVED: Final = "snapshot.json"
# Beyond the guest's RAM: QEMU itself, its code cache, and the page cache of what it reads.
HOST_EXTRA: Final = 256 * MIB
HOST_TASKS: Final = 512  # QEMU starts threads for I/O as it likes, and aborts when it cannot
CPU_LEAST: Final = 0.1


class VmHost:
    """One VMM for all VMs of this host. Whoever starts, clones or adopts one calls `end`, also after a failure."""

    def __init__(
        self, driver: Driver, run_dir: Path, state_dir: Path, memory_dir: Path, cgroups: Cgroups,
        damon: HostDamon | None = None,
    ) -> None:  # fmt: skip
        self.driver = driver
        self._damon = damon
        self.cgroups = cgroups
        self.memory_dir = memory_dir
        self._run, self._state = run_dir, state_dir
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Booting under emulation takes a core each; more at once only makes all of them late.
        self.starts = asyncio.Semaphore(os.cpu_count() or 1)

    def directory(self, ident: str) -> Path:
        """On a disk for Firecracker: its jail has a copy of the program, and what it saves passes through it."""
        return self._state / ident / "vmm" if self.driver.name == "firecracker" else self._run / ident

    def state(self, ident: str) -> Path:
        return self._state / ident

    @property
    def templates(self) -> Path:
        """For empty disks."""
        return self._state / ".templates"

    async def place(self, ident: str, memory: int, cpu: float, uid: int) -> Limits:
        """Make its directories and its cgroup. memory: of the guest; the VMM may use somewhat more."""
        self.state(ident).mkdir(mode=0o700)
        self.directory(ident).mkdir(mode=0o700)
        groups = await asyncio.to_thread(_limited, self.cgroups.sandbox(ident), memory, cpu)
        return Limits(ident, groups, uid, uid)

    def own(self, ident: str, path: Path) -> Path:
        """A name of its own for a kernel file: a saved VM is loaded with the one it booted, whatever the store has."""
        mine = self.state(ident) / path.name
        try:
            mine.hardlink_to(path)
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            shutil.copyfile(path, mine)
            mine.chmod(0o444)  # the VMM's user reads it through a descriptor
        return mine

    def note(self, spec: MachineSpec) -> None:
        """Remember what it is made from."""
        (self.state(spec.id) / "machine.json").write_bytes(msgspec.json.encode(spec, enc_hook=str))

    def spec(self, ident: str) -> MachineSpec:
        spec: MachineSpec = _read(self.state(ident) / "machine.json", MachineSpec)
        return spec

    async def begun(self, machine: Machine) -> Machine:
        """It runs: from now on DAMON looks at its memory, where the host's operator wants that and its kernel can."""
        if self._damon is not None:
            try:
                await self._damon.watch(machine.pid)
            except DsecError as exc:
                log.warning("DAMON does not watch the VMM: %s, going on without", exc,
                            extra={"sandbox_id": machine.spec.id})  # fmt: skip
        return machine

    async def _forget(self, pid: int) -> None:
        if self._damon is not None and pid:
            with contextlib.suppress(DsecError):
                await self._damon.forget(pid)

    # -- saving and loading -----------------------------------------------------------------------------------------
    async def save(self, machine: Machine) -> None:
        """Stop it and save it; the VMM still runs. When this raises, the machine runs on and nothing is saved."""
        saved = self.state(machine.spec.id) / "saved"
        await asyncio.to_thread(_fresh, saved)
        await machine.pause()
        try:
            snapshot = await machine.snapshot(saved)
            (saved / "new").write_bytes(msgspec.json.encode(snapshot))
            (saved / "new").rename(saved / SAVED)  # from here on it is paused, whoever dies
        except BaseException:
            await machine.resume()
            raise

    def is_saved(self, ident: str) -> bool:
        return (self.state(ident) / "saved" / SAVED).exists()

    def saved_again(self, ident: str, directory: Path) -> Snapshot:
        """Other names for what it is saved as, which stay when it goes on. Blocks."""
        saved = self.state(ident) / "saved"
        snapshot: Snapshot = _read(saved / SAVED, Snapshot)
        for name in snapshot.files:
            (directory / name).hardlink_to(saved / name)
        return snapshot

    async def load(self, spec: MachineSpec) -> Machine:
        """Start it from what was saved, and let it go on.

        When this raises, nothing runs; it is still saved, unless the error is `sandbox_dead`.
        """
        saved = self.state(spec.id) / "saved"
        snapshot = _read(saved / SAVED, Snapshot)
        machine: Machine | None = None
        try:
            machine = await self.driver.restore(spec, snapshot, saved, clone=False)
            (saved / SAVED).unlink()  # its disk changes from here on, so that this memory must never be loaded again
            await machine.resume()
        except BaseException as exc:
            if machine is not None:
                await machine.release()
            await self.driver.end(spec)
            if isinstance(exc, DsecError | OSError):
                raise _unloaded(exc, self.is_saved(spec.id)) from exc
            raise
        await asyncio.to_thread(shutil.rmtree, saved, True)
        return await self.begun(machine)

    async def adopt(self, ident: str, pid: int, started: int) -> tuple[MachineSpec, Machine | None]:
        """Take back what an earlier daemon started; without a machine when it had saved it. `sandbox_dead`: neither."""
        spec = self.spec(ident)
        if self.is_saved(ident):
            await self.driver.end(spec)  # the daemon may have died while it saved or loaded it
            return spec, None
        machine = await self.driver.adopt(spec, *(self.driver.alive(spec) or (pid, started)))
        try:
            await machine.resume()  # it may have died while it saved it
        except BaseException:
            await machine.release()
            raise
        return spec, await self.begun(machine)

    async def end_machine(self, spec: MachineSpec) -> None:
        """Its process and what that holds; its state stays."""
        found = self.driver.alive(spec)
        await self._forget(found[0] if found is not None else 0)
        await self.driver.end(spec)

    # -- ending -----------------------------------------------------------------------------------------------------
    async def end(self, ident: str) -> None:
        """Kill what runs, remove what is left: callable at any point of a start, and twice. No cancel stops it."""
        await asyncio.shield(self._end(ident))

    async def _end(self, ident: str) -> None:
        cgroup = self.cgroups.sandbox(ident)
        cgroup.kill()
        try:
            spec: MachineSpec | None = self.spec(ident)
        except DsecError:
            spec = None  # it never came to a process
        if spec is not None:
            await self.end_machine(spec)
        await asyncio.to_thread(cgroup.remove)
        for path in (self.directory(ident), self.state(ident)):
            await asyncio.to_thread(shutil.rmtree, path, True)
        (self.memory_dir / f"{ident}.ram").unlink(missing_ok=True)

    async def sweep(self, keep: set[str]) -> list[str]:
        """End every VM that no record owns; returns their ids."""
        found = {name for name in os.listdir(self._state) if not name.startswith(".")}
        strays = sorted(found - keep)
        for ident in strays:
            log.warning("removing a VM nobody owns: %s", ident, extra={"sandbox_id": ident})
            try:
                await self._end(ident)
            except (DsecError, OSError) as exc:  # no reason for a daemon not to start
                log.error("something of it is left: %s", exc, extra={"sandbox_id": ident})
        return strays


def round_memory(size: int) -> int:
    """To whole 2 MiB, as VMMs want it."""
    return -(-size // (2 * MIB)) * 2 * MIB


def _unloaded(exc: DsecError | OSError, saved: bool) -> DsecError:
    """Whether the sandbox died, and not only a VMM, is told by what is left of it."""
    if isinstance(exc, OSError):
        exc = DsecError(kind_of_errno(exc.errno or 0), f"it could not be loaded: {exc.strerror or exc}", infra=True)
    if saved:
        return DsecError("vmm", exc.message) if exc.kind == "sandbox_dead" else exc
    return DsecError("sandbox_dead", f"its machine ended as it was to go on: {exc.message}")


def _limited(cgroup: SandboxCgroup, memory: int, cpu: float) -> tuple[Path, ...]:
    cgroup.create_all()
    cgroup.set_limits(memory=memory + HOST_EXTRA, pids=HOST_TASKS + math.ceil(cpu), cpu=max(cpu, CPU_LEAST))
    return tuple(cgroup.paths())


def _fresh(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)


def _read(path: Path, kind: Any) -> Any:
    """One of our own files; gone or broken: `sandbox_dead`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind, dec_hook=lambda to, value: to(value))
    except (OSError, msgspec.MsgspecError) as exc:
        raise DsecError("sandbox_dead", f"{path.name} of the VM cannot be read: {exc}") from exc


async def silent(machine: Machine, exc: DsecError) -> DsecError:
    """Why no agent answered: what the guest said last, shown as what it is."""
    said = b""
    with contextlib.suppress(DsecError):
        said = await machine.console()
    lines = "".join(chr(c) if 32 <= c < 127 else "\n" for c in said).split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    alive = proc.start_time(machine.pid) == machine.started
    how = "did not come up" if alive else "ended while it booted"
    return DsecError("vmm", f"the guest {how} ({exc.message}); its console's last line: {last[:200]}")
