"""kernel.*"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from pathlib import PurePath

from dsecd.api.flows import teller
from dsecd.errors import DsecError
from dsecd.vmm import kernel_jobs
from dsecd.vmm.kernel import Kernel, KernelStore
from dsecd.wire import base
from dsecd.wire import kernels as wire
from dsecd.wire.call import Call


class KernelApi:
    """Imports and builds run in processes of their own, one at a time: a build has all cores already."""

    def __init__(
        self, store: KernelStore, default: str = "", in_use: Callable[[], Collection[str]] = lambda: ()
    ) -> None:
        """default: name of the kernel for machines that ask for none; empty: the newest. in_use: names."""
        self._store = store
        self._default = default
        self._in_use = in_use
        self._slot = asyncio.Semaphore(1)
        store.collect()

    async def list_(self, call: Call, params: wire.ListKernels) -> wire.Kernels:
        return wire.Kernels(kernels=await asyncio.to_thread(self._all))

    async def import_deb(self, call: Call, params: wire.ImportDeb) -> wire.Kernel:
        async with self._slot:
            made = await kernel_jobs.import_deb(self._store, params.name, params.package, teller(call))
        return await self._shown(made)

    async def build(self, call: Call, params: wire.Build) -> wire.Kernel:
        async with self._slot:
            made = await kernel_jobs.build(self._store, params.name, tuple(params.options), teller(call))
        return await self._shown(made)

    async def remove(self, call: Call, params: wire.KernelByName) -> base.Empty:
        await asyncio.to_thread(self._store.remove, params.name, self._in_use())
        return base.Empty()

    async def _shown(self, kernel: Kernel) -> wire.Kernel:
        return _kernel(kernel, await asyncio.to_thread(self._default_name))

    def _all(self) -> list[wire.Kernel]:
        default = self._default_name()
        return [_kernel(kernel, default) for kernel in self._store.list()]

    def _default_name(self) -> str:
        with contextlib.suppress(DsecError):
            return self._store.default(self._default).name
        return ""


def _kernel(kernel: Kernel, default: str) -> wire.Kernel:
    modules = [PurePath(one).stem.partition("-")[2] for one in kernel.modules]
    return wire.Kernel(
        name=kernel.name, kind=kernel.kind, source=kernel.source, version=kernel.version, release=kernel.release,
        digest=kernel.digest, created=kernel.created, size=kernel.size, modules=modules,
        features=dict(kernel.features), default=kernel.name == default,
    )  # fmt: skip
