"""Brings chunks that are missing: one fetch for all who wait for a chunk, neighbours together, faults first.

A chunk that is wanted and not there is in `File.wanted`, in one of these states:

    queued ──> fetching ──> (written, bit set, gone from `wanted`; its readers are allowed)
       ^          │ failed, and somebody still waits
       └── resting┘ a moment later; when nobody waits any more, it is forgotten

Readers do not sit in threads: they wait in the kernel, and `Read` says what for. So a thousand of them cost nothing,
and a store that hangs holds up at most its own few workers.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Condition
from typing import Final, Literal

from dsecd.erofs.model import SUM
from dsecd.erofs.pages.cachefile import CacheFile
from dsecd.erofs.pages.model import Trouble, Watched
from dsecd.erofs.pages.trace import Trace
from dsecd.erofs.stores import BlobStore
from dsecd.errors import DsecError

log: Final = logging.getLogger(__name__)

FAULT, AHEAD, TRACE = 0, 1, 2  # priorities
RUN: Final = (4, 8, 8)  # chunks in one request, by priority of the first: bounds memory, and how long others wait
MAX_AHEAD: Final = 16
STREAMS: Final = 16
LIES: Final = 3  # wrong bytes for a chunk, then its readers wait no longer
REST_S: Final = (0.05, 1.0)  # between tries: first, longest
PER_STORE: Final = 6
NOBODY_WAITS_S: Final = 10.0  # how long a fetch may take that no reader waits for


class Read:
    """A reader that waits in the kernel for `missing` chunks."""

    __slots__ = ("came", "deadline", "done", "fd", "file", "first", "missing", "slot")

    def __init__(self, file: File | None, fd: int, slot: int, deadline: float) -> None:
        self.file, self.fd, self.slot, self.deadline = file, fd, slot, deadline
        self.came = time.monotonic()
        self.first = 0  # chunk
        self.missing = 0
        self.done = False


class Chunk:
    """One that is wanted and not there."""

    __slots__ = ("file", "index", "lies", "not_before", "priority", "readers", "state", "tries", "why")

    def __init__(self, file: File, index: int, priority: int) -> None:
        self.file, self.index, self.priority = file, index, priority
        self.state: Literal["queued", "fetching", "resting", "evicting"] = "queued"
        self.readers: list[Read] = []
        self.tries = self.lies = 0
        self.not_before = 0.0
        self.why: DsecError | None = None


class File:
    """A cache file and those who use it. `watched`: images whose mounts read it."""

    def __init__(self, cached: CacheFile) -> None:
        self.cached = cached
        self.watched: dict[str, Watched] = {}
        self.traces: dict[str, Trace] = {}
        self.wanted: dict[int, Chunk] = {}
        self.store: BlobStore | None = None
        self.blob = ""
        self.marked = False
        self.marked_at = 0.0
        self.latched = False  # opened while marked: a new mark would be seen
        self.unlatched = False  # some mount of it opened it unmarked: never
        self.lost: set[str] = set()  # images whose mounts may have read holes
        self.mounted = False
        self.claims = 0
        self.streams: dict[int, int] = {}  # where readers are -> how far to read ahead of them
        self.denied: dict[int, float] = {}  # first chunk of a read -> when it got EIO for being late
        self.trouble: Trouble | None = None


class Queue:
    """Chunks of one priority: each file's in their order, and the files in turn, so that no image holds up another."""

    def __init__(self) -> None:
        self._files: OrderedDict[File, OrderedDict[Chunk, None]] = OrderedDict()

    def put(self, chunk: Chunk) -> None:
        self._files.setdefault(chunk.file, OrderedDict())[chunk] = None

    def remove(self, chunk: Chunk) -> None:
        """Not to be in it is no error."""
        chunks = self._files.get(chunk.file, OrderedDict())
        chunks.pop(chunk, None)
        if not chunks:
            self._files.pop(chunk.file, None)

    def next(self, fit: Callable[[File], bool]) -> Chunk | None:
        """The first of the file whose turn it is, among those that are fit. It stays in the queue."""
        for file, chunks in self._files.items():
            if fit(file):
                self._files.move_to_end(file)
                return next(iter(chunks))
        return None


