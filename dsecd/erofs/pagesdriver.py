"""What the drivers have in common whose mounts the page server fills."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Final

from dsecd.erofs.drivers import Driver, Probe, Source
from dsecd.erofs.pages.client import Pages
from dsecd.erofs.pages.model import Trouble, Watched
from dsecd.errors import DsecError

log: Final = logging.getLogger(__name__)


class PagesDriver(Driver):
    """An image of a configured store. Every byte is checked on its way in."""

    whole = False

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def unfit(self, source: Source) -> str:
        if source.manifest is not None and source.manifest.store not in self._pages.config.stores:
            return f"store {source.manifest.store!r} is not in the config"
        return ""

    def probe(self, files: Path, mounts: Path) -> Probe:
        """On the cache's file system, which is the one that matters."""
        cache = self._pages.config.cache
        try:
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            work = Path(tempfile.mkdtemp(prefix="probe-", dir=cache))
        except OSError as e:
            return Probe(self.name, False, f"{cache}: {e.strerror}")
        try:
            return self.try_out(work, mounts)
        except OSError as e:
            return Probe(self.name, False, self.why(e))
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def try_out(self, work: Path, mounts: Path) -> Probe:
        """Mount an image of which nothing is there yet, made in `work`, and read it. OSError: it cannot be."""
        raise NotImplementedError

    def why(self, error: OSError) -> str:
        """What such an error of `try_out` means, for `doctor`."""
        return error.strerror or str(error)

    def resume(self, source: Source) -> None:
        self._pages.resume(self.watched(source))

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

    def watched(self, source: Source) -> Watched:
        manifest = source.manifest
        if manifest is None or source.sums is None:
            raise DsecError("internal", "only an image of the store can be filled on demand")
        return Watched(
            image=manifest.digest, data_digest=manifest.data_digest, data_size=manifest.data_size,
            sums=str(source.sums), store=manifest.store, blob=manifest.blob_name,
            trace=str(source.metadata.with_name("trace")),
        )  # fmt: skip
