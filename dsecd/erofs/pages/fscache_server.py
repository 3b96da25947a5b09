"""The page server's other door: images filled through cachefiles, where the kernel has it in on-demand mode.

    reader ── read(2) ──> EROFS ── hole? ──> READ on /dev/cachefiles: the reader waits in the kernel
                                                │
      Fscache (one thread) ── all there? ── yes ──────────> answered; the kernel looks again, and gives EIO for a hole
                                  │ no                           ^
                                  v                              │ after the write
                       the same queue, threads, stores, sums and traces as for fanotify (`chunks`, `trace`)

A mount has two blobs: its metadata, copied from the image's own file, and its data. The device is opened when the first
image is to be mounted this way, since a host has but one. Nothing is journaled: the kernel remembers what was not
answered, and gives it again to the next server, which has a copy of the device's descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsecd.erofs.pages import fscache
from dsecd.erofs.pages.chunks import Fetcher, File, Read
from dsecd.erofs.pages.evict import LOW_WATER
from dsecd.erofs.pages.fan import out_of_the_way
from dsecd.erofs.pages.fscache_file import OndemandFile
from dsecd.erofs.pages.model import PagesConfig, Watched
from dsecd.erofs.pages.table import Table
from dsecd.erofs.sys import in_directory
from dsecd.erofs.tar import bad
from dsecd.errors import DsecError

log: Final = logging.getLogger(__name__)

CULL_S: Final = 5.0
DEVICE_S: Final = 2.0  # for a process that was just killed, or a probe, to let go of the device
REFUSED_S: Final = 0.02  # the kernel may ask again at once for what was refused
META_WINDOW: Final = 1 << 20  # the kernel asks for metadata page by page


class OndemandRead(Read):
    """A reader of a READ request. `message` is the kernel's number for it."""

    __slots__ = ("message",)

    def __init__(self, file: File, message: int, deadline: float) -> None:
        super().__init__(file, -1, -1, deadline)
        self.message = message


