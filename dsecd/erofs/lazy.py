"""The driver for images that are filled while they are read (fanotify, Linux 6.14 and later)."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import shutil
import tempfile
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Final

from dsecd.erofs.drivers import Driver, DriverName, FileDriver, LoopDriver, Probe, Source, read_back, tiny_image, trying
from dsecd.erofs.pages import fan
from dsecd.erofs.pages.client import Pages
from dsecd.erofs.pages.model import Trouble, Watched
from dsecd.erofs.sys import mount_erofs
from dsecd.errors import DsecError

log: Final = logging.getLogger(__name__)

_WRONG_FS: Final = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTBLK)


def lazy_drivers(pages: Pages) -> tuple[Driver, ...]:
    """All, in the order they are preferred. A path is mounted straight where its store is marked `direct`."""
    indirect = [name for name, store in pages.config.stores.items() if not store.direct]
    return FileDriver(indirect), FanotifyDriver(pages), LoopDriver()


class FanotifyDriver(Driver):
    """EROFS on a sparse file of the local cache, which the page server fills. Every byte is checked on its way in."""

    name: DriverName = "fanotify"
    whole = False

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def unfit(self, source: Source) -> str:
        if source.manifest is not None and source.manifest.store not in self._pages.config.stores:
            return f"store {source.manifest.store!r} is not in the config"
        return ""

    def mount(self, source: Source, target: Path) -> None:
        watched = self._watched(source)
        path = self._pages.watch(watched)  # the mark comes first: only who opens the file after it waits for data
        try:
            mount_erofs(str(source.metadata), [str(path)], target)
        except OSError:
            self._pages.unwatch(watched.image)
            raise
        self._pages.mounted(watched.image)

    def resume(self, source: Source) -> None:
        self._pages.resume(self._watched(source))

    def unmounted(self, digest: str) -> None:
        try:
            self._pages.unwatch(digest)
        except (DsecError, OSError) as exc:  # the mount is gone all the same; `settle` catches up
            log.warning("image %s stays watched: %s", digest, exc)

    def trouble(self, digest: str) -> Trouble | None:
        stats = self._pages.peek()
        images = stats.images if stats is not None else ()
        return next((image.trouble for image in images if image.image == digest), None)

    def settle(self, mounted: Collection[str]) -> None:
        if self._pages.running():
            self._pages.retain(tuple(mounted))

    def probe(self, files: Path, mounts: Path) -> Probe:
        """With a group of our own, on the cache's file system: the file begins as a hole, and reads must ask."""
        cache = self._pages.config.cache
        try:
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            work = Path(tempfile.mkdtemp(prefix="probe-", dir=cache))
        except OSError as e:
            return Probe(self.name, False, f"{cache}: {e.strerror}")
        try:
            return self._probe(work, mounts)
        except OSError as e:
            if e.errno in _WRONG_FS:
                return Probe(
                    self.name, False, f"{cache} is on a file system without pre-content events: use ext4, xfs, btrfs"
                )
            return Probe(self.name, False, e.strerror or str(e))
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _probe(self, work: Path, mounts: Path) -> Probe:
        metadata, data, content = tiny_image(work)
        sparse = work / "sparse"
        with contextlib.ExitStack() as held:
            fill = os.open(sparse, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.callback(os.close, fill)
            os.truncate(fill, data.stat().st_size)
            group = fan.new_group()
            answering = _Answering(group, fill, data.read_bytes())
            held.callback(answering.end)
            fan.mark(group, sparse)
            target = held.enter_context(trying(mounts, self.name))
            mount_erofs(str(metadata), [str(sparse)], target)
            found = read_back(self.name, target, content)
        if found.usable and not answering.asked:
            return Probe(self.name, False, "reads do not ask for what is missing")
        return found

    def _watched(self, source: Source) -> Watched:
        manifest = source.manifest
        if manifest is None or source.sums is None:
            raise DsecError("internal", "only an image of the store can be filled on demand")
        return Watched(
            image=manifest.digest, data_digest=manifest.data_digest, data_size=manifest.data_size,
            sums=str(source.sums), store=manifest.store, blob=manifest.blob_name,
            trace=str(source.metadata.with_name("trace")),
        )  # fmt: skip


class _Answering(threading.Thread):
    """Answers the probe's own reads. However it ends, the group is closed, and then nobody waits."""

    def __init__(self, group: int, fill: int, content: bytes) -> None:
        super().__init__(name="probe", daemon=True)
        self._group, self._fill, self._content = group, fill, content
        self._ended = False
        self.asked = 0
        self.start()

    def run(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._group, select.POLLIN)
            while not self._ended:
                if poll.poll(20):
                    self._answer()
        finally:
            os.close(self._group)

    def _answer(self) -> None:
        event = bytearray(64)
        with contextlib.suppress(BlockingIOError):
            os.readv(self._group, [event])
            asked = fan.parse(event)
            self.asked += 1
            os.pwrite(self._fill, self._content[asked.offset : asked.offset + asked.length], asked.offset)
            fan.answer(self._group, asked.fd)
            os.close(asked.fd)

    def end(self) -> None:
        self._ended = True
        self.join()
