"""What long requests have in common: the client's bytes for a child, and progress for the client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Final

from dsecd.erofs.model import Progress
from dsecd.errors import DsecError
from dsecd.wire import base
from dsecd.wire.call import Call
from dsecd.wire.stream import CHUNK

INFLOW: Final = 4 << 20


@contextlib.asynccontextmanager
async def inflow(call: Call) -> AsyncIterator[int]:
    """A descriptor from which a child can read the client's stream. When it breaks off, the child sees it truncated."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    pump = asyncio.ensure_future(_pump(call, ours))
    try:
        yield theirs.fileno()
    finally:
        pump.cancel()
        with contextlib.suppress(asyncio.CancelledError, DsecError, OSError):
            await pump
        ours.close()
        theirs.close()


async def _pump(call: Call, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        async for chunk in call.inflow(INFLOW):
            await loop.sock_sendall(sock, chunk)
    finally:
        sock.shutdown(socket.SHUT_WR)


async def outflow(call: Call, sock: socket.socket, window: int) -> None:
    """What comes from a socket, to the client, until its far end closes."""
    flow = call.outflow(window)
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(sock, CHUNK):
        await flow.write(data)


async def tunnel(call: Call, sock: socket.socket, window: int) -> tuple[int, int]:
    """The client's stream into a socket and back, until its far end closes: bytes sent there, and received from it.

    The client's end of stream, or its breaking off, is passed on; the far end then closes, as its protocol has it.
    """
    loop = asyncio.get_running_loop()
    inflow, flow = call.inflow(INFLOW), call.outflow(window)
    pump = asyncio.ensure_future(_pump(call, sock))
    try:
        with contextlib.suppress(ConnectionResetError):  # it closed with bytes unread: an end like the other
            while data := await loop.sock_recv(sock, CHUNK):
                await flow.write(data)
    finally:
        pump.cancel()
        with contextlib.suppress(asyncio.CancelledError, DsecError, OSError):
            await pump
    call.notify("stream.eof", base.StreamEof(call.id))
    return inflow.taken, flow.sent


def teller(call: Call) -> Callable[[Progress], None]:
    """Tells the caller where a job of his stands."""

    def progress(at: Progress) -> None:
        call.notify("progress", base.Progress(call.id, at.phase, at.done, at.total))

    return progress
