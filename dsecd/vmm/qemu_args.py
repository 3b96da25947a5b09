"""QEMU's command line for one machine. Pure but for the descriptors it opens.

q35, because `-M microvm` maps no pmem device (QEMU 10). Files go in as descriptors: QEMU runs as a user who may neither
see nor open their paths. RAM and pmem files are named through /proc/self/fd, where the file's own mode decides; disks
through fd sets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from dsecd.vmm.kvm import DEVICE
from dsecd.vmm.launch import Descriptors
from dsecd.vmm.machine import Accel, Drive, MachineSpec

MIB: Final = 1 << 20
# Reboot through the triple fault is what `-no-reboot` turns into an end, whatever the guest's state.
# swiotlb: a guest with devices above 4 GiB (all with pmem) sets 64 MiB aside for bounces that virtio never makes.
# cryptomgr.notests: a distribution's kernel tries its ciphers at every boot.
_KERNEL: Final = (
    "console=ttyS0", "quiet", "reboot=t", "panic=-1", "random.trust_cpu=on", "no_timer_check", "swiotlb=noforce",
    "cryptomgr.notests",
)  # fmt: skip
# A CPU that is emulated speculates about nothing, and what is done against that costs it most: with page table
# isolation every system call empties the emulator's TLB. A fifth level of page tables makes its page walks longer.
# With notests, Debian's cloud kernel reaches /init after 2.3 s of CPU instead of 4.7.
_TCG_KERNEL: Final = ("mitigations=off",)
_TCG_CPU: Final = "max,-la57"
# boot: RAM is a new file. resume: a copy of a saved one. clone: a template's file, mapped privately. load: an empty
# one, mapped privately, because what is in the saved state can only go there; so it is when a clone was saved.
Mode = Literal["boot", "resume", "clone", "load"]
SHARED: Final[frozenset[str]] = frozenset({"boot", "resume"})
_TB_MIB: Final = 48  # TCG's code cache; its default is an eighth of the host's memory
AGENT_PORT: Final = "dsec.agent"
CONSOLE_BYTES: Final = 65_536
_KVM_SET: Final = 200  # sets of disks count from 0, those of what lies below them from 100


def arguments(
    spec: MachineSpec, accel: Accel, fds: Descriptors, *, ram: Path, state: Path, mode: Mode, taps: Sequence[int] = ()
) -> list[str]:
    """All but the program. taps: open ones of `spec.nics`, where they are not of the machine's namespace."""
    pmem = sum(path.stat().st_size for path in spec.pmem)
    out = [
        "-nodefaults", "-no-user-config", "-display", "none", "-name", spec.id,
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-M", "q35,memory-backend=ram,usb=off,vmport=off,hpet=off,graphics=off",
        *_accelerated(accel, fds),
        "-cpu", "host" if accel == "kvm" else _TCG_CPU,
        "-smp", str(spec.vcpus),
        "-m", f"size={spec.memory // MIB}M,maxmem={(spec.memory + pmem) // MIB + 1024}M,slots=0",
    ]  # fmt: skip
    if not spec.reboots:
        out += ["-no-reboot"]
    out += _ram(fds, ram, spec.memory, mode)
    if spec.kernel is not None:
        out += ["-kernel", _name(fds.open(spec.kernel))]
        out += ["-append", " ".join((*_KERNEL, *(_TCG_KERNEL if accel == "tcg" else ()), *spec.cmdline))]
    if spec.initrd is not None:
        out += ["-initrd", _name(fds.open(spec.initrd))]
    out += _control(spec, fds)
    for number, path in enumerate(spec.pmem):
        size, name = path.stat().st_size, _name(fds.open(path))
        out += ["-object", f"memory-backend-file,id=pm{number},mem-path={name},size={size},share=on,readonly=on"]
        out += ["-device", f"virtio-pmem-pci,memdev=pm{number},id=pmem{number}"]
    for number, drive in enumerate(spec.drives):
        out += _drive(number, drive, fds)
    for number, nic in enumerate(spec.nics):
        how = f"fd={fds.give(taps[number])}" if taps else f"ifname={nic.tap},script=no,downscript=no"
        out += ["-netdev", f"tap,id=net{number},{how}"]
        out += ["-device", f"virtio-net-pci,netdev=net{number},mac={nic.mac},romfile="]
    reporting = "on" if spec.reporting else "off"
    out += ["-device", f"virtio-balloon-pci,id=balloon,free-page-reporting={reporting},deflate-on-oom=on"]
    out += ["-device", "virtio-rng-pci"]
    if spec.display:
        # Two of each input device: the guest has a driver for one of them, and QEMU sends events to that one.
        out += ["-vnc", "none", "-device", "VGA", "-device", "virtio-keyboard-pci", "-device", "virtio-tablet-pci"]
        out += ["-device", "qemu-xhci", "-device", "usb-kbd", "-device", "usb-tablet"]
    # One descriptor for saving and loading: QEMU cannot make files.
    fds.open(state, os.O_RDWR)
    if mode != "boot":
        out += ["-incoming", "defer"]
    return out


