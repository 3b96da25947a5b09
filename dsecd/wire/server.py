"""The server loop: one connection, many calls in flight, exactly one reply each.

`Connection` owns the socket and its calls. A handler gets a `Call` and decoded params and returns a result or raises
`DsecError`; `_end` alone turns every way of ending into one reply. Tracebacks go to the log, and only for bugs.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dsecd import logs
from dsecd.errors import DsecError
from dsecd.flow import Flow
from dsecd.wire import base, execs
from dsecd.wire.access import AUDITED
from dsecd.wire.call import Call, Handler, Interceptor, Peer
from dsecd.wire.framing import FrameTooLong, Lines
from dsecd.wire.limits import Held, Limits
from dsecd.wire.methods import METHODS
from dsecd.wire.stream import CHUNK
from dsecd.wire.watch import Watch

log = logging.getLogger("dsecd.wire")

PARAMS = {name: msgspec.json.Decoder(m.params).decode for name, m in METHODS.items()}
_decode_data = msgspec.json.Decoder(base.StreamData).decode
_decode_eof = msgspec.json.Decoder(base.StreamEof).decode
_decode_credit = msgspec.json.Decoder(base.StreamCredit).decode
_decode_cancel = msgspec.json.Decoder(base.Cancel).decode


class Connection(Flow):
    """One client."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self._lines = Lines(server.limits.frame)
        self._unfinished = 0  # bytes of a line that are counted as held
        self._out: list[bytes] = []
        self._batching = False
        self._calls: dict[int | str, Call] = {}
        self.peer = Peer(0, 0, 0)
        self.closed = asyncio.get_running_loop().create_future()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        pid, uid, gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        peer = self._server.greet(Peer(pid, uid, gid, real_uid=uid))
        if peer is None or len(self._server.connections) >= self._server.limits.connections:
            assert self.transport is not None
            self.transport.abort()
            return
        self.peer = peer
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.connections.discard(self)
        if self._unfinished:
            self._server.held.drop(self.peer.real_uid, self._unfinished)
            self._unfinished = 0
        for call in list(self._calls.values()):
            if call.task is not None:
                call.task.cancel()
            call.cut()
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None:
            self.transport.pause_reading()  # a client that does not read is not read from

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.transport is not None:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._batching = True
        try:
            for line in self._lines.feed(data):
                self._line(line)
            self._count_unfinished()
        except FrameTooLong:
            self._cut(DsecError("invalid", f"a message is longer than {self._server.limits.frame} bytes"))
        except DsecError as exc:
            self._cut(exc)
        finally:
            self._batching = False
            self.flush()

    def _count_unfinished(self) -> None:
        """What has come of a line that is not whole is held, too: by its sender, whoever that logs in as meanwhile."""
        if self.transport is None:
            return
        if self._unfinished:
            self._server.held.drop(self.peer.real_uid, self._unfinished)
            self._unfinished = 0
        if size := self._lines.unfinished:
            self._server.held.take(self.peer.real_uid, size)
            self._unfinished = size

    def _cut(self, why: DsecError) -> None:
        self._fail(None, why)
        self.flush()
        self.close()

    # -- sending ------------------------------------------------------------------------------------------------------
    def send(self, message: object) -> None:
        if self.transport is None:
            return
        self._out.append(base.encode(message))
        if not self._batching:
            self.flush()

    def flush(self) -> None:
        if self._out and self.transport is not None:
            self._out.append(b"")
            self.transport.write(b"\n".join(self._out))
            if self.transport.get_write_buffer_size() > self._server.limits.unsent:
                log.warning("client pid %d does not read its replies, cutting it off", self.peer.pid)
                self.transport.abort()
        self._out.clear()

    async def drained(self) -> None:
        """Wait until the client has read enough; ConnectionError when it is gone."""
        await super().drained()
        if self.transport is None:
            raise ConnectionResetError("the client is gone")

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def revoke(self, gone: Callable[[Peer], bool]) -> None:
        """End the requests of those who are gone, but not the one that says so."""
        for call in list(self._calls.values()):
            if call.task is not None and call.task is not asyncio.current_task() and gone(call.peer):
                call.revoked = True
                call.task.cancel()

    # -- receiving ----------------------------------------------------------------------------------------------------
    def _line(self, line: bytes) -> None:
        try:
            if line.startswith(base.STREAM_DATA_PREFIX):
                self._stream_data(base.decode_stream_data(line).params)
                return
            message = base.decode_incoming(line)
        except (msgspec.DecodeError, RecursionError) as exc:
            self._fail(None, DsecError("invalid", f"not a request: {_reason(exc)}"), code=-32700)
            return
        except DsecError as exc:
            self._fail(None, exc)
            return
        if message.id is None:
            self._notification(message)
        else:
            self._request(message.id, message, len(line))

    def _notification(self, message: base.Incoming) -> None:
        try:
            match message.method:
                case "stream.data":
                    self._stream_data(_decode_data(message.params))
                case "stream.eof":
                    if (call := self._calls.get(_decode_eof(message.params).sub)) is not None:
                        call.on_eof()
                case "stream.credit":
                    credit = _decode_credit(message.params)
                    if (call := self._calls.get(credit.sub)) is not None:
                        call.on_credit(credit)
                case "$/cancelRequest":
                    call = self._calls.get(_decode_cancel(message.params).id)
                    if call is not None and call.task is not None:
                        call.cancelled = True
                        call.task.cancel()
                case _:
                    raise DsecError("invalid", f"unknown notification {message.method[:80]!r}")
        except (msgspec.DecodeError, RecursionError) as exc:
            self._fail(None, DsecError("invalid", f"{message.method[:80]}: {_reason(exc)}"))
        except DsecError as exc:
            self._fail(None, exc)

    def _stream_data(self, data: base.StreamData) -> None:
        call = self._calls.get(data.sub)
        if call is not None:
            call.on_data(data)

    def _request(self, ident: int | str, message: base.Incoming, size: int) -> None:
        self._server.requests += 1
        method = METHODS.get(message.method)
        handler = self._server.handlers.get(message.method)
        if method is None or handler is None:
            self._fail(ident, DsecError("invalid", f"unknown method {message.method[:80]!r}"), code=-32601)
            return
        if ident in self._calls:
            self._fail(ident, DsecError("invalid", f"request id {ident!r} is still in flight"))
            return
        limits = self._server.limits
        if len(self._calls) >= limits.calls:
            self._fail(ident, DsecError("capacity", f"more than {limits.calls} requests in flight on one connection"))
            return
        try:
            params = PARAMS[message.method](message.params)
        except (msgspec.DecodeError, RecursionError) as exc:
            self._fail(ident, DsecError("invalid", f"{message.method}: {_reason(exc)}"))
            return
        call = Call(self, self.peer, ident, message.method, method, size)
        plain = message.method in self._server.plain
        try:
            if message.as_ is not None:
                call.peer = self._server.assume(self.peer, message.as_)
            if call.peer.bounded:
                self._server.gate(call, params)
            if not plain:
                self._server.held.take(call.peer.uid, size)
        except DsecError as exc:
            self._fail(ident, exc)
            return
        if plain:
            try:
                self._succeed(call, handler(call, params))
            except Exception as exc:  # noqa: BLE001 - the one place that ends a plain request
                self._fail_any(call, exc)
            if self._server.watch is not None:
                self._server.watch.count(call)
            return
        self._calls[ident] = call
        call.task = asyncio.get_running_loop().create_task(self._run(call, handler, params))
        call.task.add_done_callback(lambda _t: self._never_began(call))

    async def _run(self, call: Call, handler: Handler, params: base.Params) -> None:
        logs.request_id.set(params.request_id or str(call.id))
        if self._server.watch is not None:
            self._server.watch.begin(call, params)
        try:
            kept = call.method.recorded or call.name in AUDITED or (params.request_id is not None and call.method.once)
            if kept and self._server.interceptor is not None:
                work = self._server.interceptor(call, params, lambda: handler(call, params))
            else:
                work = handler(call, params)
            if params.timeout_s is not None and not call.method.own_timeout:
                async with asyncio.timeout(params.timeout_s):
                    result = await work
            else:
                result = await work
            if isinstance(result, execs.Ran):
                result = await _sent_ahead(call, result)
            self._succeed(call, result)
        except asyncio.CancelledError:
            self._fail_any(call, _cancelled(call))
        except TimeoutError:
            self._fail_any(call, DsecError("timeout", f"{call.name} did not end within {params.timeout_s} s"))
        except Exception as exc:  # noqa: BLE001 - the one place that ends a request
            self._fail_any(call, exc)
        finally:
            self._over(call)
            if self._server.watch is not None:
                self._server.watch.end(call)

    def _never_began(self, call: Call) -> None:
        """A task that is cancelled before its first step runs none of `_run`: a cancel right behind its request."""
        if self._calls.get(call.id) is call:
            self._over(call)
            self._fail(call.id, _cancelled(call))

    def _over(self, call: Call) -> None:
        if self._calls.pop(call.id, None) is not None:
            self._server.held.drop(call.peer.uid, call.size)

    def _succeed(self, call: Call, result: Any) -> None:
        call.outcome = "ok" if self.transport is not None else "gone"
        self.send(base.Success("2.0", call.id, result))

    def _fail_any(self, call: Call, exc: Exception) -> None:
        if isinstance(exc, ConnectionError) and self.transport is None:
            return
        if not isinstance(exc, DsecError):
            log.error("%s failed: a bug, please report it", call.name, exc_info=exc)
            exc = DsecError("internal", f"{call.name} failed: {type(exc).__name__} (the daemon's log has more)")
        if self.transport is not None:
            call.outcome = exc.kind
        self._fail(call.id, exc)

    def _fail(self, ident: int | str | None, exc: DsecError, code: int | None = None) -> None:
        self.send(base.Failure.of(ident, exc, code))


