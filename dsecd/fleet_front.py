"""A client of the fleet: what is passed on to one host as it came, and what is answered here."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, Struct

from dsecd import spans
from dsecd.errors import DsecError
from dsecd.fleet_metrics import REQUESTS
from dsecd.fleethosts import acting, at_host
from dsecd.flow import Flow
from dsecd.wire import base
from dsecd.wire.framing import FrameTooLong, Lines
from dsecd.wire.limits import MAX_UNSENT
from dsecd.wire.methods import METHODS
from dsecd.wire.peer import broken
from dsecd.wire.server import PARAMS

if TYPE_CHECKING:
    from dsecd.fleet import Fleet
    from dsecd.fleethosts import Host

log = logging.getLogger("dsecd.fleet")

MAX_CALLS: Final = 20_000
EARLY: Final = 64  # notifications kept for a request whose host is being found: it has no credit for more
EARLY_LINE: Final = 1024
_STREAM: Final = base.STREAM_DATA_PREFIX + b'"params":{"sub":'


class _Head(Struct, rename={"as_": "as"}):
    """What is read of a line that is passed on."""

    id: int | str | None = None
    method: str | None = None
    params: Raw = Raw(b"{}")
    error: Raw = Raw()
    as_: Raw = Raw()


class _Whose(Struct):
    """Of params: the sandbox, or the request that a notification belongs to, and the idempotency key."""

    id: int | str | None = None
    sub: int | str | None = None
    request_id: str | None = None


_head = msgspec.json.Decoder(_Head).decode
_whose = msgspec.json.Decoder(_Whose).decode
_error = msgspec.json.Decoder(base.ErrorBody).decode


class _End(Flow):
    """What both ends do: write lines, stop to read while the other end is full. Who never reads is cut off."""

    def write(self, line: bytes) -> None:
        if self.transport is not None:
            self.transport.writelines((line, b"\n"))
            if self.transport.get_write_buffer_size() > MAX_UNSENT:
                log.warning("the other end does not read what it asked for, cutting it off")
                self.transport.abort()

    def hold(self, full: bool) -> None:
        if self.transport is not None:
            (self.transport.pause_reading if full else self.transport.resume_reading)()

    def drop(self) -> None:
        if self.transport is not None:
            self.transport.close()


class Back(_End):
    """A front's connection to one host. Lines go back as they are, but for answers that somebody here waits for.

    A host speaks for what it was asked, and not for other hosts: what belongs to no request of its own is dropped.
    """

    def __init__(self, front: Front, host: Host) -> None:
        super().__init__()
        self.host = host
        self._front = front
        self._lines = Lines()

    def data_received(self, data: bytes) -> None:
        try:
            for line in self._lines.feed(data):
                if line.startswith(_STREAM) and line[len(_STREAM) : len(_STREAM) + 1] != b'"':
                    self._front.said(self, int(line[len(_STREAM) : line.index(b",", len(_STREAM))]), line)
                    continue
                head = _head(line)
                if head.method is None:
                    self._front.answered(self, head, line)
                else:
                    self._front.said(self, _whose(head.params).sub, line)
        except (FrameTooLong, ValueError, RecursionError):  # a DecodeError is a ValueError
            log.warning("host %s says what is not of the protocol: cut off", self.host.name)
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._front.lost(self)
        self._front.listen()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._front.listen()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._front.listen()

    @property
    def full(self) -> bool:
        return not self._writable.is_set()


class Front(_End):
    """One client."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet
        self.principal = ""  # for whom hosts are asked; "": they know the fleet itself as who it is
        self.token = ""  # the id of the one that it logged in with
        self._lines = Lines()
        self._backs: dict[Host, Back] = {}
        self._coming: dict[Host, asyncio.Future[Back]] = {}
        self._routes: dict[int | str, Back] = {}  # requests under way at a host
        self._early: dict[int | str, list[bytes]] = {}  # of requests that are on their way to one
        self._methods: dict[int | str, str] = {}  # of all that are under way
        self._waiting: dict[int | str, asyncio.Future[tuple[_Head, bytes]]] = {}
        self._tasks: dict[int | str, asyncio.Task[None]] = {}
        self._traces: dict[int | str, spans.Trace] = {}  # of those that are followed

    # -- the client ---------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.getuid()):  # root could be the fleet's own user
            self.principal = f"uid:{uid}"
        self._fleet.fronts.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._fleet.fronts.discard(self)
        for ident in list(self._traces):
            self._traced(ident, "gone")
        for task in list(self._tasks.values()):
            task.cancel()
        for back in self._backs.values():
            back.drop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._hold_backs(True)
        self.listen()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._hold_backs(False)
        self.listen()

    def _hold_backs(self, full: bool) -> None:
        for back in self._backs.values():  # all of them: a request may have ended since it was held up
            back.hold(full)

    def listen(self) -> None:
        """Read from the client while it reads, and every host that it uses does."""
        self.hold(not self._writable.is_set() or any(back.full for back in self._backs.values()))

    def data_received(self, data: bytes) -> None:
        try:
            for line in self._lines.feed(data):
                self._line(line)
        except FrameTooLong:
            self.fail(None, DsecError("invalid", f"a message is longer than {base.MAX_FRAME} bytes"))
            self.drop()

    def send(self, message: Any) -> None:
        self.write(base.encode(message))

    def fail(self, ident: int | str | None, exc: DsecError) -> None:
        self.send(base.Failure.of(ident, exc))
        self._traced(ident, exc.kind)

    # -- one line -----------------------------------------------------------------------------------------------------
    def _line(self, line: bytes) -> None:
        try:
            head = _head(line)
            whose = _whose(head.params)
        except (msgspec.DecodeError, RecursionError) as exc:
            self.fail(None, DsecError("invalid", f"not a request: {str(exc)[:200]}"))
            return
        if head.id is None:
            self._notification(head.method, whose, line)
        elif bytes(head.as_):
            self.fail(head.id, DsecError("denied", "`as` is for the fleet to say to its hosts; here one logs in"))
        elif head.method not in METHODS:
            self.fail(head.id, DsecError("invalid", f"unknown method {str(head.method)[:80]!r}"))
        elif head.id in self._methods or len(self._methods) >= MAX_CALLS:
            self.fail(head.id, DsecError("invalid", f"request id {head.id!r} is still in flight, or too many are"))
        else:
            self._methods[head.id] = head.method
            if self.principal:  # behind all else: of two, the last one counts
                line = line.rstrip()[:-1] + b',"as":' + msgspec.json.encode(self.principal) + b"}"
            REQUESTS.add(1, head.method)
            trace = self._fleet.watch.begin(head.method, whose.id, whose.request_id, self.principal)
            if trace is not None:
                self._traces[head.id] = trace
            self._request(head.id, head.method, head.params, whose, line)

    def _notification(self, method: str | None, whose: _Whose, line: bytes) -> None:
        """Credit, data and cancels go where their request went."""
        of = whose.id if method == "$/cancelRequest" else whose.sub
        if of is None:
            return
        if (back := self._routes.get(of)) is not None:
            back.write(line)
        elif (early := self._early.get(of)) is not None:
            if len(early) < EARLY and len(line) <= EARLY_LINE:
                early.append(line)
        elif method == "$/cancelRequest" and (task := self._tasks.get(of)) is not None:
            task.cancel()

    def _request(self, ident: int | str, method: str, raw: Raw, whose: _Whose, line: bytes) -> None:
        here = self._fleet.methods.get(method)
        if here is None and isinstance(whose.id, str):
            host = self._fleet.known(whose.id)
            back = self._backs.get(host) if host is not None else None
            if back is not None:  # the usual case, without a task
                self._routes[ident] = back
                self._passed(ident, method, back)
                back.write(line)
                return
            self._early[ident] = []
            work = self._pass(ident, whose.id, line)
        elif here is None:
            self._done(ident)
            text = f"{method} is about one host: ask that one (dsecctl -H ssh://HOST), the fleet has many"
            self.fail(ident, DsecError("unsupported", text))
            return
        else:
            work = self._answer(Asked(self, ident, method, line), raw, here)
        task = self._tasks[ident] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _t: self._ended(ident, task))

    def _ended(self, ident: int | str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(ident, None)
        if task.cancelled() and ident in self._methods:  # before its first step: a cancel right behind its request
            self._done(ident)
            self.fail(ident, DsecError("timeout", "cancelled before it began"))

    async def _pass(self, ident: int | str, sandbox_id: str, line: bytes) -> None:
        acting.set(self.principal)
        spans.current.set(self._traces.get(ident))
        try:
            back = await self.back(await self._fleet.find(sandbox_id))
            if back.transport is None:  # since: `lost` does not know of this one yet
                raise DsecError("network", f"host {back.host.name} went away")
        except DsecError as exc:
            self._done(ident)
            self.fail(ident, exc)
            return
        self._routes[ident] = back
        self._passed(ident, self._methods[ident], back)
        for one in (line, *self._early.pop(ident)):
            back.write(one)

    async def _answer(self, asked: Asked, raw: Raw, here: Callable[..., Awaitable[Any]]) -> None:
        """What concerns several hosts."""
        ident, method = asked.ident, asked.method
        acting.set(self.principal)
        spans.current.set(self._traces.get(ident))
        try:
            params = PARAMS[method](raw)
            async with asyncio.timeout(None if METHODS[method].own_timeout else params.timeout_s):
                result = await here(asked, params)
            self.send(base.Success("2.0", ident, result))
            self._traced(ident, "ok")
        except DsecError as exc:
            self.fail(ident, exc)
        except (msgspec.DecodeError, RecursionError) as exc:
            self.fail(ident, DsecError("invalid", f"{method}: {str(exc)[:300]}"))
        except (asyncio.CancelledError, TimeoutError):
            self.fail(ident, DsecError("timeout", f"{method} was cancelled, or did not end in time"))
        except Exception as exc:  # the one place that ends a request of the fleet's own
            log.exception("%s failed: a bug, please report it", method)
            self.fail(ident, DsecError("internal", f"{method} failed: {type(exc).__name__} (the fleet's log has more)"))
        finally:
            self._done(ident)

    def _done(self, ident: int | str) -> None:
        for table in (self._methods, self._routes, self._early):
            table.pop(ident, None)

    # -- traces -------------------------------------------------------------------------------------------------------
    def _passed(self, ident: int | str, method: str, back: Back) -> None:
        """A request that is followed goes to a host as it came."""
        if (trace := self._traces.get(ident)) is not None:
            trace.add(at_host(method, back.host.name), "fleet", time.monotonic(), None, 1)

    def _traced(self, ident: int | str | None, outcome: str) -> None:
        """It was answered; what went on for it is over."""
        if ident is not None and (trace := self._traces.pop(ident, None)) is not None:
            trace.ended, trace.outcome = time.monotonic(), outcome
            for span in trace.spans:
                if span.ended is None:
                    span.ended = trace.ended

    def asked_hosts(self) -> Iterator[str]:
        """Of each request that a host was asked and has not answered."""
        return (back.host.name for back in self._routes.values())

    # -- hosts --------------------------------------------------------------------------------------------------------
    async def back(self, host: Host) -> Back:
        """This client's connection to that host."""
        if (ready := self._backs.get(host)) is not None:
            return ready
        coming = self._coming.get(host)
        if coming is None:
            coming = self._coming[host] = asyncio.ensure_future(self._connect(host))
            coming.add_done_callback(lambda _f: self._coming.pop(host))
        return await asyncio.shield(coming)

    async def _connect(self, host: Host) -> Back:
        if host.path is None:
            raise DsecError("network", f"host {host.name} cannot be reached: {host.problem}")
        try:
            loop = asyncio.get_running_loop()
            _, back = await loop.create_unix_connection(lambda: Back(self, host), host.path)
        except OSError as exc:
            raise DsecError("network", f"host {host.name} cannot be reached: {exc.strerror}") from exc
        if self.transport is None:  # the client went meanwhile
            back.drop()
        if back.transport is None:  # lost before it was in the table: nobody would hear of it
            raise DsecError("network", f"host {host.name} went away")
        back.hold(not self._writable.is_set())
        self._backs[host] = back
        return back

    async def ask(self, host: Host, ident: int | str, line: bytes) -> Raw:
        """Send a request of the client to one host and wait for what it says: the result, or its error raised."""
        back = await self.back(host)
        if back.transport is None:
            raise DsecError("network", f"host {host.name} went away")
        waiting = self._waiting[ident] = asyncio.get_running_loop().create_future()
        self._routes[ident] = back
        back.write(line)
        try:
            with spans.span(at_host(self._methods[ident], host.name), "fleet"):
                head, answer = await waiting
        finally:
            self._waiting.pop(ident, None)
            self._routes.pop(ident, None)
        try:
            body = _error(head.error) if bytes(head.error) else None
            result = msgspec.json.decode(answer, type=base.Outgoing).result
        except (msgspec.DecodeError, RecursionError) as exc:
            raise DsecError("internal", f"host {host.name} gave an answer that is none: {str(exc)[:200]}") from exc
        if body is not None:
            raise body.data.error(body.message)
        return result

    def said(self, back: Back, ident: int | str | None, line: bytes) -> None:
        """A line of a host for a request of the client's."""
        if ident is not None and self._routes.get(ident) is back:
            self.write(line)

    def answered(self, back: Back, head: _Head, line: bytes) -> None:
        """An answer came, for the client, or for somebody here who waits for it."""
        ident = head.id
        if ident is None or self._routes.get(ident) is not back:
            return
        waiting = self._waiting.get(ident)
        if waiting is None:
            self._done(ident)
            self.write(line)
            if ident in self._traces:
                self._traced(ident, _error(head.error).data.kind if bytes(head.error) else "ok")
        elif not waiting.done():
            waiting.set_result((head, line))

    def lost(self, back: Back) -> None:
        """A host went in the middle. Whoever reads may ask again; what changes something may have been done."""
        if self._backs.get(back.host) is back:
            del self._backs[back.host]
        for ident in [one for one, its in self._routes.items() if its is back]:
            method = self._methods[ident]
            error = broken(method, f"host {back.host.name} went away during {method}")
            waiting = self._waiting.get(ident)
            if waiting is not None:
                if not waiting.done():
                    waiting.set_exception(error)
                continue
            self._done(ident)
            self.fail(ident, error)


class Asked(Struct):
    """Who asked, under which id, for what, and the line itself."""

    front: Front
    ident: int | str
    method: str
    line: bytes

    async def of(self, host: Host) -> Raw:
        """Have one host answer it."""
        return await self.front.ask(host, self.ident, self.line)
