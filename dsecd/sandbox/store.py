"""state.db: the registry and the answers to requests with an idempotency key.

One thread owns the SQLite connection. Writes that arrive together are committed together; `write` returns when its
commit is done, so what was acknowledged is there after a kill -9 of the daemon. WAL with synchronous=NORMAL: a power
cut may lose the last commits, and with them go the sandboxes themselves.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dsecd.errors import DsecError, Kind
from dsecd.sandbox.record import Record

Statement = tuple[str, tuple[Any, ...]]

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, live INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS requests (
    uid INTEGER NOT NULL, key TEXT NOT NULL, method TEXT NOT NULL, digest BLOB NOT NULL, reply BLOB,
    at REAL NOT NULL, sandbox TEXT, seq INTEGER, PRIMARY KEY (uid, key)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_at ON requests (at);
"""
_FROM_1: Final = """
ALTER TABLE requests ADD COLUMN sandbox TEXT;
ALTER TABLE requests ADD COLUMN seq INTEGER;
"""
FORMAT: Final = 2
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode


class _Job(msgspec.Struct):
    statements: Sequence[Statement]
    query: bool
    done: Callable[[Any, Exception | None], None]


class Store:
    """Open one per state directory; the caller holds that directory's lock."""

    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, 1, FORMAT):  # before anything is changed in it
                self._db.close()
                raise DsecError("unsupported", f"{path} has format {version}, this dsecd reads {FORMAT}")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            if version == 1:  # of 0.1: answers were beside their keys, and still may be
                self._db.executescript(f"BEGIN; {_FROM_1} PRAGMA user_version={FORMAT}; COMMIT;")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={FORMAT}")
        except sqlite3.Error as exc:
            raise DsecError("internal", f"cannot open {path}: {exc}") from exc
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="dsecd-store", daemon=True)
        self._thread.start()

    def load(self) -> list[Record]:
        """All records; only before the first write."""
        return [_decode(body) for (body,) in self._db.execute("SELECT body FROM sandboxes ORDER BY id")]

    async def put(self, *records: Record) -> None:
        sql = "INSERT OR REPLACE INTO sandboxes (id, live, body) VALUES (?, ?, ?)"
        await self.write([(sql, (r.id, int(r.live), _encode(r))) for r in records])

    async def drop(self, idents: Sequence[str]) -> None:
        await self.write([("DELETE FROM sandboxes WHERE id = ?", (ident,)) for ident in idents])

    async def write(self, statements: Sequence[Statement]) -> None:
        """Run statements in one transaction, together with what others wrote meanwhile."""
        await self._submit(statements, query=False)

    async def query(self, sql: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Rows of one SELECT."""
        rows: list[tuple[Any, ...]] = await self._submit([(sql, args)], query=True)
        return rows

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._db.close()

    async def _submit(self, statements: Sequence[Statement], *, query: bool) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def done(result: Any, error: Exception | None) -> None:
            loop.call_soon_threadsafe(settle, result, error)

        self._jobs.put(_Job(statements, query, done))
        try:
            return await future
        except sqlite3.OperationalError as exc:
            kind: Kind = "disk_full" if "full" in str(exc) else "internal"
            raise DsecError(kind, f"the registry cannot be written: {exc}", infra=True) from exc
        except Exception as exc:
            raise DsecError("internal", f"the registry cannot be written: {exc}") from exc

    # -- the thread ---------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch = [job]
            while len(batch) < 512 and not self._jobs.empty():
                extra = self._jobs.get()
                if extra is None:
                    self._jobs.put(None)
                    break
                batch.append(extra)
            self._commit(batch)

    def _commit(self, batch: list[_Job]) -> None:
        results: list[tuple[_Job, Any]] = []
        try:
            self._db.execute("BEGIN")
            for job in batch:
                rows: Any = None
                for sql, args in job.statements:
                    cursor = self._db.execute(sql, args)
                    rows = cursor.fetchall() if job.query else None
                results.append((job, rows))
            self._db.execute("COMMIT")
        except Exception as exc:  # noqa: BLE001 - the thread outlives whatever a value was that SQLite does not take
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if len(batch) > 1:  # one bad statement must not fail its neighbours
                for job in batch:
                    self._commit([job])
                return
            batch[0].done(None, exc)
            return
        for job, rows in results:
            job.done(rows, None)
