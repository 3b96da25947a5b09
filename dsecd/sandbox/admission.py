"""Admission: whether this host has room for one more. Pure arithmetic; the node has the last word.

CPU is overcommitted (about 90 % of sandboxes use 5 % of what they ask for, paper §4); memory and disk by a factor of
the config; the number of sandboxes has a hard bound. That promises are many is fine until they are all called in: then
the brake holds new ones off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.sandbox.brake import Brake
from dsecd.wire.access import ROOT
from dsecd.wire.sandbox import Spec


class Capacity(Struct, frozen=True, kw_only=True):
    """What may be promised in all. MiB, cores."""

    sandboxes: int
    cpu: float
    memory_mb: int
    disk_mb: int
    cpu_each: float
    memory_each_mb: int


class Allowance(Protocol):
    """What projects may hold (dsecd.tenants.ledger)."""

    def allow(self, project: str, spec: Spec) -> None: ...

    def take(self, project: str, spec: Spec) -> None: ...

    def give_back(self, project: str, spec: Spec) -> None: ...


class Admission:
    """Promises made so far, by the host and to each project. allowance: None: projects have no quotas."""

    def __init__(self, capacity: Capacity, cordon: Path, brake: Brake) -> None:
        self.capacity = capacity
        self.brake = brake
        self._cordon = cordon
        self.allowance: Allowance | None = None
        self.draining = False  # as long as this daemon lives, or until somebody takes it back
        self.count = 0
        self.cpu = 0.0
        self.memory_mb = 0
        self.disk_mb = 0

    @property
    def cordoned(self) -> bool:
        """No new ones: a file says so, which outlives the daemon, or this daemon's last hour has come."""
        return self.draining or self._cordon.exists()

    def cordon(self, on: bool) -> None:
        if on:
            self._cordon.touch()
        else:
            self._cordon.unlink(missing_ok=True)
            self.draining = False

    def check(self, spec: Spec, project: str = ROOT) -> None:
        """`invalid` when no empty host of this size could run it, `capacity` when this one has no room now, `quota`
        when its project has none. What passes counts as begun, so it is taken at once."""
        c = self.capacity
        if self.cordoned:
            raise DsecError(
                "capacity",
                f"this host takes no new sandboxes: it is {'being emptied' if self.draining else 'cordoned'}",
                detail={"short": ["cordon"]},
            )
        if spec.cpu > c.cpu_each:
            raise DsecError("invalid", f"cpu {spec.cpu:g}: this host has {c.cpu_each:g} cores")
        if spec.memory_mb > c.memory_each_mb:
            raise DsecError("invalid", f"memory_mb {spec.memory_mb}: this host has {c.memory_each_mb} MiB")
        if spec.disk_mb > c.disk_mb:
            raise DsecError("invalid", f"disk_mb {spec.disk_mb}: this host can give {c.disk_mb} MiB")
        if pressure := self.brake.reason():
            raise DsecError("capacity", f"this host is busy: {pressure}", detail={"short": ["pressure"]})
        short = self._short(spec)
        if short:
            raise DsecError("capacity", f"this host is short of {', '.join(short)}", detail={"short": list(short)})
        if self.allowance is not None:
            self.allowance.allow(project, spec)

    def _short(self, spec: Spec) -> dict[str, float]:
        c = self.capacity
        left = {
            "sandboxes": c.sandboxes - self.count - 1,
            "cpu": c.cpu - self.cpu - spec.cpu,
            "memory_mb": c.memory_mb - self.memory_mb - spec.memory_mb,
            "disk_mb": c.disk_mb - self.disk_mb - spec.disk_mb,
        }
        return {what: value for what, value in left.items() if value < 0}

    def take(self, spec: Spec, project: str = ROOT) -> None:
        if self.allowance is not None:
            self.allowance.take(project, spec)
        self.count += 1
        self.cpu += spec.cpu
        self.memory_mb += spec.memory_mb
        self.disk_mb += spec.disk_mb

    def give_back(self, spec: Spec, project: str = ROOT) -> None:
        if self.allowance is not None:
            self.allowance.give_back(project, spec)
        self.count -= 1
        self.cpu -= spec.cpu
        self.memory_mb -= spec.memory_mb
        self.disk_mb -= spec.disk_mb
