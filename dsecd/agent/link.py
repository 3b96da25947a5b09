"""One link to one agent: connect, greet, carry channels, notice the end.

The link ends when the agent dies, breaks the protocol or a newer daemon took over; every channel then gets
`sandbox_dead`. Nothing here is retried: the owner decides what a lost link means.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from dsecd.agent.frames import FROM_AGENT, VERSION, Decoder, Field, Fields, FrameError, Tag, Type, fields, frame, header
from dsecd.errors import DsecError
from dsecd.flow import Flow

log = logging.getLogger("dsecd.agent")

MAX_RECORDS: Final = 4096


class Channel:
    """One request of the host and all that belongs to it. Subclasses say what frames mean."""

    __slots__ = ("link", "number")

    def __init__(self, link: AgentLink) -> None:
        self.link = link
        self.number = link.take_number()

    def frame(self, kind: Type, payload: memoryview) -> None:
        """A frame came. FrameError when it does not belong here."""
        raise FrameError(f"{kind.name} on channel {self.number}")

    def lost(self, error: DsecError) -> None:
        """The link is gone; no frame will come any more."""

    def send(self, kind: Type, items: list[Field] | None = None) -> None:
        self.link.send(kind, self.number, fields(items) if items else b"")

    def send_raw(self, kind: Type, payload: bytes | memoryview) -> None:
        self.link.send(kind, self.number, payload)


class AgentLink(Flow):
    """The host end. Use `connect`."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = Decoder()
        self._channels: dict[int, Channel] = {}
        self._next = 1
        self._listing: list[tuple[int, Fields]] | None = None
        self._listed: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Fields] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.reason = ""

    @classmethod
    async def connect(cls, path: str, hello: list[Field], timeout: float) -> AgentLink:
        """Connect to the agent's socket and wait for READY.

        Raises `sandbox_dead` when it does not answer in `timeout` seconds or not properly.
        """
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.connect(path)
        except OSError as exc:
            sock.close()
            raise DsecError("sandbox_dead", f"the agent does not listen: {exc.strerror}") from exc
        _, link = await loop.create_unix_connection(cls, sock=sock)
        try:
            link.send(Type.HELLO, 0, fields([(Tag.VERSION, VERSION), *hello]))
            async with asyncio.timeout(timeout):
                ready = await link._ready
            link._next = max(1, ready.integer(Tag.NEXT))
        except (TimeoutError, FrameError) as exc:
            await link.close()
            raise DsecError("sandbox_dead", f"the agent did not greet within {timeout:g} s") from exc
        except BaseException:
            await link.close()
            raise
        return link

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.reason = self.reason or (f"link error: {exc}" if exc else "the agent closed the link")
        error = DsecError("sandbox_dead", f"the sandbox died: {self.reason}")
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # `connect` may have given up already
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.lost(error)
        if self._listed is not None and not self._listed.done():
            self._listed.set_exception(error)
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, number, payload in self._decoder.feed(data):
                self._frame(kind, number, payload)
        except FrameError as exc:
            self.reason = f"the agent broke the protocol: {exc}"
            log.warning("%s", self.reason)
            if self.transport is not None:
                self.transport.abort()

    def _frame(self, kind: Type, number: int, payload: memoryview) -> None:
        if kind not in FROM_AGENT:
            raise FrameError(f"{kind.name} from the agent")
        if number == 0:
            if kind is Type.READY and not self._ready.done():
                parsed = Fields(payload)
                if parsed.integer(Tag.VERSION) != VERSION:
                    raise FrameError("the agent is of another version")
                self._ready.set_result(parsed)
            elif kind is Type.DONE and self._listed is not None and not self._listed.done():
                self._listed.set_result(None)
            elif kind is not Type.PONG:
                raise FrameError(f"{kind.name} on channel 0")
            return
        if kind is Type.RECORD:
            if self._listing is None or len(self._listing) >= MAX_RECORDS:
                raise FrameError("RECORD out of place")
            self._listing.append((number, Fields(payload)))
            return
        channel = self._channels.get(number)
        if channel is not None:  # frames for a channel that was closed here may still be under way
            channel.frame(kind, payload)

    # -- channels -----------------------------------------------------------------------------------------------------
    @property
    def alive(self) -> bool:
        return self.transport is not None

    async def list_commands(self) -> list[tuple[int, Fields]]:
        """Channel number and RECORD of every command the agent still knows."""
        self._listing, self._listed = [], asyncio.get_running_loop().create_future()
        self.send(Type.LIST, 0)
        if not self.alive:
            raise DsecError("sandbox_dead", f"the sandbox died: {self.reason}")
        await self._listed
        listing, self._listing = self._listing, None
        return listing

    def take_number(self) -> int:
        self._next += 1
        return self._next - 1

    def attach(self, channel: Channel) -> None:
        """Route frames of its number to it. Raises `sandbox_dead` when the link is gone."""
        if self.transport is None:
            raise DsecError("sandbox_dead", f"the sandbox died: {self.reason}")
        self._channels[channel.number] = channel

    def detach(self, channel: Channel) -> None:
        if self._channels.get(channel.number) is channel:
            del self._channels[channel.number]

    def send(self, kind: Type, number: int, payload: bytes | memoryview = b"") -> None:
        """Queue one frame; a link that is gone swallows it (the channel has been told)."""
        if self.transport is None:
            return
        if len(payload) > 16384:
            self.transport.write(header(kind, number, len(payload)))
            self.transport.write(payload)
        else:
            self.transport.write(frame(kind, number, payload))

    async def close(self) -> None:
        """Let go of the link. The agent and its commands go on."""
        if self.transport is not None:
            self.reason = self.reason or "the daemon let go of it"
            self.transport.abort()
            await self.closed
