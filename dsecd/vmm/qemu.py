"""Machines under QEMU: with KVM where it works, else TCG (which needs no hardware and is slow).

Saving: the vCPUs stop, QEMU writes its devices' state (`x-ignore-shared`: RAM is a file already and is not written),
and the RAM file is copied without its zeros. Resuming copies it back; a clone maps the saved file privately instead,
so that all clones share its pages until they write.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsecd import proc
from dsecd.agent.address import AgentAddress
from dsecd.errors import DsecError
from dsecd.vmm import launch, snapshot
from dsecd.vmm.kvm import DEVICE
from dsecd.vmm.machine import Accel, DriverName, MachineSpec, Snapshot
from dsecd.vmm.qemu_args import CONSOLE_BYTES, SHARED, Mode, arguments, state_name
from dsecd.vmm.qmp import Qmp

PROGRAM: Final = "qemu-system-x86_64"
START_S: Final = 20.0
SAVE_S: Final = 120.0
END_S: Final = 10.0
_POLL_S: Final = 0.01
# QEMU 7.2's TCG (Debian 12's own) makes guests fault at random (lab.md); 10 does not.
TCG_MIN: Final = (8, 0)
# Whether it knows the property; it ends at once either way, since that is no KVM.
_TAKES_KVM: Final = ("-nodefaults", "-display", "none", "-machine", "none", "-accel", "kvm,device=/dev/null")


class QemuMachine:
    """One QEMU process."""

    driver: DriverName = "qemu"

    def __init__(
        self, spec: MachineSpec, accel: Accel, version: str, pid: int, started: int, qmp: Qmp, uri: str, mode: str
    ) -> None:
        self.spec, self.accel, self.version = spec, accel, version
        self.pid, self.started = pid, started
        self.qmp = qmp
        self.uri = uri
        self._mode = mode
        self._console = b""

    @property
    def agent(self) -> AgentAddress:
        return agent_address(self.spec)

    async def pause(self) -> None:
        await self.qmp.run("stop")

    async def resume(self) -> None:
        await self.qmp.run("cont")

    async def snapshot(self, directory: Path) -> Snapshot:
        await self.qmp.run("migrate", uri=self.uri)
        await _migrated(self.qmp)
        files = {"state": self.spec.directory / "state"}
        if self._mode in SHARED:  # else QEMU wrote the RAM into the state
            files["ram"] = ram_path(self.spec)
        digests = {}
        for name, path in files.items():
            digests[name] = await asyncio.to_thread(snapshot.copy, path, directory / name)
        return Snapshot(
            driver="qemu", version=self.version, accel=self.accel, cpu=snapshot.cpu_model(), memory=self.spec.memory,
            files=digests,
        )  # fmt: skip

    async def set_balloon(self, target: int) -> None:
        await self.qmp.run("balloon", value=target)

    async def console(self) -> bytes:
        text = await self.qmp.run("ringbuf-read", device="console", size=CONSOLE_BYTES, format="base64")
        with contextlib.suppress(binascii.Error, ValueError, TypeError):
            self._console = (self._console + base64.b64decode(text))[-CONSOLE_BYTES:]
        return self._console

    async def release(self) -> None:
        await self.qmp.close()


class QemuDriver:
    """QEMU of this host. Make one with `find`."""

    name: DriverName = "qemu"

    def __init__(self, program: Path, accel: Accel, version: str) -> None:
        self.program, self.accel, self.version = program, accel, version
        self.taps: Callable[[str], int] | None = None  # opens a tap by its name; blocks for a moment
        self._children: dict[str, int] = {}  # by machine: ours to reap, so their numbers cannot be another's

    @classmethod
    def find(cls, *, kvm: bool, program: str = PROGRAM) -> QemuDriver:
        """`unsupported` says what to install. Blocks for a moment."""
        path = shutil.which(program)
        if path is None:
            raise DsecError("unsupported", f"{program} is not installed: apt-get install qemu-system-x86")
        version = next((word for word in _said(path, "--version").split() if word[:1].isdigit()), "0")
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if not kvm and numbers < TCG_MIN:
            raise DsecError(
                "unsupported",
                f"QEMU {version} without KVM corrupts its guests: install a newer one (bookworm-backports has 10)",
            )
        if kvm and "not found" in _said(path, *_TAKES_KVM):
            raise DsecError(
                "unsupported",
                f"QEMU {version} opens {DEVICE} itself, as a user who may not: install a newer one (bookworm-backports "
                "has 10)",
            )
        return cls(Path(path), "kvm" if kvm else "tcg", version)

    def address(self, spec: MachineSpec) -> AgentAddress:
        return agent_address(spec)

    async def start(self, spec: MachineSpec) -> QemuMachine:
        ram = _new_file(ram_path(spec), spec)
        os.truncate(ram, spec.memory)
        return await self._launch(spec, ram, _new_file(spec.directory / "state", spec), "boot")

    async def restore(self, spec: MachineSpec, saved: Snapshot, directory: Path, *, clone: bool) -> QemuMachine:
        await asyncio.to_thread(snapshot.check, saved, directory, self, spec.memory)
        state = _new_file(spec.directory / "state", spec)
        await asyncio.to_thread(shutil.copyfile, directory / "state", state)
        mode: Mode = "load" if "ram" not in saved.files else "clone" if clone else "resume"
        ram = directory / "ram" if mode == "clone" else ram_path(spec)
        if mode == "clone":
            ram.chmod(0o444)  # in a directory that only root can enter
        elif mode == "resume":
            ram.unlink(missing_ok=True)
            ram.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            await asyncio.to_thread(snapshot.copy_back, directory / "ram", ram)
            os.chown(ram, spec.limits.uid, spec.limits.gid)
        else:
            os.truncate(_new_file(ram, spec), spec.memory)
        machine = await self._launch(spec, ram, state, mode)
        try:
            await machine.qmp.run("migrate-incoming", uri=machine.uri)
            await _migrated(machine.qmp)
        except BaseException:
            await machine.release()
            raise
        return machine

    async def _launch(self, spec: MachineSpec, ram: Path, state: Path, mode: Mode) -> QemuMachine:
        with launch.Descriptors() as fds, contextlib.ExitStack() as stack:
            fds.log(spec.directory / "vmm.log")
            taps: list[int] = []
            if self.taps is not None:
                for nic in spec.nics:
                    taps.append(await asyncio.to_thread(self.taps, nic.tap))
                    stack.callback(os.close, taps[-1])
            words = [str(self.program)]
            words += arguments(spec, self.accel, fds, ram=ram, state=state, mode=mode, taps=taps)
            uri = state_name(fds)
            pid = proc.spawn(launch.wrapped(words, spec.limits), fds.passed)
        self._children[spec.id] = pid
        started = proc.start_time(pid)
        try:
            (spec.directory / "vmm.pid").write_text(f"{pid} {started} {uri} {mode}\n")
            qmp = await _connect(spec, pid)
            try:
                await qmp.run(
                    "migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}]
                )
            except BaseException:
                await qmp.close()
                raise
        except BaseException:
            await self.end(spec)
            raise
        return QemuMachine(spec, self.accel, self.version, pid, started or 0, qmp, uri, mode)

    def alive(self, spec: MachineSpec) -> tuple[int, int] | None:
        try:
            pid, started = (int(word) for word in (spec.directory / "vmm.pid").read_text().split()[:2])
        except (FileNotFoundError, ValueError):
            return None
        return (pid, started) if proc.start_time(pid) == started else None

    async def adopt(self, spec: MachineSpec, pid: int, started: int) -> QemuMachine:
        if proc.start_time(pid) != started:
            raise DsecError("sandbox_dead", "the VMM is gone")
        uri, mode = (spec.directory / "vmm.pid").read_text().split()[2:]
        return QemuMachine(spec, self.accel, self.version, pid, started, await _connect(spec, pid), uri, mode)

    async def end(self, spec: MachineSpec) -> None:
        child, found = self._children.get(spec.id), self.alive(spec)
        if child is not None:
            os.kill(child, signal.SIGKILL)
        elif found is not None:
            launch.kill(*found)
        pid = child or (found[0] if found is not None else 0)
        if pid and not await launch.gone(pid, END_S):
            raise DsecError("internal", f"QEMU {pid} does not die")
        self._children.pop(spec.id, None)
        for path in (*spec.directory.glob("*"), ram_path(spec)):
            if not path.is_dir():  # Firecracker makes one, where the configuration named that before
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            ram_path(spec).parent.rmdir()


def _said(path: str, *words: str) -> str:
    """What it says when it is run so, on stdout and stderr."""
    try:
        done = subprocess.run([path, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise DsecError("unsupported", f"{path} does not run: {exc}") from exc
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def agent_address(spec: MachineSpec) -> AgentAddress:
    return AgentAddress(spec.directory / "agent.sock", serial=True)


def ram_path(spec: MachineSpec) -> Path:
    """On tmpfs, or the guest's every write would go to disk."""
    return (spec.memory_dir or spec.directory) / f"{spec.id}.ram"


