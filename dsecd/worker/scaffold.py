"""One rollout from the worker's side: relay, set-up, scaffold, diff, grading, result.

Every command has a key of its own within the rollout, so that none runs twice, however often the daemon dies.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from dsecd.client import ExecResult, Sandbox, Tunnel
from dsecd.errors import DsecError
from dsecd.wire import execs
from dsecd.wire import rollouts as wire
from dsecd.worker.link import Link, at

RELAY: Final = "/run/dsec-relay.py"
LINE_MAX: Final = 8 << 20
DIFF_MAX: Final = 2 << 20
TAIL: Final = 64 << 10
GRADE_TRIES: Final = 5
AWAY_S: Final = 60.0  # how long the relay may be out of reach before the scaffold has lost its model


class Task(Struct, kw_only=True, forbid_unknown_fields=True):
    """What this worker understands of a rollout's task. Commands are lines for the agent sandbox's /bin/sh.

    files: written first. setup: run in order, each must succeed. scaffold: what is driven; OPENAI_BASE_URL and
    OPENAI_API_KEY are in its environment. diff: prints what was changed. grade: the reward is 1.0 when it succeeds,
    else 0.0; without it there is none. fresh: the grader runs in a copy of the sandbox without the agent's processes
    (containers only); keep: of what the sandbox wrote, it sees what is below these paths. port: of the model inside,
    the worker's is one above.
    """

    scaffold: str
    files: dict[str, str] = {}
    setup: list[str] = []
    diff: str = ""
    grade: str = ""
    fresh: bool = True
    keep: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=30 * 86400)] = 86400.0
    grade_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    port: Annotated[int, Meta(ge=1024, le=65534)] = 8411


class Request(Struct):
    """A line of the relay's."""

    id: int
    body: Raw


async def drive(link: Link) -> None:
    """From the task to its result. DsecError: there is none."""
    given: wire.Assignment = await link.call("rollout.worker.task", wire.GetTask())
    try:
        task = msgspec.json.decode(given.task, type=Task)
    except msgspec.ValidationError as exc:
        raise DsecError("invalid", f"the task cannot be understood: {exc}") from exc
    await link.call("rollout.worker.result", wire.Deliver(outcome=await _Drive(link, given.agent, task).run()))


