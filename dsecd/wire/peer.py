"""The client's end of one connection: requests, streams, notifications. No policy, no reconnecting."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

import msgspec

from dsecd.errors import DsecError
from dsecd.flow import Flow
from dsecd.wire import base
from dsecd.wire.framing import FrameTooLong, Lines
from dsecd.wire.methods import METHODS
from dsecd.wire.stream import Inflow, Outflow

R = TypeVar("R", bound=base.Result)

_RESULTS = {name: msgspec.json.Decoder(m.result).decode for name, m in METHODS.items()}
_decode_data = msgspec.json.Decoder(base.StreamData).decode
_decode_eof = msgspec.json.Decoder(base.StreamEof).decode
_decode_credit = msgspec.json.Decoder(base.StreamCredit).decode


class _Sub(msgspec.Struct):
    """All that is needed to know which call a notification belongs to."""

    sub: int | str


_decode_sub = msgspec.json.Decoder(_Sub).decode

Notified = Callable[[str, msgspec.Raw], None]
READ: Final = 1 << 20
CLOSE_S: Final = 3.0


class Pending:
    """One request under way, and what can be done about it on its own connection: another has other requests under
    the same number. `inflow` is set before sending when the server will stream to us."""

    __slots__ = ("future", "ident", "inflow", "method", "notified", "outflow", "peer")

    def __init__(self, peer: Peer, ident: int, method: str, future: asyncio.Future[Any]) -> None:
        self.peer = peer
        self.ident = ident
        self.method = method
        self.future = future
        self.inflow: Inflow | None = None
        self.outflow: Outflow | None = None
        self.notified: Notified | None = None

    async def finish(self) -> Any:
        """Wait for the reply. Cancelled: the server is told."""
        try:
            return await self.future
        except asyncio.CancelledError:
            self.peer.drop(self)
            raise

    def cancel(self) -> None:
        """The server is told to give it up, unless it is over; `finish` then says how it ended."""
        if not self.future.done():
            self.peer.notify("$/cancelRequest", base.Cancel(self.ident))

    def end_upload(self) -> None:
        self.peer.notify("stream.eof", base.StreamEof(self.ident))

    def grant(self, limit: int, stream: int) -> None:
        """The server may send up to that byte of one of a command's streams."""
        self.peer.notify("stream.credit", base.StreamCredit(self.ident, limit, stream))

    async def pour(self, stream: AsyncIterator[bytes]) -> None:
        """Send a stream under the server's credit. When the call ends early, its own error is what counts."""
        assert self.outflow is not None
        try:
            async for chunk in stream:
                await self.outflow.write(chunk)
        except DsecError:
            if not self.future.done():
                raise
        except BaseException:
            self.cancel()
            raise
        self.end_upload()


