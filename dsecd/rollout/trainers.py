"""Who is the model now: trainers that are attached, and the steps on their way to them.

A rollout has one trainer at most. A newer one takes over from any whose rollouts it would share; the older is told
once. A step is delivered again to whoever comes next until it is answered: the trainer may die at any instant.
"""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.rollout.record import Record

Ref = tuple[str, int]  # rollout, step


class Scope(Struct, frozen=True):
    """All rollouts of a user's job, or one of them. uid 0: of everybody's jobs of that name."""

    uid: int
    job: str
    rollout: str | None = None

    def covers(self, record: Record) -> bool:
        return self.uid in (0, record.owner.uid) and self.job == record.job and self.rollout in (None, record.id)

    def meets(self, other: Scope) -> bool:
        same = self.rollout == other.rollout or None in (self.rollout, other.rollout)
        return self.job == other.job and same and (self.uid == other.uid or 0 in (self.uid, other.uid))

    def __str__(self) -> str:
        return f"rollout {self.rollout}" if self.rollout else f"job {self.job!r}"


class Trainer:
    """One attach. `take` gives the next step that it has room for."""

    def __init__(self, scope: Scope, window: int) -> None:
        self.scope: Final = scope
        self._window = window
        self._todo: dict[Ref, None] = {}  # in order
        self._sent: set[Ref] = set()
        self._wake = asyncio.Event()
        self._lost: DsecError | None = None

    def offer(self, ref: Ref) -> None:
        if ref in self._sent or ref in self._todo:
            return
        self._todo[ref] = None
        self._wake.set()

    def answered(self, ref: Ref) -> None:
        """By whomever: it has room for another one."""
        self._sent.discard(ref)
        self._wake.set()

    def over(self, rollout: str) -> None:
        """Nobody waits for its steps any more."""
        self._todo = {ref: None for ref in self._todo if ref[0] != rollout}
        self._sent = {ref for ref in self._sent if ref[0] != rollout}
        self._wake.set()

    def lose(self, why: DsecError) -> None:
        self._lost = why
        self._wake.set()

    async def take(self) -> Ref:
        """The next step; `conflict` once another trainer took over."""
        while True:
            if self._lost is not None:
                raise self._lost
            if self._todo and len(self._sent) < self._window:
                ref = next(iter(self._todo))
                del self._todo[ref]
                self._sent.add(ref)
                return ref
            self._wake.clear()
            await self._wake.wait()


class Trainers:
    """All that are attached to this daemon."""

    def __init__(self) -> None:
        self._attached: list[Trainer] = []

    def attach(self, scope: Scope, window: int) -> Trainer:
        for older in [one for one in self._attached if one.scope.meets(scope)]:
            self._attached.remove(older)
            older.lose(DsecError("conflict", f"another trainer attached to {older.scope}"))
        trainer = Trainer(scope, window)
        self._attached.append(trainer)
        return trainer

    def detach(self, trainer: Trainer) -> None:
        if trainer in self._attached:
            self._attached.remove(trainer)

    def of(self, record: Record) -> Trainer | None:
        return next((one for one in self._attached if one.scope.covers(record)), None)
