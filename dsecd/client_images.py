"""The SDK's calls about images and kernels: a part of `DSecClient`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from dsecd.wire import base
from dsecd.wire import images as image_wire
from dsecd.wire import kernels as kernel_wire
from dsecd.wire.peer import Notified, Pending


class ImageCalls:
    """progress(base.Progress) is called now and then during long ones."""

    if TYPE_CHECKING:

        async def begin(
            self, method: str, params: base.Params, *, window: int = 0, notified: Notified | None = None
        ) -> Pending: ...
        async def call(self, method: str, params: base.Params) -> Any: ...

    async def images(self) -> list[image_wire.Image]:
        found: image_wire.Images = await self.call("image.list", image_wire.ListImages())
        return found.images

    async def import_image(
        self, params: image_wire.Import, stream: AsyncIterator[bytes] | None = None, progress: Any = None
    ) -> image_wire.Image:
        """Import an image; `stream` gives its tar. progress(base.Progress) is called now and then."""
        pending = await self.begin("image.import", params, notified=on_progress(progress))
        if stream is not None:
            await pending.pour(stream)
        return cast(image_wire.Image, await pending.finish())

    async def bootstrap_image(self, params: image_wire.Bootstrap, progress: Any = None) -> image_wire.Image:
        """Make a Debian base on the daemon's host with mmdebstrap."""
        return cast(image_wire.Image, await self._followed("image.bootstrap", params, progress))

    async def collapse_images(self, params: image_wire.Collapse, progress: Any = None) -> image_wire.Image:
        """Merge layers into one image, offline; they stay."""
        return cast(image_wire.Image, await self._followed("image.collapse", params, progress))

    async def push_image(self, params: image_wire.Push, progress: Any = None) -> image_wire.Pushed:
        """Bring an image to a registry."""
        return cast(image_wire.Pushed, await self._followed("image.push", params, progress))

    async def pull_image(self, params: image_wire.Pull, progress: Any = None) -> image_wire.Image:
        """Get an image that was pushed, with its data or lazily."""
        return cast(image_wire.Image, await self._followed("image.pull", params, progress))

    async def kernels(self) -> list[kernel_wire.Kernel]:
        """What virtual machines can boot, newest first."""
        found: kernel_wire.Kernels = await self.call("kernel.list", kernel_wire.ListKernels())
        return found.kernels

    async def make_kernel(
        self, params: kernel_wire.ImportDeb | kernel_wire.Build, progress: Any = None
    ) -> kernel_wire.Kernel:
        """Get a kernel from a Debian package, or build one. progress(base.Progress) is called now and then."""
        method = "kernel.build" if isinstance(params, kernel_wire.Build) else "kernel.import_deb"
        return cast(kernel_wire.Kernel, await self._followed(method, params, progress))

    async def _followed(self, method: str, params: base.Params, progress: Any) -> Any:
        return await (await self.begin(method, params, notified=on_progress(progress))).finish()


def on_progress(progress: Callable[[base.Progress], None] | None) -> Callable[[str, msgspec.Raw], None]:
    def notified(method: str, raw: msgspec.Raw) -> None:
        if method == "progress" and progress is not None:
            progress(msgspec.json.decode(raw, type=base.Progress))

    return notified
