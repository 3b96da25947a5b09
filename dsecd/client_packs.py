"""The SDK's calls about environments, which are packed sandboxes: a part of `DSecClient`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from dsecd.client_images import on_progress
from dsecd.wire import base
from dsecd.wire import environments as wire
from dsecd.wire.images import Image
from dsecd.wire.peer import Notified, Pending


class PackCalls:
    """progress(base.Progress) is called now and then during long ones."""

    if TYPE_CHECKING:

        async def begin(
            self, method: str, params: base.Params, *, window: int = 0, notified: Notified | None = None
        ) -> Pending: ...
        async def call(self, method: str, params: base.Params) -> Any: ...

    async def pack_diff(
        self, ident: str, name: str, *, leave_out: Iterable[str] = (), label: str = "", request_id: str | None = None,
        progress: Any = None,
    ) -> wire.Packed:  # fmt: skip
        """What a container or a microVM wrote becomes the environment `name`: an image that others are started from.

        leave_out: paths inside (`*`, `?`, `**`) that it must not show, not even from a lower layer: answers. `denied`
        names the rule that the pack breaks, and the path.
        """
        params = wire.PackDiff(id=ident, name=name, leave_out=[*leave_out], label=label, request_id=request_id)
        pending = await self.begin("sandbox.pack_diff", params, notified=on_progress(progress))
        return cast(wire.Packed, await pending.finish())

    async def export_environment(
        self, ref: str, write: Callable[[bytes], Awaitable[object]], *, progress: Any = None
    ) -> wire.Exported:
        """An image with all layers below it, as a tar that is given to `write` piece by piece."""
        params = wire.Export(ref=ref)
        pending = await self.begin(
            "environment.export", params, window=params.window, notified=on_progress(progress)
        )  # fmt: skip
        assert pending.inflow is not None
        while chunk := await pending.inflow.take():
            await write(chunk)
        return cast(wire.Exported, await pending.finish())

    async def import_environment(
        self, stream: AsyncIterator[bytes], *, name: str | None = None, progress: Any = None
    ) -> Image:
        """One that was exported; layers that are here already are not made again."""
        pending = await self.begin("environment.import", wire.Load(name=name), notified=on_progress(progress))
        await pending.pour(stream)
        return cast(Image, await pending.finish())

    async def environment_rules(self) -> list[wire.Rule]:
        """What packs are held against, and what is left out of them."""
        found: wire.Rules = await self.call("environment.rules", wire.RulesParams())
        return found.rules