class Metadata:
    """The blob of an image's metadata while it is mounted."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd, self.path = fd, path

    def read(self, request: fscache.Read, buffer: fscache.Buffer) -> None:
        """Write what is asked for, and what is around it. What lies behind the file's end is left alone."""
        start = request.offset // META_WINDOW * META_WINDOW
        end = -(-(request.offset + request.length) // META_WINDOW) * META_WINDOW
        with self.path.open("rb", buffering=0) as f:
            for at in range(start, end, META_WINDOW):
                buffer.write(self.fd, os.pread(f.fileno(), META_WINDOW, at), at)

    def close(self) -> None:
        os.close(self.fd)


class Fscache:
    """device: a copy of an earlier server's, or None. keep: given the device, to put a copy where it outlives us.

    attach, ask: the server's. ask(file, offset, length, read) is called with the lock held, and queues what is missing.
    """

    def __init__(
        self,
        config: PagesConfig,
        lock: threading.Condition,
        table: Table,
        fetcher: Fetcher,
        *,
        device: int | None,
        keep: Callable[[int], None],
        attach: Callable[[File, Watched], None],
        ask: Callable[[File, int, int, Read], None],
    ) -> None:
        self._config = config
        self._lock = lock
        self._table = table
        self._fetcher = fetcher
        self._keep = keep
        self._attach = attach
        self._ask = ask
        self._device = fscache.Device(device) if device is not None else None
        self._turn = threading.Lock()  # over watching, which may open the device
        self._culling = threading.Lock()
        self._images: dict[str, Watched] = {}  # by hex digest: whose metadata is asked for
        self._objects: dict[int, File | Metadata] = {}  # the thread's own
        self._wake = (-1, -1)
        self._buffer = fscache.Buffer(META_WINDOW)  # the thread's own; no memory before it is used
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._next_cull = 0.0
        self.culled = 0

    @property
    def device(self) -> int | None:
        return self._device.fd if self._device is not None else None

    @property
    def root(self) -> Path:
        return self._config.cache / "fscache"

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on with what an earlier server watched, where its device came with it."""
        for note in self._table.notes():
            if note.watched.metadata:
                try:
                    self._again(note.watched)
                except (DsecError, OSError) as exc:
                    log.error("image %s cannot be filled any more: %s", note.watched.image, exc)
        if self._device is not None:
            self._device.restore()
            self._begin()

    def _again(self, watched: Watched) -> None:
        with self._table.claimed(watched) as file, self._lock:
            self._take(file, watched)
            if self._device is None:
                file.lost.add(watched.image)
                log.error("the cachefiles device was lost: image %s cannot be read", watched.image)

    def stop(self) -> None:
        self._stopping = True
        if self._thread is None:
            return
        os.write(self._wake[1], b"x")
        self._thread.join()
        for target in self._objects.values():
            if isinstance(target, Metadata):
                target.close()
        if self._device is not None:
            self._device.close()
        for fd in self._wake:
            os.close(fd)

    def _begin(self) -> None:
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name="fscache", daemon=True)
        self._thread.start()

    def _open_device(self) -> None:
        """OSError: it cannot be had, or does not do what is needed."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        until = time.monotonic() + DEVICE_S
        while self._device is None:
            try:
                device = fscache.Device.bind(self.root)
            except OSError as exc:
                if exc.errno != errno.EBUSY or time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                device.fd = out_of_the_way(device.fd)
                self._keep(device.fd)
                self._device = device
                self._begin()

    # -- images --------------------------------------------------------------------------------------------------

    def watch(self, watched: Watched, *, resume: bool) -> None:
        """Be ready for a mount of the image. OSError: not this way, here. resume: refused when it was lost."""
        with self._turn:
            if resume and (self._device is None or not self._serves(watched.image)):
                raise bad(f"image {watched.image}: the kernel's image cache was lost, and its reads fail")
            self._open_device()
            with self._table.claimed(watched) as file, self._lock:
                self._take(file, watched)
                if not resume:
                    file.lost.discard(watched.image)
                self._table.note()  # before the mount: whoever comes after us must know what it will be asked for

    def _serves(self, image: str) -> bool:
        files = self._table.of(image)
        return image.removeprefix("sha256:") in self._images and not any(image in file.lost for file in files)

    def _take(self, file: File, watched: Watched) -> None:
        self._attach(file, watched)
        self._images[watched.image.removeprefix("sha256:")] = watched
        cached = file.cached
        if isinstance(cached, OndemandFile) and cached.looked:
            self._fetcher.prefetch(file, file.traces[watched.image].ahead)

    def forget(self, image: str) -> None:
        """It is not mounted any more."""
        self._images.pop(image.removeprefix("sha256:"), None)

    def tick(self, now: float) -> None:
        """Every tenth of a second: learn what newly opened blobs hold, fetch ahead, keep within the bound."""
        for file in self._table.all():
            cached = file.cached
            if isinstance(cached, OndemandFile) and cached.object and not cached.looked:
                self._look(file, cached)
        if now >= self._next_cull and self._device is not None:
            self._next_cull = now + CULL_S
            used = sum(file.cached.cached_bytes for file in self._table.all())
            used += sum(size for _, size, _ in self._idle())
            if used > self._config.cache_bytes:
                self.cull(used - int(self._config.cache_bytes * LOW_WATER))

    def _look(self, file: File, cached: OndemandFile) -> None:
        number = cached.object
        try:
            found = cached.look()
        except OSError:  # closed meanwhile
            return
        with self._lock:
            if found is None or cached.object != number:
                return
            cached.looked = True
            for chunk in found:
                cached.set(chunk)
                self._fetcher.known.setdefault(cached.sum(chunk), (file, chunk))
            for trace in file.traces.values():
                self._fetcher.prefetch(file, trace.ahead)

    # -- requests of the kernel ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._device is not None
        poll = select.poll()
        poll.register(self._device.fd, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        while not self._stopping:
            poll.poll()
            try:
                while not self._stopping and (raw := self._device.next()):
                    self._handle(fscache.parse(raw))
            except (OSError, ValueError) as exc:
                log.warning("a request of cachefiles could not be handled: %s", exc)
                time.sleep(REFUSED_S)
            except Exception:  # the thread must live: readers wait for it
                log.exception("a request of cachefiles could not be handled")

    def _handle(self, request: fscache.Open | fscache.Read | fscache.Close) -> None:
        match request:
            case fscache.Open():
                os.set_inheritable(request.fd, False)
                self._opened(request)
            case fscache.Read():
                self._read(request)
            case fscache.Close():
                self._closed(request.object)

    def _opened(self, request: fscache.Open) -> None:
        assert self._device is not None
        try:
            found = self._target(request)
        except OSError as exc:  # the image's metadata is gone
            log.error("%s: %s", request.blob, exc)
            found = None
        if found is None:
            try:
                self._device.opened(request.message, -errno.ENOENT)
            finally:
                os.close(request.fd)
            log.warning("%s of %s is no blob of ours", request.blob, request.volume)
            time.sleep(REFUSED_S)
            return
        self._objects[request.object], size = found
        try:
            self._device.opened(request.message, size)
        except OSError:  # whoever mounted was killed
            self._closed(request.object)
            raise

    def _target(self, request: fscache.Open) -> tuple[File | Metadata, int] | None:
        """The blob, ready to be read through the new descriptor, and its size."""
        if request.volume != fscache.VOLUME:
            return None
        if request.blob.startswith(fscache.DATA):
            file = self._table.files.get(request.blob)
            if file is None or not isinstance(file.cached, OndemandFile):
                return None
            with self._lock:
                file.cached.bind(request.object, request.fd)
            return file, file.cached.size
        # Before the dot: a number that tells this mount from one that somebody still has (see `FscacheDriver._mount`).
        watched = self._images.get(request.blob.removeprefix(fscache.META).rpartition(".")[2])
        if watched is None or not request.blob.startswith(fscache.META):
            return None
        path = Path(watched.metadata)
        return Metadata(request.fd, path), path.stat().st_size

    def _read(self, request: fscache.Read) -> None:
        target = self._objects.get(request.object)
        if target is None:
            self._refuse(request)
            return
        if isinstance(target, Metadata):
            try:
                target.read(request, self._buffer)
            finally:
                fscache.complete(target.fd, request.message)
            return
        cached = target.cached
        assert isinstance(cached, OndemandFile)
        gone = cached.gone(request.offset, request.length)
        read = OndemandRead(target, request.message, time.monotonic() + self._config.deadline_s)
        with self._lock:
            for chunk in gone:
                cached.clear(chunk)
            self._ask(target, request.offset, request.length, read)
        if read.done:
            self.finish(read)

    def _refuse(self, request: fscache.Read) -> None:
        """A READ of what is not open here, which the kernel does not send. Any blob's descriptor answers for all."""
        log.error("a read of object %d, which is not open, gets EIO", request.object)
        for other in self._objects.values():
            if isinstance(other, Metadata):
                fscache.complete(other.fd, request.message)
            elif isinstance(other.cached, OndemandFile):
                other.cached.answer(request.message)

    def finish(self, read: OndemandRead) -> None:
        """Let the reader look again; what could not be had is still a hole, and that is his EIO."""
        assert read.file is not None and isinstance(read.file.cached, OndemandFile)
        read.file.cached.answer(read.message)

    def _closed(self, number: int) -> None:
        target = self._objects.pop(number, None)
        if isinstance(target, Metadata):
            target.close()
        elif target is not None and isinstance(target.cached, OndemandFile):
            with self._lock:
                target.cached.unbind(number)
                if not target.watched:
                    self._fetcher.drop(target)

    # -- the bound -----------------------------------------------------------------------------------------------

    def cull(self, size: int) -> bool:
        """Remove whole files that nobody has mounted, those used longest ago first. False: there was none."""
        freed = 0
        with self._culling:
            for _, held, path in sorted(self._idle()):
                if freed >= size or self._device is None:
                    break
                try:
                    in_directory(path.parent, functools.partial(self._device.command, f"cull {path.name}"))
                except OSError as exc:
                    if exc.errno not in (errno.EBUSY, errno.ESTALE, errno.ENOENT):
                        log.warning("cannot remove %s from the image cache: %s", path, exc.strerror)
                else:
                    freed += held
        self.culled += freed
        return freed > 0

    def _idle(self) -> list[tuple[float, int, Path]]:
        """(last used, bytes on disk, path) of the kernel's files that are not open, as far as we know."""
        found = []
        for path in self.root.glob("cache/*/*/*"):
            file = self._table.files.get(path.name[1:])
            if file is not None and (file.watched or file.cached.in_use()):
                continue
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                used = max(about.st_atime, about.st_mtime, about.st_ctime)
                found.append((used, about.st_blocks * 512, path))
        return found
