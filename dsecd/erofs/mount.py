"""The table of mounted images: each is mounted once, read-only, and counted by the owners that hold it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from dsecd.aio import uninterrupted
from dsecd.erofs import sys
from dsecd.erofs.drivers import DRIVERS, NOT_THIS_WAY, Driver, DriverName, Probe, Source, probe_drivers
from dsecd.erofs.model import Manifest
from dsecd.erofs.pages.model import Trouble
from dsecd.erofs.store import ImageStore
from dsecd.erofs.tar import bad
from dsecd.errors import DsecError

log: Final = logging.getLogger(__name__)

SHORT: Final = 12


class Mount(Struct, frozen=True):
    """An image where it is mounted. Also the note beside the mount point, for a later daemon."""

    digest: str
    path: str
    driver: DriverName


class _Image:
    """What the table knows of one image. The lock is held over every mount and unmount of it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.mount: Mount | None = None
        self.owners: set[str] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.waiting = 0


class MountTable:
    """Mounts below a directory of /run, which a restarted daemon finds again.

        <run_dir>/
            <12 hex>/        the mount point of one image (more digits where two images share twelve)
            <12 hex>.json    which image that is, and its driver; written before the mount, removed after it

    Owners are names (sandbox ids): holding twice under one name is holding once. When the last one lets go the mount
    stays for `linger_s`, so that a burst of short sandboxes mounts once. After a restart the daemon acquires again for
    each sandbox that lives, finds the mounts in place, and then calls `adopt`, which unmounts what nobody holds.

    All methods belong to one event loop; system calls and reads run in threads.
    """

    def __init__(
        self, run_dir: Path, store: ImageStore, *, linger_s: float = 30.0, drivers: Sequence[Driver] = DRIVERS
    ) -> None:
        self._dir = run_dir
        self._store = store
        self.linger_s = linger_s
        self._drivers = tuple(drivers)
        self._images: dict[str, _Image] = {}
        self._paths: dict[str, str] = {}  # name of a mount point -> digest that has it or is about to
        self._probes: tuple[Probe, ...] | None = None
        self._probing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        run_dir.mkdir(parents=True, exist_ok=True)
        # Images hold setuid programs of anyone who may import one. Only root may walk to them on the host: sandboxes
        # get them by mounts, where root is not the host's.
        run_dir.chmod(0o700)

    async def acquire(self, digest: str, owner: str) -> Mount:
        """Mount the image unless it is, and hold it for the owner. DsecError `image`: it cannot be mounted."""
        image = self._images.setdefault(digest, _Image())
        image.owners.add(owner)  # from here on nobody unmounts it, whether or not we wait
        if image.timer is not None:
            image.timer.cancel()
            image.timer = None
        try:
            async with self._turn(image):
                if image.mount is None:
                    image.mount = await self._mount(digest)
                return image.mount
        except BaseException:
            image.owners.discard(owner)
            self._let_go(digest, image)
            raise

    async def release(self, digest: str, owner: str) -> None:
        """Let go. Not to hold it is no error: a destroy may be done twice."""
        image = self._images.get(digest)
        if image is not None and owner in image.owners:
            image.owners.discard(owner)
            self._let_go(digest, image)

    @contextlib.asynccontextmanager
    async def hold(self, digest: str, owner: str = "") -> AsyncIterator[Path]:
        """Acquire for the length of a block, under a name of its own unless one is given."""
        owner = owner or f"hold-{os.urandom(8).hex()}"
        mount = await self.acquire(digest, owner)
        try:
            yield Path(mount.path)
        finally:
            await self.release(digest, owner)

    def in_use(self) -> frozenset[str]:
        """Digests that somebody holds: not for `remove` or `gc`."""
        return frozenset(digest for digest, image in self._images.items() if image.owners)

    def owners(self, digest: str) -> frozenset[str]:
        image = self._images.get(digest)
        return frozenset(image.owners) if image else frozenset()

    def trouble(self, digest: str) -> Trouble | None:
        """Reads of a mounted image that failed because its data could not be had. Blocks."""
        image = self._images.get(digest)
        mount = image.mount if image else None
        for driver in self._drivers:
            if mount is not None and driver.name == mount.driver:
                return driver.trouble(digest)
        return None

    def mounts(self) -> list[Mount]:
        return [image.mount for image in self._images.values() if image.mount is not None]

    async def adopt(self) -> list[str]:
        """Unmount what an earlier daemon left and nobody has acquired by now; the names of those mount points."""
        kept = {Path(mount.path).name for mount in self.mounts()} | self._paths.keys()
        swept = await uninterrupted(asyncio.to_thread(self._sweep, kept))
        mounted = [mount.digest for mount in self.mounts()]
        for driver in self._drivers:
            await uninterrupted(asyncio.to_thread(driver.settle, mounted))
        return swept

    async def probe(self) -> tuple[Probe, ...]:
        """What each driver can do here; found out once."""
        async with self._probing:
            if self._probes is None:
                self._probes = await uninterrupted(asyncio.to_thread(self._probe))
            return self._probes

    async def close(self) -> None:
        """Unmount what nobody holds and forget the rest, which stays mounted for sandboxes that outlive the daemon."""
        for digest, image in list(self._images.items()):
            if image.timer is not None:
                image.timer.cancel()
                image.timer = None
            await self._unmount_if_free(digest, image, again=False)
        await asyncio.gather(*self._tasks)

    # -- inside --------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _turn(self, image: _Image) -> AsyncIterator[None]:
        image.waiting += 1
        try:
            async with image.lock:
                yield
        finally:
            image.waiting -= 1

    def _let_go(self, digest: str, image: _Image) -> None:
        if image.owners or image.timer is not None:
            return
        if image.mount is None:
            self._forget(digest, image)
            return
        loop = asyncio.get_running_loop()
        image.timer = loop.call_later(self.linger_s, self._lingered, digest, image)

    def _lingered(self, digest: str, image: _Image) -> None:
        image.timer = None
        task = asyncio.get_running_loop().create_task(self._unmount_if_free(digest, image))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unmount_if_free(self, digest: str, image: _Image, *, again: bool = True) -> None:
        async with self._turn(image):
            if image.owners or image.mount is None:
                return
            path = Path(image.mount.path)
            try:
                await uninterrupted(asyncio.to_thread(self._end_mount, image.mount))
            except OSError as e:
                log.warning("cannot unmount image %s: %s, trying again later", path.name, e.strerror)
                if again:
                    self._let_go(digest, image)
                return
            image.mount = None
            self._paths.pop(path.name, None)
        self._forget(digest, image)

    def _forget(self, digest: str, image: _Image) -> None:
        if not image.owners and not image.waiting and image.mount is None and self._images.get(digest) is image:
            del self._images[digest]

    async def _mount(self, digest: str) -> Mount:
        manifest = await asyncio.to_thread(self._store.resolve, digest)
        path = self._dir / self._claim(manifest)
        found = await asyncio.to_thread(_find, path, digest)
        try:
            asked = manifest if found is None else self._store.as_stored(manifest)
            source = await asyncio.to_thread(self._source, asked)
            if found is not None:
                for driver in self._drivers:
                    if driver.name == found.driver:
                        await uninterrupted(asyncio.to_thread(driver.resume, source))
                return found
            await asyncio.to_thread(self._store.trust, manifest)
            usable = [driver for driver, probe in zip(self._drivers, await self.probe(), strict=True) if probe.usable]
            return await uninterrupted(asyncio.to_thread(self._mount_with, usable, source, manifest, path))
        except BaseException:
            self._paths.pop(path.name, None)
            raise

    def _claim(self, manifest: Manifest) -> str:
        """A name for the mount point that no other image has, here or from an earlier daemon."""
        for length in (SHORT, 64):
            name = manifest.hex[:length]
            holder = self._paths.get(name) or _noted(self._dir / name)
            if holder in (None, manifest.digest):
                self._paths[name] = manifest.digest
                return name
        raise AssertionError("two images of one digest")

    def _source(self, manifest: Manifest) -> Source:
        data: Path | None = None
        with contextlib.suppress(DsecError):  # on a store that is no directory here
            data = self._store.data_path(manifest)
        return Source(
            metadata=self._store.meta_path(manifest), data=data, sums=self._store.sums_path(manifest), manifest=manifest
        )

    def _mount_with(self, drivers: Sequence[Driver], source: Source, manifest: Manifest, path: Path) -> Mount:
        why = "no mount driver works here (see doctor)"
        for driver in drivers:
            if unfit := driver.unfit(source):
                why = f"{driver.name}: {unfit}"
                continue
            if driver.whole:
                self._store.check(manifest)
            mount = Mount(manifest.digest, str(path), driver.name)
            path.mkdir(exist_ok=True)
            _note(path).write_bytes(msgspec.json.encode(mount))
            try:
                driver.mount(source, path)
            except OSError as e:
                _unmount(path)
                why = e.strerror or str(e)
                if e.errno in NOT_THIS_WAY:
                    continue
                break
            except DsecError:
                _unmount(path)
                raise
            return mount
        raise bad(f"image {manifest.hex[:SHORT]} cannot be mounted: {why}")

    def _end_mount(self, mount: Mount) -> None:
        _unmount(Path(mount.path))
        for driver in self._drivers:
            if driver.name == mount.driver:
                driver.unmounted(mount.digest)

    def _sweep(self, kept: set[str]) -> list[str]:
        names = {mounted.target.name for mounted in sys.mounts_below(self._dir)}
        names |= {path.name.removesuffix(".json") for path in self._dir.iterdir()}
        swept = []
        for name in sorted(names - kept):
            try:
                _unmount(self._dir / name)
            except OSError as e:
                log.warning("cannot unmount %s: %s, ignoring", self._dir / name, e.strerror)
            else:
                swept.append(name)
        return swept

    def _probe(self) -> tuple[Probe, ...]:
        with self._store.workspace() as work:
            return probe_drivers(work.path, self._dir, self._drivers)


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _noted(path: Path) -> str | None:
    """The digest that an earlier daemon noted for a mount point; something unreadable is somebody's all the same."""
    try:
        return msgspec.json.decode(_note(path).read_bytes(), type=Mount).digest
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        return "unknown"


def _find(path: Path, digest: str) -> Mount | None:
    """The mount of an earlier daemon, if it is still there."""
    try:
        mount = msgspec.json.decode(_note(path).read_bytes(), type=Mount)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    mounted = any(m.target == path and m.fstype == "erofs" for m in sys.mounts_below(path.parent))
    return mount if mounted and mount.digest == digest else None


def _unmount(path: Path) -> None:
    """Unmount, and remove the mount point and the note. Nothing of it being there is fine."""
    try:
        while True:
            sys.umount(path)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOENT):  # not a mount point (any more), or gone
            raise
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()
    _note(path).unlink(missing_ok=True)


def unusable(probes: Sequence[Probe]) -> DsecError | None:
    """For a daemon that wants to refuse to start: no driver works."""
    if any(probe.usable for probe in probes):
        return None
    return DsecError("unsupported", "; ".join(f"{p.driver}: {p.why}" for p in probes))
