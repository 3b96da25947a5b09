"""Messages of `trajectory.*`: what was done to a sandbox, in order."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from dsecd.wire.access import ROOT
from dsecd.wire.base import Count, Id, Params, Result


class Who(Struct, omit_defaults=True):
    """Who asked: as the kernel says of the socket's other end, or its token. uid: of a principal its number."""

    uid: int
    pid: int = 0
    principal: str = ""
    project: str = ROOT


class Entry(Struct, kw_only=True, omit_defaults=True):
    """One step. seq counts from 1; at is UNIX time.

    event `request`: method, params, and key, the request_id, where it had one. `reply`: to the request `ref`, with its
    result or error and how long it took. `ended`: of a command that was started (exec_id), with its result. Others: a
    move of the life cycle, or what a rollout notes; `data` is theirs.
    """

    seq: int = 0
    at: float = 0.0
    event: str
    who: Who | None = None
    method: str = ""
    key: str = ""
    params: Any = None
    ref: int = 0
    took_ms: float = 0.0
    exec_id: str = ""
    result: Any = None
    error: Any = None
    data: Any = None


class Read(Params):
    """`trajectory.read`: entries behind `after`: at most `limit`, and some 8 MiB of them.

    sum: of entry `after`, as an earlier read gave it: `conflict` when that is another one now.
    """

    id: Id
    after: Count = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    sum: Annotated[str, Meta(max_length=64)] = ""


class Entries(Result):
    """last: seq of the newest entry there is. sum: over all up to the last one here."""

    entries: list[Entry]
    last: int
    sum: str = ""


class Verify(Params):
    """`trajectory.verify`: read all of it and follow the chain of sums."""

    id: Id


class Altered(Struct):
    """An entry that is not as it was written. offset: where its line begins in the file."""

    seq: int
    offset: int


class Verified(Result):
    """altered: empty when all of it is intact. sum: over all entries."""

    entries: int
    size: int
    sum: str
    altered: list[Altered] = []


class Export(Params):
    """`trajectory.export`: the file itself, as a stream: `<sum> <entry as JSON>` lines."""

    id: Id
    window: Annotated[int, Meta(ge=4096, le=8 << 20)] = 1 << 20


class Exported(Result):
    size: int
