"""What is recorded of requests: each that changes a sandbox goes into its trajectory, before and after.

A request without a request_id is recorded lazily when it comes and durably when it is answered: one sync. With one it
is durable before it starts, so that nobody runs it a second time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.sandbox.commands import Commands
from dsecd.sandbox.trajectory import Trajectories
from dsecd.spans import span
from dsecd.wire.base import ErrorData, Params
from dsecd.wire.trajectory import Entry, Who

log = logging.getLogger("dsecd.trajectory")

BULK: Final = 64 << 10  # of a request's own bytes (standard input, a file): more is recorded by its digest


class Mark(Struct):
    """A request that was begun: whose, its place, and when (monotonic)."""

    sandbox: str
    seq: int
    began: float
    durable: asyncio.Future[None] | None = None


class Failure(Struct):
    """An error as it is kept."""

    message: str
    data: ErrorData


class Recorder:
    """`find` gives the id of a sandbox, which a request may call by its name; `not_found`."""

    def __init__(self, trajectories: Trajectories, find: Callable[[str], str]) -> None:
        self.trajectories = trajectories
        self._find = find

    async def begin(self, method: str, params: Params, who: Who, *, lazy: bool) -> Mark:
        """Record the request. Not lazy: it is durable when this returns."""
        ident = self._find(params.id)  # type: ignore[attr-defined]  # every recorded method has one
        entry = Entry(event="request", who=who, method=method, key=params.request_id or "", params=_content(params))
        seq, durable = await self.trajectories.append(ident, entry, lazy=lazy)
        if not lazy:
            with span("log the request"):
                await asyncio.shield(durable)
        return Mark(ident, seq, time.monotonic(), durable)

    async def reply(self, mark: Mark, result: Any) -> None:
        """Record its result; durable when this returns."""
        await self._end(mark, Entry(event="reply", ref=mark.seq, result=result))

    async def failure(self, mark: Mark, exc: BaseException) -> None:
        """Record how it failed."""
        await self._end(mark, Entry(event="reply", ref=mark.seq, error=failure_of(exc)))

    async def _end(self, mark: Mark, entry: Entry) -> None:
        entry.took_ms = round((time.monotonic() - mark.began) * 1000, 3)
        if mark.durable is not None and mark.durable.done():
            mark.durable.result()  # a request that could not be recorded has no reply either
        with span("log the answer"):
            _, durable = await self.trajectories.append(mark.sandbox, entry)
            await asyncio.shield(durable)

    async def record(self, method: str, params: Params, who: Who, invoke: Callable[[], Awaitable[Any]]) -> Any:
        """Carry a request out that has no request_id."""
        mark = await self.begin(method, params, who, lazy=True)
        try:
            result = await invoke()
        except (DsecError, asyncio.CancelledError) as exc:
            await asyncio.shield(self.failure(mark, exc))
            raise
        await self.reply(mark, result)
        return result

    async def command_ended(self, ident: str, commands: Commands, exec_id: str) -> None:
        """Record how a command ended that was only started, with what it wrote."""
        if await self.trajectories.has_ended(ident, exec_id):
            return
        try:
            result = await commands.again(exec_id)
            entry = Entry(event="ended", exec_id=exec_id, result=result)
            await self.trajectories.append(ident, entry, lazy=True)
        except DsecError as exc:
            log.warning("the end of %s is not recorded: %s", exec_id, exc.message, extra={"sandbox_id": ident})


def failure_of(exc: BaseException) -> Failure:
    """As it is answered."""
    if isinstance(exc, DsecError):
        return Failure(exc.message, ErrorData.of(exc))
    return Failure("the caller left, or the daemon stopped", ErrorData("timeout", False, False))


def _content(params: Params) -> Any:
    """What was asked; bytes over BULK as size and digest."""
    bulk = {
        name: {"size": len(value), "sha256": hashlib.sha256(value).hexdigest()}
        for name, value in msgspec.structs.asdict(params).items()
        if isinstance(value, bytes) and len(value) > BULK
    }
    if not bulk:
        return params
    small = msgspec.structs.replace(params, **dict.fromkeys(bulk, b""))
    return {**msgspec.to_builtins(small), **bulk}