class Fetcher:
    """The queue, and the work of its threads. `lock` is the server's one lock; it is never held over I/O."""

    def __init__(
        self,
        lock: Condition,
        *,
        finish: Callable[[Read, int], None],
        make_room: Callable[[int], bool],
        prefetch_workers: int,
    ) -> None:
        self._lock = lock
        self._finish = finish
        self._make_room = make_room
        self._queues = (Queue(), Queue(), Queue())
        self._resting: set[Chunk] = set()
        self._busy: dict[str, int] = {}
        self._prefetching = 0
        self._prefetch_workers = prefetch_workers
        self.known: dict[bytes, tuple[File, int]] = {}  # sum -> where such a chunk was last seen
        self.stopped = False
        self.requests = self.fetched = self.shared = 0

    # -- asking (the lock is held) -------------------------------------------------------------------------------

    def want(self, file: File, index: int, priority: int, read: Read | None = None) -> None:
        chunk = file.wanted.get(index)
        if chunk is None:
            chunk = file.wanted[index] = Chunk(file, index, priority)
            self._queues[priority].put(chunk)
            self._lock.notify()
        elif priority < chunk.priority:
            if chunk.state == "queued":
                self._queues[chunk.priority].remove(chunk)
                self._queues[priority].put(chunk)
                self._lock.notify()
            chunk.priority = priority
        if read is not None:
            if chunk.state == "resting":  # who asks now may find the store back; but no faster than the first retry
                chunk.not_before = min(chunk.not_before, time.monotonic() + REST_S[0])
            chunk.readers.append(read)
            read.missing += 1

    def ahead(self, file: File, first: int, last: int) -> None:
        """Read on where a reader goes forward: the window doubles with each chunk that it does. Several may."""
        if last in file.streams:
            return
        window = file.streams.pop(first - 1, 0) or file.streams.pop(first, 0)
        file.streams[last] = min(window * 2, MAX_AHEAD) or 1
        if len(file.streams) > STREAMS:
            del file.streams[next(iter(file.streams))]
        for index in range(last + 1, min(last + 1 + window, file.cached.chunks)):
            if index not in file.cached:
                self.want(file, index, AHEAD)

    def prefetch(self, file: File, chunks: list[int]) -> None:
        for index in chunks:
            if index not in file.cached:
                self.want(file, index, TRACE)

    def drop(self, file: File) -> None:
        """Nobody reads the file any more: what is queued for it is not fetched."""
        for index, chunk in list(file.wanted.items()):
            if chunk.state in ("queued", "resting") and not any(not read.done for read in chunk.readers):
                self._queues[chunk.priority].remove(chunk)
                self._resting.discard(chunk)
                del file.wanted[index]

    def forget(self, file: File) -> None:
        for index in range(file.cached.chunks):
            if self.known.get(file.cached.sum(index), (None, 0))[0] is file:
                del self.known[file.cached.sum(index)]

    def wake_rested(self, now: float) -> None:
        """Try again what failed, as long as somebody waits for it."""
        for chunk in [chunk for chunk in self._resting if chunk.not_before <= now]:
            self._resting.discard(chunk)
            chunk.readers = [read for read in chunk.readers if not read.done]
            if chunk.readers:
                chunk.state = "queued"
                self._queues[chunk.priority].put(chunk)
                self._lock.notify()
            else:
                del chunk.file.wanted[chunk.index]

    # -- working (threads) ---------------------------------------------------------------------------------------

    def work(self) -> None:
        while True:
            with self._lock:
                while not (run := self._take()):
                    if self.stopped:
                        return
                    self._lock.wait()
                file, store = run[0].file, run[0].file.store
                name = store.name if store else ""
                prefetch = all(chunk.priority == TRACE for chunk in run)
                self._busy[name] = self._busy.get(name, 0) + 1
                self._prefetching += prefetch
            try:
                self._bring(file, run)
            except Exception as exc:  # a worker must live: its readers would wait for ever
                log.exception("cannot fill %s", file.cached.hex[:12])
                self._failed(run, DsecError("internal", f"the page server failed: {exc!r}"))
            finally:
                with self._lock:
                    self._busy[name] -= 1
                    self._prefetching -= prefetch
                    self._lock.notify()

    def _take(self) -> list[Chunk]:
        """The most urgent chunk whose store has a worker left, and its queued neighbours."""
        for priority, queue in enumerate(self._queues):
            if priority == TRACE and self._prefetching >= self._prefetch_workers:
                break
            chunk = queue.next(lambda file: file.store is None or self._busy.get(file.store.name, 0) < PER_STORE)
            if chunk is not None:
                return self._run(chunk, RUN[priority])
        return []

    def _run(self, chunk: Chunk, length: int) -> list[Chunk]:
        """With its neighbours that are at least as urgent: who waits for a chunk waits for no guess beside it."""
        run = [chunk]
        for step in (1, -1):
            while len(run) < length:
                end = run[-1] if step == 1 else run[0]
                other = chunk.file.wanted.get(end.index + step)
                if other is None or other.state != "queued" or other.priority > chunk.priority:
                    break
                run.insert(len(run) if step == 1 else 0, other)
        for one in run:
            self._queues[one.priority].remove(one)
            one.state = "fetching"
        return run

    def _bring(self, file: File, run: list[Chunk]) -> None:
        asked: list[Chunk] = []
        for chunk in run:
            if self._copied(file, chunk):
                self._fetch(file, asked)
                asked = []
            else:
                asked.append(chunk)
        self._fetch(file, asked)

    def _copied(self, file: File, chunk: Chunk) -> bool:
        """From another file, or another place of this one, that has the same bytes."""
        wanted = file.cached.sum(chunk.index)
        with self._lock:
            other, index = self.known.get(wanted, (None, 0))
            if other is None or index not in other.cached:
                return False
        try:
            data = other.cached.read(index)
        except (OSError, ValueError):
            return False
        if len(data) != file.cached.length(chunk.index) or hashlib.sha256(data).digest() != wanted:
            return False
        if self._write([chunk], data):
            self.shared += len(data)
        return True

    def _fetch(self, file: File, run: list[Chunk]) -> None:
        if not run:
            return
        first, last = run[0].index, run[-1].index
        size = sum(file.cached.length(chunk.index) for chunk in run)
        with self._lock:
            deadlines = [read.deadline for chunk in run for read in chunk.readers if not read.done]
            self.requests += 1
        patience = max(0.5, max(deadlines) - time.monotonic()) if deadlines else NOBODY_WAITS_S
        try:
            if file.store is None:
                raise DsecError("image", f"the store of data {file.cached.hex[:12]} is not in the config")
            data = memoryview(file.store.read(file.blob, first * SUM, size, patience))
            if len(data) != size:
                raise DsecError("image", f"store {file.store.name}: {len(data)} bytes instead of {size}")
        except DsecError as exc:
            self._failed(run, exc)
            return
        self.fetched += size
        for chunk in run:
            at = (chunk.index - first) * SUM
            piece = data[at : at + file.cached.length(chunk.index)]
            if hashlib.sha256(piece).digest() == file.cached.sum(chunk.index):
                self._write([chunk], piece)
                continue
            chunk.lies += 1
            what = f"piece {chunk.index} of {file.blob[:80]} is not what the image says (asked for {first} to {last})"
            self._failed([chunk], DsecError("image", f"store {file.store.name}: {what}"), final=chunk.lies >= LIES)

    def _write(self, run: list[Chunk], data: bytes | memoryview) -> bool:
        (chunk,) = run
        try:
            try:
                chunk.file.cached.write(chunk.index, data)
            except OSError as exc:
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._make_room(RUN[TRACE] * SUM):
                    raise
                chunk.file.cached.write(chunk.index, data)
        except OSError as exc:
            full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
            what = f"the image cache cannot be written: {exc.strerror}"
            self._failed(run, DsecError("disk_full" if full else "image", what), final=True)
            return False
        self._arrived(chunk)
        return True

    def _arrived(self, chunk: Chunk) -> None:
        file = chunk.file
        with self._lock:
            file.cached.set(chunk.index)
            self.known[file.cached.sum(chunk.index)] = (file, chunk.index)
            del file.wanted[chunk.index]
            ready = []
            for read in chunk.readers:
                read.missing -= 1
                if read.missing == 0 and not read.done:
                    read.done = True
                    ready.append(read)
        for read in ready:
            self._finish(read, 0)

    def _failed(self, run: list[Chunk], why: DsecError, *, final: bool = False) -> None:
        now = time.monotonic()
        refused: list[Read] = []
        with self._lock:
            for chunk in run:
                if chunk.file.wanted.get(chunk.index) is not chunk:
                    continue  # it arrived before the failure
                chunk.tries += 1
                chunk.why = why
                waiting = [read for read in chunk.readers if not read.done]
                if final or not waiting:
                    del chunk.file.wanted[chunk.index]
                    for read in waiting:
                        read.done = True
                        refused.append(read)
                else:
                    chunk.state = "resting"
                    chunk.not_before = now + min(REST_S[0] * 2**chunk.tries, REST_S[1])
                    self._resting.add(chunk)
                if waiting:
                    chunk.file.trouble = _worse(chunk.file.trouble, why, len(waiting) if final else 0)
        for read in refused:
            self._finish(read, errno.EIO)


def _worse(before: Trouble | None, why: DsecError, denied: int) -> Trouble:
    return Trouble((before.denied if before else 0) + denied, why.kind, why.message[:512], time.time())
