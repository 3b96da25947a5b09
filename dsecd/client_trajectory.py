"""The SDK's calls of trajectories: a part of `DSecClient`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, cast

from dsecd.wire import base
from dsecd.wire import trajectory as wire
from dsecd.wire.peer import Notified, Pending


class TrajectoryCalls:
    """What was done to a sandbox, also when it is over."""

    if TYPE_CHECKING:

        async def begin(
            self, method: str, params: base.Params, *, window: int = 0, notified: Notified | None = None
        ) -> Pending: ...
        async def call(self, method: str, params: base.Params) -> Any: ...

    async def trajectory(self, ident: str, *, after: int = 0, sum: str = "") -> wire.Entries:
        """All entries behind `after`, with the last one's number and sum: give both back to go on from there."""
        found: wire.Entries = await self.call("trajectory.read", wire.Read(id=ident, after=after, sum=sum))
        while found.entries and found.entries[-1].seq < found.last:
            more: wire.Entries = await self.call("trajectory.read", wire.Read(id=ident, after=found.entries[-1].seq))
            found.entries += more.entries
            found.last, found.sum = more.last, more.sum
        return found

    async def verify_trajectory(self, ident: str) -> wire.Verified:
        """Whether each entry is as it was written."""
        return cast(wire.Verified, await self.call("trajectory.verify", wire.Verify(id=ident)))

    async def export_trajectory(self, ident: str) -> AsyncGenerator[bytes, None]:
        """The log's file, in pieces: a line `<sum> <JSON>` for each entry."""
        params = wire.Export(id=ident)
        pending = await self.begin("trajectory.export", params, window=params.window)
        assert pending.inflow is not None
        async for piece in pending.inflow:
            yield piece
        await pending.finish()
