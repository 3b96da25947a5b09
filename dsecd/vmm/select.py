"""Which VMM this host uses: what the config says, else Firecracker where it and KVM work, else QEMU."""

from __future__ import annotations

from dsecd.errors import DsecError
from dsecd.vmm import kvm
from dsecd.vmm.firecracker import FirecrackerDriver
from dsecd.vmm.machine import Driver
from dsecd.vmm.qemu import QemuDriver


def find_driver(wanted: str) -> Driver:
    """`unsupported` says why none works and what to install. Blocks: it tries KVM for real."""
    obstacle = kvm.usable()
    if wanted == "firecracker" or (wanted == "auto" and not obstacle):
        try:
            if obstacle:
                raise DsecError("unsupported", f"Firecracker needs KVM, and here {obstacle}: set vm_driver to qemu")
            driver = FirecrackerDriver.find()
            if driver.jailer is None:
                raise DsecError("unsupported", "Firecracker's jailer is not on the PATH: install both of one release")
        except DsecError:
            if wanted == "firecracker":
                raise
        else:
            return driver
    return QemuDriver.find(kvm=not obstacle)