class _Drive:
    """One rollout under way."""

    def __init__(self, link: Link, agent: str, task: Task) -> None:
        self._link, self._agent, self._task = link, agent, task
        self._steps: dict[int, int] = {}  # the relay's number of a request -> the step it is
        self._listens = asyncio.Event()  # the relay, to the scaffold

    async def run(self) -> wire.Outcome:
        task = self._task
        for path, text in task.files.items():
            await self._write(path, text)
        for number, line in enumerate(task.setup):
            done = await self._shell(line, f"setup-{number}", task.timeout_s)
            if done.exit_code != 0:
                raise DsecError("invalid", f"setup failed with status {done.exit_code}: {_tail(done, 200)!r}")
        await self._start_relay()
        relaying = asyncio.ensure_future(self._relay())
        try:
            ended = await self._race(relaying)
        finally:
            relaying.cancel()
            with contextlib.suppress(asyncio.CancelledError, DsecError):
                await relaying
        await self._partial(1, {"scaffold": ended.exit_code, "timed_out": ended.timed_out})
        outcome = wire.Outcome(exit_code=ended.exit_code)
        if ended.exit_code:
            outcome.error = _tail(ended, 2000).decode("utf-8", "replace")
        if task.diff:
            outcome.diff = (await self._shell(task.diff, "diff", task.grade_timeout_s)).stdout_bytes[:DIFF_MAX]
        if task.grade:
            graded = await self._grade()
            outcome.reward = 1.0 if graded.exit_code == 0 else 0.0
            outcome.output = _tail(graded, TAIL)
        return outcome

    async def _grade(self) -> ExecResult:
        """A fresh copy dies with the daemon and leaves nothing, so it may be made again."""
        task = self._task
        if not task.fresh:
            return await self._shell(task.grade, "grade", task.grade_timeout_s)
        for attempt in range(GRADE_TRIES):
            key = f"grade-{attempt}"
            try:
                return await self._shell(task.grade, key, task.grade_timeout_s, fresh=True, keep=task.keep)
            except DsecError as exc:
                if exc.kind != "outcome_unknown":
                    raise
        raise DsecError("outcome_unknown", f"the daemon died during each of {GRADE_TRIES} runs of the grader")

    async def _race(self, relaying: asyncio.Future[None]) -> ExecResult:
        """The scaffold to its end; a relay that is lost for good is the end, too."""
        scaffold = asyncio.ensure_future(self._scaffold())
        try:
            await asyncio.wait((scaffold, relaying), return_when=asyncio.FIRST_COMPLETED)
            if not scaffold.done():
                relaying.result()
            return await scaffold
        finally:
            scaffold.cancel()

    async def _scaffold(self) -> ExecResult:
        task = self._task
        await self._listens.wait()
        env = {"OPENAI_BASE_URL": f"http://127.0.0.1:{task.port}/v1", "OPENAI_API_KEY": "none", **task.env}
        started = await self._start(["/bin/sh", "-c", task.scaffold], "scaffold", env, task.timeout_s)
        ended: ExecResult = await self._on(lambda box: box.process(started).wait())
        return ended

    # -- the agent sandbox --------------------------------------------------------------------------------------------
    async def _on(self, work: Any) -> Any:
        return await self._link.on(self._agent, work)

    async def _write(self, path: str, text: str) -> None:
        await self._on(lambda box: box.write_file(path, text))

    async def _shell(self, line: str, key: str, timeout: float, **options: Any) -> ExecResult:
        def run(box: Sandbox) -> Any:
            return box.run_shell(
                line, env=self._task.env, cwd=self._task.cwd, timeout=timeout, request_id=key, **options
            )

        result: ExecResult = await self._on(run)
        return result

    async def _start(self, argv: list[str], key: str, env: dict[str, str], timeout: float | None) -> str:
        params = execs.Start(
            id=self._agent, argv=argv, env=env, cwd=self._task.cwd, timeout_s=timeout, cap_bytes=1 << 20, request_id=key
        )
        started: execs.Started = await self._link.call("exec.start", params)
        return started.exec_id

    async def _partial(self, number: int, data: Any) -> None:
        params = wire.Partial(number=number, data=Raw(msgspec.json.encode(data)))
        await self._link.call("rollout.worker.partial", params)

    # -- the model ----------------------------------------------------------------------------------------------------
    async def _start_relay(self) -> None:
        source = Path(__file__).with_name("relay.py").read_text()
        await self._write(RELAY, source)
        await self._start(["python3", RELAY, str(self._task.port)], "relay", {}, None)

    async def _relay(self) -> None:
        """Carry both ways. A tunnel that breaks is made again; the relay then tells what is open."""
        away = 0.0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                heard = await self._link.again(lambda client: self._pump(at(client, self._agent)))
                away = 0.0 if heard else away + loop.time() - began
            except DsecError as exc:
                if exc.kind != "not_found":  # nobody listens there yet, or any more
                    raise
                away += loop.time() - began
            if away > AWAY_S:
                raise DsecError("not_found", "the relay in the agent sandbox is gone: the scaffold has no model")
            await asyncio.sleep(0.1)
            away += 0.1

    async def _pump(self, box: Sandbox) -> bool:
        """One tunnel to its end; whether anything came through it."""
        tunnel = await box.connect_port(self._task.port + 1)
        answering: set[asyncio.Task[None]] = set()
        heard, rest = False, b""
        try:
            while data := await tunnel.read():
                heard = True
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > LINE_MAX:
                    raise DsecError("invalid", "the relay sends no lines: the agent is at it")
                for line in lines:
                    answering.add(asyncio.ensure_future(self._answer(tunnel, line)))
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
            with contextlib.suppress(DsecError):
                await tunnel.close()
        return heard

    async def _answer(self, tunnel: Tunnel, line: bytes) -> None:
        """The tenant may write such lines itself: then it asks its own model, within the rollout's limits."""
        try:
            request = msgspec.json.decode(line, type=Request)
        except msgspec.DecodeError:
            return
        self._listens.set()
        if request.id == 0:
            return
        step = self._steps.setdefault(request.id, len(self._steps) + 1)
        try:
            reply: wire.Reply = await self._link.call("rollout.worker.ask", wire.Ask(step=step, body=request.body))
            answer = {"id": request.id, "status": reply.status, "body": reply.body}
        except DsecError as exc:  # the scaffold must not wait for what never comes
            answer = {"id": request.id, "status": 502, "body": {"error": {"message": str(exc), "type": "server_error"}}}
        await tunnel.write(msgspec.json.encode(answer) + b"\n")


def _tail(result: ExecResult, size: int) -> bytes:
    return (result.stdout_bytes + result.stderr_bytes)[-size:]
