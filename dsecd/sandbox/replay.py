"""Idempotency: the same `request_id` gives the same answer, never a second run.

A key belongs to a uid. What it was first used for is written before the work starts and its answer before the caller
gets it. The work itself belongs to nobody's connection: a client that is cut off finds it running when it asks again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from dsecd.errors import DsecError
from dsecd.sandbox.store import Store
from dsecd.wire.base import ErrorData, Params
from dsecd.wire.methods import METHODS

KEEP_S: Final = 7 * 86400.0
_ERROR: Final = b"!"


class _Failure(msgspec.Struct):
    message: str
    data: ErrorData


class _Running(msgspec.Struct):
    digest: bytes
    task: asyncio.Task[Any]


class Replay:
    """`recover` is asked for the answer of work that a daemon's death interrupted; None: nobody knows."""

    def __init__(self, store: Store, recover: Callable[[str, Params, int], Awaitable[Any]]) -> None:
        self._store = store
        self._recover = recover
        self._running: dict[tuple[int, str], _Running] = {}
        self._closing = False

    def cancel(self, params: Params, uid: int) -> None:
        """The caller does not want it any more (not: its connection broke)."""
        running = self._running.get((uid, params.request_id or ""))
        if running is not None:
            running.task.cancel()

    async def once(self, method: str, params: Params, uid: int, invoke: Callable[[], Awaitable[Any]]) -> Any:
        """Run `invoke` unless this key was used before."""
        assert params.request_id is not None
        key = (uid, params.request_id)
        digest = _digest(method, params)
        running = self._running.get(key)
        if running is not None:
            self._same(running.digest, digest, params)
            return _replayed(await asyncio.shield(running.task))
        task = asyncio.get_running_loop().create_task(self._first(key, digest, method, params, invoke))
        self._running[key] = _Running(digest, task)
        task.add_done_callback(lambda t: (self._running.pop(key, None), t.cancelled() or t.exception()))
        return await asyncio.shield(task)

    async def _first(
        self, key: tuple[int, str], digest: bytes, method: str, params: Params, invoke: Callable[[], Awaitable[Any]]
    ) -> Any:
        rows = await self._store.query("SELECT digest, reply FROM requests WHERE uid = ? AND key = ?", key)
        if rows:
            self._same(rows[0][0], digest, params)
            if rows[0][1] is not None:
                return _replayed(_decode(method, rows[0][1]))
            return _replayed(await self._settle(key, method, lambda: self._recover(method, params, key[0])))
        sql = "INSERT INTO requests (uid, key, method, digest, at) VALUES (?, ?, ?, ?, ?)"
        await self._store.write([(sql, (*key, method, digest, time.time()))])
        return await self._settle(key, method, invoke)

    async def _settle(self, key: tuple[int, str], method: str, invoke: Callable[[], Awaitable[Any]]) -> Any:
        """Do the work and write its answer; a failure that may be retried frees the key."""
        try:
            result = await invoke()
        except DsecError as exc:
            if exc.retryable:
                await self._store.write([("DELETE FROM requests WHERE uid = ? AND key = ?", key)])
            else:
                data = ErrorData(exc.kind, exc.infra, exc.retryable, exc.sandbox_id, exc.detail)
                await self._write(key, _ERROR + msgspec.json.encode(_Failure(exc.message, data)))
            raise
        except BaseException:
            if self._closing:
                raise  # the next daemon is asked what became of it
            await self._store.write([("DELETE FROM requests WHERE uid = ? AND key = ?", key)])
            raise
        await self._write(key, msgspec.json.encode(result))
        return result

    async def _write(self, key: tuple[int, str], reply: bytes) -> None:
        await self._store.write([("UPDATE requests SET reply = ? WHERE uid = ? AND key = ?", (reply, *key))])

    @staticmethod
    def _same(known: bytes, digest: bytes, params: Params) -> None:
        if known != digest:
            raise DsecError("conflict", f"request_id {params.request_id!r} was used for something else before")

    async def trim(self) -> None:
        """Forget answers older than a week."""
        await self._store.write([("DELETE FROM requests WHERE at < ?", (time.time() - KEEP_S,))])

    async def close(self) -> None:
        """The daemon stops: what runs is let go of without an answer; the next daemon is asked what became of it."""
        self._closing = True
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _digest(method: str, params: Params) -> bytes:
    content = msgspec.structs.asdict(params)
    content.pop("request_id")
    return hashlib.sha256(method.encode() + msgspec.json.encode(content, order="deterministic")).digest()


def _decode(method: str, reply: bytes) -> Any:
    if reply.startswith(_ERROR):
        failure = msgspec.json.decode(reply[1:], type=_Failure)
        data = failure.data
        raise DsecError(
            data.kind,  # type: ignore[arg-type]  # written by us from a Kind
            failure.message,
            infra=data.infra,
            retryable=data.retryable,
            sandbox_id=data.sandbox_id,
            detail=data.detail,
        )
    return msgspec.json.decode(reply, type=METHODS[method].result)


def _replayed(result: Any) -> Any:
    return msgspec.structs.replace(result, replayed=True) if hasattr(result, "replayed") else result
