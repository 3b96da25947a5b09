"""The SDK's rollouts: a part of `DSecClient`.

rollout = await client.start_rollout(agent, worker, task={...}, job="7", request_id="7-0001")
async for step in client.attach(job="7"):
    await step.forward("http://127.0.0.1:8000/v1")
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec
from msgspec import Raw

from dsecd.client_types import DSecContainerRunArgs
from dsecd.errors import DsecError
from dsecd.wire import base
from dsecd.wire import rollouts as wire
from dsecd.wire.peer import Notified, Pending

if TYPE_CHECKING:
    from dsecd.client import DSecClient

T = TypeVar("T")
FORWARD_S: Final = 600.0
ANSWER_MAX: Final = 8 << 20


class Step:
    """A request of a scaffold to its model. `body` is what it sent (OpenAI's chat completion, as a rule)."""

    def __init__(self, client: RolloutCalls, asked: wire.StepAsked) -> None:
        self._client = client
        self.rollout, self.agent, self.number, self.seq = asked.rollout, asked.agent, asked.step, asked.seq
        self.raw = bytes(asked.body)

    @property
    def body(self) -> Any:
        return msgspec.json.decode(self.raw)

    async def answer(
        self, body: Any, *, status: int = 200, tokens: Sequence[int] = (), logprobs: Sequence[float] = ()
    ) -> wire.Answered:
        """Durable when this returns. `conflict`: it has another answer already."""
        params = wire.Answer(
            id=self.rollout, step=self.number, body=Raw(msgspec.json.encode(body)), status=status,
            tokens=[*tokens], logprobs=[*logprobs],
        )  # fmt: skip
        return cast(wire.Answered, await self._client.call("rollout.answer", params))

    async def forward(self, url: str, *, timeout: float = FORWARD_S) -> wire.Answered:
        """Answer it with what an OpenAI-compatible endpoint of the trainer says, its log-probabilities beside it."""
        status, text = await asyncio.to_thread(_post, f"{url.rstrip('/')}/chat/completions", self.raw, timeout)
        try:
            body = msgspec.json.decode(text)
        except msgspec.DecodeError as exc:
            raise DsecError("network", f"{url} answered {status} and no JSON") from exc
        tokens, logprobs = _sampled(body)
        return await self.answer(body, status=status, tokens=tokens, logprobs=logprobs)


class RolloutCalls:
    """Everything about rollouts that a trainer needs."""

    if TYPE_CHECKING:

        async def begin(
            self, method: str, params: base.Params, *, window: int = 0, notified: Notified | None = None
        ) -> Pending: ...
        async def call(self, method: str, params: base.Params) -> Any: ...

    async def start_rollout(
        self, agent: DSecContainerRunArgs, worker: DSecContainerRunArgs, *, task: Any = None, job: str = "",
        program: Sequence[str] | None = None, limits: wire.Limits | None = None, keep_agent: bool = False,
        request_id: str | None = None,
    ) -> wire.Rollout:  # fmt: skip
        """Start one. With a request_id a trainer that died meanwhile gets the same one again."""
        params = wire.Start(
            agent=agent.spec(), worker=worker.spec(), task=Raw(msgspec.json.encode(task)), job=job,
            limits=limits or wire.Limits(), keep_agent=keep_agent, request_id=request_id,
        )  # fmt: skip
        if program is not None:
            params.program = [*program]
        return cast(wire.Rollout, await self.call("rollout.start", params))

    async def rollout(self, ident: str) -> wire.Rollout:
        """Where it stands: state, steps, the last entry of its trajectory."""
        return cast(wire.Rollout, await self.call("rollout.get", wire.ById(id=ident)))

    async def rollouts(self, job: str | None = None, states: Iterable[wire.State] = ()) -> list[wire.Rollout]:
        """Those that are not over, or that are in one of `states`."""
        found: wire.Rollouts = await self.call("rollout.list", wire.ListRollouts(job=job, states=[*states]))
        return found.rollouts

    async def stop_rollout(self, ident: str, reason: str = "stopped by request") -> wire.Rollout:
        return cast(wire.Rollout, await self.call("rollout.stop", wire.Stop(id=ident, reason=reason)))

    async def rollout_steps(self, ident: str, *, after: int = 0, bodies: bool = False) -> list[wire.Step]:
        """Its steps behind `after`; with bodies some 8 MiB at a time."""
        found: wire.StepList = await self.call("rollout.steps", wire.Steps(id=ident, after=after, bodies=bodies))
        return found.steps

    async def attach(
        self, job: str = "", *, rollout: str | None = None, window: int = 64
    ) -> AsyncGenerator[Step, None]:
        """Be the model of a job's rollouts, or of one: their steps, for ever; those that nobody has answered first.

        `conflict` when another trainer took over.
        """
        queue: asyncio.Queue[wire.StepAsked | None] = asyncio.Queue()  # bounded by the window

        def notified(method: str, raw: msgspec.Raw) -> None:
            if method == "rollout.step":
                queue.put_nowait(msgspec.json.decode(raw, type=wire.StepAsked))

        params = wire.Attach(job=job, id=rollout, window=window)
        pending = await self.begin("rollout.attach", params, notified=notified)
        pending.future.add_done_callback(lambda _f: queue.put_nowait(None))
        try:
            while (asked := await queue.get()) is not None:
                yield Step(self, asked)
            await pending.finish()
        finally:
            pending.cancel()

    async def rollout_results(
        self, job: str | None = None, *, after: int = 0, wait_s: float = 0.0
    ) -> list[wire.Delivered]:
        """Results that were not acknowledged; each at least once, always under the same id."""
        params = wire.AskResults(job=job, after=after, wait_s=wait_s)
        found: wire.Results = await self.call("rollout.results", params)
        return found.results

    async def acknowledge(self, idents: Iterable[int]) -> int:
        """They are not delivered again."""
        done: wire.Acked = await self.call("rollout.ack", wire.Ack(ids=[*idents]))
        return done.acked


class SyncStep:
    """As Step, blocking."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], step: Step) -> None:
        self._run = run
        self.aio = step

    @property
    def body(self) -> Any:
        return self.aio.body

    def answer(self, body: Any, **options: Any) -> wire.Answered:
        return cast(wire.Answered, self._run(self.aio.answer(body, **options)))

    def forward(self, url: str, **options: Any) -> wire.Answered:
        return cast(wire.Answered, self._run(self.aio.forward(url, **options)))


class SyncRolloutCalls:
    """As RolloutCalls, blocking: a part of `DSecSyncClient`."""

    if TYPE_CHECKING:
        aio: DSecClient

        def run(self, work: Coroutine[Any, Any, T]) -> T: ...

    def start_rollout(self, agent: DSecContainerRunArgs, worker: DSecContainerRunArgs, **options: Any) -> wire.Rollout:
        return self.run(self.aio.start_rollout(agent, worker, **options))

    def rollout(self, ident: str) -> wire.Rollout:
        return self.run(self.aio.rollout(ident))

    def rollouts(self, job: str | None = None, states: Iterable[wire.State] = ()) -> list[wire.Rollout]:
        return self.run(self.aio.rollouts(job, states))

    def stop_rollout(self, ident: str, reason: str = "stopped by request") -> wire.Rollout:
        return self.run(self.aio.stop_rollout(ident, reason))

    def rollout_steps(self, ident: str, **options: Any) -> list[wire.Step]:
        return self.run(self.aio.rollout_steps(ident, **options))

    def attach(self, job: str = "", **options: Any) -> Iterator[SyncStep]:
        """Steps as they come, for ever."""
        steps = self.aio.attach(job, **options)

        async def following() -> Step | None:
            return await anext(steps, None)

        try:
            while (step := self.run(following())) is not None:
                yield SyncStep(self.run, step)
        finally:
            self.run(steps.aclose())

    def rollout_results(self, job: str | None = None, **options: Any) -> list[wire.Delivered]:
        return self.run(self.aio.rollout_results(job, **options))

    def acknowledge(self, idents: Iterable[int]) -> int:
        return self.run(self.aio.acknowledge(idents))


def _post(url: str, body: bytes, timeout: float) -> tuple[int, bytes]:
    """The status and what was said, of refusals too; `network` when nobody answers."""
    if not url.startswith(("http://", "https://")):
        raise DsecError("invalid", f"{url!r} is no http URL")
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read(ANSWER_MAX)
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read(ANSWER_MAX)
    except OSError as exc:
        raise DsecError("network", f"{url} does not answer: {exc}") from exc


def _sampled(body: Any) -> tuple[list[int], list[float]]:
    """Token ids and log-probabilities of the first choice, where the endpoint gives them."""
    try:
        content = body["choices"][0]["logprobs"]["content"]
        logprobs = [float(one["logprob"]) for one in content]
        tokens = [int(one["token_id"]) for one in content if "token_id" in one]
    except (KeyError, IndexError, TypeError, ValueError):
        return [], []
    return tokens, logprobs
