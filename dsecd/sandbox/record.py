"""One sandbox as the registry keeps it, and what it becomes on the wire."""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct

from dsecd.sandbox.states import LIVE
from dsecd.wire import sandbox as wire


def now() -> float:
    """Seconds since boot, suspend included: no sandbox outlives a boot, and no clock step moves a deadline."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def as_unix(moment: float | None) -> float | None:
    """A `now()` moment as UNIX time, for people."""
    return None if moment is None else round(time.time() + moment - now(), 3)


class Record(Struct, kw_only=True):
    """Durable. Times are `now()` seconds; `boot` says of which boot. pid and ticks name the init process."""

    id: str
    spec: wire.Spec
    backend: str
    boot: str
    owner: wire.Owner
    state: wire.State = "creating"
    layers: list[str] = []
    slot: int = 0
    pid: int = 0
    ticks: int = 0
    created: float = 0.0
    running: float | None = None
    ended: float | None = None
    idle_since: float = 0.0
    total_deadline: float | None = None
    lease_deadline: float | None = None
    request: str = ""
    reason: str = ""
    commands: int = 0

    @property
    def live(self) -> bool:
        return self.state in LIVE

    def matches(self, labels: dict[str, str]) -> bool:
        mine = self.spec.labels
        return all(mine.get(key) == value for key, value in labels.items())


def public(record: Record, busy: int = 0) -> wire.Sandbox:
    """What a client sees."""
    spec = record.spec
    idle: float | None = None
    if spec.ttl_idle_s is not None and not busy and record.state == "running":
        idle = record.idle_since + spec.ttl_idle_s
    optional: dict[str, Any] = {
        "running_at": as_unix(record.running),
        "ended_at": as_unix(record.ended),
        "idle_deadline": as_unix(idle),
        "total_deadline": as_unix(record.total_deadline),
        "lease_deadline": as_unix(record.lease_deadline),
    }
    return wire.Sandbox(
        id=record.id,
        state=record.state,
        backend=record.backend,
        image=spec.image,
        layers=record.layers,
        name=spec.name,
        labels=spec.labels,
        owner=record.owner,
        created_at=as_unix(record.created) or 0.0,
        commands=record.commands,
        reason=record.reason,
        cpu=spec.cpu,
        memory_mb=spec.memory_mb,
        disk_mb=spec.disk_mb,
        pids=spec.pids,
        **optional,
    )
