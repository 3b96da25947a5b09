"""One rollout that is not over: its record, steps, sandboxes and worker program, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from dsecd.errors import DsecError
from dsecd.rollout.channel import Channel
from dsecd.rollout.record import Record, Table
from dsecd.rollout.states import move
from dsecd.rollout.steps import Steps
from dsecd.sandbox.live import Live
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.states import ENDED
from dsecd.wire import execs
from dsecd.wire import rollouts as wire
from dsecd.wire import sandbox as box_wire

log = logging.getLogger("dsecd.rollout")
T = TypeVar("T")

LABEL: Final = "dsec.rollout"
SAID: Final = 300  # bytes of a worker's last words


class Active:
    """The worker's program and both sandboxes are watched; whatever ends first ends the rollout."""

    def __init__(self, record: Record, manager: Manager, table: Table, channel: Channel) -> None:
        self.record = record
        self.channel = channel
        self.lock = asyncio.Lock()  # one change at a time
        self.ready = asyncio.Event()  # the worker may be served
        self.steps = Steps(manager.trajectory, record.agent, record.id, record.limits)
        self.on_decided: Callable[[], None] = lambda: None
        self.on_over: Callable[[Active], object] = lambda active: None
        self._manager, self._table = manager, table
        self._tasks: set[asyncio.Task[None]] = set()
        self._carried: set[asyncio.Task[Any]] = set()
        self._ending: asyncio.Task[None] | None = None

    # -- making -------------------------------------------------------------------------------------------------------
    async def begin(self) -> None:
        """Both sandboxes, then the worker's program. On failure `finish` takes back what there is."""
        record, manager = self.record, self._manager
        async with asyncio.TaskGroup() as group:
            agent = group.create_task(manager.create(_labelled(record.agent_spec, record), record.owner))
            worker = group.create_task(
                manager.create(_labelled(record.worker_spec, record), record.owner, "", (self.channel.bind,))
            )
        self.check_live()  # it may have been stopped meanwhile
        record.agent, record.worker = agent.result().id, worker.result().id
        self.steps = Steps(manager.trajectory, record.agent, record.id, record.limits)
        self.channel.belong(manager.rooms.slots.base(worker.result().slot), record.agent)
        live = await manager.running(record.worker)
        assert live.commands is not None
        asked = execs.Start(id=record.worker, argv=record.program, user="0", cap_bytes=64 << 10)  # the socket is root's
        record.exec_id = (await live.commands.start(asked, record.owner.uid)).exec_id
        await self.steps.moved("running")
        await self.move("started")
        self.serve()

    async def take_back(self) -> None:
        """After a restart, of one that runs."""
        await self.steps.rebuild()
        worker = self._manager.record(self.record.worker)
        self.channel.belong(self._manager.rooms.slots.base(worker.slot), self.record.agent)
        if self.steps.open:
            self.record.state = move("running", "asked")
        self.serve()

    def serve(self) -> None:
        """From now on the worker is answered, and the end of anything is noticed."""
        self.ready.set()
        self.spawn(self._watch_program())
        self.spawn(self._watch_sandbox(self.record.agent, "agent sandbox"))
        self.spawn(self._watch_sandbox(self.record.worker, "worker"))

    # -- watching -----------------------------------------------------------------------------------------------------
    async def _watch_program(self) -> None:
        try:
            # A frozen one that was taken back knows its commands only when it runs.
            await self._manager.wait(self.record.worker, {"running", *ENDED})
            live = self._present(self.record.worker)
            if live is None or live.commands is None:
                return  # the other watch says it
            ran = await live.commands.wait(self.record.exec_id)
        except DsecError as exc:
            if exc.kind != "sandbox_dead":
                await self.fail(f"the worker's program was lost: {exc.message}")
            return
        agent = self._present(self.record.agent)
        if agent is None or agent.record.state in {"stopping", *ENDED}:
            return  # a program that lost what it drives; the other watch says it
        said = (ran.stderr or ran.stdout)[-SAID:].decode("utf-8", "replace").strip()
        last = said.splitlines()[-1] if said else "it said nothing"
        await self.fail(f"the worker's program ended with status {ran.exit_code} and no result: {last}")

    async def _watch_sandbox(self, ident: str, what: str) -> None:
        try:
            record = await self._manager.wait(ident, set(ENDED))
        except DsecError as exc:
            await self.fail(f"its {what} is gone: {exc.message}")
            return
        await self.fail(f"its {what} {record.id} is {record.state}: {record.reason or 'no reason'}")

    async def fail(self, reason: str) -> None:
        await self.end("failed", reason)

    # -- moving -------------------------------------------------------------------------------------------------------
    async def move(self, event: str) -> None:
        """Along the table; written when it is more than `waiting_model` and back."""
        record = self.record
        record.state = move(record.state, event)
        if event not in ("asked", "answered"):
            await self._table.put(record)

    def check_live(self) -> None:
        if self.record.state == "finishing" or self._ending is not None:
            raise DsecError("conflict", f"rollout {self.record.id} is over: {self.record.reason or self.record.end}")

    async def end(self, fate: wire.State, reason: str, outcome: wire.Outcome | None = None) -> None:
        """Decide how it ends, once: what is decided is durable and can be fetched as its result. Then take it apart."""
        await self.carry(self._end(fate, reason, outcome))

    async def _end(self, fate: wire.State, reason: str, outcome: wire.Outcome | None) -> None:
        async with self.lock:
            if self.record.state != "finishing" and self._ending is None:
                await self._decide(fate, reason, outcome)
        self.finish()

    async def _decide(self, fate: wire.State, reason: str, outcome: wire.Outcome | None) -> None:
        """What cannot be written is not decided: it goes on as it is, and may be ended again."""
        record, steps = self.record, self.steps
        log.info("rollout %s: %s %s", record.id, fate, reason)
        if record.agent:
            try:
                await steps.moved(fate, reason, outcome)
            except DsecError as exc:  # an end is an end, also when a disk is full
                log.error("rollout %s: its end is not in the trajectory, ignoring: %s", record.id, exc.message)
        decided = msgspec.structs.replace(
            record, state=move(record.state, "end"), end=fate, reason=reason[:4096], outcome=outcome,
            ended=time.time(), steps=len(steps), seq=steps.seq,
        )  # fmt: skip
        result = wire.Delivered(
            id=0, rollout=record.id, job=record.job, state=fate, reason=decided.reason, steps=decided.steps,
            at=decided.ended or 0.0, outcome=outcome,
        )  # fmt: skip
        await self._table.end(decided, result)
        self.record = decided
        self.on_decided()

    def finish(self) -> asyncio.Task[None]:
        """Take it apart; many may ask. Not in the caller's task, which may be one of the worker's calls."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._finish())
            self._ending.add_done_callback(_log_failure)
        return self._ending

    async def _finish(self) -> None:
        record = self.record
        self.ready.set()  # whoever waits for it learns that it is over
        for task in list(self._tasks):
            task.cancel()
        await self.channel.remove()
        await self.stop_sandboxes(f"rollout {record.id} is {record.end}")
        record.state = move(record.state, record.end)
        try:
            await self._table.put(record)
        except DsecError as exc:  # it says `finishing`, which the next daemon finishes
            log.error("rollout %s: that it is over is not written, ignoring: %s", record.id, exc.message)
        self.on_over(self)

    async def stop_sandboxes(self, why: str) -> None:
        """By label: a start may have failed before it had ids."""
        for found in self._manager.all((), {LABEL: self.record.id}, None):
            if found.id != self.record.agent or not self.record.keep_agent:
                await self._manager.stop(found.id, why)

    # -- tasks --------------------------------------------------------------------------------------------------------
    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)

    async def carry(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for what must be done whole: what is in the trajectory must be in memory, also when its caller went."""
        task = asyncio.get_running_loop().create_task(work)
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def release(self) -> None:
        """The daemon goes: let go of it. Its sandboxes and its worker go on."""
        await asyncio.gather(*self._carried, return_exceptions=True)
        tasks = [*self._tasks, *([self._ending] if self._ending is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.channel.close()

    # -- public -------------------------------------------------------------------------------------------------------
    def paused(self) -> bool:
        found = (self._present(ident) for ident in (self.record.agent, self.record.worker))
        return any(live is not None and live.record.state == "paused" for live in found)

    def _present(self, ident: str) -> Live | None:
        """One of its sandboxes as it is: a paused one stays paused."""
        try:
            return self._manager.present(ident)[1]
        except DsecError:
            return None

    async def resume(self) -> None:
        """Both sandboxes: a frozen worker receives nothing, and what it does next is in the agent's."""
        for ident in (self.record.agent, self.record.worker):
            try:
                await self._manager.running(ident)
            except DsecError as exc:
                log.warning("rollout %s: %s was not resumed: %s", self.record.id, ident, exc.message)


def _labelled(spec: box_wire.Spec, record: Record) -> box_wire.Spec:
    """A copy with what says whose it is."""
    return msgspec.structs.replace(spec, labels={**spec.labels, LABEL: record.id}, job=record.job or None)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.error("work for a rollout failed", exc_info=exc)
