"""What every asyncio protocol of ours shares: a transport that may be gone, and waiting while it is full."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

HIGH: Final = 512 << 10  # bytes that wait here before writers do
# Asked of the socket; the kernel gives what net.core.wmem_max allows. A stream message should fit at once: what is left
# of a write, asyncio moves again and again.
SOCKET_BUFFER: Final = 1 << 20


class Flow(asyncio.Protocol):
    """`transport` is None before and after the connection."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def drained(self) -> None:
        """Wait until the other end has read enough, or is gone."""
        if not self._writable.is_set():
            await self._writable.wait()
