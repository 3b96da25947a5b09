"""The worker's way to its daemon, which may be restarted at any time: the same call again, under the same key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from dsecd.client import DSecClient, Sandbox
from dsecd.errors import DsecError
from dsecd.wire import sandbox as wire
from dsecd.wire.base import Params

URL: Final = "unix:///run/dsec/sock"
GONE: Final = ("network", "shutting_down", "outcome_unknown")
UNKNOWN_MAX: Final = 3  # a daemon that is there and cannot know has said it for good
BACKOFF_S: Final = (0.05, 2.0)
T = TypeVar("T")


def at(client: DSecClient, sandbox: str) -> Sandbox:
    """The SDK's object for it, without asking."""
    return Sandbox(client, wire.Sandbox(id=sandbox, state="running", backend="", image=""))


class Link:
    """Connects when it must. Whatever is done through it may be done again."""

    def __init__(self, url: str = URL) -> None:
        self._url = url
        self._client: DSecClient | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def call(self, method: str, params: Params) -> Any:
        return await self.again(lambda client: client.call(method, params))

    async def on(self, sandbox: str, work: Callable[[Sandbox], Awaitable[T]]) -> T:
        """`work` with that sandbox's SDK object."""
        return await self.again(lambda client: work(at(client, sandbox)))

    async def again(self, work: Callable[[DSecClient], Awaitable[T]]) -> T:
        """Until a daemon has answered it. Its refusals are raised, but for those that say: later."""
        pause, unknown = BACKOFF_S[0], 0
        while True:
            try:
                client = await self._connected()
                return await work(client)
            except DsecError as exc:
                if exc.kind not in GONE and not exc.retryable:
                    raise
                alive = self._client is not None and self._client.alive
                unknown += exc.kind == "outcome_unknown" and alive
                if unknown >= UNKNOWN_MAX:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, BACKOFF_S[1])

    async def _connected(self) -> DSecClient:
        async with self._lock:
            if self._client is not None and not self._client.alive:
                client, self._client = self._client, None
                with contextlib.suppress(DsecError):
                    await client.close()
            if self._client is None:
                self._client = await DSecClient(self._url).open()
            return self._client
