"""The driver for images that are filled while they are read, through the kernel's own image cache.

cachefiles in on-demand mode is in Linux 5.19 to 7.1, where it was compiled. It is for kernels without fanotify's
pre-content events: it can be open once on a host, a mounted image's data cannot be evicted in parts, and the kernel
asks for a range only while it is missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from pathlib import Path
from typing import Final

from msgspec import structs

from dsecd.erofs.drivers import DriverName, Probe, Source, read_back, tiny_image, trying
from dsecd.erofs.pages import fscache
from dsecd.erofs.pages.model import Watched
from dsecd.erofs.pagesdriver import PagesDriver
from dsecd.erofs.sys import mount_erofs

PROBE_S: Final = 10.0
RESTART_S: Final = 3.0
STILL_THERE: Final = 8  # mounts of one image that nobody counts any more, and that have not gone yet


class FscacheDriver(PagesDriver):
    """EROFS on blobs of cachefiles, which the page server fills. Every byte is checked on its way in."""

    name: DriverName = "fscache"

    def watched(self, source: Source) -> Watched:
        return structs.replace(super().watched(source), metadata=str(source.metadata))

    def mount(self, source: Source, target: Path) -> None:
        watched = self.watched(source)
        try:
            self._pages.watch(watched)
        except OSError as e:  # the device is somebody else's by now, or the cache's file system will not do
            raise OSError(errno.ENODEV, f"fscache: {e.strerror}") from e
        try:
            self._mount(watched, target)
        except OSError:
            self._pages.unwatch(watched.image)
            raise

    def _mount(self, watched: Watched, target: Path) -> None:
        """A name for metadata is free again when its last mount is gone, the one in a dying sandbox included.

        The number comes first: the name in /sys/fs/erofs, which must be unique too, is the first 36 characters of
        domain and name (seen on 6.12).
        """
        hexa = watched.image.removeprefix("sha256:")
        for number in range(STILL_THERE):
            fsid = f"{fscache.META}{number}.{hexa}" if number else f"{fscache.META}{hexa}"
            try:
                mount_erofs("dsecd", [watched.key], target, fsid=fsid, domain=fscache.DOMAIN)
                return
            except FileExistsError:
                continue
        raise OSError(errno.EBUSY, "earlier mounts of it are still there")

    def why(self, error: OSError) -> str:
        if error.errno == errno.ENOENT:
            return f"no {fscache.DEVICE}: Linux 5.19 to 7.1 has it with CONFIG_CACHEFILES_ONDEMAND (cachefiles)"
        return super().why(error)

    def _taken(self) -> Probe:
        """A page server that has just been killed is started again with the device."""
        until = time.monotonic() + RESTART_S
        while time.monotonic() < until:
            if self._pages.running() and self._pages.stats().device:
                return Probe(self.name, True, "the page server has the device")
            time.sleep(0.1)
        return Probe(self.name, False, f"another process has {fscache.DEVICE} (cachefilesd, another dsecd)")

    def try_out(self, work: Path, mounts: Path) -> Probe:
        """With the device: blobs begin as holes, and reads must ask."""
        metadata, data, content = tiny_image(work)
        root = work / "cache"
        root.mkdir()
        try:
            device = fscache.Device.bind(root)
        except OSError as e:
            if e.errno == errno.EBUSY:
                return self._taken()
            raise
        serving = _Serving(device, {"m-probe": metadata.read_bytes(), "d-probe": data.read_bytes()})
        try:
            with trying(mounts, self.name) as target:
                mount_erofs("dsecd", ["d-probe"], target, fsid="m-probe", domain="dsecd-probe")
                found = read_back(self.name, target, content)
        finally:
            serving.end()
        if found.usable and not serving.asked:
            return Probe(self.name, False, "reads do not ask for what is missing")
        return found


class _Serving(threading.Thread):
    """Answers the probe's own requests. However it ends, and it does in time, the device is closed: nobody waits."""

    def __init__(self, device: fscache.Device, blobs: dict[str, bytes]) -> None:
        super().__init__(name="probe", daemon=True)
        self._device = device
        self._blobs = blobs
        self._open: dict[int, tuple[int, bytes]] = {}
        self._ended = False
        self._until = time.monotonic() + PROBE_S
        self.asked = 0
        self.start()

    def run(self) -> None:
        buffer = fscache.Buffer(1 << 20)
        try:
            poll = select.poll()
            poll.register(self._device.fd, select.POLLIN)
            while not self._ended and time.monotonic() < self._until:
                if poll.poll(20):
                    while raw := self._device.next():
                        self._reply(fscache.parse(raw), buffer)
        finally:
            for fd, _ in self._open.values():
                os.close(fd)
            self._device.close()
            buffer.close()

    def _reply(self, request: fscache.Open | fscache.Read | fscache.Close, buffer: fscache.Buffer) -> None:
        match request:
            case fscache.Open():
                os.set_inheritable(request.fd, False)
                content = self._blobs.get(request.blob, b"")
                self._open[request.object] = request.fd, content
                self._device.opened(request.message, len(content))
            case fscache.Read():
                self.asked += 1
                fd, content = self._open[request.object]
                start = request.offset // fscache.ALIGN * fscache.ALIGN
                with contextlib.suppress(OSError):  # a full disk: the reader finds the hole
                    buffer.write(fd, content[start : request.offset + request.length], start)
                fscache.complete(fd, request.message)
            case fscache.Close():
                os.close(self._open.pop(request.object)[0])

    def end(self) -> None:
        self._ended = True
        self.join()
