"""Admission: whether this host has room for one more. Pure arithmetic; the node has the last word.

CPU is overcommitted (about 90 % of sandboxes use 5 % of what they ask for, paper §4); memory and disk by a factor of
the config; the number of sandboxes has a hard bound.
"""

from __future__ import annotations

from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.wire.sandbox import Spec


class Capacity(Struct, frozen=True, kw_only=True):
    """What may be promised in all. MiB, cores."""

    sandboxes: int
    cpu: float
    memory_mb: int
    disk_mb: int
    cpu_each: float
    memory_each_mb: int


class Admission:
    """Promises made so far."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.count = 0
        self.cpu = 0.0
        self.memory_mb = 0
        self.disk_mb = 0

    def check(self, spec: Spec) -> None:
        """`invalid` when no empty host of this size could run it, `capacity` when this one has no room now."""
        c = self.capacity
        if spec.cpu > c.cpu_each:
            raise DsecError("invalid", f"cpu {spec.cpu:g}: this host has {c.cpu_each:g} cores")
        if spec.memory_mb > c.memory_each_mb:
            raise DsecError("invalid", f"memory_mb {spec.memory_mb}: this host has {c.memory_each_mb} MiB")
        if spec.disk_mb > c.disk_mb:
            raise DsecError("invalid", f"disk_mb {spec.disk_mb}: this host can give {c.disk_mb} MiB")
        short = self._short(spec)
        if short:
            raise DsecError("capacity", f"this host is short of {', '.join(short)}", detail={"short": list(short)})

    def _short(self, spec: Spec) -> dict[str, float]:
        c = self.capacity
        left = {
            "sandboxes": c.sandboxes - self.count - 1,
            "cpu": c.cpu - self.cpu - spec.cpu,
            "memory_mb": c.memory_mb - self.memory_mb - spec.memory_mb,
            "disk_mb": c.disk_mb - self.disk_mb - spec.disk_mb,
        }
        return {what: value for what, value in left.items() if value < 0}

    def take(self, spec: Spec) -> None:
        self.count += 1
        self.cpu += spec.cpu
        self.memory_mb += spec.memory_mb
        self.disk_mb += spec.disk_mb

    def give_back(self, spec: Spec) -> None:
        self.count -= 1
        self.cpu -= spec.cpu
        self.memory_mb -= spec.memory_mb
        self.disk_mb -= spec.disk_mb
