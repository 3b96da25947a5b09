"""Many sandboxes as one: those that were created with the same `job`, of one user (root's are everybody's).

A job is not kept anywhere: it is what the sandboxes' records say. So a sandbox that is created while its job is paused
simply runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from dsecd.errors import DsecError
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.record import Record, as_unix, now
from dsecd.sandbox.states import ENDED
from dsecd.wire import jobs as wire
from dsecd.wire.sandbox import Failed

AT_ONCE: Final = 16  # moves of one request under way; more would only wait for each other in the kernel
SETTLE_S: Final = 60.0  # so long a sandbox that is still being created is waited for


class Jobs:
    """What `job.*` does. `uid` is the caller's."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def listing(self, uid: int) -> list[wire.Job]:
        """Jobs with sandboxes that are not over, by user and name."""
        found: dict[tuple[int, str], list[Record]] = {}
        for record in self._manager.all((), {}, _whose(uid)):
            if record.spec.job is not None:
                found.setdefault((record.owner.uid, record.spec.job), []).append(record)
        return [await self._about(job, owner, found[owner, job]) for owner, job in sorted(found)]

    async def _about(self, job: str, uid: int, records: list[Record]) -> wire.Job:
        states: dict[str, int] = {}
        used = swapped = 0
        last = 0.0
        for record in records:
            states[record.state] = states.get(record.state, 0) + 1
            _, live = self._manager.present(record.id)
            if live is not None and live.body is not None:
                memory = await live.body.memory()
                used, swapped = used + memory[0], swapped + memory[1]
            busy = live is not None and live.busy and record.state == "running"
            last = max(last, now() if busy else record.idle_since)
        promised = sum(record.spec.memory_mb for record in records)
        return wire.Job(job, uid, states, promised, used, swapped, as_unix(last) or 0.0)

    async def pause(self, job: str, uid: int) -> wire.JobDone:
        """First all are frozen, then all give their memory back: that nothing runs any more is what is urgent."""
        pausing = self._manager.pausing

        async def freeze(record: Record) -> None:
            if record.state == "creating":
                async with asyncio.timeout(SETTLE_S):
                    await self._manager.wait(record.id, {"running", "paused", *ENDED})
            await pausing.freeze(record.id)

        async def give_back(record: Record) -> None:
            if record.state == "paused":
                await pausing.give_back(record.id)

        records = self._records(job, uid)
        failed = await _each(records, freeze)
        return _done(job, records, failed | await _each([r for r in records if r.id not in failed], give_back))

    async def resume(self, job: str, uid: int) -> wire.JobDone:
        records = self._records(job, uid)
        return _done(job, records, await _each(records, lambda record: self._manager.pausing.resume(record.id)))

    async def stop(self, job: str, uid: int, reason: str) -> wire.JobDone:
        records = self._records(job, uid)
        return _done(job, records, await _each(records, lambda record: self._manager.stop(record.id, reason)))

    def _records(self, job: str, uid: int) -> list[Record]:
        """Its sandboxes that are not over, oldest first; `not_found` for a job that never had one."""
        found = self._manager.all((), {}, _whose(uid), job)
        if not found and not self._manager.all(ENDED, {}, _whose(uid), job):
            raise DsecError("not_found", f"no sandbox of yours has the job {job!r}: `job.list` has those there are")
        return sorted(found, key=lambda record: record.created)


def _whose(uid: int) -> int | None:
    return None if uid == 0 else uid


async def _each(records: list[Record], act: Callable[[Record], Awaitable[object]]) -> dict[str, Failed]:
    """Act on all, side by side; what failed, by sandbox."""
    limit = asyncio.Semaphore(AT_ONCE)
    failed: dict[str, Failed] = {}

    async def one(record: Record) -> None:
        async with limit:
            try:
                await act(record)
            except DsecError as exc:
                failed[record.id] = Failed.of(exc)
            except TimeoutError:
                failed[record.id] = Failed("timeout", f"it was still {record.state} after {SETTLE_S:g} s", False, True)

    async with asyncio.TaskGroup() as group:
        for record in records:
            group.create_task(one(record))
    return failed


def _done(job: str, records: list[Record], failed: dict[str, Failed]) -> wire.JobDone:
    return wire.JobDone(job, [wire.Outcome(record.id, record.state, failed.get(record.id)) for record in records])
