"""What a guest kernel can do, told from its configuration, never from its version."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final, Literal

from dsecd.errors import DsecError

How = Literal["built-in", "module", "absent"]

# Feature: the options that it takes, all of them; of a group in one string, any.
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "pvh": ("PVH",),
    "acpi": ("ACPI",),
    "initramfs": ("BLK_DEV_INITRD",),
    "erofs": ("EROFS_FS",),
    "overlay": ("OVERLAY_FS",),
    "ext4": ("EXT4_FS",),
    "cgroups": ("MEMCG", "CGROUP_PIDS", "CFS_BANDWIDTH"),
    "seccomp": ("SECCOMP_FILTER",),
    "pmem": ("VIRTIO_PMEM", "BLK_DEV_PMEM"),
    "dax": ("FS_DAX", "DAX"),
    "blk": ("VIRTIO_BLK",),
    "net": ("VIRTIO_NET",),
    "serial": ("VIRTIO_CONSOLE",),
    "vsock": ("VIRTIO_VSOCKETS",),
    "mmio": ("VIRTIO_MMIO",),
    "rng": ("HW_RANDOM_VIRTIO",),
    "balloon": ("VIRTIO_BALLOON",),
    "reporting": ("PAGE_REPORTING", "VIRTIO_BALLOON"),
    "damon": ("DAMON_PADDR", "DAMON_SYSFS"),
    "damon-reclaim": ("DAMON_RECLAIM",),
    "vmgenid": ("VMGENID",),
    "screen": ("DRM_BOCHS DRM_VIRTIO_GPU", "FRAMEBUFFER_CONSOLE"),
}
# Without these no microVM can start, whatever it is given.
MICROVM: Final = ("initramfs", "erofs", "overlay", "ext4", "cgroups", "seccomp")


def features_of(config: str, modules: Collection[str] | None = None) -> dict[str, How]:
    """By feature. modules: those that the initramfs will have; an option that is a module and not there is absent."""
    values = dict(re.findall(r"^CONFIG_(\w+)=([ym])$", config, re.MULTILINE))
    found: dict[str, How] = {}
    for feature, options in OPTIONS.items():
        best = [_best(group.split(), values, modules) for group in options]
        found[feature] = "absent" if "absent" in best else "module" if "module" in best else "built-in"
    return found


def _best(group: list[str], values: Mapping[str, str], modules: Collection[str] | None) -> How:
    kinds = [values.get(option) for option in group]
    if "y" in kinds:
        return "built-in"
    loadable = [option for option in group if values.get(option) == "m"]
    if any(modules is None or MODULE_OF.get(option) in modules for option in loadable):
        return "module"
    return "absent"


# The file that an option becomes when it is a module.
MODULE_OF: Final[Mapping[str, str]] = {
    "EROFS_FS": "erofs", "OVERLAY_FS": "overlay", "EXT4_FS": "ext4", "VIRTIO_PMEM": "virtio_pmem",
    "BLK_DEV_PMEM": "nd_pmem", "VIRTIO_BLK": "virtio_blk", "VIRTIO_NET": "virtio_net",
    "VIRTIO_CONSOLE": "virtio_console", "VIRTIO_VSOCKETS": "vmw_vsock_virtio_transport", "VIRTIO_MMIO": "virtio_mmio",
    "HW_RANDOM_VIRTIO": "virtio_rng", "VIRTIO_BALLOON": "virtio_balloon",
}  # fmt: skip


def need(name: str, features: Mapping[str, How], wanted: Collection[str]) -> None:
    """DsecError `vmm` that says what kernel `name` lacks of the wanted features, and what to do."""
    lacking = [feature for feature in wanted if features.get(feature, "absent") == "absent"]
    if lacking:
        raise DsecError(
            "vmm",
            f"the guest kernel {name!r} has no {', '.join(lacking)}: get another with `dsecctl kernel import-deb`",
            detail={"lacking": lacking},
        )
