"""What every message shares: base Structs, the JSON-RPC envelope, error data, stream notifications.

Requests refuse unknown fields; results may grow new fields with defaults, and never change the type of one.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from dsecd.errors import CODES, KINDS, DsecError, Kind

PROTOCOL: Final = 1
MAX_FRAME: Final = 16 << 20
MAX_INLINE: Final = 8 << 20  # bytes of data in one message: base64 and JSON must fit the frame

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # what SQLite and the agent take
Seconds = Annotated[float, Meta(gt=0, le=30 * 86400)]
RequestKey = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Id = Annotated[str, Meta(min_length=1, max_length=128)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Text = Annotated[str, Meta(max_length=4096)]
Labels = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=128)], Text], Meta(max_length=64)]


class Params(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every request's params.

    timeout_s: the caller's deadline; for exec.run it is the command's own. request_id: idempotency key; the same key
    with the same content is answered from the first run's result, never run twice.
    """

    timeout_s: Seconds | None = None
    request_id: RequestKey | None = None


class Result(Struct, kw_only=True, omit_defaults=True):
    """Base of every result. replayed: it is the answer to an earlier request with this request_id."""

    replayed: bool = False


class Empty(Result):
    """A result that says only: done."""


class Incoming(Struct, forbid_unknown_fields=True, rename={"as_": "as"}):
    """A request (with id) or a notification (without), params still undecoded. as_: whom it is for (a fleet's)."""

    jsonrpc: Literal["2.0"]
    method: str
    params: Raw = Raw(b"{}")
    id: int | str | None = None
    as_: Annotated[str, Meta(max_length=128)] | None = None


class ErrorData(Struct, omit_defaults=True):
    kind: str
    infra: bool
    retryable: bool
    sandbox_id: str | None = None
    detail: dict[str, Any] = {}

    @classmethod
    def of(cls, exc: DsecError) -> ErrorData:
        return cls(exc.kind, exc.infra, exc.retryable, exc.sandbox_id, exc.detail)

    def error(self, message: str) -> DsecError:
        """The error that it says, with its sentence. A kind that we do not know is `internal`."""
        kind: Kind = self.kind if self.kind in KINDS else "internal"
        return DsecError(
            kind, message, infra=self.infra, retryable=self.retryable, sandbox_id=self.sandbox_id, detail=self.detail
        )


class ErrorBody(Struct):
    code: int
    message: str
    data: ErrorData


class Failure(Struct):
    """jsonrpc, id, error: in that order on the line."""

    jsonrpc: str
    id: int | str | None
    error: ErrorBody

    @classmethod
    def of(cls, ident: int | str | None, exc: DsecError, code: int | None = None) -> Failure:
        """code: the standard's, where it has a more exact one than its kind's."""
        return cls("2.0", ident, ErrorBody(CODES[exc.kind] if code is None else code, exc.message, ErrorData.of(exc)))


class Success(Struct):
    jsonrpc: str
    id: int | str | None
    result: Any


class Notification(Struct):
    jsonrpc: str
    method: str
    params: Any


class Outgoing(Struct):
    """What a client reads: a reply or a notification."""

    jsonrpc: str = "2.0"
    id: int | str | None = None
    result: Raw = Raw(b"{}")
    error: ErrorBody | None = None
    method: str | None = None
    params: Raw = Raw(b"{}")


class StreamData(Struct, forbid_unknown_fields=True):
    """`stream.data`: bytes of the byte stream that request `sub` opened; offset counts from its start."""

    sub: int | str
    offset: int
    data: bytes


class StreamSent(Struct):
    """`stream.data` as its sender has it: encoded from a view, without a copy first."""

    sub: int | str
    offset: int
    data: memoryview


class StreamDataLine(Struct):
    """A whole `stream.data` notification: one pass over its base64 instead of two."""

    jsonrpc: Literal["2.0"]
    method: Literal["stream.data"]
    params: StreamData


# How our own encoders begin such a line; from anybody else it takes the general path.
STREAM_DATA_PREFIX: Final = b'{"jsonrpc":"2.0","method":"stream.data",'


class StreamEof(Struct, forbid_unknown_fields=True):
    """`stream.eof`: the sender has no more."""

    sub: int | str


class StreamCredit(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`stream.credit`: the peer may have sent `limit` bytes in all. stream: 1 or 2 for exec.output, else 0."""

    sub: int | str
    limit: int
    stream: int = 0


class ExecOutput(Struct):
    """`exec.output`: stream 1 stdout, 2 stderr (3 never leaves the host)."""

    sub: int | str
    stream: int
    offset: int
    data: bytes


class Progress(Struct, omit_defaults=True):
    """`progress`: where a long request stands. total: None while unknown."""

    sub: int | str
    phase: str
    done: int = 0
    total: int | None = None
    text: str = ""


class Cancel(Struct, forbid_unknown_fields=True):
    """`$/cancelRequest`."""

    id: int | str


encode = msgspec.json.Encoder().encode
decode_incoming = msgspec.json.Decoder(Incoming).decode
decode_stream_data = msgspec.json.Decoder(StreamDataLine).decode
decode_outgoing = msgspec.json.Decoder(Outgoing).decode
