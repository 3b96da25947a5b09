"""Can this host's /dev/kvm run an ordinary guest? Found out by running one, for a few instructions.

That the device opens says little. Hosts that are guests of a paravirtual hypervisor have a /dev/kvm which takes kernels
made for it, and interprets the rest: such a one passes every call and even runs real-mode code, yet no distribution's
kernel gets through its early boot there. So the guest here is in long mode, with paging, and executes an instruction
(popcnt) that a processor has and KVM's interpreter has not.

Structures and numbers: linux/kvm.h. Run as a program, it is the probe itself: a child, because KVM_RUN on a broken host
may never return. It needs the standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import subprocess
import sys
from contextlib import ExitStack
from typing import Final

DEVICE: Final = "/dev/kvm"
PROBE_S: Final = 30.0  # five under emulation on a busy host

_API_VERSION: Final = 12
_GET_API_VERSION: Final = 0xAE00
_CREATE_VM: Final = 0xAE01
_GET_VCPU_MMAP_SIZE: Final = 0xAE04
_CREATE_VCPU: Final = 0xAE41
_SET_USER_MEMORY_REGION: Final = 0x4020AE46
_RUN: Final = 0xAE80
_GET_REGS: Final = 0x8090AE81
_SET_REGS: Final = 0x4090AE82
_GET_SREGS: Final = 0x8138AE83
_SET_SREGS: Final = 0x4138AE84
_GET_SUPPORTED_CPUID: Final = 0xC008AE05
_SET_CPUID2: Final = 0x4008AE90
_EXIT_HLT: Final = 5

_CPUID_ENTRIES: Final = 256

_MEMORY: Final = 4 * mmap.PAGESIZE
# mov $0xf0f0, %ecx; popcnt %ecx, %eax; hlt
_CODE: Final = b"\xb9\xf0\xf0\x00\x00\xf3\x0f\xb8\xc1\xf4"
_ANSWER: Final = 8
# Page tables: one 2 MiB page at 0, through the tables at 0x1000, 0x2000, 0x3000.
_TABLES: Final = ((0x1000, 0x2003), (0x2000, 0x3003), (0x3000, 0x83))


def usable() -> str:
    """Empty, or why virtual machines cannot use KVM here. Blocks for a moment: call it in a thread."""
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return f"{DEVICE}: {exc.strerror}"
    argv = [sys.executable, "-I", "-S", __file__, DEVICE]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{DEVICE} did not run a small guest within {PROBE_S:g} s"
    if done.returncode == 0:
        return ""
    said = done.stdout.decode("utf-8", "replace").strip()
    return said or f"the probe of {DEVICE} ended with status {done.returncode}"


def probe(device: str) -> str:
    """Run the guest in this process: empty when its answer is right. OSError when a call fails."""
    with ExitStack() as stack:
        kvm = _owned(stack, os.open(device, os.O_RDWR | os.O_CLOEXEC))
        if (version := fcntl.ioctl(kvm, _GET_API_VERSION)) != _API_VERSION:
            return f"{device} speaks version {version} of the interface, not {_API_VERSION}"
        machine = _owned(stack, fcntl.ioctl(kvm, _CREATE_VM, 0))
        memory = stack.enter_context(mmap.mmap(-1, _MEMORY))
        memory[: len(_CODE)] = _CODE
        for at, entry in _TABLES:
            struct.pack_into("Q", memory, at, entry)
        anchor = ctypes.c_char.from_buffer(memory)
        region = struct.pack("IIQQQ", 0, 0, 0, _MEMORY, ctypes.addressof(anchor))
        del anchor  # the memory can be unmapped only when nobody points into it
        fcntl.ioctl(machine, _SET_USER_MEMORY_REGION, region)
        vcpu = _owned(stack, fcntl.ioctl(machine, _CREATE_VCPU, 0))
        # What a VMM does, too: without it, a vCPU has no long mode to enter.
        cpuid = bytearray(8 + 40 * _CPUID_ENTRIES)
        struct.pack_into("I", cpuid, 0, _CPUID_ENTRIES)
        fcntl.ioctl(kvm, _GET_SUPPORTED_CPUID, cpuid)
        fcntl.ioctl(vcpu, _SET_CPUID2, cpuid)
        _enter_long_mode(vcpu)
        shared = stack.enter_context(mmap.mmap(vcpu, fcntl.ioctl(kvm, _GET_VCPU_MMAP_SIZE)))
        fcntl.ioctl(vcpu, _RUN, 0)
        (reason,) = struct.unpack_from("I", shared, 8)  # struct kvm_run: exit_reason
        (rax,) = struct.unpack_from("Q", fcntl.ioctl(vcpu, _GET_REGS, bytes(144)))
    if reason != _EXIT_HLT or rax & 0xFFFFFFFF != _ANSWER:
        return f"{device} does not run ordinary guests (a small one ended with exit reason {reason})"
    return ""


def _owned(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _enter_long_mode(vcpu: int) -> None:
    """64-bit code at address 0, at the highest privilege, as after a kernel's own switch."""
    # struct kvm_segment: base, limit, selector, type, present, dpl, db, s, l, g, avl, unusable, padding
    code = struct.pack("QIH10B", 0, 0xFFFFFFFF, 8, 11, 1, 0, 0, 1, 1, 1, 0, 0, 0)
    data = struct.pack("QIH10B", 0, 0xFFFFFFFF, 16, 3, 1, 0, 1, 1, 0, 1, 0, 0, 0)
    special = bytearray(fcntl.ioctl(vcpu, _GET_SREGS, bytes(312)))
    special[: 6 * 24] = code + 5 * data  # cs; ds, es, fs, gs, ss
    pe, pg, pae, lme, lma = 1 << 0, 1 << 31, 1 << 5, 1 << 8, 1 << 10
    struct.pack_into("5QQ", special, 224, pe | pg, 0, 0x1000, pae, 0, lme | lma)  # cr0, cr2, cr3, cr4, cr8; efer
    fcntl.ioctl(vcpu, _SET_SREGS, bytes(special))
    registers = bytearray(144)
    struct.pack_into("QQ", registers, 16 * 8, 0, 2)  # rip; rflags with its one bit that is always set
    fcntl.ioctl(vcpu, _SET_REGS, bytes(registers))


def main() -> int:
    """The child: says why not on stdout."""
    device = sys.argv[1]
    try:
        why = probe(device)
    except OSError as exc:
        why = f"{device}: {exc.strerror}"
    sys.stdout.write(why)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