def bound(path: Path, mask: int) -> socket.socket:
    """A stream socket at `path`, for those whom the umask `mask` leaves; the caller's to close. `invalid`: why not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    old = os.umask(mask)
    try:
        sock.bind(str(path))
    except OSError as exc:
        sock.close()
        raise DsecError("invalid", f"cannot listen on {path}: {exc.strerror}") from exc
    finally:
        os.umask(old)
    return sock


def _no_other(peer: Peer, name: str) -> Peer:
    raise DsecError("denied", "nobody asks for others here")


def _open_gate(call: Call, params: base.Params) -> None:
    """For servers whose table is closed enough."""


class Server:
    """Listens, and holds what all connections share.

    greet: whom a connection acts for, by who is at its other end; None cuts it off. assume: whom a request is for that
    says `as`. gate: refuses what a bounded peer may not do.
    """

    def __init__(
        self, handlers: dict[str, Handler], interceptor: Interceptor | None = None, limits: Limits | None = None,
        greet: Callable[[Peer], Peer | None] = lambda peer: peer,
        assume: Callable[[Peer, str], Peer] = _no_other, gate: Callable[[Call, Any], None] = _open_gate,
    ) -> None:  # fmt: skip
        unknown = handlers.keys() - METHODS.keys()
        assert not unknown, f"handlers for unknown methods: {unknown}"
        self.handlers = handlers
        self.plain = {name for name, handler in handlers.items() if not inspect.iscoroutinefunction(handler)}
        self.interceptor = interceptor
        self.limits = limits or Limits()
        self.greet, self.assume, self.gate = greet, assume, gate
        self.watch: Watch | None = None  # of the daemon's own clients
        self.connections: set[Connection] = set()
        self.requests = 0
        self.held = Held(self.limits.held)
        self._listener: asyncio.Server | None = None

    async def serve(self, sock: socket.socket) -> None:
        """Start to accept on a bound AF_UNIX stream socket."""
        # Not create_unix_server: from Python 3.13 on that removes the path in the end, which is systemd's.
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self), sock=sock, backlog=1024)

    def renew(self, now: Callable[[Peer], Peer | None], gone: Callable[[Peer], bool]) -> None:
        """Principals have changed: who each connection is now; those of nobody any more are cut, and so are requests
        for one who is gone, on whosever connection."""
        for connection in list(self.connections):
            peer = now(connection.peer)
            if peer is None:
                connection.close()
            else:
                connection.peer = peer
                connection.revoke(gone)

    async def close(self) -> None:
        """Stop to accept, cancel what runs, close every connection."""
        if self._listener is not None:
            self._listener.close()
        waits = [c.closed for c in self.connections]
        for connection in list(self.connections):
            connection.flush()
            connection.close()
        if waits:
            await asyncio.wait(waits, timeout=2)


def _cancelled(call: Call) -> DsecError:
    """By the client; by who took its principal away; or by a daemon that stops, which says nothing of what became of
    it."""
    if call.revoked:
        return DsecError("denied", f"{call.peer.principal} is no principal any more, or its token was revoked")
    if call.cancelled:
        return DsecError("timeout", f"{call.name} was cancelled", detail={"cancelled": True})
    if call.method.once:
        return DsecError("outcome_unknown", f"the daemon stopped during {call.name}; ask again with its request_id")
    return DsecError("shutting_down", f"the daemon stopped during {call.name}")


async def _sent_ahead(call: Call, result: execs.Ran) -> execs.Ran:
    """Output that no one message holds goes ahead of the reply, as exec.output in pieces."""
    if len(result.stdout) + len(result.stderr) <= base.MAX_INLINE:
        return result
    for stream, data in ((1, result.stdout), (2, result.stderr)):
        for start in range(0, len(data), CHUNK):
            piece = base.ExecOutput(call.id, stream, start, data[start : start + CHUNK])
            await call.notify_bounded("exec.output", piece)
    return msgspec.structs.replace(result, stdout=b"", stderr=b"", sent_ahead=True)


def _reason(exc: Exception) -> str:
    if isinstance(exc, RecursionError):
        return "nested too deeply"
    return str(exc)[:300]