def _new_file(path: Path, spec: MachineSpec) -> Path:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchown(fd, spec.limits.uid, spec.limits.gid)
    finally:
        os.close(fd)
    return path


async def _connect(spec: MachineSpec, pid: int) -> Qmp:
    """The socket listens before QEMU runs, so connecting waits for it; its death is noticed at once."""
    connecting = asyncio.ensure_future(Qmp.connect(spec.directory / "qmp.sock", START_S))
    ending = asyncio.ensure_future(launch.ended(pid, START_S))
    try:
        await asyncio.wait((connecting, ending), return_when=asyncio.FIRST_COMPLETED)
        if connecting.done() and connecting.exception() is None:
            return connecting.result()
        words = launch.last_words(spec.directory / "vmm.log")
        raise DsecError("vmm", f"QEMU did not start: {words or 'it said nothing'}") from (
            connecting.exception() if connecting.done() else None
        )
    finally:
        ending.cancel()
        if not connecting.done():
            connecting.cancel()
        await asyncio.gather(connecting, ending, return_exceptions=True)


async def _migrated(qmp: Qmp) -> None:
    """Wait for the end of a save or a load."""
    try:
        async with asyncio.timeout(SAVE_S):
            while True:
                info = await qmp.run("query-migrate")
                status = info.get("status") if isinstance(info, dict) else None
                if status == "completed":
                    return
                if status in ("failed", "cancelled"):
                    raise DsecError("vmm", f"QEMU could not save or load: {str(info.get('error-desc', status))[:300]}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError as exc:
        raise DsecError("vmm", f"QEMU did not save or load within {SAVE_S:g} s") from exc
