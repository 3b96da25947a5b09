"""Trajectories: for each sandbox one log of all that changed it, in order, durable before anybody is answered.

Entries of one sandbox that arrive together are written and synced together; different sandboxes' files are synced side
by side, since the file system then commits them in one go. Everything but files is done on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import queue
import re
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.metrics import DAEMON
from dsecd.sandbox import logfile
from dsecd.sandbox.logfile import Bad
from dsecd.sandbox.record import now
from dsecd.wire.trajectory import Entry

log = logging.getLogger("dsecd.trajectory")

SYNC_S: Final = DAEMON.histogram(
    "dsecd_trajectory_sync_seconds", "To write what came together of one trajectory, and have it on the disk."
)
THREADS: Final = 4
KNOWN: Final = 8192  # files whose index is kept in memory
LAZY_S: Final = 0.2  # an entry nobody waits for is synced after so long at the latest
PAGE: Final = 8 << 20
JUMP_S: Final = 60.0
_IDENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,127}")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


class _Log:
    """One file. The loop counts entries and their places when they are asked for, a thread writes them later."""

    def __init__(self, path: Path, scan: logfile.Scan) -> None:
        self.path = path
        self.offsets = scan.offsets
        self.ends = scan.ends
        self.commands = scan.commands
        self.bad = scan.bad
        self.asked = scan.size  # bytes, with what is not written yet
        self.pending: list[tuple[bytes, asyncio.Future[None]]] = []
        self.queued = False
        self.timer: asyncio.TimerHandle | None = None
        # The writer's:
        self.sum = scan.sum
        self.size = scan.size
        self.error: OSError | None = None


class Page(Struct):
    """Entries as they stand in the file, without their sums. last: the log's last seq. sum: of the last line here."""

    lines: list[bytes]
    last: int
    sum: str


class Verified(Struct):
    """entries: in all. sum: of the last line."""

    entries: int
    bad: list[Bad]
    sum: str
    size: int


