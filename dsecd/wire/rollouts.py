"""Messages of `rollout.*`: a scaffold in an agent sandbox, the worker that drives it, the trainer that is its model.

Bodies of steps and tasks are JSON of the caller's, carried as they are.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from dsecd.wire.base import Count, Id, Params, Result, Text
from dsecd.wire.execs import Arg
from dsecd.wire.sandbox import Spec

State = Literal["starting", "running", "waiting_model", "finishing", "done", "failed", "stopped"]
Job = Annotated[str, Meta(max_length=128, pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?\Z")]  # "": of none
Status = Annotated[int, Meta(ge=200, le=599)]
Number = Annotated[int, Meta(ge=1, le=1 << 31)]
Tokens = Annotated[list[int], Meta(max_length=131_072)]
Logprobs = Annotated[list[float], Meta(max_length=131_072)]


class Limits(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """What a worker may ask for before its rollout has failed. open_steps: not answered yet; total_mb: all bodies."""

    steps: Annotated[int, Meta(ge=1, le=100_000)] = 1000
    open_steps: Annotated[int, Meta(ge=1, le=64)] = 8
    body_kb: Annotated[int, Meta(ge=1, le=4096)] = 1024
    total_mb: Annotated[int, Meta(ge=1, le=4096)] = 256


class Start(Params):
    """`rollout.start`: both sandboxes are made and the worker's program is started.

    worker: a container with the SDK in it. task: for the worker, at most 1 MiB. program: what is started in the worker.
    keep_agent: the agent sandbox stays when the rollout is over; the worker's never does.
    """

    agent: Spec
    worker: Spec
    task: Raw
    job: Job = ""
    program: Annotated[list[Arg], Meta(min_length=1, max_length=256)] = msgspec.field(
        default_factory=lambda: ["python3", "-m", "dsecd.worker"]
    )
    limits: Limits = Limits()
    keep_agent: bool = False


class Outcome(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a worker delivers at the end. exit_code: the scaffold's. output: the end of what grading printed."""

    exit_code: int = 0
    reward: float | None = None
    diff: Annotated[bytes, Meta(max_length=2 << 20)] = b""
    output: Annotated[bytes, Meta(max_length=256 << 10)] = b""
    error: Text = ""


class Rollout(Result):
    """A handle to go on from. agent, worker: ids of its sandboxes. open: steps that wait for an answer.

    seq: of its last entry in the agent sandbox's trajectory. paused: one of its sandboxes is. attached: a trainer is.
    """

    id: str
    state: State
    job: str = ""
    agent: str = ""
    worker: str = ""
    reason: str = ""
    steps: int = 0
    open: list[int] = []
    seq: int = 0
    paused: bool = False
    attached: bool = False
    created_at: float = 0.0
    ended_at: float | None = None
    outcome: Outcome | None = None


class ById(Params):
    """Any call that names one rollout."""

    id: Id


class ListRollouts(Params):
    """`rollout.list`: of one job (None: of all); states empty = all that are not over."""

    job: Job | None = None
    states: list[State] = []


class Rollouts(Result):
    rollouts: list[Rollout]


class Stop(Params):
    """`rollout.stop`: its sandboxes go, and its result says `stopped`. Of one that is over: nothing."""

    id: Id
    reason: Text = "stopped by request"


class Steps(Params):
    """`rollout.steps`: what was asked and answered behind step `after`. bodies: with both texts, some 8 MiB at most."""

    id: Id
    after: Count = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    bodies: bool = False


class Step(Struct, omit_defaults=True):
    """One step. seq, answer_seq: its entries in the trajectory (0: not answered). body, answer: null when not there."""

    step: int
    seq: int
    asked_at: float
    body: Raw
    answer: Raw
    answer_seq: int = 0
    answered_at: float | None = None
    tokens: list[int] = []
    logprobs: list[float] = []


class StepList(Result):
    steps: list[Step]


class Attach(Params):
    """`rollout.attach`: be the model of a job's rollouts (or of one). Answers only when cancelled or taken over.

    Steps come as `rollout.step` notifications, also those that an earlier trainer left, never more than `window` that
    are not answered.
    """

    job: Job = ""
    id: Id | None = None
    window: Annotated[int, Meta(ge=1, le=1024)] = 64


class StepAsked(Struct):
    """`rollout.step`: a request of the scaffold to its model; at least once."""

    sub: int | str
    rollout: str
    agent: str
    step: int
    seq: int
    body: Raw


class Answer(Params):
    """`rollout.answer`: durable before its reply. status: of HTTP, as the scaffold sees it.

    tokens, logprobs: of the answer, kept in the trajectory beside it.
    """

    id: Id
    step: Number
    body: Raw
    status: Status = 200
    tokens: Tokens = []
    logprobs: Logprobs = []


class Answered(Result):
    """seq: of the answer in the trajectory. replayed: the step had this answer already."""

    seq: int


class AskResults(Params):
    """`rollout.results`: results behind id `after` that were not acknowledged; waits up to wait_s for the first."""

    job: Job | None = None
    after: Count = 0
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class Delivered(Struct, omit_defaults=True):
    """One rollout's result. id: rises, and is the same each time it is delivered. state: what the rollout ends as."""

    id: int
    rollout: str
    job: str
    state: State
    reason: str = ""
    steps: int = 0
    at: float = 0.0
    outcome: Outcome | None = None


class Results(Result):
    results: list[Delivered]


class Ack(Params):
    """`rollout.ack`: these results are not delivered again. Unknown ids are no error."""

    ids: Annotated[list[Count], Meta(max_length=10_000)]


class Acked(Result):
    acked: int


# -- what only a worker may call, on its own socket -------------------------------------------------------------------
class GetTask(Params):
    """`rollout.worker.task`: what to do."""


class Assignment(Result):
    """rollout: its id. agent: the one sandbox that the worker may use."""

    rollout: str
    agent: str
    job: str
    task: Raw
    limits: Limits


class Ask(Params):
    """`rollout.worker.ask`: one request of the scaffold to its model; the reply is the trainer's answer.

    step: the worker's number for it, from 1; the same number with the same body is the same step, however often it is
    asked for.
    """

    step: Number
    body: Raw


class Reply(Result):
    step: int
    status: int
    body: Raw


class Partial(Params):
    """`rollout.worker.partial`: something to keep before the end; a number that was kept is kept."""

    number: Number
    data: Raw


class Deliver(Params):
    """`rollout.worker.result`: the end. The first one counts; another one is `conflict`."""

    outcome: Outcome
