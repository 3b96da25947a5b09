"""Messages of `job.*`: all sandboxes that one user created with the same `job`; for root, all that any user did."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from dsecd.wire.base import Name, Params, Result, Text
from dsecd.wire.sandbox import Failed, State


class ListJobs(Params):
    """`job.list`: jobs that have a sandbox which is not over."""


class Job(Struct):
    """states: how many of its sandboxes are in each. memory_mb: what they may use; memory_bytes: what they use of the
    host now, swapped_bytes: what of theirs is in swap. used_at: the last command or call in any of them.
    """

    job: str
    uid: int
    states: dict[str, int]
    memory_mb: int
    memory_bytes: int
    swapped_bytes: int
    used_at: float


def merged(found: Iterable[Job]) -> list[Job]:
    """The same jobs on several hosts are one."""
    out: dict[tuple[int, str], Job] = {}
    for one in found:
        known = out.setdefault((one.uid, one.job), one)
        if known is not one:
            for state, count in one.states.items():
                known.states[state] = known.states.get(state, 0) + count
            known.memory_mb += one.memory_mb
            known.memory_bytes += one.memory_bytes
            known.swapped_bytes += one.swapped_bytes
            known.used_at = max(known.used_at, one.used_at)
    return list(out.values())


class Jobs(Result):
    jobs: list[Job]


class ByJob(Params):
    """`job.pause`, `job.resume`."""

    job: Name


class StopJob(Params):
    """`job.stop`: kill and remove all of it. Of a job whose sandboxes are all over: no error."""

    job: Name
    reason: Text = "stopped by request"


class Outcome(Struct, omit_defaults=True):
    """Of one sandbox. state: what it is in now, after it was done or could not be."""

    id: str
    state: State
    error: Failed | None = None


class JobDone(Result):
    """One outcome for each of its sandboxes, oldest first. One that failed keeps no other."""

    job: str
    results: list[Outcome]