def state_name(fds: Descriptors) -> str:
    """The URI of the state file, which `arguments` opened last."""
    return f"file:/proc/self/fd/{max(fds.passed)}"


def _name(number: int) -> str:
    return f"/proc/self/fd/{number}"


def _accelerated(accel: Accel, fds: Descriptors) -> list[str]:
    """KVM's device is handed over, too: QEMU's user may not open it."""
    if accel != "kvm":
        return ["-accel", f"tcg,thread=multi,tb-size={_TB_MIB}"]
    number = fds.open(Path(DEVICE), os.O_RDWR)
    return ["-add-fd", f"fd={number},set={_KVM_SET}", "-accel", f"kvm,device=/dev/fdset/{_KVM_SET}"]


def _ram(fds: Descriptors, ram: Path, size: int, mode: Mode) -> list[str]:
    if mode == "clone":
        # readonly: a discard of the balloon would punch holes into the template.
        name, how = _name(fds.open(ram)), "share=off,readonly=on,rom=off"
    else:
        name, how = _name(fds.open(ram, os.O_RDWR)), "share=off" if mode == "load" else "share=on"
    return ["-object", f"memory-backend-file,id=ram,mem-path={name},size={size},{how}"]


def _control(spec: MachineSpec, fds: Descriptors) -> list[str]:
    qmp, agent = fds.listen(spec.directory / "qmp.sock"), fds.listen(spec.directory / "agent.sock")
    guest_agent: list[str] = []
    if spec.guest_agent:
        number = fds.listen(spec.directory / "qga.sock")
        guest_agent = ["-chardev", f"socket,id=qga,fd={number},server=on,wait=off",
                       "-device", "virtserialport,chardev=qga,name=org.qemu.guest_agent.0"]  # fmt: skip
    return [
        "-chardev", f"socket,id=qmp,fd={qmp},server=on,wait=off", "-mon", "chardev=qmp,mode=control",
        "-chardev", f"ringbuf,id=console,size={CONSOLE_BYTES}", "-serial", "chardev:console",
        "-device", "virtio-serial-pci,max_ports=4",
        "-chardev", f"socket,id=agent,fd={agent},server=on,wait=off",
        "-device", f"virtserialport,chardev=agent,name={AGENT_PORT},id={AGENT_PORT}", *guest_agent,
    ]  # fmt: skip


def _drive(number: int, drive: Drive, fds: Descriptors) -> list[str]:
    # A private disk past the host's page cache: the guest caches it already. Shared files are cached once for all.
    child, direct = fds.open_direct(drive.path) if not drive.read_only else (fds.open(drive.path), False)
    more: list[str] = []
    node: dict[str, Any] = {
        "driver": drive.format,
        "node-name": f"disk{number}",
        "read-only": drive.read_only,
        "discard": "unmap" if drive.discard else "ignore",
        "cache": {"direct": direct},
        "file": {
            "driver": "file", "filename": f"/dev/fdset/{number}", "locking": "off",
            "read-only": drive.read_only, "discard": "unmap" if drive.discard else "ignore",
            "cache": {"direct": direct},
        },
    }  # fmt: skip
    if drive.backing is not None:
        below = 100 + number
        more = ["-add-fd", f"fd={fds.open(drive.backing)},set={below}"]
        file = {"driver": "file", "filename": f"/dev/fdset/{below}", "locking": "off", "read-only": True,
                "cache": {"direct": False}}  # fmt: skip
        node["backing"] = {"driver": "qcow2", "read-only": True, "file": file, "backing": None,
                           "cache": {"direct": False}}  # fmt: skip
    elif drive.format == "qcow2":
        node["backing"] = None
    return [
        *more, "-add-fd", f"fd={child},set={number}",
        "-blockdev", msgspec.json.encode(node).decode(),
        "-device", f"virtio-blk-pci,drive=disk{number},id=vd{number}",
    ]  # fmt: skip
