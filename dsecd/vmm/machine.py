"""What every VMM driver gives: one `Machine` for one virtual machine, and what it is made from.

A driver starts the VMM as a process of its own (uid, cgroup, network namespace), owns its run directory and its
sockets, and knows nothing of sandboxes, images or requests. Whoever starts, restores or adopts a machine calls `end`,
also after a failure. All paths are the host's; none comes from a guest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from dsecd.agent.address import AgentAddress

DriverName = Literal["firecracker", "qemu"]
Accel = Literal["kvm", "tcg"]


class Drive(Struct, frozen=True):
    """A virtio-blk disk; the guest sees them as vda, vdb... in order. `format` is raw for microVMs.

    backing: of an overlay, the read-only qcow2 file below it (what its own header says is not looked at).
    """

    path: Path
    read_only: bool = False
    format: Literal["raw", "qcow2"] = "raw"
    discard: bool = True
    backing: Path | None = None


class Nic(Struct, frozen=True):
    """A virtio-net card on a tap device: of the VMM's network namespace, or what the driver is given (QEMU: an open
    one, `taps`; Firecracker: one that is there while it is opened, `lend`)."""

    tap: str
    mac: str


class Limits(Struct, frozen=True):
    """What the VMM process itself may use on the host: its own cgroup, made by whoever starts the machine."""

    cgroup: str = ""  # name below the sandboxes' parent cgroup; empty: none of its own
    groups: tuple[Path, ...] = ()  # the directories of that cgroup, one for each hierarchy: the VMM joins them first
    uid: int = 0
    gid: int = 0
    netns: str = ""  # path; empty: a new, empty one


class MachineSpec(Struct, frozen=True, kw_only=True):
    """One machine. memory: bytes, a multiple of 2 MiB. pmem: read-only files of 2 MiB multiples; pmem0, pmem1..."""

    id: str
    directory: Path  # exists, 0700, empty; all sockets and state of the VMM go there
    vcpus: int
    cpu: float = 1.0  # host cores that the VMM may use; not its business, but that of whoever makes its cgroup
    memory: int
    kernel: Path | None  # an uncompressed vmlinux (PVH); None: the first disk has a boot loader (QEMU)
    initrd: Path | None = None
    cmdline: tuple[str, ...] = ()
    pmem: tuple[Path, ...] = ()
    drives: tuple[Drive, ...] = ()
    memory_dir: Path | None = None  # on tmpfs: where guest RAM lies as a file (QEMU)
    nics: tuple[Nic, ...] = ()
    reporting: bool = True  # balloon with free page reporting
    # Full VMs (QEMU):
    display: bool = False  # a screen, a keyboard and a tablet; VNC for whoever is handed a socket
    guest_agent: bool = False  # a port for QEMU's guest agent: qga.sock in `directory`
    service: bool = False  # our agent is a service of the guest's own init, which may start it anew
    reboots: bool = False  # a reboot of the guest does not end it
    limits: Limits = Limits()


class Snapshot(Struct, frozen=True, kw_only=True):
    """A saved machine on disk, checked before it is loaded. `files` maps a file's name in `directory` to its sha256."""

    driver: DriverName
    version: str  # of the VMM (Firecracker: of the snapshot format)
    cpu: str  # model of the host's CPU
    accel: Accel
    memory: int
    files: dict[str, str]


class Machine(Protocol):
    """A running (or paused) virtual machine. Errors are of kind `vmm`, or `sandbox_dead` when its process is gone."""

    spec: MachineSpec
    driver: DriverName
    accel: Accel
    pid: int
    started: int  # the process's start time, proc.start_time

    @property
    def agent(self) -> AgentAddress: ...

    async def pause(self) -> None:
        """Stop the vCPUs; the process stays."""

    async def resume(self) -> None:
        """Let the vCPUs go on."""

    async def snapshot(self, directory: Path) -> Snapshot:
        """Save memory and devices into an empty directory. The machine is paused before, and paused after."""

    async def set_balloon(self, target: int) -> None:
        """Ask the guest for all but `target` bytes of its memory."""

    async def console(self) -> bytes:
        """The last 64 KiB that the guest wrote to its serial console. Data, never trusted."""

    async def release(self) -> None:
        """Let go of the control connection (the daemon stops); the machine goes on."""


class Driver(Protocol):
    """One VMM program of this host."""

    name: DriverName
    accel: Accel
    version: str

    def address(self, spec: MachineSpec) -> AgentAddress:
        """Where the agent of such a machine is, or will be, reached."""

    async def start(self, spec: MachineSpec) -> Machine:
        """Boot. Returns when the vCPUs run, not when the guest answers."""

    async def restore(self, spec: MachineSpec, snapshot: Snapshot, directory: Path, *, clone: bool) -> Machine:
        """Start from a snapshot, with its vCPUs stopped: `resume` lets them go on.

        clone: others use the same snapshot: its files stay as they are, and memory is shared copy-on-write.
        """

    def alive(self, spec: MachineSpec) -> tuple[int, int] | None:
        """(pid, start time) of the machine's process, as its run directory tells; None: there is none."""

    async def adopt(self, spec: MachineSpec, pid: int, started: int) -> Machine:
        """Take back a machine that an earlier daemon started; `sandbox_dead` when it is gone."""

    async def end(self, spec: MachineSpec) -> None:
        """Kill what runs of it and remove the run directory's contents: at any point, and twice."""
