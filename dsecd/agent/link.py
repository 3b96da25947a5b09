"""One link to one agent: connect, greet, carry channels, notice the end.

The link ends when the agent dies, breaks the protocol or a newer daemon took over; every channel then gets
`sandbox_dead`. Nothing here is retried: the owner decides what a lost link means. The owner may also suspend a link
(its VM is saved to disk) and connect it again later: commands go on then, as they went on in the guest. Where the agent
is a service that its machine outlives, the owner connects again after a loss, too; what was asked of the agent that
ended has an unknown outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Final

from dsecd.agent.address import AgentAddress
from dsecd.agent.frames import FROM_AGENT, VERSION, Decoder, Field, Fields, FrameError, Tag, Type, fields, frame, header
from dsecd.agent.serial import Serial
from dsecd.errors import DsecError
from dsecd.flow import Flow

log = logging.getLogger("dsecd.agent")

MAX_RECORDS: Final = 4096
MAX_RECORD: Final = 8192  # bytes, of which META has half
MAX_NEXT: Final = 1 << 31  # numbers have 32 bits; whoever pushes them has still as many left
SYNC_S: Final = 0.25
DIAL_S: Final = 0.02


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

    def renewed(self) -> None:
        """The link was suspended and is connected again; the agent dropped what only a connection holds."""
        self.link.detach(self)
        self.lost(DsecError("sandbox_dead", "the sandbox was paused meanwhile: ask again", retryable=True))

    def send(self, kind: Type, items: list[Field] | None = None) -> None:
        self.link.send(kind, self.number, fields(items) if items else b"")

    def send_raw(self, kind: Type, payload: bytes | memoryview) -> None:
        self.link.send(kind, self.number, payload)


class AgentLink(Flow):
    """The host end, to one agent for its life. Use `connect`, or `connect_again` on a suspended one."""

    def __init__(self, address: AgentAddress, hello: list[Field], *, outlived: bool = False) -> None:
        """outlived: the agent's end is not the sandbox's; that of the transport by itself still is."""
        super().__init__()
        self.outlived = outlived
        self._pid = 0  # the agent's, as it says
        self._address = address
        self._hello = hello
        self._serial: Serial | None = None
        self._heard = asyncio.Event()
        self._down = asyncio.Event()
        self._decoder = Decoder()
        self._channels: dict[int, Channel] = {}
        self._next = 1
        self._listing: list[tuple[int, Fields]] | None = None
        self._listed: asyncio.Future[None] | None = None
        self._held: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Fields] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.suspended = False
        self._resets = False
        self.reason = ""

    @classmethod
    async def connect(cls, address: AgentAddress, hello: list[Field], timeout: float) -> AgentLink:
        """Connect to the agent's socket and wait for READY.

        Raises `sandbox_dead` when it does not answer in `timeout` seconds or not properly.
        """
        link = cls(address, hello)
        await link._open(timeout)
        return link

    @classmethod
    def asleep(cls, address: AgentAddress, hello: list[Field], *, outlived: bool = False) -> AgentLink:
        """A link that is suspended from its beginning: its agent cannot answer before `connect_again`."""
        link = cls(address, hello, outlived=outlived)
        link.suspended = True
        return link

    async def suspend(self) -> None:
        """Let go of the connection without telling channels: the agent will be back."""
        self.suspended = True
        if self.transport is not None:
            self.transport.abort()
            await self._down.wait()

    async def connect_again(self, timeout: float, hello: list[Field] | None = None) -> None:
        """End the suspension, or the loss. Channels of commands go on; all others get an error. Errors as `connect`."""
        self._ready = asyncio.get_running_loop().create_future()
        if self.closed.done():
            self.closed, self.reason = asyncio.get_running_loop().create_future(), ""
        self._hello = self._hello if hello is None else hello
        self._decoder = Decoder()
        self._down.clear()
        before = self._pid
        await self._open(timeout)
        self.suspended = False
        if before not in (0, self._pid):
            self._lose(DsecError("outcome_unknown", "another agent answers: the one that was asked has ended"))
        for channel in list(self._channels.values()):
            channel.renewed()

    async def _open(self, timeout: float) -> None:
        # A guest whose memory was loaded resets its vsock once, soon after it runs: who connected before does it again.
        self._resets = self._address.vsock_port is not None
        try:
            async with asyncio.timeout(timeout):
                ready = await self._greet()
            self._next = max(self._next, _bounded(ready.integer(Tag.NEXT)))
            self._pid = ready.integer(Tag.PID, 0)
        except (TimeoutError, FrameError) as exc:
            self._resets = False
            await self.close()
            raise DsecError("sandbox_dead", f"the agent did not greet within {timeout:g} s") from exc
        except BaseException:
            self._resets = False
            await self.close()
            raise

    async def _greet(self) -> Fields:
        while True:
            await self._dial_until()
            if self._address.serial:
                await self._synchronise()
            self._write(frame(Type.HELLO, 0, fields([(Tag.VERSION, VERSION), *self._hello])))
            try:
                return await self._ready
            except DsecError:
                if not self._resets or self.reason:
                    raise
            self._ready = asyncio.get_running_loop().create_future()
            self._decoder = Decoder()
            self._down.clear()
            await asyncio.sleep(DIAL_S)

    async def _dial_until(self) -> None:
        """A vsock connection is refused until the guest has booted far enough; sockets of ours listen at once."""
        while True:
            try:
                return await self._dial()
            except _NobodyListensError:
                await asyncio.sleep(DIAL_S)

    async def _dial(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        loop = asyncio.get_running_loop()
        try:
            sock.connect(str(self._address.path))
            if self._address.vsock_port is not None:
                await _vsock_connect(sock, self._address.vsock_port)
        except (ConnectionResetError, BrokenPipeError) as exc:
            sock.close()
            raise _NobodyListensError("sandbox_dead", f"the agent does not listen: {exc.strerror or exc}") from exc
        except OSError as exc:  # of the socket itself: its VMM is gone
            sock.close()
            raise DsecError("sandbox_dead", f"the agent does not listen: {exc.strerror or exc}") from exc
        except BaseException:
            sock.close()
            raise
        self._serial = Serial() if self._address.serial else None
        await loop.create_unix_connection(lambda: self, sock=sock)

    async def _synchronise(self) -> None:
        """Say where this connection begins until the agent, which may still be booting, says the same."""
        assert self._serial is not None
        while not self._serial.synced and self.transport is not None:
            self._heard.clear()
            if self.transport.get_write_buffer_size() == 0:  # else the guest does not read
                self.transport.write(self._serial.sync())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SYNC_S):
                    await self._heard.wait()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._down.set()
        if self.suspended or self._resets:
            if not self._ready.done():
                self._ready.set_exception(DsecError("sandbox_dead", "the agent closed the link"))
                self._ready.exception()
            return
        if self.outlived and self.reason:
            error = DsecError("outcome_unknown", f"the agent in the guest ended meanwhile: {self.reason}")
        else:
            self.reason = self.reason or (f"link error: {exc}" if exc else "the agent closed the link")
            error = DsecError("sandbox_dead", f"the sandbox died: {self.reason}")
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # `connect` may have given up already
        self._lose(error)
        if self._listed is not None and not self._listed.done():
            self._listed.set_exception(error)
        if not self.closed.done():
            self.closed.set_result(None)

    def _lose(self, error: DsecError) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.lost(error)

    def data_received(self, data: bytes) -> None:
        try:
            if self._serial is not None:
                data = self._serial.feed(data)
                self._heard.set()
            for kind, number, payload in self._decoder.feed(data):
                self._frame(kind, number, payload)
        except FrameError as exc:
            self.reason = f"the agent broke the protocol: {exc.message}"
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
                self._resets = False
            elif kind is Type.DONE and self._listed is not None and not self._listed.done():
                self._listed.set_result(None)
            elif kind is not Type.PONG:
                raise FrameError(f"{kind.name} on channel 0")
            elif self._held is not None and not self._held.done():
                self._held.set_result(None)
            return
        if kind is Type.RECORD:
            if self._listing is None or len(self._listing) >= MAX_RECORDS or len(payload) > MAX_RECORD:
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
            raise self._absent()
        await self._listed
        listing, self._listing = self._listing, None
        return listing

    async def hold(self, timeout: float) -> None:
        """It is about to be frozen: from the agent's answer on the time of commands stands still, until `go_on`.

        One that does not answer in time is frozen all the same; it hears of it later or, with its link, never.
        """
        self._held = asyncio.get_running_loop().create_future()
        self.send(Type.HOLD, 0, fields([(Tag.FLAGS, 1)]))
        if self.alive:
            await asyncio.wait((self._held, self.closed), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    def go_on(self) -> None:
        """It was thawed, or not frozen after all. Whoever connects anew need not say so."""
        self.send(Type.HOLD, 0, fields([(Tag.FLAGS, 0)]))

    def take_number(self) -> int:
        self._next += 1
        return self._next - 1

    def attach(self, channel: Channel) -> None:
        """Route frames of its number to it. Raises `sandbox_dead`, or `vmm` if it may return, when the link is gone."""
        if self.transport is None:
            raise self._absent()
        self._channels[channel.number] = channel

    def _absent(self) -> DsecError:
        if self.outlived:
            return DsecError("vmm", "the agent in the guest is not there now: does it run?", retryable=True)
        return DsecError("sandbox_dead", f"the sandbox died: {self.reason or 'it is paused'}")

    def detach(self, channel: Channel) -> None:
        if self._channels.get(channel.number) is channel:
            del self._channels[channel.number]

    def send(self, kind: Type, number: int, payload: bytes | memoryview = b"") -> None:
        """Queue one frame; a link that is gone swallows it (the channel has been told)."""
        if self.transport is None:
            return
        if len(payload) > 16384:
            self._write(header(kind, number, len(payload)))
            self._write(payload)
        else:
            self._write(frame(kind, number, payload))

    def _write(self, data: bytes | memoryview) -> None:
        if self.transport is not None:
            self.transport.write(data if self._serial is None else self._serial.encode(data))

    async def close(self, reason: str = "the daemon let go of it") -> None:
        """Let go of the link. The agent and its commands go on."""
        self.reason = self.reason or reason
        if self.suspended:  # nobody else will tell the channels
            self.suspended = False
            if self.transport is None:
                self.connection_lost(None)
        if self.transport is not None:
            self.transport.abort()
            await self.closed


def _bounded(number: int) -> int:
    if not 0 < number < MAX_NEXT:
        raise FrameError("a channel number is out of its bounds")
    return number


class _NobodyListensError(DsecError):
    """In the guest, on the agent's vsock port: not yet, perhaps."""


async def _vsock_connect(sock: socket.socket, port: int) -> None:
    """Firecracker's hybrid vsock: one line each way, read byte by byte, because the guest may speak right behind it."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, b"CONNECT %d\n" % port)
    line = b""
    while not line.endswith(b"\n") and len(line) < 64:
        byte = await loop.sock_recv(sock, 1)
        if not byte:
            raise ConnectionResetError(104, "nobody listens on the agent's vsock port yet")
        line += byte
    if not line.startswith(b"OK "):
        raise ConnectionRefusedError(111, "the VMM refused the vsock connection")
