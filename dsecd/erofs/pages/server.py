"""The page server itself: threads around one table of files.

    reader      reads events; answers those whose chunks are there, queues the rest; never does I/O on watched files
    workers     fetch, check, write, answer (`chunks.Fetcher.work`)
    keeper      every tenth of a second: deadlines, retries; every few seconds: saves, the bound, marks that may go
    control     the socket; one request at a time

One lock for the table, never held over I/O on the cache or a store. The process may be killed at any instant: see
`journal` and `cachefile`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from dsecd.erofs.model import SUM
from dsecd.erofs.pages import fan
from dsecd.erofs.pages.chunks import FAULT, Fetcher, File, Read
from dsecd.erofs.pages.evict import Evictor
from dsecd.erofs.pages.fscache_server import Fscache, OndemandRead
from dsecd.erofs.pages.journal import Journal, Pending
from dsecd.erofs.pages.model import ImageStats, PagesConfig, Stats, Trouble, Watched
from dsecd.erofs.pages.table import Table
from dsecd.erofs.pages.trace import Trace
from dsecd.erofs.stores import BlobStore
from dsecd.erofs.tar import bad

log: Final = logging.getLogger(__name__)

AGAIN_S: Final = 1.0
STOP_S: Final = 2.0
TICK_S: Final = 0.1
SAVE_S: Final = 5.0
RELEASE_S: Final = 2.0  # how long `unwatch` waits for a mount that was just unmounted to let go of the file


class PageServer:
    """Make it, `start` it, hand it requests, `stop` it. group, device: copies of an earlier server's, or None.

    keep_device: see `Fscache`.
    """

    def __init__(
        self,
        config: PagesConfig,
        stores: Mapping[str, BlobStore],
        group: int | None,
        device: int | None = None,
        keep_device: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.inherited = group is not None
        self._stores = stores
        self._lock = threading.Condition()
        self._journal = Journal(config.run / "journal")
        first = group if group is not None else fan.new_group()
        self.group = fan.out_of_the_way(first)
        device = fan.out_of_the_way(device) if device is not None else None
        self._owed = self._reserve()  # before anything else is opened
        self.generation = self._generation()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._fetcher = Fetcher(
            self._lock, finish=self._finish,
            make_room=lambda size: self._evictor.make_room(size) or self.fscache.cull(size),
            prefetch_workers=max(1, config.workers * 3 // 8),
        )  # fmt: skip
        self._table = Table(config, self._lock, self._fetcher)
        self._evictor = Evictor(
            self._lock,
            self._table.files,
            self._fetcher,
            bound=config.cache_bytes,
            settle_s=config.settle_s,
            mark=self._mark,
        )
        self.fscache = Fscache(
            config,
            self._lock,
            self._table,
            self._fetcher,
            device=device,
            keep=keep_device,
            attach=self._attach,
            ask=self._asked,
        )
        self._reads: dict[Read, None] = {}
        self._waited, self._waited_s = 0, 0.0
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._events = self._hits = self._denied = 0
        self._event_s = 0.0

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._table.load()
        self._restore()
        self.fscache.start()
        for pending in self._owed:
            self._answer_for_the_dead(pending)
        names = ["reader", "keeper", *(f"worker-{n}" for n in range(self.config.workers))]
        bodies = [self._read_events, self._keep, *[self._fetcher.work] * self.config.workers]
        for name, body in zip(names, bodies, strict=True):
            thread = threading.Thread(target=body, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Only when nothing is watched, or in a test: readers that wait would see holes once the last group closes."""
        with self._lock:
            self._stopping = self._fetcher.stopped = True
            self._lock.notify_all()
        os.write(self._wake_w, b"x")
        until = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))  # one may hang in its store; it holds nothing of ours
        self.fscache.stop()
        for file in self._table.all():
            file.cached.save()
            file.cached.close()
        for store in self._stores.values():
            store.close()
        for fd in (self._wake_r, self._wake_w, self.group):
            os.close(fd)

    def _reserve(self) -> list[Pending]:
        """The numbers of unanswered events must not be given to new ones, so something else takes them."""
        if not self.inherited:
            self._journal.clear_all()
            return []
        owed = list(self._journal.pending())
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for pending in owed:
            if pending.event.fd >= 0 and pending.event.fd != null:
                os.dup2(null, pending.event.fd, inheritable=False)
        if all(pending.event.fd != null for pending in owed):
            os.close(null)
        return owed

    def _generation(self) -> str:
        """A name for the group: another one means that the last was lost."""
        path = self.config.run / "generation"
        if self.inherited:
            with contextlib.suppress(FileNotFoundError):
                return path.read_text()
        name = secrets.token_hex(8)
        path.write_text(name)
        return name

    def _restore(self) -> None:
        """What an earlier server watched. Its marks are still there, unless the group was lost."""
        marked = fan.marked(self.group)
        for every in self._table.all():
            every.marked = every.cached.ino in marked
            every.marked_at = time.monotonic()
        for note in self._table.notes():
            file = self._table.files.get(note.watched.key)
            if file is None:  # the file is gone, or `Fscache` makes it
                continue
            self._attach(file, note.watched)
            self._fetcher.prefetch(file, file.traces[note.watched.image].ahead)
            file.latched, file.mounted = note.latched, note.mounted
            if not file.marked and not file.cached.complete and file.cached.in_use():
                file.lost.add(note.watched.image)
                log.error("the fanotify group was lost: readers of image %s may have seen holes", note.watched.image)

    def _answer_for_the_dead(self, pending: Pending) -> None:
        """An event that a server read and did not live to answer. Its number is all that is needed."""
        named = self._table.by_ino.get(pending.ino)
        files = [named] if named is not None else [file for file in self._table.all() if file.marked]
        read = Read(files[0] if files else None, pending.event.fd, pending.slot, self._deadline())
        with self._lock:
            read.missing = 1  # so that it is not done before all are asked for
            for file in files:
                for chunk in self._span(file, pending.event):
                    if chunk not in file.cached:
                        self._fetcher.want(file, chunk, FAULT, read)
            read.missing -= 1
            read.done = read.missing == 0
            if not read.done:
                self._reads[read] = None
        if read.done:
            self._finish(read, 0)

    # -- events --------------------------------------------------------------------------------------------------

    def _read_events(self) -> None:
        own = os.getpid()
        poll = select.poll()
        poll.register(self.group, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        while not self._stopping:
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                while not self._stopping:
                    with self._lock:
                        found = self._next()
                    if found is None:
                        time.sleep(0.01)  # a thousand readers wait: the next ones do so in the kernel's queue
                        break
                    began = time.perf_counter()
                    try:
                        self._event(*found, own)
                    except OSError as exc:
                        log.warning("an event could not be handled: %s", exc)
                    self._event_s += time.perf_counter() - began

    def _next(self) -> tuple[int, fan.Event] | None:
        try:
            return self._journal.read(self.group)
        except BlockingIOError:
            raise
        except OSError as exc:  # no descriptor for it: the kernel has refused that read, and the next may do better
            log.error("an event could not be read: %s", exc.strerror)
            return None

    def _event(self, slot: int, event: fan.Event, own: int) -> None:
        read = Read(None, event.fd, slot, self._deadline())
        if event.fd == fan.NOFD or event.pid == own:  # our own writes, through a descriptor younger than the mark
            self._finish(read, 0)
            return
        ino = os.fstat(event.fd).st_ino
        with self._lock:
            self._journal.name(slot, ino)
            file = self._table.by_ino.get(ino)
            read.file = file
            self._events += 1
            if file is not None:
                self._ask(file, event, read)
        if file is None:
            self._finish(read, errno.EIO)
        elif read.done:
            self._finish(read, 0)

    def _ask(self, file: File, event: fan.Event, read: Read) -> None:
        now = time.monotonic()
        span = self._span(file, event)
        for chunk in span:
            if chunk in file.cached:
                file.cached.used[chunk] = now
            else:
                self._fetcher.want(file, chunk, FAULT, read)
        read.done = read.missing == 0
        read.first = span.start
        if not read.done and now - file.denied.get(read.first, -AGAIN_S) < AGAIN_S:
            # Failed reads are tried once more by the kernel, in smaller pieces: that must not double the deadline.
            read.deadline = now + max(AGAIN_S / 2, self.config.deadline_s / 10)
        self._hits += read.done
        for trace in file.traces.values():
            trace.touch(event.offset, event.length, read.done)
        if not read.done:
            self._reads[read] = None
        if span and not file.cached.complete:
            self._fetcher.ahead(file, span[0], span[-1])

    @staticmethod
    def _span(file: File, event: fan.Event) -> range:
        end = min(event.offset + (event.length or file.cached.size), file.cached.size)
        return range(event.offset // SUM, -(-end // SUM)) if end > event.offset else range(0)

    def _deadline(self) -> float:
        return time.monotonic() + self.config.deadline_s

    def _asked(self, file: File, offset: int, length: int, read: Read) -> None:
        self._events += 1
        self._ask(file, fan.Event(fan.NOFD, 0, offset, length), read)

    def _finish(self, read: Read, error: int) -> None:
        """Answer. The slot is free before the number is: see `journal`."""
        if isinstance(read, OndemandRead):
            self.fscache.finish(read)
        elif read.fd >= 0:
            fan.answer(self.group, read.fd, error)
        with self._lock:
            if read in self._reads:
                del self._reads[read]
                self._waited += 1
                self._waited_s += time.monotonic() - read.came
            self._denied += error != 0
            if not isinstance(read, OndemandRead):
                self._journal.clear(read.slot)
        if read.fd >= 0:
            os.close(read.fd)

    # -- keeping -------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        next_save = time.monotonic() + SAVE_S
        while not self._stopping:
            time.sleep(TICK_S)
            try:
                now = time.monotonic()
                self._expire(now)
                self._evictor.keep_bound()
                self.fscache.tick(now)
                self._unmark_complete()
                if now >= next_save:
                    next_save = now + SAVE_S
                    self._save()
            except Exception:  # a keeper must live: deadlines are its
                log.exception("housekeeping failed, going on")

    def _expire(self, now: float) -> None:
        with self._lock:
            late = [read for read in self._reads if read.deadline <= now]
            for read in late:
                read.done = True
                del self._reads[read]
                if read.file is not None:
                    read.file.denied[read.first] = now
                    before = read.file.trouble
                    why = before.why if before else "the store did not answer in time"
                    kind = before.kind if before else "image"
                    read.file.trouble = Trouble((before.denied if before else 0) + 1, kind, why, time.time())
            self._fetcher.wake_rested(now)
            for file in self._table.all():
                if len(file.denied) > 1024:
                    file.denied.clear()
        for read in late:
            self._finish(read, errno.EIO)
        if late:
            log.warning("%d reads waited %g s for their data and got EIO", len(late), self.config.deadline_s)

    def _unmark_complete(self) -> None:
        """A complete file needs no events, and they cost. Not before the mount has opened it: see `File.latched`."""
        for file in self._table.all():
            with self._lock:
                fit = file.marked and file.mounted and file.cached.complete and self._within_bound()
                if fit:
                    fan.unmark(self.group, file.cached.path)
                    file.marked = False
        for file in self._table.all():
            if file.marked and not file.watched:
                self._release(file)

    def _within_bound(self) -> bool:
        return self._evictor.used() <= self.config.cache_bytes

    def _release(self, file: File) -> bool:
        """Take the mark off a file that nobody has open any more. A process that dies slowly may still."""
        with self._lock:
            if file.watched or file.cached.in_use():
                return False
            if file.marked:
                fan.unmark(self.group, file.cached.path)
            file.marked = file.latched = file.unlatched = file.mounted = False
            file.lost.clear()
            self._fetcher.drop(file)
        return True

    def _save(self) -> None:
        for file in self._table.all():
            with contextlib.suppress(OSError):  # a full disk: the map says less than is there
                file.cached.save()
            for trace in list(file.traces.values()):
                self._save_trace(trace)
            self._table.forget_if_empty(file)

    def _save_trace(self, trace: Trace) -> None:
        with self._lock:
            kept = trace.taken()
        if kept is not None:
            trace.save(kept)

    # -- requests ------------------------------------------------------------------------------------------------

    def watch(self, watched: Watched, *, resume: bool) -> Path:
        """Mark the file of an image, and the path to mount. OSError: not on this file system, or not by fscache."""
        if watched.metadata:
            self.fscache.watch(watched, resume=resume)
            return Path()
        with self._table.claimed(watched) as file:
            return self._watch(file, watched, resume)

    def _watch(self, file: File, watched: Watched, resume: bool) -> Path:
        if file.cached.size != watched.data_size and not (file.watched or file.marked or file.cached.in_use()):
            file.cached.open(watched.data_size)  # somebody cut it: begin again
        if file.cached.size != watched.data_size:
            raise bad(f"data {watched.hex[:12]} has {file.cached.size} bytes, and not {watched.data_size}")
        if resume and self._lost(file, watched.image):
            raise bad(f"image {watched.image}: the page server was lost, and reads may have seen holes instead of data")
        with self._lock:
            self._attach(file, watched)
            self._table.note()  # before the mark: whoever comes after us must know what is marked
            if resume:
                file.mounted = True
                file.unlatched |= not file.marked and not file.latched
                file.latched = not file.unlatched
            else:
                file.mounted = False
                file.lost.discard(watched.image)  # the mount to come reads nothing but what is there
                if not file.marked:
                    self._mark(file)
            self._fetcher.prefetch(file, file.traces[watched.image].ahead)
        return file.cached.path

    def _lost(self, file: File, image: str) -> bool:
        """Whether a mount that is there may have read holes, or reads from a file that is none of ours any more."""
        return image in file.lost or not (file.marked or file.cached.complete) or not file.cached.in_use()

    def _attach(self, file: File, watched: Watched) -> None:
        file.watched[watched.image] = watched
        file.store, file.blob = self._stores.get(watched.store), watched.blob
        if watched.image not in file.traces:
            trace = Path(watched.trace) if watched.trace else self.config.cache / f"{watched.hex}.trace"
            file.traces[watched.image] = Trace(trace, file.cached.chunks)

    def _mark(self, file: File) -> None:
        fan.mark(self.group, file.cached.path)
        file.marked, file.marked_at = True, time.monotonic()

    def mounted(self, image: str) -> None:
        for file in self._table.of(image):
            with self._lock:
                file.mounted, file.latched = True, file.marked and not file.unlatched
                self._table.note()

    def unwatch(self, image: str) -> bool:
        """True: the file is free. False: somebody still has it open; it stays marked until nobody has."""
        free = True
        self.fscache.forget(image)
        for file in self._table.of(image):
            with self._lock:
                trace = file.traces.pop(image)
                del file.watched[image]
                file.lost.discard(image)
                self._table.note()
            self._save_trace(trace)
            if not file.watched:
                file.cached.save()
                until = time.monotonic() + RELEASE_S
                while not (free := self._release(file)) and time.monotonic() < until:
                    time.sleep(0.02)
        return free

    def retain(self, images: frozenset[str]) -> None:
        for note in self._table.notes():
            if note.watched.image not in images:
                self.unwatch(note.watched.image)

    def idle(self) -> bool:
        with self._lock:
            return not self._reads and not any(file.watched or file.marked for file in self._table.all())

    def stats(self) -> Stats:
        with self._lock:
            images = tuple(
                ImageStats(
                    image=image, data_size=file.cached.size, cached_bytes=file.cached.cached_bytes,
                    waiting=sum(read.file is file for read in self._reads), complete=file.cached.complete,
                    lost=image in file.lost, trouble=file.trouble,
                )
                for file in self._table.all() for image in file.watched
            )  # fmt: skip
            return Stats(
                pid=os.getpid(), generation=self.generation, inherited=self.inherited, events=self._events,
                hits=self._hits, waits=self._events - self._hits, denied=self._denied,
                requests=self._fetcher.requests, fetched_bytes=self._fetcher.fetched,
                shared_bytes=self._fetcher.shared, evicted_bytes=self._evictor.evicted + self.fscache.culled,
                event_us=round(1e6 * self._event_s / self._events, 1) if self._events else 0.0,
                cached_bytes=self._evictor.used(), cache_bytes=self.config.cache_bytes, images=images,
                device=self.fscache.device is not None, waited=self._waited, waited_s=round(self._waited_s, 6),
            )  # fmt: skip
