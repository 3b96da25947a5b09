"""Byte streams under credit: nobody sends what the other end has not made room for.

`limit` is absolute: the number of bytes the sender may have sent in all since the stream began.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from dsecd.errors import DsecError

# Most bytes in one stream message: as base64 it is 256 KiB, about what a socket takes at once. What a socket does not
# take, asyncio copies on every further send, so larger messages are slower.
CHUNK: Final = 192 << 10


class Inflow:
    """The receiving half. Iterate over it; what was taken is granted again."""

    def __init__(self, send_credit: Callable[[int], None]) -> None:
        self._window = 0  # nothing may come before a handler says how much it will hold
        self._send_credit = send_credit
        self._chunks: deque[bytes] = deque()
        self._received = 0
        self._taken = 0
        self._granted = 0
        self._ended = False
        self._error: DsecError | None = None
        self._wake = asyncio.Event()
        self.digest: hashlib._Hash | None = None  # of what was taken, for whoever asked before the first byte

    def grant(self) -> None:
        """Tell the sender how far it may go, when that is worth a message."""
        limit = self._taken + self._window
        if limit - self._granted >= max(1, self._window // 2) and not self._ended:
            self._granted = limit
            self._send_credit(limit)

    def preset(self, window: int) -> None:
        """The window was agreed in the request itself; no message is needed for it."""
        self._window = self._granted = window

    def widen(self, window: int) -> None:
        """A handler that really reads sets its window."""
        self._window = max(self._window, window)
        self.grant()

    def feed(self, offset: int, data: bytes) -> None:
        """Bytes arrived. Out of order or beyond the credit: the stream fails with `invalid`."""
        if self._error is not None:
            return
        if self._ended or offset != self._received or offset + len(data) > self._granted:
            self.fail(DsecError("invalid", f"stream data at {offset} is out of order or beyond the credit"))
            return
        self._received += len(data)
        if data:
            self._chunks.append(data)
            self._wake.set()

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    def fail(self, error: DsecError) -> None:
        self._error = error
        self._wake.set()

    def cut(self) -> None:
        """No more comes: whoever sent it is gone. What came to its end is whole all the same."""
        if not self._ended:
            self.fail(DsecError("network", "the connection broke in the middle of the stream"))

    @property
    def ended(self) -> bool:
        """Whether its sender said that this was all."""
        return self._ended

    @property
    def waits(self) -> bool:
        """Whether it is the sender's turn: all that came was taken, and more may come."""
        return self._granted > self._received and not (self._chunks or self._ended or self._error)

    @property
    def taken(self) -> int:
        """Bytes that the receiver has had so far."""
        return self._taken

    async def take(self) -> bytes:
        """The next bytes; b"" at the end."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            self._wake.clear()
            await self._wake.wait()
        chunk = self._chunks.popleft()
        self._taken += len(chunk)
        if self.digest is not None:
            self.digest.update(chunk)
        self.grant()
        return chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.take():
            yield chunk


class Upload:
    """A stream as content of its request, which a `request_id` is compared by. inflow: opens it, with that window."""

    def __init__(self, inflow: Callable[[int], Inflow]) -> None:
        self._inflow = inflow

    @property
    def stream(self) -> Inflow:
        return self._inflow(0)

    def watch(self) -> None:
        """Before its handler takes the first byte."""
        self.stream.digest = hashlib.sha256()

    def digest(self) -> bytes:
        """SHA-256 of what its handler has taken."""
        digest = self.stream.digest
        assert digest is not None
        return digest.digest()

    async def read(self) -> bytes:
        """The same of all there is, where no handler takes it."""
        self.watch()
        async for _ in self._inflow(4 * CHUNK):
            pass
        return self.digest()


class Outflow:
    """The sending half: `write` waits for credit and for the transport."""

    def __init__(
        self,
        window: int,
        send: Callable[[int, memoryview], None],
        drained: Callable[[], Awaitable[None]],
        start: int = 0,
    ) -> None:
        self._send = send
        self._drained = drained
        self._limit = start + window
        self._credit = asyncio.Event()
        self._failed: Exception | None = None
        self.sent = start

    def grant(self, limit: int) -> None:
        if limit > self._limit:
            self._limit = limit
            self._credit.set()

    def fail(self, error: Exception) -> None:
        """The other end is gone: every write raises this from now on."""
        self._failed = error
        self._credit.set()

    async def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            if self._failed is not None:
                raise self._failed
            room = min(self._limit - self.sent, CHUNK)
            if room <= 0:
                self._credit.clear()
                await self._credit.wait()
                continue
            piece, view = view[:room], view[room:]
            self._send(self.sent, piece)
            self.sent += len(piece)
            await self._drained()
