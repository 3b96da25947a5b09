"""One request in flight at the server, and who made it: what handlers get."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from dsecd.errors import DsecError
from dsecd.spans import Trace
from dsecd.wire import base
from dsecd.wire.access import ROOT, Role
from dsecd.wire.methods import Method
from dsecd.wire.sandbox import Owner
from dsecd.wire.stream import Inflow, Outflow, Upload
from dsecd.wire.trajectory import Who

if TYPE_CHECKING:
    from dsecd.wire.server import Connection

Handler = Callable[["Call", Any], Any]
Interceptor = Callable[["Call", Any, Callable[[], Awaitable[Any]]], Awaitable[Any]]


class Peer(msgspec.Struct, frozen=True):
    """Who is at the other end (SO_PEERCRED), and the principal that is.

    uid: whom things belong to: of a principal its number, else real_uid, as the kernel says. token: what it came with.
    bounded: it is not the root project's admin, so each request is held against `Method.access`.
    """

    pid: int
    uid: int
    gid: int
    principal: str = ""
    project: str = ROOT
    role: Role = "admin"
    token: str = ""
    real_uid: int = -1
    bounded: bool = False

    def owner(self, label: str = "") -> Owner:
        return Owner(self.uid, self.pid, label, principal=self.principal, project=self.project)

    @property
    def who(self) -> Who:
        return Who(self.uid, self.pid, self.principal, self.project)


class Call:
    """One request in flight. `received` is the monotonic time it was read."""

    __slots__ = (
        "_inflow", "_outflow", "cancelled", "connection", "id", "method", "name", "on_limit", "outcome", "peer",
        "received", "revoked", "size", "task", "trace",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, peer: Peer, ident: int | str, name: str, method: Method, size: int
    ) -> None:
        self.connection = connection
        self.peer = peer
        self.id = ident
        self.name = name
        self.method = method
        self.size = size
        self.received = time.monotonic()
        self.outcome = "gone"  # or ok, or the kind of the error that it was answered with
        self.trace: Trace | None = None
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False  # by $/cancelRequest, not by a connection that broke
        self.revoked = False  # whose it is, is gone
        self.on_limit: Callable[[int, int], None] | None = None  # credit that is passed through: stream, limit
        self._inflow: Inflow | None = None
        self._outflow: Outflow | None = None

    def notify(self, method: str, params: object) -> None:
        """Send a notification; it carries no credit, so only for small ones."""
        self.connection.send(base.Notification("2.0", method, params))

    async def notify_bounded(self, method: str, params: object) -> None:
        """Send a notification and wait while the client is not reading."""
        self.notify(method, params)
        await self.connection.drained()

    def inflow(self, window: int) -> Inflow:
        """The bytes the client sends for this call; at most `window` of them are held here."""
        if self._inflow is None:
            self._inflow = Inflow(lambda limit: self.notify("stream.credit", base.StreamCredit(self.id, limit)))
            if self.connection.transport is None:
                self._inflow.cut()
        self._inflow.widen(window)
        return self._inflow

    def cut(self) -> None:
        """The connection is gone; with a request_id the work is not."""
        if self._inflow is not None:
            self._inflow.cut()

    def upload(self, params: base.Params) -> Upload | None:
        """Its stream as content; None where there is none."""
        return Upload(self.inflow) if self.method.upload and getattr(params, "stream", True) else None

    def outflow(self, window: int) -> Outflow:
        """The byte stream to the client, never ahead of its credit."""

        def send(offset: int, data: memoryview) -> None:
            self.notify("stream.data", base.StreamSent(self.id, offset, data))

        self._outflow = Outflow(window, send, self.connection.drained)
        return self._outflow

    def on_data(self, message: base.StreamData) -> None:
        if self._inflow is None:
            if not self.method.upload:
                raise DsecError("invalid", f"{self.name} takes no stream")
            self.inflow(0)
        assert self._inflow is not None
        self._inflow.feed(message.offset, message.data)

    def on_eof(self) -> None:
        if self._inflow is None and self.method.upload:
            self.inflow(0)
        if self._inflow is not None:
            self._inflow.end()

    def on_credit(self, message: base.StreamCredit) -> None:
        if self.on_limit is not None:
            self.on_limit(message.stream, message.limit)
        if self._outflow is not None:
            self._outflow.grant(message.limit)
