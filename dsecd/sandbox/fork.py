"""Copies of a sandbox as it is now.

Of a container: its files, copy-on-write, with ids of their own; no process is carried over. Of a microVM: its memory,
processes and disk. It stands still while it is saved and its disk is cloned, then all go on. The copies' memory is the
saved file, mapped privately by each; the file has no name any more once all of them run.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from dsecd.aio import uninterrupted
from dsecd.errors import DsecError
from dsecd.sandbox.ids import new_id
from dsecd.sandbox.live import Live
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.record import Record
from dsecd.sandbox.snapshot import snapshot
from dsecd.vmm.backend import Template
from dsecd.wire import sandbox as wire


async def fork(
    manager: Manager, ident: str, count: int, owner: wire.Owner, request: str = ""
) -> list[Record | DsecError]:
    """One result for each copy, in order: its record, or why there is none. Raises when the source cannot be saved.

    A paused container stays paused; a paused microVM is resumed.
    """
    record = manager.record(ident)
    if record.state == "creating":
        await manager.wait(record.id, {"running", "stopped", "failed"})
    if record.backend == "container":
        return await _containers(manager, manager.standing(ident), count, owner, request)
    return await _machines(manager, await manager.running(ident), count, owner, request)


def shown(manager: Manager, made: list[Record | DsecError]) -> wire.Created:
    """What a client sees of them."""
    return wire.Created(
        results=[
            wire.CreateOne(error=wire.Failed.of(one))
            if isinstance(one, DsecError)
            else wire.CreateOne(sandbox=manager.public(one))
            for one in made
        ]
    )


@contextlib.asynccontextmanager
async def fleeting(manager: Manager, ident: str, owner: wire.Owner, keep: Sequence[str] = ()) -> AsyncIterator[Live]:
    """A copy of a container for one command: it ends with the block, or with the daemon.

    keep: paths inside; of what the container wrote, the copy has what is below them. None: all of it.
    """
    source = manager.standing(ident)
    if source.record.backend != "container":
        raise DsecError(
            "unsupported",
            "a copy of a VM has its processes, so nothing is fresh in it: take out what is judged, and run it in a "
            "new sandbox",
        )
    async with snapshot(manager.rooms, source) as template:
        if keep:
            await uninterrupted(asyncio.to_thread(manager.rooms.pool.keep_only, template, keep))
        live = _admit(manager, source, owner, "", fleeting=True)
        try:
            await manager.bring_up(live, lambda: live.start(template))
        except BaseException as exc:
            await manager.give_up(live, _error(exc).message)
            raise
    try:
        yield live
    finally:
        await asyncio.shield(manager.stop(live.record.id, "its one command is over"))


async def _containers(
    manager: Manager, source: Live, count: int, owner: wire.Owner, request: str
) -> list[Record | DsecError]:
    made: list[_Copy] = []
    try:
        async with snapshot(manager.rooms, source) as template:
            made = [_Copy(manager, source, owner, request) for _ in range(count)]
            await asyncio.gather(*(one.bring_up(lambda live: live.start(template)) for one in made))
    finally:
        await _settle(made)
    return [one.result for one in made]


async def _machines(
    manager: Manager, source: Live, count: int, owner: wire.Owner, request: str
) -> list[Record | DsecError]:
    made = [_Copy(manager, source, owner, request) for _ in range(count)]
    template: Template | None = None
    try:
        async with source.lock:
            assert source.body is not None
            async with manager.rooms.vms.template(source.body) as template:
                for one in made:
                    await one.attempt(lambda live: live.start_fork(source.record.id))
        found = template
        await asyncio.gather(*(one.bring_up(lambda live: live.finish_fork(found)) for one in made))
    finally:
        if template is not None:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, template.directory, True))
        await _settle(made)
    return [one.result for one in made]


class _Copy:
    """One copy on its way. `result`: its record, or why there is none; the others do not mind."""

    def __init__(self, manager: Manager, source: Live, owner: wire.Owner, request: str) -> None:
        self._manager = manager
        self._live: Live | None = None
        try:
            self._live = _admit(manager, source, owner, request)
            self.result: Record | DsecError = self._live.record
        except DsecError as exc:
            self.result = exc

    async def attempt(self, step: Callable[[Live], Awaitable[None]]) -> None:
        """One step of its making, unless an earlier one failed."""
        if self._live is None or isinstance(self.result, DsecError):
            return
        try:
            await step(self._live)
        except (DsecError, OSError) as exc:
            self.result = _error(exc)

    async def bring_up(self, start: Callable[[Live], Awaitable[None]]) -> None:
        """The last step."""
        await self.attempt(lambda live: self._manager.bring_up(live, lambda: start(live)))

    async def settle(self) -> None:
        """Nothing stays of one that failed, nor of one that was still being made when all of it was ended."""
        if self._live is None:
            return
        if isinstance(self.result, DsecError):
            await self._manager.give_up(self._live, self.result.message)
        elif self._live.record.state == "creating":
            await self._manager.give_up(self._live, "its creation was cancelled")


async def _settle(made: list[_Copy]) -> None:
    await asyncio.shield(asyncio.gather(*(one.settle() for one in made)))


def _admit(manager: Manager, source: Live, owner: wire.Owner, request: str, *, fleeting: bool = False) -> Live:
    """A record for a copy of it: the same spec, without its name."""
    old = source.record
    spec = msgspec.structs.replace(old.spec, name=None)
    if fleeting:  # the request that waits for it is its owner, and nobody renews a lease of what he does not know of
        spec = msgspec.structs.replace(spec, lease_s=None, ttl_idle_s=None, ttl_total_s=None)
    manager.admission.check(spec, owner.project)
    record = Record(
        id=new_id(manager.tag), spec=spec, backend=old.backend, choice=old.choice, boot=manager.boot, owner=owner,
        layers=list(old.layers), request=request, fleeting=fleeting,
    )  # fmt: skip
    return manager.enter(record, f"copy of {old.id}")


def _error(exc: BaseException) -> DsecError:
    return exc if isinstance(exc, DsecError) else DsecError("internal", f"the copy could not be made: {exc}")
