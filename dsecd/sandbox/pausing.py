"""Pausing a sandbox and letting it go on: the two moves, each once however many ask for it at the same time.

What pausing does to a container or a VM is its backend's business (dsecd.sandbox.body); here are the order of states
and what becomes of a failure.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from dsecd.errors import DsecError
from dsecd.sandbox import expiry
from dsecd.sandbox.live import Live
from dsecd.sandbox.record import Record


class Moves(Protocol):
    """The manager, as far as it is needed here."""

    def present(self, ident: str) -> tuple[Record, Live | None]: ...
    def standing(self, ident: str) -> Live: ...
    async def move(self, live: Live, event: str, *, must_write: bool = True) -> None: ...
    async def carry(self, work: Coroutine[Any, Any, None]) -> None: ...
    async def keep(self, record: Record) -> None: ...
    def broke(self, live: Live, why: str) -> None: ...
    def look(self, live: Live) -> None: ...


class Pausing:
    """One per manager."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves

    async def pause(self, ident: str) -> Record:
        """Freeze it (a VM: save it and end its process), and let its memory go. When it cannot be frozen, it runs on.

        Of a paused one: nothing. Somebody may have resumed it by the time this returns.
        """
        record = await self.freeze(ident)
        await self.give_back(ident)
        return record

    async def freeze(self, ident: str) -> Record:
        """The first half of `pause`: from now on nothing runs in it."""
        record, live = self._moves.present(ident)
        if live is None:
            raise DsecError("conflict", f"sandbox {record.id} is {record.state}", sandbox_id=record.id)
        await self._moves.carry(self._freeze(live))
        return record

    async def give_back(self, ident: str) -> None:
        """The second half, which a resume cuts short."""
        _, live = self._moves.present(ident)
        if live is not None:
            await self._moves.carry(self._give_back(live))

    async def _freeze(self, live: Live) -> None:
        async with live.lock:
            if live.record.state == "paused":
                return
            expiry.stand_still(live.record)
            try:
                await self._moves.move(live, "pause")
                await live.pause()
            except (DsecError, OSError):
                expiry.go_on(live.record)
                if live.record.state == "pausing":
                    await self._moves.move(live, "unpaused", must_write=False)
                self._moves.look(live)
                raise
            await self._moves.move(live, "paused")

    async def _give_back(self, live: Live) -> None:
        """Without the lock: it is whoever resumes it who needs that."""
        if live.record.state == "paused" and await live.give_back():
            await self._moves.keep(live.record)

    async def resume(self, ident: str) -> Record:
        """Thaw or load it. Of a running one: nothing; many at once wait for one thaw.

        When it fails it is paused as before and may be asked for again; after `sandbox_dead` it is over.
        """
        live = self._moves.standing(ident)
        await self._moves.carry(self._resume(live))
        return live.record

    async def _resume(self, live: Live) -> None:
        record = live.record
        async with live.lock:
            if record.state != "paused":
                return
            await self._moves.move(live, "resume")
            try:
                await live.resume()
            except (DsecError, OSError) as exc:
                if isinstance(exc, DsecError) and exc.kind == "sandbox_dead":
                    self._moves.broke(live, exc.message)
                else:
                    await self._moves.move(live, "unresumed", must_write=False)
                raise
            expiry.go_on(record)
            await self._moves.move(live, "resumed")
            self._moves.look(live)
