"""The SDK's way to a daemon or a fleet: opened, and opened again when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from dsecd.client_tenants import read_token
from dsecd.errors import DsecError
from dsecd.wire import base, daemon, tenants
from dsecd.wire.methods import METHODS
from dsecd.wire.peer import Notified, Peer, Pending
from dsecd.wire.ssh import forwarded

T = TypeVar("T")
SSH_AGAIN_S: Final = 60.0  # so long a tunnel that broke is tried again, by default
HELLO_S: Final = 60.0  # a daemon that takes back what it had answers late
PAUSE_S: Final = 0.1  # at first, between two attempts; then twice as long, up to 2 s
CUT: Final = ("network", "outcome_unknown", "shutting_down")


class Link:
    """again_s: how long a call may wait for a connection that broke to be made again; 0: it fails at once.

    A call is repeated when that is safe: it changes nothing, or has a request_id, which it gets where it may have one.
    """

    def __init__(self, url: str, again_s: float | None, token_file: str | None = None) -> None:
        if not url.startswith(("ssh://", "unix://")):
            raise DsecError("invalid", f"{url!r} is neither unix:///path nor ssh://host")
        self.url = url
        self._token_file = token_file or os.environ.get("DSEC_TOKEN_FILE")
        self._again_s = again_s if again_s is not None else SSH_AGAIN_S if url.startswith("ssh://") else 0.0
        self._stack = contextlib.AsyncExitStack()
        self._peer: Peer | None = None
        self._lock = asyncio.Lock()

    @property
    def peer(self) -> Peer:
        if self._peer is None:
            raise DsecError("invalid", "the client is not open: use `async with` or `await client.open()`")
        return self._peer

    async def open(self) -> None:
        """Connect and agree on the protocol."""
        try:
            path = self.url.removeprefix("unix://")
            if self.url.startswith("ssh://"):
                path = await self._stack.enter_async_context(forwarded(self.url))
            peer = await Peer.connect_unix(path)
            self._stack.push_async_callback(peer.aclose)
            async with asyncio.timeout(HELLO_S):
                await peer.call("daemon.hello", daemon.Hello(client=f"python/{os.getpid()}"))
                if self._token_file:
                    token = await asyncio.to_thread(read_token, self._token_file)
                    await peer.call("session.login", tenants.Login(token=token))
        except BaseException as exc:
            await self._stack.aclose()
            if isinstance(exc, TimeoutError):
                text = f"{self.url} takes connections and does not answer ({HELLO_S:g} s)"
                raise DsecError("network", text) from exc
            raise
        self._peer = peer

    async def close(self) -> None:
        await self._stack.aclose()
        self._peer = None

    async def carry(
        self, method: str, params: base.Params, send: Callable[[Peer], Awaitable[T]], *, whole: bool = False
    ) -> T:
        """One call, made again over a new connection where that is safe. whole: `send` streams from the start again."""
        entry = METHODS[method]
        safe = self._again_s > 0 and (whole or not (entry.upload or entry.download or entry.events))
        if safe and entry.once and params.request_id is None:
            params.request_id = uuid.uuid4().hex
        while True:
            peer = self.peer
            try:
                return await send(peer)
            except DsecError as exc:
                if not safe or (entry.recorded and not entry.once) or exc.kind not in CUT or not await _went(peer):
                    raise
                await self._anew(peer, exc)

    async def begin(
        self, method: str, params: base.Params, *, window: int = 0, notified: Notified | None = None
    ) -> Pending:
        """A call whose bytes or notifications come in between. It is not made again, but it does not begin on a
        connection that is over."""
        peer = self.peer
        if not peer.alive and self._again_s > 0:
            await self._anew(peer, DsecError("network", f"the connection to {self.url} broke"))
        return self.peer.start(method, params, window=window, notified=notified)

    async def _anew(self, broken: Peer, why: DsecError) -> None:
        """A new connection in place of a broken one; many at once wait for one. Raises `why` when there is none."""
        async with self._lock:
            if self._peer is not broken:
                return
            deadline, pause = time.monotonic() + self._again_s, PAUSE_S
            while True:
                await self._stack.aclose()
                with contextlib.suppress(DsecError):
                    await self.open()
                    return
                if time.monotonic() + pause > deadline:
                    raise why
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)


async def _went(peer: Peer) -> bool:
    """Whether the connection is over. A daemon that stops says so before it closes."""
    done, _ = await asyncio.wait((peer.closed,), timeout=1.0 if peer.alive else 0.0)
    return bool(done)
