"""The steps of one rollout: asked once, answered once, both durable before anybody is told.

They are entries of the *agent* sandbox's trajectory: there an answer stands between the commands that led to it and
those that it led to, in one order. A worker is replaceable, and its own log would say nothing that this does not. In
memory there are only numbers and digests; bodies are read back when they are delivered.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw, Struct

from dsecd.errors import DsecError
from dsecd.sandbox.trajectory import Trajectories
from dsecd.wire import rollouts as wire

ASKED: Final = "rollout.step"
ANSWERED: Final = "rollout.answer"
PARTIAL: Final = "rollout.partial"
MOVED: Final = "rollout.state"
PAGE: Final = 1000


class Lied(DsecError):
    """The worker broke the rules: its rollout has failed."""

    def __init__(self, message: str) -> None:
        super().__init__("denied", message)


class Entry(Struct):
    """A line of the trajectory, with what we noted as the bytes it is."""

    seq: int
    at: float
    event: str
    data: Raw = Raw()


_entry = msgspec.json.Decoder(Entry).decode


class Kept(Struct, omit_defaults=True):
    """What all entries of a rollout say: whose it is, and which step (or number) it is about."""

    rollout: str
    step: int = 0


class Question(Kept):
    body: Raw = Raw(b"null")


class Reply(Kept):
    body: Raw = Raw(b"null")
    status: int = 200
    tokens: list[int] = []
    logprobs: list[float] = []


class Moved(Kept):
    state: str = ""
    reason: str = ""
    outcome: wire.Outcome | None = None


class Step:
    """One step in memory. `answered` is set when its answer is durable."""

    __slots__ = ("answer_at", "answer_digest", "answer_seq", "answered", "at", "digest", "number", "seq")

    def __init__(self, number: int, seq: int, at: float, digest: bytes) -> None:
        self.number, self.seq, self.at, self.digest = number, seq, at, digest
        self.answer_seq, self.answer_at, self.answer_digest = 0, 0.0, b""
        self.answered = asyncio.Event()


class Steps:
    """All of one rollout. Who calls `ask`, `answer` and `partial` holds the rollout's lock."""

    def __init__(self, log: Trajectories, agent: str, rollout: str, limits: wire.Limits) -> None:
        self._log, self._agent, self._rollout, self._limits = log, agent, rollout, limits
        self._steps: dict[int, Step] = {}
        self._open: dict[int, Step] = {}
        self._partials: dict[int, bytes] = {}
        self._bytes = 0
        self.seq = 0

    # -- rules --------------------------------------------------------------------------------------------------------
    async def ask(self, number: int, body: Raw) -> Step:
        """Write it down; one that is there already is returned. `Lied`: against the rules or beyond the limits."""
        plain = canonical(body)
        digest = _digest(plain)
        if (known := self._steps.get(number)) is not None:
            if known.digest != digest:
                raise Lied(f"the worker asked for step {number} again, with another body")
            return known
        limits = self._limits
        if number > limits.steps:  # their order does not count: after a reconnect, one may overtake another
            raise Lied(f"the worker asked for step {number}, of at most {limits.steps}")
        if len(self.open) >= limits.open_steps:
            raise Lied(f"the worker has more than {limits.open_steps} steps open at once")
        self._check(plain, "a step")
        seq = await self._note(ASKED, Question(self._rollout, number, Raw(plain)))
        return self._add(Step(number, seq, time.time(), digest), len(plain))

    def _add(self, step: Step, size: int) -> Step:
        self._steps[step.number] = step
        self._open[step.number] = step
        self._bytes += size
        return step

    def _settle(self, step: Step, seq: int, at: float, digest: bytes) -> None:
        step.answer_seq, step.answer_at, step.answer_digest = seq, at, digest
        self._open.pop(step.number, None)
        step.answered.set()

    async def answer(self, params: wire.Answer) -> tuple[Step, bool]:
        """Make an answer durable; False: it had this one before. `conflict`: it had another one."""
        step = self.get(params.step)
        reply = Reply(
            self._rollout, params.step, Raw(canonical(params.body)), params.status, params.tokens, params.logprobs
        )
        digest = _digest(msgspec.json.encode(reply))
        if step.answer_seq:
            if step.answer_digest != digest:
                raise DsecError("conflict", f"step {params.step} of {self._rollout} has another answer already")
            return step, False
        self._settle(step, await self._note(ANSWERED, reply), time.time(), digest)
        return step, True

    async def partial(self, number: int, data: Raw) -> None:
        plain = canonical(data)
        digest = _digest(plain)
        if (known := self._partials.get(number)) is not None:
            if known != digest:
                raise Lied(f"the worker delivered partial result {number} again, with other content")
            return
        if number > self._limits.steps:
            raise Lied(f"the worker delivered partial result {number}, of at most {self._limits.steps}")
        self._check(plain, "a partial result")
        await self._note(PARTIAL, Question(self._rollout, number, Raw(plain)))
        self._partials[number] = digest
        self._bytes += len(plain)

    async def moved(self, state: str, reason: str = "", outcome: wire.Outcome | None = None) -> None:
        await self._note(MOVED, Moved(self._rollout, 0, state, reason, outcome))

    def _check(self, plain: bytes, what: str) -> None:
        limits = self._limits
        if len(plain) > limits.body_kb << 10:
            raise Lied(f"{what} of the worker is {len(plain)} bytes, more than {limits.body_kb} KiB")
        if self._bytes + len(plain) > limits.total_mb << 20:
            raise Lied(f"the worker sent more than {limits.total_mb} MiB in all")

    async def _note(self, event: str, data: Kept) -> int:
        self.seq = await self._log.note(self._agent, event, data)
        return self.seq

    # -- looking ------------------------------------------------------------------------------------------------------
    def get(self, number: int) -> Step:
        if (step := self._steps.get(number)) is None:
            raise DsecError("not_found", f"rollout {self._rollout} has no step {number}")
        return step

    def __contains__(self, number: int) -> bool:
        return number in self._steps

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def open(self) -> list[int]:
        """Steps that wait for an answer, oldest first."""
        return list(self._open)

    def behind(self, number: int, limit: int) -> Sequence[Step]:
        return [self._steps[at] for at in sorted(self._steps) if at > number][:limit]

    async def question(self, step: Step) -> Question:
        return msgspec.json.decode((await self._entry(step.seq)).data, type=Question)

    async def reply(self, step: Step) -> Reply:
        return msgspec.json.decode((await self._entry(step.answer_seq)).data, type=Reply)

    async def _entry(self, seq: int) -> Entry:
        return _entry((await self._log.page(self._agent, seq - 1, 1)).lines[0])

    # -- after a restart ----------------------------------------------------------------------------------------------
    async def rebuild(self) -> None:
        """From the trajectory."""
        at = 0
        while lines := (await self._log.page(self._agent, at, PAGE)).lines:
            for line in lines:
                self._seen(_entry(line))
            at += len(lines)

    def _seen(self, entry: Entry) -> None:
        if not entry.event.startswith("rollout."):
            return
        head = msgspec.json.decode(entry.data, type=Kept)
        if head.rollout != self._rollout:
            return
        self.seq = entry.seq
        if entry.event == ANSWERED:
            self._settle(self.get(head.step), entry.seq, entry.at, _digest(bytes(entry.data)))
        elif entry.event in (ASKED, PARTIAL):
            plain = bytes(msgspec.json.decode(entry.data, type=Question).body)
            if entry.event == ASKED and head.step not in self._steps:
                self._add(Step(head.step, entry.seq, entry.at, _digest(plain)), len(plain))
            elif entry.event == PARTIAL and head.step not in self._partials:
                self._partials[head.step] = _digest(plain)
                self._bytes += len(plain)


def canonical(raw: Raw) -> bytes:
    """The same value is the same bytes, whoever encoded it; `invalid` when it is no JSON we would carry."""
    try:
        return msgspec.json.encode(msgspec.json.decode(raw), order="deterministic")
    except (msgspec.DecodeError, RecursionError) as exc:
        raise DsecError("invalid", f"a body is not JSON: {str(exc)[:200]}") from exc


def _digest(plain: bytes) -> bytes:
    return hashlib.sha256(plain).digest()
