"""trajectory.*: of sandboxes that live, and of those that are over as long as their log is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from msgspec import Raw

from dsecd.errors import DsecError
from dsecd.sandbox.manager import Manager
from dsecd.wire import trajectory as wire
from dsecd.wire.call import Call
from dsecd.wire.stream import CHUNK


class TrajectoryApi:
    """What was done to a sandbox."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._logs = manager.trajectory

    def _id(self, ident: str) -> str:
        """A name becomes an id; an id may be of one that the registry has forgotten."""
        try:
            return self._manager.record(ident).id
        except DsecError:
            return ident

    async def read(self, call: Call, params: wire.Read) -> wire.Entries:
        ident = self._id(params.id)
        if params.sum and params.after:
            known = await self._logs.page(ident, params.after - 1, 1)
            if known.sum != params.sum:
                raise DsecError("conflict", f"entry {params.after} of the trajectory of {ident} is another one")
        page = await self._logs.page(ident, params.after, params.limit)
        entries = cast("list[wire.Entry]", [Raw(line) for line in page.lines])  # as they stand in the file
        return wire.Entries(entries=entries, last=page.last, sum=page.sum)

    async def verify(self, call: Call, params: wire.Verify) -> wire.Verified:
        found = await self._logs.verify(self._id(params.id))
        altered = [wire.Altered(bad.seq, bad.offset) for bad in found.bad]
        return wire.Verified(entries=found.entries, size=found.size, sum=found.sum, altered=altered)

    async def export(self, call: Call, params: wire.Export) -> wire.Exported:
        path, size = await self._logs.whole(self._id(params.id))
        flow = call.outflow(params.window)
        at = 0
        while at < size:
            piece = await asyncio.to_thread(_piece, path, at, min(CHUNK, size - at))
            if not piece:
                raise DsecError("internal", f"{path.name} ended after {at} of {size} bytes")
            await flow.write(piece)
            at += len(piece)
        return wire.Exported(size=at)


def _piece(path: Path, at: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(size)
