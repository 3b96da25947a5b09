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
    """Durable. Times are `now()` seconds; `boot` says of which boot. pid and ticks name the init process.

    devices: CDI names of what it has leased, by pool. networked: it has a link, whatever its rules say now. paused_at:
    since when it is paused. stood: seconds of all pauses before. reclaimed: bytes that the last one gave back.
    fleeting: it lives for one command.
    """

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
    devices: dict[str, tuple[str, ...]] = {}
    networked: bool = False
    choice: wire.Choice | None = None
    fleeting: bool = False
    paused_at: float | None = None
    stood: float = 0.0
    reclaimed: int = 0

    @property
    def frozen(self) -> bool:
        """Whether it is a container that is paused, or was on its way there or back."""
        return self.backend == "container" and self.state in ("pausing", "paused", "resuming")

    @property
    def clock(self) -> float:
        """`now()` as its total deadline and its lease count it: it stands still while they do."""
        return now() if self.paused_at is None or self.spec.paused_clock == "running" else self.paused_at

    @property
    def awake(self) -> float:
        """Seconds on a clock that stands still in pauses, whatever its deadlines do."""
        return (now() if self.paused_at is None else self.paused_at) - self.stood

    def moment(self, deadline: float | None) -> float | None:
        """When that will be, in `now()` seconds; of a clock that stands still: if it went on now."""
        return None if deadline is None else deadline + now() - self.clock

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
        "paused_at": as_unix(record.paused_at),
        "total_deadline": as_unix(record.moment(record.total_deadline)),
        "lease_deadline": as_unix(record.moment(record.lease_deadline)),
    }
    return wire.Sandbox(
        id=record.id,
        state=record.state,
        backend=record.backend,
        image=spec.image,
        layers=record.layers,
        name=spec.name,
        job=spec.job,
        labels=spec.labels,
        owner=record.owner,
        created_at=as_unix(record.created) or 0.0,
        commands=record.commands,
        reason=record.reason,
        cpu=spec.cpu,
        memory_mb=spec.memory_mb,
        disk_mb=spec.disk_mb,
        pids=spec.pids,
        devices=record.devices,
        choice=record.choice,
        **optional,
    )
