"""Messages of `trace.*`: what requests did, and when. Kept in memory for the last so many; a restart forgets them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dsecd.wire.base import Params, RequestKey, Result


class Get(Params):
    """`trace.get`: of a request_id, or a key that `trace.list` shows. Of one's own project, and those below."""

    trace: RequestKey


class ListTraces(Params):
    """`trace.list`: the newest first."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 50


class Span(Struct, omit_defaults=True):
    """start_ms: since the request began. took_ms: None while it goes on. depth: 0 is a request, 1 right below it.

    place: daemon, launcher, agent or fleet; host: whose.
    """

    name: str
    place: str
    host: str
    start_ms: float
    took_ms: float | None = None
    depth: int = 1


class Trace(Struct, omit_defaults=True):
    """One request at one host. at: UNIX time. outcome: ok, an error's kind, gone (its client left), "" while it runs.

    left_out: spans beyond the most that are kept of one.
    """

    key: str
    method: str
    host: str
    at: float
    took_ms: float | None = None
    outcome: str = ""
    sandbox: str = ""
    spans: list[Span] = []
    left_out: int = 0


class Traces(Result):
    traces: list[Trace]
