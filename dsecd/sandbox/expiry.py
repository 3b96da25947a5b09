"""When a sandbox's time is over, and what its clocks do while it is paused. A record in, a moment out: no I/O here.

The idle TTL counts while it runs and nothing runs in it. Total TTL and lease stand still while it is paused, or go on,
as its spec has it (`paused_clock`). A lease begins anew when it is resumed: whoever asked for that is alive, and must
be given the time to renew it.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from dsecd.sandbox.record import Record, now

AGAIN_S: Final = 60.0


class End(NamedTuple):
    """moment: in `now()` seconds."""

    moment: float
    which: Literal["idle", "total", "lease"]
    why: str


def next_end(record: Record, busy: bool) -> End | None:
    """The first of its deadlines that count now. busy: something runs in it."""
    spec, ends = record.spec, list[End]()
    if spec.ttl_idle_s is not None and record.state == "running":
        moment = (now() if busy else record.idle_since) + spec.ttl_idle_s
        ends.append(End(moment, "idle", f"idle for {spec.ttl_idle_s:g} s"))
    if record.paused_at is None or (spec.paused_clock == "running" and spec.on_expiry == "stop"):
        if record.total_deadline is not None:
            ends.append(End(record.total_deadline, "total", f"lived its {spec.ttl_total_s:g} s"))
        if record.lease_deadline is not None:
            ends.append(End(record.lease_deadline, "lease", "its lease ran out: the owner is gone"))
    return min(ends, default=None)


def begin(record: Record) -> None:
    """It is new: its clocks start."""
    record.created = record.idle_since = now()
    if record.spec.ttl_total_s is not None:
        record.total_deadline = record.created + record.spec.ttl_total_s
    renew(record)


def stand_still(record: Record) -> None:
    """It is being paused. Of one that is already: nothing, so that a daemon's death half-way loses no time."""
    if record.paused_at is None:
        record.paused_at = now()


def go_on(record: Record) -> None:
    """It runs again, or still."""
    record.total_deadline = record.moment(record.total_deadline)
    record.stood = now() - record.awake
    record.paused_at = None
    record.idle_since = now()
    renew(record)


def renew(record: Record) -> None:
    """Its owner is alive."""
    if record.spec.lease_s is not None:
        record.lease_deadline = record.clock + record.spec.lease_s


def act_once(record: Record, end: End) -> None:
    """It is about to be paused for this: a total TTL must not do it again under whoever resumes it, at once perhaps."""
    if end.which == "total":
        record.total_deadline = None


def act_again(record: Record, end: End) -> None:
    """It could not be, and will be a while from now. Idle TTL and lease have begun anew by then."""
    if end.which == "total":
        record.total_deadline = record.clock + AGAIN_S