class Trajectories:
    """All trajectories of one daemon, below one directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._logs: dict[str, _Log] = {}
        self._opening: dict[str, asyncio.Future[_Log]] = {}
        self._lock = threading.Lock()  # over `pending` and `queued` of all
        self._jobs: queue.SimpleQueue[tuple[_Log, asyncio.AbstractEventLoop] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"dsecd-log{n}", daemon=True) for n in range(THREADS)]
        for thread in self._threads:
            thread.start()
        self._clock = (time.time(), now())

    # -- writing ------------------------------------------------------------------------------------------------------
    async def append(self, ident: str, entry: Entry, *, lazy: bool = False) -> tuple[int, asyncio.Future[None]]:
        """Give it its place. The future is done when it is durable; who does not wait may say `lazy`."""
        found = self._logs.get(ident) or await self._open(ident)
        entry.seq = len(found.offsets) + 1
        entry.at = round(time.time(), 6)
        body = _encode(entry)
        found.offsets.append(found.asked)
        found.asked += logfile.HEX + 2 + len(body)
        if entry.event == "reply":
            found.ends[entry.ref] = entry.seq
        elif entry.event == "ended":
            found.commands.add(entry.exec_id)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        done.add_done_callback(lambda f: f.cancelled() or f.exception())
        with self._lock:
            found.pending.append((body, done))
        if not lazy:
            self._kick(found, loop)
        elif found.timer is None:
            found.timer = loop.call_later(LAZY_S, self._kick, found, loop)
        return entry.seq, done

    async def note(self, ident: str, event: str, data: Any = None) -> int:
        """An entry of the caller's; its seq. Durable when this returns."""
        seq, done = await self.append(ident, Entry(event=event, data=data))
        await asyncio.shield(done)
        return seq

    def _kick(self, found: _Log, loop: asyncio.AbstractEventLoop) -> None:
        if found.timer is not None:
            found.timer.cancel()
            found.timer = None
        with self._lock:
            if found.queued or not found.pending:
                return
            found.queued = True
        self._jobs.put((found, loop))

    async def _open(self, ident: str) -> _Log:
        """The index of that file, made by reading all of it. Single flight."""
        opening = self._opening.get(ident)
        if opening is None:
            opening = self._opening[ident] = asyncio.ensure_future(self._read_index(ident))
            opening.add_done_callback(lambda _f: self._opening.pop(ident, None))
        return await asyncio.shield(opening)

    async def _read_index(self, ident: str) -> _Log:
        path = self._path(ident)
        try:
            found = await asyncio.to_thread(logfile.recover, path, ident)
        except OSError as exc:
            raise DsecError("internal", f"the trajectory of {ident} cannot be read: {exc.strerror}") from exc
        self._logs[ident] = made = _Log(path, found)
        if len(self._logs) > KNOWN:
            self._let_go()
        return made

    def _let_go(self) -> None:
        """Forget indexes of files that nothing is written to; the oldest first."""
        for ident in list(self._logs)[: KNOWN // 8]:
            if not self._logs[ident].queued and not self._logs[ident].pending:
                del self._logs[ident]

    def _path(self, ident: str) -> Path:
        if _IDENT.fullmatch(ident) is None:
            raise DsecError("not_found", f"there is no trajectory of {ident[:80]!r}")
        return self._directory / f"{ident}{logfile.SUFFIX}"

    # -- the threads --------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._commit(*job)

    def _commit(self, found: _Log, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            batch, found.pending = found.pending, []
        began = time.monotonic()
        if found.error is None:
            try:
                found.sum, found.size = logfile.write(found.path, found.sum, found.size, [body for body, _ in batch])
            except OSError as exc:
                found.error = exc
        took = time.monotonic() - began
        with self._lock:
            again = bool(found.pending) and found.error is None
            found.queued = again
        if again:
            self._jobs.put((found, loop))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._settle, found, [done for _, done in batch], found.error, took)

    def _settle(self, found: _Log, batch: list[asyncio.Future[None]], error: OSError | None, took: float) -> None:
        """On the loop. After a failure nothing that was asked for behind it may have a place either."""
        SYNC_S.observe(took)
        if error is not None:
            with self._lock:
                batch += [done for _, done in found.pending]
                found.pending = []
                found.queued = False
            found.error = None
            while found.offsets and found.offsets[-1] >= found.size:
                found.offsets.pop()
            found.asked = found.size
            last = len(found.offsets)
            found.ends = {ref: seq for ref, seq in found.ends.items() if seq <= last}
        for done in batch:
            if done.done():
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(_failure(error))

    # -- reading ------------------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> int:
        """Logs that a thread is to write."""
        return self._jobs.qsize()

    async def page(self, ident: str, after: int, limit: int = 1000) -> Page:
        """Entries behind `after`, at most `limit` and some 8 MiB of them, at least one.

        `not_found`: there is no log. `conflict`: it is shorter than `after`. `internal`: an entry was altered.
        """
        found = await self._flushed(ident)
        last = len(found.offsets)
        if after > last:
            raise DsecError(
                "conflict", f"the trajectory of {ident} ends at {last}: whoever holds {after} has another one's"
            )
        first, end = after + 1, min(last, after + limit)
        while end > first and self._place(found, end + 1) - self._place(found, first) > PAGE:
            end = first + (end - first) // 2
        bad = {one.seq: one for one in found.bad}
        if altered := [seq for seq in bad if first <= seq <= end]:
            raise _altered(ident, bad[altered[0]])
        start = self._place(found, first)
        before = None if first - 1 in bad else self._place(found, max(first - 1, 1))
        try:
            lines, last_sum = await asyncio.to_thread(
                logfile.read, found.path, ident, before, start, self._place(found, end + 1)
            )
        except OSError as exc:
            raise DsecError("internal", f"the trajectory of {ident} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise _altered(ident, Bad(first + int(str(exc)), start)) from exc
        return Page(lines, last, last_sum)

    async def read(self, ident: str, after: int = 0, limit: int = 1000) -> list[Entry]:
        """As `page`, decoded."""
        return [_decode(line) for line in (await self.page(ident, after, limit)).lines]

    async def reply(self, ident: str, ref: int) -> Entry | None:
        """The reply to request `ref`; None: there is none. `outcome_unknown` when it was altered."""
        try:
            found = await self._flushed(ident)
            seq = found.ends.get(ref)
            return None if seq is None else (await self.read(ident, seq - 1, 1))[0]
        except DsecError as exc:
            if exc.kind == "not_found":
                return None
            raise DsecError("outcome_unknown", f"its answer was recorded, but {exc.message}") from exc

    async def has_ended(self, ident: str, exec_id: str) -> bool:
        """Whether the end of this command is recorded."""
        found = self._logs.get(ident) or await self._open(ident)
        return exec_id in found.commands

    async def verify(self, ident: str) -> Verified:
        """Read the whole file and follow its chain."""
        found = await self._flushed(ident)
        scan = await asyncio.to_thread(logfile.scan, found.path, ident)
        return Verified(len(scan.offsets), scan.bad, scan.sum.hex(), scan.size)

    async def whole(self, ident: str) -> tuple[Path, int]:
        """The file, and how much of it there is."""
        found = await self._flushed(ident)
        return found.path, found.size

    async def _flushed(self, ident: str) -> _Log:
        found = self._logs.get(ident)
        if found is None:
            if not await asyncio.to_thread(self._path(ident).exists):
                raise DsecError("not_found", f"there is no trajectory of {ident[:80]!r}")
            found = await self._open(ident)
        with self._lock:
            last = found.pending[-1][1] if found.pending else None
        if last is not None:
            self._kick(found, asyncio.get_running_loop())
            await asyncio.shield(last)
        return found

    @staticmethod
    def _place(found: _Log, seq: int) -> int:
        return found.offsets[seq - 1] if seq <= len(found.offsets) else found.asked

    # -- retention ----------------------------------------------------------------------------------------------------
    async def trim(self, live: set[str], keep_s: float, keep_bytes: int) -> list[str]:
        """Remove logs of sandboxes that are over: those older than keep_s, then the oldest of more than keep_bytes.

        Nothing goes by age when the clock was set since the last time: all may look old then.
        """
        clock = (time.time(), now())
        jumped = abs((clock[0] - self._clock[0]) - (clock[1] - self._clock[1])) > JUMP_S
        self._clock = clock
        oldest = None if jumped else clock[0] - keep_s
        gone = await asyncio.to_thread(logfile.trim, self._directory, live, oldest, keep_bytes)
        for ident in gone:
            self._logs.pop(ident, None)
        return gone

    def close(self) -> None:
        """Write what was asked for, and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        for ident, found in self._logs.items():
            if found.timer is not None:
                found.timer.cancel()
            if found.pending and found.error is None:
                try:
                    logfile.write(found.path, found.sum, found.size, [body for body, _ in found.pending])
                except OSError as exc:
                    log.error("trajectory: last entries not written: %s", exc, extra={"sandbox_id": ident})


def _failure(error: OSError) -> DsecError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = "the disk of trajectories is full: what cannot be recorded is not done; make room in state_dir"
        return DsecError("disk_full", text, infra=True)
    return DsecError("internal", f"the trajectory cannot be written: {error.strerror}")


def _altered(ident: str, bad: Bad) -> DsecError:
    return DsecError(
        "internal",
        f"entry {bad.seq} of the trajectory of {ident} was altered after it was written; "
        f"`dsecctl trajectory verify {ident}` says what is intact",
    )
