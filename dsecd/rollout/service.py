"""All rollouts of this host: start, find, stop, take back; trainers' answers, and results."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Raw

from dsecd.errors import DsecError
from dsecd.rollout.active import Active
from dsecd.rollout.channel import Channel
from dsecd.rollout.record import Record, Table, Whose
from dsecd.rollout.states import ENDED, LIVE
from dsecd.rollout.steps import Step, Steps, canonical
from dsecd.rollout.trainers import Scope, Trainer, Trainers
from dsecd.rollout.workers import WorkerCalls
from dsecd.sandbox.ids import new_id
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.recover import owner_of
from dsecd.wire import rollouts as wire
from dsecd.wire.call import Call, Handler, Interceptor
from dsecd.wire.sandbox import Owner, Spec
from dsecd.wire.trajectory import Who

NONE: Final = Raw(b"null")
AT_ONCE: Final = 32  # taken back side by side: their trajectories are read
TASK_MAX: Final = 1 << 20
BODIES_MAX: Final = 6 << 20  # of one answer to `steps`


class Rollouts:
    """One per daemon. Live ones are in memory; those that are over are rows of state.db."""

    def __init__(self, manager: Manager, run_dir: Path) -> None:
        self._manager = manager
        self._run_dir = run_dir
        self._table = Table(manager.store)
        self._live: dict[str, Active] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._delivered = asyncio.Event()  # a result has come since somebody looked
        self._handlers: Mapping[str, Handler] = {}
        self._once: Interceptor | None = None
        self.trainers = Trainers()

    # -- life ---------------------------------------------------------------------------------------------------------
    async def open(self, handlers: Mapping[str, Handler], once: Interceptor) -> None:
        """Take back what an earlier daemon left. handlers: the API, of which workers may use a part."""
        self._handlers, self._once = handlers, once
        records = await self._table.open()
        await asyncio.to_thread(_sweep, self._run_dir, {record.id for record in records})
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(active: Active) -> None:
            async with limit:
                await self._take_back(active)

        await asyncio.gather(*(one(self._enter(record)) for record in records))

    async def _take_back(self, active: Active) -> None:
        record = active.record
        if record.state == "finishing":
            active.finish()
            return
        try:
            if record.state == "starting":  # nothing of it has come out yet: from the beginning
                await active.stop_sandboxes("the daemon was restarted while its rollout was made")
                await self._listen(active)
                self._spawn(self._begin(active))
                return
            await active.take_back()
            await self._listen(active)
        except (DsecError, OSError) as exc:
            await active.fail(f"it could not be taken back: {exc}")

    async def close(self) -> None:
        """Let go of all; workers find the next daemon."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(active.release() for active in self._live.values()))

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(_quiet(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _enter(self, record: Record) -> Active:
        channel = Channel(self._run_dir / record.id, record.id, record.owner)
        active = self._live[record.id] = Active(record, self._manager, self._table, channel)
        active.on_decided = lambda: self._decided(active)
        active.on_over = lambda active: self._live.pop(active.record.id, None)
        return active

    def _decided(self, active: Active) -> None:
        self._delivered.set()
        if (trainer := self.trainers.of(active.record)) is not None:
            trainer.over(active.record.id)

    async def _listen(self, active: Active) -> None:
        assert self._once is not None
        own = WorkerCalls(active, self.trainers).handlers()
        await active.channel.listen(self._handlers, own, self._once)

    # -- start, stop, look --------------------------------------------------------------------------------------------
    async def start(self, params: wire.Start, owner: Owner) -> wire.Rollout:
        _refuse(params)
        record = Record(
            id=new_id("ro"), owner=owner, job=params.job, agent_spec=params.agent, worker_spec=params.worker,
            task=Raw(_task(params.task)), program=params.program, limits=params.limits, keep_agent=params.keep_agent,
            request=params.request_id or "", created=time.time(),
        )  # fmt: skip
        await self._table.put(record)
        active = self._enter(record)
        try:
            await self._listen(active)
            await self._begin(active)
        except asyncio.CancelledError:
            if not self._manager.closing:
                await asyncio.shield(active.fail("its start was cancelled"))
            raise
        return self.public(active)

    async def _begin(self, active: Active) -> None:
        """What cannot be made fails, as a rollout with a result, and as the caller's error."""
        try:
            await active.begin()
        except (DsecError, OSError, ExceptionGroup) as exc:
            why = _plain(exc)
            await active.fail(f"it could not be started: {why.message}")
            await active.stop_sandboxes("its rollout was over before it was made")
            raise why from exc

    async def recover(self, params: wire.Start, who: Who) -> wire.Rollout:
        """Of a `rollout.start` that a daemon's death interrupted."""
        record = await self._table.by_request(who.uid, params.request_id or "")
        if record is None:  # it had not come to its record
            return await self.start(params, owner_of(who, params.agent.owner))
        active = self._live.get(record.id)
        if active is None:
            return _ended(record)
        await active.ready.wait()
        return self.public(active)

    async def stop(self, ident: str, reason: str) -> wire.Rollout:
        active = self._live.get(ident)
        if active is not None:
            await active.end("stopped", reason)
            await asyncio.shield(active.finish())
        return await self.get(ident)

    async def get(self, ident: str) -> wire.Rollout:
        active = self._live.get(ident)
        return self.public(active) if active is not None else _ended(await self._record(ident))

    async def owner(self, ident: str) -> Owner:
        active = self._live.get(ident)
        return active.record.owner if active is not None else (await self._record(ident)).owner

    async def find(self, params: wire.ListRollouts, uid: int) -> list[wire.Rollout]:
        states, whose = frozenset(params.states) or LIVE, Whose(uid, params.job)
        found = [
            self.public(active) for active in self._live.values()
            if active.record.state in states and whose.covers(active.record)
        ]  # fmt: skip
        if over := states & ENDED:
            found += [_ended(r) for r in await self._table.find(whose, over) if r.id not in self._live]
        return sorted(found, key=lambda one: one.id)

    async def steps(self, params: wire.Steps) -> list[wire.Step]:
        steps = await self._steps(params.id)
        found: list[wire.Step] = []
        size = 0
        for step in steps.behind(params.after, params.limit):
            one = wire.Step(step.number, step.seq, step.at, NONE, NONE, step.answer_seq)
            if step.answer_seq:
                one.answered_at = step.answer_at
            if params.bodies:
                one.body = (await steps.question(step)).body
                size += len(bytes(one.body))
                if step.answer_seq:
                    reply = await steps.reply(step)
                    one.answer, one.tokens, one.logprobs = reply.body, reply.tokens, reply.logprobs
                    size += len(bytes(reply.body)) + 24 * len(reply.tokens)
                if size > BODIES_MAX and found:
                    break
            found.append(one)
        return found

    async def _record(self, ident: str) -> Record:
        record = await self._table.get(ident)
        if record is None:
            raise DsecError("not_found", f"no rollout {ident[:80]!r}")
        return record

    async def _steps(self, ident: str) -> Steps:
        """Of one that is over they are read from its trajectory."""
        if (active := self._live.get(ident)) is not None:
            return active.steps
        record = await self._record(ident)
        steps = Steps(self._manager.trajectory, record.agent, record.id, record.limits)
        if record.agent:
            await steps.rebuild()
        return steps

    def public(self, active: Active) -> wire.Rollout:
        record, steps = active.record, active.steps
        return msgspec.structs.replace(
            _ended(record), steps=len(steps), open=steps.open, seq=steps.seq, paused=active.paused(),
            attached=self.trainers.of(record) is not None,
        )  # fmt: skip

    # -- trainers -----------------------------------------------------------------------------------------------------
    async def attach(self, call: Call, params: wire.Attach) -> None:
        """Deliver steps until the trainer goes (CancelledError) or another one takes over (`conflict`)."""
        scope = Scope(call.peer.uid, params.job)
        if params.id is not None:
            record = await self._record(params.id)
            scope = Scope(record.owner.uid, record.job, record.id)
        trainer = self.trainers.attach(scope, params.window)
        try:
            for active in [a for a in self._live.values() if scope.covers(a.record)]:
                for number in active.steps.open:
                    trainer.offer((active.record.id, number))
                if not active.steps.open and active.paused():
                    # Whoever waits for the model is resumed by its answer; this one would never go on by itself.
                    active.spawn(active.resume())
            while True:
                await self._deliver(call, trainer, await trainer.take())
        finally:
            self.trainers.detach(trainer)

    async def _deliver(self, call: Call, trainer: Trainer, ref: tuple[str, int]) -> None:
        active = self._live.get(ref[0])
        step = active.steps.get(ref[1]) if active is not None else None
        if active is None or step is None or step.answer_seq:
            trainer.answered(ref)
            return
        body = (await active.steps.question(step)).body
        asked = wire.StepAsked(call.id, active.record.id, active.record.agent, step.number, step.seq, body)
        await call.notify_bounded("rollout.step", asked)

    async def answer(self, params: wire.Answer) -> wire.Answered:
        """Durable first; then the worker has it, and what was paused goes on."""
        active = self._live.get(params.id)
        if active is None:
            steps = await self._steps(params.id)
            if not steps.get(params.step).answer_seq:
                raise DsecError("conflict", f"rollout {params.id} is over")
            step, _ = await steps.answer(params)
            return wire.Answered(seq=step.answer_seq, replayed=True)
        step, fresh = await active.carry(self._settle(active, params))
        return wire.Answered(seq=step.answer_seq, replayed=not fresh)

    async def _settle(self, active: Active, params: wire.Answer) -> tuple[Step, bool]:
        async with active.lock:
            if not active.steps.get(params.step).answer_seq:
                active.check_live()
            step, fresh = await active.steps.answer(params)
            if fresh and not active.steps.open:
                await active.move("answered")
        if fresh:
            active.spawn(active.resume())
            if (trainer := self.trainers.of(active.record)) is not None:
                trainer.answered((params.id, params.step))
        return step, fresh

    # -- results ------------------------------------------------------------------------------------------------------
    async def results(self, params: wire.AskResults, uid: int) -> list[wire.Delivered]:
        deadline, whose = time.monotonic() + params.wait_s, Whose(uid, params.job)
        while True:
            self._delivered.clear()
            found = await self._table.results(whose, params.after, params.limit)
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._delivered.wait()

    async def acknowledge(self, idents: list[int], uid: int) -> int:
        return await self._table.acknowledge(Whose(uid), idents)


def _ended(record: Record) -> wire.Rollout:
    return wire.Rollout(
        id=record.id, state=record.state, job=record.job, agent=record.agent, worker=record.worker,
        reason=record.reason, steps=record.steps, seq=record.seq, created_at=round(record.created, 3),
        ended_at=record.ended, outcome=record.outcome,
    )  # fmt: skip


def _refuse(params: wire.Start) -> None:
    if params.worker.backend != "container":
        raise DsecError("invalid", "a worker is a container: leave its backend as it is")
    for what, spec in (("agent", params.agent), ("worker", params.worker)):
        _refuse_spec(what, spec)


def _refuse_spec(what: str, spec: Spec) -> None:
    if spec.name is not None:
        raise DsecError("invalid", f"the {what} sandbox of a rollout is its own: it has no name that others may use")
    if spec.lease_s is not None:
        raise DsecError("invalid", f"the {what} sandbox outlives its trainer: leave out lease_s")


def _task(task: Raw) -> bytes:
    plain = canonical(task)
    if len(plain) > TASK_MAX:
        raise DsecError("invalid", f"the task is {len(plain)} bytes, more than {TASK_MAX}")
    return plain


def _plain(exc: Exception) -> DsecError:
    """The error itself, of those that making two sandboxes side by side may raise."""
    while isinstance(exc, ExceptionGroup):
        exc = exc.exceptions[0]
    return exc if isinstance(exc, DsecError) else DsecError("internal", f"the host could not do it: {exc}")


def _sweep(directory: Path, keep: set[str]) -> None:
    """Directories of rollouts that nobody knows."""
    with contextlib.suppress(FileNotFoundError):
        for name in set(os.listdir(directory)) - keep:
            shutil.rmtree(directory / name, ignore_errors=True)


async def _quiet(work: object) -> None:
    with contextlib.suppress(DsecError):  # it is in the rollout's reason
        await work  # type: ignore[misc]