class Peer(Flow):
    """Use `connect_unix`. When the connection breaks, calls get `outcome_unknown`, or `network` if they only read."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = Lines()
        self._pending: dict[int, Pending] = {}
        self._ids = itertools.count(1)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect_unix(cls, path: str) -> Peer:
        """`network` with what to do when nobody listens there."""
        try:
            _, peer = await asyncio.get_running_loop().create_unix_connection(cls, path)
        except FileNotFoundError as exc:
            raise DsecError("network", f"no daemon at {path}: is dsecd running?") from exc
        except PermissionError as exc:
            raise DsecError("denied", f"{path}: permission denied; join the group `dsec`") from exc
        except OSError as exc:
            raise DsecError("network", f"no daemon answers at {path}: {exc.strerror}") from exc
        return peer

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        pending, self._pending = self._pending, {}
        for item in pending.values():
            error = broken(item.method, f"the connection to the daemon broke during {item.method}")
            if not item.future.done():
                item.future.set_exception(error)
                item.future.exception()
            if item.inflow is not None:
                item.inflow.fail(error)
            if item.outflow is not None:
                item.outflow.fail(error)
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            for line in self._lines.feed(data):
                if line.startswith(base.STREAM_DATA_PREFIX):
                    self._stream_data(base.decode_stream_data(line).params)
                else:
                    self._message(base.decode_outgoing(line))
        except (FrameTooLong, msgspec.DecodeError):
            self.close()

    # -- calls --------------------------------------------------------------------------------------------------------
    @property
    def alive(self) -> bool:
        return self.transport is not None

    def start(
        self, method: str, params: base.Params, *, window: int = 0, notified: Notified | None = None, as_: str = ""
    ) -> Pending:
        """Send a request. window: the server may stream so many bytes ahead to us. as_: for whom, if not for us."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        pending = Pending(self, next(self._ids), method, future)
        if self.transport is None:
            raise DsecError("network", "the connection to the daemon is closed")
        if window:
            pending.inflow = Inflow(lambda limit: self._credit(pending, limit))
            pending.inflow.preset(window)
        if METHODS[method].upload:
            pending.outflow = Outflow(0, lambda offset, data: self._data(pending, offset, data), self.drained)
        pending.notified = notified
        self._pending[pending.ident] = pending
        message = {"jsonrpc": "2.0", "id": pending.ident, "method": method, "params": params}
        self._send(message | {"as": as_} if as_ else message)
        return pending

    async def call(self, method: str, params: base.Params) -> Any:
        return await self.start(method, params).finish()

    def drop(self, pending: Pending) -> None:
        """Nobody waits for its reply any more: the server is told."""
        if self._pending.pop(pending.ident, None) is not None:
            self.notify("$/cancelRequest", base.Cancel(pending.ident))

    def notify(self, method: str, params: Any) -> None:
        if self.transport is not None:
            self._send(base.Notification("2.0", method, params))

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    async def aclose(self) -> None:
        """Gone, in a bounded time: what the other end does not read is not waited for."""
        self.close()
        done, _ = await asyncio.wait((self.closed,), timeout=CLOSE_S)
        if not done and self.transport is not None:
            self.transport.abort()
            await asyncio.wait((self.closed,), timeout=CLOSE_S)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _send(self, message: Any) -> None:
        if self.transport is not None:
            line = base.encode(message)
            if len(line) > base.MAX_FRAME:
                raise DsecError("invalid", f"the request is {len(line)} bytes; at most {base.MAX_FRAME} fit")
            self.transport.write(line + b"\n")

    def _data(self, pending: Pending, offset: int, data: memoryview) -> None:
        self.notify("stream.data", base.StreamSent(pending.ident, offset, data))

    def _credit(self, pending: Pending, limit: int) -> None:
        self.notify("stream.credit", base.StreamCredit(pending.ident, limit))

    def _message(self, message: base.Outgoing) -> None:
        if message.method is not None:
            self._notification(message.method, message.params)
            return
        pending = self._pending.pop(message.id, None) if isinstance(message.id, int) else None
        if pending is None:
            return
        try:
            outcome: Any = message.error.data.error(message.error.message) if message.error is not None else None
            if outcome is None:
                outcome = _RESULTS[pending.method](message.result)
        except msgspec.DecodeError as exc:
            outcome = DsecError("internal", f"the daemon's answer to {pending.method} cannot be read: {exc}")
        failed = isinstance(outcome, DsecError)
        if not pending.future.done():
            if failed:
                pending.future.set_exception(outcome)
                pending.future.exception()
            else:
                pending.future.set_result(outcome)
        if pending.inflow is not None:
            if failed:
                pending.inflow.fail(outcome)
            else:
                pending.inflow.end()
        if pending.outflow is not None:
            pending.outflow.fail(outcome if failed else DsecError("invalid", f"{pending.method} has ended"))

    def _stream_data(self, data: base.StreamData) -> None:
        pending = self._pending.get(data.sub) if isinstance(data.sub, int) else None
        if pending is not None and pending.inflow is not None:
            pending.inflow.feed(data.offset, data.data)

    def _notification(self, method: str, params: msgspec.Raw) -> None:
        sub = _decode_sub(params).sub
        pending = self._pending.get(sub) if isinstance(sub, int) else None
        if pending is None:
            return
        if method == "stream.data":
            self._stream_data(_decode_data(params))
        elif method == "stream.eof" and pending.inflow is not None:
            pending.inflow.end()
        elif method == "stream.credit" and pending.outflow is not None:
            pending.outflow.grant(_decode_credit(params).limit)
        elif pending.notified is not None:
            pending.notified(method, params)


def broken(method: str, text: str) -> DsecError:
    """A call that was under way on a connection that broke: it may have run, unless it changes nothing."""
    if METHODS[method].once or METHODS[method].upload:
        return DsecError("outcome_unknown", text + "; with a request_id it can be asked for again")
    return DsecError("network", text)
