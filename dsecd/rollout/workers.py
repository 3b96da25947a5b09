"""What a rollout's worker says to its daemon, and what becomes of it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from dsecd.rollout.active import Active
from dsecd.rollout.steps import Lied, Step
from dsecd.rollout.trainers import Trainers
from dsecd.wire import rollouts as wire
from dsecd.wire.base import Empty
from dsecd.wire.call import Call, Handler

T = TypeVar("T")


class WorkerCalls:
    """What one rollout's worker may call on its socket. It lies: whatever breaks the rules ends its rollout."""

    def __init__(self, active: Active, trainers: Trainers) -> None:
        self._active, self._trainers = active, trainers

    def handlers(self) -> dict[str, Handler]:
        return {
            "rollout.worker.task": self.task,
            "rollout.worker.ask": self.ask,
            "rollout.worker.partial": self.partial,
            "rollout.worker.result": self.result,
        }

    async def _served(self) -> Active:
        await self._active.ready.wait()
        self._active.check_live()
        return self._active

    async def task(self, call: Call, params: wire.GetTask) -> wire.Assignment:
        record = (await self._served()).record
        return wire.Assignment(
            rollout=record.id, agent=record.agent, job=record.job, task=record.task, limits=record.limits
        )

    async def ask(self, call: Call, params: wire.Ask) -> wire.Reply:
        active = await self._served()
        known = params.step in active.steps
        step = await self._kept(self._ask(params))
        await step.answered.wait()
        reply = await active.steps.reply(step)
        return wire.Reply(step=step.number, status=reply.status, body=reply.body, replayed=known)

    async def _ask(self, params: wire.Ask) -> Step:
        active = self._active
        async with active.lock:
            active.check_live()
            step = await active.steps.ask(params.step, params.body)
            if not step.answer_seq:
                await active.move("asked")
                # In here: who asked may be cut off, and comes back with the same step.
                if (trainer := self._trainers.of(active.record)) is not None:
                    trainer.offer((active.record.id, step.number))
            return step

    async def partial(self, call: Call, params: wire.Partial) -> Empty:
        await self._served()
        await self._kept(self._partial(params))
        return Empty()

    async def _partial(self, params: wire.Partial) -> None:
        async with self._active.lock:
            self._active.check_live()
            await self._active.steps.partial(params.number, params.data)

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._active.carry(work)
        except Lied as exc:
            await self._active.fail(exc.message)
            raise

    async def result(self, call: Call, params: wire.Deliver) -> Empty:
        active = self._active
        await active.ready.wait()
        if active.record.outcome != params.outcome:
            active.check_live()
            await active.end("done", "", params.outcome)
        return Empty()
