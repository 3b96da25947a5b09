"""rollout.*, for trainers. What workers call is in dsecd.rollout.service: it is on their own sockets only."""

from __future__ import annotations

from dsecd.errors import DsecError
from dsecd.rollout.service import Rollouts
from dsecd.wire import base
from dsecd.wire import rollouts as wire
from dsecd.wire.call import Call


class RolloutApi:
    """Thin: all of it is the room's."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def start(self, call: Call, params: wire.Start) -> wire.Rollout:
        return await self._rollouts.start(params, call.peer.owner(params.agent.owner))

    async def get(self, call: Call, params: wire.ById) -> wire.Rollout:
        return await self._rollouts.get(params.id)

    async def list(self, call: Call, params: wire.ListRollouts) -> wire.Rollouts:
        return wire.Rollouts(rollouts=await self._rollouts.find(params, call.peer.uid))

    async def stop(self, call: Call, params: wire.Stop) -> wire.Rollout:
        return await self._rollouts.stop(params.id, params.reason)

    async def steps(self, call: Call, params: wire.Steps) -> wire.StepList:
        return wire.StepList(steps=await self._rollouts.steps(params))

    async def attach(self, call: Call, params: wire.Attach) -> base.Empty:
        await self._rollouts.attach(call, params)
        return base.Empty()

    async def answer(self, call: Call, params: wire.Answer) -> wire.Answered:
        return await self._rollouts.answer(params)

    async def results(self, call: Call, params: wire.AskResults) -> wire.Results:
        return wire.Results(results=await self._rollouts.results(params, call.peer.uid))

    async def ack(self, call: Call, params: wire.Ack) -> wire.Acked:
        return wire.Acked(acked=await self._rollouts.acknowledge(params.ids, call.peer.uid))

    def not_a_worker(self, call: Call, params: base.Params) -> base.Empty:
        raise DsecError("denied", f"{call.name} is for the worker of a rollout, on the socket in its container")
