"""What is durable of a rollout beside its trajectory: one row of state.db, and its result until it is acknowledged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Raw, Struct

from dsecd.rollout.states import ENDED, LIVE
from dsecd.sandbox.store import Statement, Store
from dsecd.wire import rollouts as wire
from dsecd.wire.sandbox import Owner, Spec

KEEP_ENDED: Final = 10_000  # rollouts that are over and that `get` still knows

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS rollouts (id TEXT PRIMARY KEY, state TEXT NOT NULL, uid INTEGER NOT NULL,"
    " job TEXT NOT NULL, body BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS rollout_results (id INTEGER PRIMARY KEY AUTOINCREMENT, uid INTEGER NOT NULL,"
    " job TEXT NOT NULL, rollout TEXT NOT NULL UNIQUE, body BLOB NOT NULL)",
    f"DELETE FROM rollouts WHERE state IN ('done', 'failed', 'stopped') AND id NOT IN (SELECT id FROM rollouts"
    f" WHERE state IN ('done', 'failed', 'stopped') ORDER BY id DESC LIMIT {KEEP_ENDED})",
)  # fmt: skip


class Record(Struct, kw_only=True, omit_defaults=True):
    """Times are UNIX seconds. exec_id: the worker's program. end: the state that `finishing` ends in.

    steps, seq: of one that is over; of a live one they are counted in memory.
    """

    id: str
    owner: Owner
    job: str
    agent_spec: Spec
    worker_spec: Spec
    task: Raw
    program: list[str]
    limits: wire.Limits
    keep_agent: bool = False
    request: str = ""
    state: wire.State = "starting"
    agent: str = ""
    worker: str = ""
    exec_id: str = ""
    created: float = 0.0
    ended: float | None = None
    end: wire.State = "failed"
    reason: str = ""
    steps: int = 0
    seq: int = 0
    outcome: wire.Outcome | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode
_result = msgspec.json.Decoder(wire.Delivered).decode


class Whose(Struct, frozen=True):
    """A job is one user's, as that of sandboxes is; root's are everybody's. job None: all of them."""

    uid: int
    job: str | None = None

    def covers(self, record: Record) -> bool:
        return self.uid in (0, record.owner.uid) and self.job in (None, record.job)

    @property
    def clause(self) -> str:
        """Of SQL, for `args`."""
        return "(? = 0 OR uid = ?)" + ("" if self.job is None else " AND job = ?")

    @property
    def args(self) -> tuple[int | str, ...]:
        return (self.uid, self.uid) if self.job is None else (self.uid, self.uid, self.job)


class Table:
    """Rollouts and undelivered results in state.db."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def open(self) -> list[Record]:
        """Make the tables, forget the oldest that are over; those that are not."""
        await self._store.write([(sql, ()) for sql in _SCHEMA])
        return await self.find(Whose(0), LIVE)

    async def put(self, record: Record) -> None:
        await self._store.write([_put(record)])

    async def end(self, record: Record, result: wire.Delivered) -> None:
        """The rollout's fate and its result, both or none."""
        sql = "INSERT OR IGNORE INTO rollout_results (uid, job, rollout, body) VALUES (?, ?, ?, ?)"
        values = (record.owner.uid, record.job, record.id, _encode(result))
        await self._store.write([_put(record), (sql, values)])

    async def get(self, ident: str) -> Record | None:
        rows = await self._store.query("SELECT body FROM rollouts WHERE id = ?", (ident,))
        return _decode(rows[0][0]) if rows else None

    async def by_request(self, uid: int, request: str) -> Record | None:
        """The one that was started for an idempotency key; looked for after a restart only."""
        for record in await self.find(Whose(uid), LIVE | ENDED):
            if record.owner.uid == uid and record.request == request:
                return record
        return None

    async def find(self, whose: Whose, states: Iterable[wire.State]) -> list[Record]:
        """In the order of their creation."""
        wanted = sorted(states)
        among = f"state IN ({', '.join('?' * len(wanted))})"
        sql = f"SELECT body FROM rollouts WHERE {among} AND {whose.clause} ORDER BY id"
        return [_decode(body) for (body,) in await self._store.query(sql, (*wanted, *whose.args))]

    async def results(self, whose: Whose, after: int, limit: int) -> list[wire.Delivered]:
        sql = f"SELECT id, body FROM rollout_results WHERE id > ? AND {whose.clause} ORDER BY id LIMIT ?"
        rows = await self._store.query(sql, (after, *whose.args, limit))
        return [msgspec.structs.replace(_result(body), id=number) for number, body in rows]

    async def acknowledge(self, whose: Whose, idents: list[int]) -> int:
        """How many of them were there."""
        found = 0
        for start in range(0, len(idents), 500):
            some = idents[start : start + 500]
            among = f"FROM rollout_results WHERE id IN ({', '.join('?' * len(some))}) AND {whose.clause}"
            args = (*some, *whose.args)
            found += int((await self._store.query(f"SELECT count(*) {among}", args))[0][0])
            await self._store.write([(f"DELETE {among}", args)])
        return found


def _put(record: Record) -> Statement:
    sql = "INSERT OR REPLACE INTO rollouts (id, state, uid, job, body) VALUES (?, ?, ?, ?, ?)"
    return sql, (record.id, record.state, record.owner.uid, record.job, _encode(record))
