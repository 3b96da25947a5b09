"""Which driver, by looking at what the host has (never at versions), and opening it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsecd.disk import btrfs, btrfs_ioctl, image, linux, quota
from dsecd.disk.btrfs import BtrfsPool, quota_mode
from dsecd.disk.pool import DiskPool, PoolConfig
from dsecd.disk.prjquota import ProjectQuotaPool
from dsecd.errors import DsecError

DRIVERS: Final = ("btrfs", "prjquota", "loop-btrfs")


@dataclass(frozen=True)
class Probe:
    """What can be used below a state directory: `driver`, or None; and for each driver that cannot, why."""

    driver: str | None
    why_not: dict[str, str]


def probe(state: Path) -> Probe:
    """Touches nothing. An existing image keeps being used: sandboxes live on it."""
    why_not = {name: reason for name in DRIVERS if (reason := _missing(name, state)) is not None}
    usable = [name for name in DRIVERS if name not in why_not]
    if image.image_path(state).exists() and "loop-btrfs" in usable:
        return Probe("loop-btrfs", why_not)
    return Probe(usable[0] if usable else None, why_not)


def _missing(driver: str, state: Path) -> str | None:
    if driver == "loop-btrfs":
        return image.missing()
    fstype = linux.mount_of(state).fstype
    if driver == "prjquota":
        if fstype not in ("xfs", "ext4"):
            return f"{state} is on {fstype}, not on xfs or ext4"
        return None if quota.enforced(state) else f"the {fstype} of {state} is not mounted with project quota"
    if fstype != "btrfs":
        return f"{state} is on {fstype}, not on btrfs"
    # Switching quotas on changes the host's own file system (simple quotas even its format): only when told to.
    if _btrfs_quota_mode(state) is None:
        return f"the btrfs of {state} has quotas off (set the driver to btrfs to have them switched on)"
    return None


def _btrfs_quota_mode(state: Path) -> str | None:
    with btrfs.directory(state) as fd:
        return quota_mode(Path("/sys/fs/btrfs") / btrfs_ioctl.fsid(fd))


def open_pool(state: Path, config: PoolConfig | None = None) -> DiskPool:
    """Open, make or adopt the pool of a state directory. Safe to repeat after a crash at any point."""
    config = config or PoolConfig()
    driver = _chosen(state) if config.driver == "auto" else config.driver
    try:
        return _open(state, driver, config)
    except OSError as error:
        raise DsecError("internal", f"open the disk pool ({driver}) of {state}: {error}") from error


def _chosen(state: Path) -> str:
    found = probe(state)
    if found.driver is None:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.why_not.items())
        raise DsecError("unsupported", f"no way to limit disk space below {state}: {reasons}")
    return found.driver


def _open(state: Path, driver: str, config: PoolConfig) -> DiskPool:
    if driver == "loop-btrfs":
        reason = image.missing()
        if reason is not None:
            raise DsecError("unsupported", f"disk driver loop-btrfs: {reason}")
        return image.open_image_pool(state, config)
    root = state / "pool"
    if driver not in ("btrfs", "prjquota"):
        raise DsecError("invalid", f"no disk driver {driver!r}; there are auto, {', '.join(DRIVERS)}")
    root.mkdir(mode=0o711, exist_ok=True)
    root.chmod(0o711)
    return BtrfsPool(root) if driver == "btrfs" else ProjectQuotaPool(root)


def remove_pool(state: Path) -> None:
    """Delete a loop image and its mount, spaces and all; a pool on the host's own file system must be empty already."""
    if image.image_path(state).exists() or linux.mounted_at(image.mount_point(state)) is not None:
        image.remove_image_pool(state)
    elif (state / "pool").is_dir():
        (state / "pool").rmdir()
