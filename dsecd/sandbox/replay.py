"""Idempotency: the same `request_id` gives the same answer, never a second run.

A key belongs to a uid. What it was first used for is written before the work starts and its answer before the caller
gets it: into the trajectory of the sandbox that is changed, else (there is none yet) beside the key. The work itself
belongs to nobody's connection: a client that is cut off finds it running when it asks again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from dsecd.errors import DsecError
from dsecd.sandbox.recorder import Failure, Mark, Recorder, failure_of
from dsecd.sandbox.store import Store
from dsecd.spans import span
from dsecd.wire.base import Params
from dsecd.wire.methods import METHODS
from dsecd.wire.stream import Inflow, Upload
from dsecd.wire.trajectory import Entry, Who

KEEP_S: Final = 7 * 86400.0
STILL_S: Final = 5.0
_ERROR: Final = b"!"
_SIZE: Final = hashlib.sha256().digest_size


class _Running(msgspec.Struct):
    digest: bytes
    task: asyncio.Task[Any]
    upload: Upload | None = None


class Replay:
    """`recover` is asked for the answer of work that a daemon's death interrupted; None: nobody knows."""

    def __init__(self, store: Store, recorder: Recorder, recover: Callable[[str, Params, Who], Awaitable[Any]]) -> None:
        self._store = store
        self._recorder = recorder
        self._recover = recover
        self._running: dict[tuple[int, str], _Running] = {}
        self._closing = False

    def cancel(self, params: Params, uid: int) -> None:
        """The caller does not want it any more (not: its connection broke)."""
        running = self._running.get((uid, params.request_id or ""))
        if running is not None:
            running.task.cancel()

    async def once(
        self, method: str, params: Params, who: Who, invoke: Callable[[], Awaitable[Any]], upload: Upload | None = None
    ) -> Any:
        """Run `invoke` unless this key was used before. upload: the stream that comes with it: content, too."""
        assert params.request_id is not None
        key = (who.uid, params.request_id)
        digest = _digest(method, params)
        while (running := self._running.get(key)) is not None:
            self._same(running.digest, digest, params)
            if upload is not None and running.upload is not None:
                await _over(running.task, running.upload.stream)
                if not running.upload.stream.ended:
                    # Cut off: the key says what became of it, and is free if this stream may take its place. The task
                    # goes from the table in the loop's next turn, which there would never be without this.
                    await asyncio.sleep(0)
                    continue
                self._same(running.upload.digest(), await upload.read(), params)
            return _replayed(await asyncio.shield(running.task))
        task = asyncio.get_running_loop().create_task(self._first(key, digest, method, params, who, invoke, upload))
        self._running[key] = _Running(digest, task, upload)
        task.add_done_callback(lambda t: (self._running.pop(key, None), t.cancelled() or t.exception()))
        return await asyncio.shield(task)

    async def _first(
        self, key: tuple[int, str], digest: bytes, method: str, params: Params, who: Who,
        invoke: Callable[[], Awaitable[Any]], upload: Upload | None,
    ) -> Any:  # fmt: skip
        with span("look the key up"):
            rows = await self._store.query(
                "SELECT digest, reply, sandbox, seq FROM requests WHERE uid = ? AND key = ?", key
            )
        if rows:
            known, reply, sandbox, seq = rows[0]
            self._same(known[:_SIZE], digest, params)
            if upload is not None and known[_SIZE:]:
                self._same(known[_SIZE:], await upload.read(), params)
            if reply is not None:
                return _replayed(_decode(method, reply))
            mark = None if sandbox is None else Mark(sandbox, seq, time.monotonic())
            if mark is not None and (entry := await self._recorder.trajectories.reply(sandbox, seq)) is not None:
                return _replayed(_recorded(method, entry))
            return _replayed(await self._settle(key, mark, lambda: self._recover(method, params, who)))
        mark = await self._recorder.begin(method, params, who, lazy=False) if METHODS[method].recorded else None
        place = (None, None) if mark is None else (mark.sandbox, mark.seq)
        sql = "INSERT INTO requests (uid, key, method, digest, at, sandbox, seq) VALUES (?, ?, ?, ?, ?, ?, ?)"
        with span("keep the key"):
            await self._store.write([(sql, (*key, method, digest, time.time(), *place))])
        if upload is None:
            return await self._settle(key, mark, invoke)

        async def taken(upload: Upload = upload) -> Any:
            upload.watch()
            result = await invoke()
            sql = "UPDATE requests SET digest = ? WHERE uid = ? AND key = ?"  # the stream's stands behind
            await self._store.write([(sql, (digest + upload.digest(), *key))])
            return result

        return await self._settle(key, mark, taken)

    async def _settle(self, key: tuple[int, str], mark: Mark | None, invoke: Callable[[], Awaitable[Any]]) -> Any:
        """Do the work and write its answer; a failure that may be retried frees the key."""
        try:
            result = await invoke()
        except DsecError as exc:
            if exc.retryable:
                await self._free(key)
            elif mark is None:
                await self._write(key, _ERROR + msgspec.json.encode(failure_of(exc)))
            if mark is not None:
                await self._recorder.failure(mark, exc)
            raise
        except BaseException as exc:
            if self._closing:
                raise  # the next daemon is asked what became of it
            await self._free(key)
            if mark is not None:
                await self._recorder.failure(mark, exc)
            raise
        if mark is None:
            await self._write(key, msgspec.json.encode(result))
        else:
            await self._recorder.reply(mark, result)
        return result

    async def _write(self, key: tuple[int, str], reply: bytes) -> None:
        await self._store.write([("UPDATE requests SET reply = ? WHERE uid = ? AND key = ?", (reply, *key))])

    async def _free(self, key: tuple[int, str]) -> None:
        await self._store.write([("DELETE FROM requests WHERE uid = ? AND key = ?", key)])

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


async def _over(task: asyncio.Task[Any], stream: Inflow) -> None:
    """Wait for its end. A stream that stands still while the same is asked again was cut off, however alive its
    connection looks: the other end of a tunnel may hear of it an hour later."""
    while not task.done():
        before = stream.taken
        await asyncio.wait((task,), timeout=STILL_S)
        if stream.waits and stream.taken == before:
            stream.cut()


def _digest(method: str, params: Params) -> bytes:
    content = msgspec.structs.asdict(params)
    content.pop("request_id")
    return hashlib.sha256(method.encode() + msgspec.json.encode(content, order="deterministic")).digest()


def _decode(method: str, reply: bytes) -> Any:
    if reply.startswith(_ERROR):
        raise _error(msgspec.json.decode(reply[1:]))
    return msgspec.json.decode(reply, type=METHODS[method].result)


def _recorded(method: str, entry: Entry) -> Any:
    if entry.error is not None:
        raise _error(entry.error)
    return msgspec.convert(entry.result, METHODS[method].result)


def _error(kept: Any) -> DsecError:
    failure = msgspec.convert(kept, Failure)
    return failure.data.error(failure.message)


def _replayed(result: Any) -> Any:
    return msgspec.structs.replace(result, replayed=True)
