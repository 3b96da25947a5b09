"""The smallest KVM guest there is: one page, one instruction. Proves that /dev/kvm runs code, in the lab's tests."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct

# linux/kvm.h
KVM_GET_API_VERSION = 0xAE00
KVM_CREATE_VM = 0xAE01
KVM_GET_VCPU_MMAP_SIZE = 0xAE04
KVM_CREATE_VCPU = 0xAE41
KVM_SET_USER_MEMORY_REGION = 0x4020AE46
KVM_RUN = 0xAE80
KVM_GET_REGS = 0x8090AE81
KVM_SET_REGS = 0x4090AE82
KVM_GET_SREGS = 0x8138AE83
KVM_SET_SREGS = 0x4138AE84
KVM_EXIT_HLT = 5
EXIT_REASON_OFFSET = 8  # struct kvm_run

# mov $42, %ax; hlt
CODE = b"\xb8\x2a\x00\xf4"


def run_one() -> tuple[int, int]:
    """Run the code in real mode at address 0; the exit reason and the AX that it left."""
    kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    fds = [kvm]
    try:
        fds.append(vm := fcntl.ioctl(kvm, KVM_CREATE_VM, 0))
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            page[: len(CODE)] = CODE
            anchor = ctypes.c_char.from_buffer(page)
            region = struct.pack("IIQQQ", 0, 0, 0, mmap.PAGESIZE, ctypes.addressof(anchor))
            fcntl.ioctl(vm, KVM_SET_USER_MEMORY_REGION, region)
            fds.append(vcpu := fcntl.ioctl(vm, KVM_CREATE_VCPU, 0))
            enter_real_mode_at_zero(vcpu)
            with mmap.mmap(vcpu, fcntl.ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0)) as shared:
                fcntl.ioctl(vcpu, KVM_RUN, 0)
                (reason,) = struct.unpack_from("I", shared, EXIT_REASON_OFFSET)
            registers = fcntl.ioctl(vcpu, KVM_GET_REGS, bytes(144))
            del anchor  # the page can be unmapped only when nobody points into it
        return reason, struct.unpack_from("Q", registers)[0] & 0xFFFF
    finally:
        for fd in reversed(fds):
            os.close(fd)


def enter_real_mode_at_zero(vcpu: int) -> None:
    special = bytearray(fcntl.ioctl(vcpu, KVM_GET_SREGS, bytes(312)))
    struct.pack_into("QIH", special, 0, 0, 0xFFFF, 0)  # cs: base, limit, selector
    fcntl.ioctl(vcpu, KVM_SET_SREGS, bytes(special))
    registers = bytearray(144)
    struct.pack_into("QQ", registers, 16 * 8, 0, 2)  # rip; rflags with its one bit that is always set
    fcntl.ioctl(vcpu, KVM_SET_REGS, bytes(registers))
