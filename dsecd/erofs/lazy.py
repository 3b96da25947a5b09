"""The driver for images that are filled while they are read, by fanotify (Linux 6.14 and later); the list of all."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
from pathlib import Path
from typing import Final

from dsecd.erofs.drivers import Driver, DriverName, FileDriver, LoopDriver, Probe, Source, read_back, tiny_image, trying
from dsecd.erofs.fscache import FscacheDriver
from dsecd.erofs.pages import fan
from dsecd.erofs.pages.client import Pages
from dsecd.erofs.pagesdriver import PagesDriver
from dsecd.erofs.sys import mount_erofs

_WRONG_FS: Final = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTBLK)


def lazy_drivers(pages: Pages) -> tuple[Driver, ...]:
    """All, in the order they are preferred. A path is mounted straight where its store is marked `direct`."""
    indirect = [name for name, store in pages.config.stores.items() if not store.direct]
    return FileDriver(indirect), FanotifyDriver(pages), FscacheDriver(pages), LoopDriver()


class FanotifyDriver(PagesDriver):
    """EROFS on a sparse file of the local cache, which the page server fills. Every byte is checked on its way in."""

    name: DriverName = "fanotify"

    def mount(self, source: Source, target: Path) -> None:
        watched = self.watched(source)
        path = self._pages.watch(watched)  # the mark comes first: only who opens the file after it waits for data
        try:
            mount_erofs(str(source.metadata), [str(path)], target)
        except OSError:
            self._pages.unwatch(watched.image)
            raise
        self._pages.mounted(watched.image)

    def why(self, error: OSError) -> str:
        if error.errno in _WRONG_FS:
            cache = self._pages.config.cache
            return f"{cache} is on a file system without pre-content events: use ext4, xfs, btrfs"
        return super().why(error)

    def try_out(self, work: Path, mounts: Path) -> Probe:
        """With a group of our own: the file begins as a hole, and reads must ask."""
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
