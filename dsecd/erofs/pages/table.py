"""The page server's files: found at its start, made for an image, forgotten when empty; a note of who watches what."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Condition, Lock
from typing import Final

import msgspec

from dsecd.erofs.pages import fscache
from dsecd.erofs.pages.cachefile import CacheFile
from dsecd.erofs.pages.chunks import Fetcher, File
from dsecd.erofs.pages.fscache_file import OndemandFile
from dsecd.erofs.pages.model import PagesConfig, Watched
from dsecd.errors import DsecError

log: Final = logging.getLogger(__name__)


class Note(msgspec.Struct, frozen=True):
    """What a later server must know of a watched image."""

    watched: Watched
    latched: bool
    mounted: bool


class Table:
    """`files` by digest, `by_ino` by inode number. `lock` is the server's."""

    def __init__(self, config: PagesConfig, lock: Condition, fetcher: Fetcher) -> None:
        self._config = config
        self._lock = lock
        self._fetcher = fetcher
        self._turn = Lock()  # over a file's coming and going, which is I/O; taken before the other
        self.files: dict[str, File] = {}
        self.by_ino: dict[int, File] = {}

    def all(self) -> list[File]:
        return list(self.files.values())

    def of(self, image: str) -> list[File]:
        return [file for file in self.all() if image in file.watched]

    def load(self) -> None:
        """Every file of the cache, watched or not: it may be evicted, and its chunks may be another's too."""
        for path in sorted(self._config.cache.glob("*.sums")):
            try:
                cached = CacheFile(self._config.cache, self._config.run, path.stem, path.read_bytes())
                self._add(cached, os.fstat(cached.fd).st_size)
            except (DsecError, OSError) as exc:  # found again, or made anew, when its image is watched
                log.warning("%s: %s, ignoring", path, exc)

    def _add(self, cached: CacheFile, size: int) -> File:
        try:
            cached.open(size)
        except (DsecError, OSError):
            cached.close()
            raise
        return self._enter(cached)

    def _ondemand(self, watched: Watched, sums: bytes) -> OndemandFile:
        root = self._config.cache / "fscache"
        return OndemandFile(watched.hex, sums, watched.data_size, lambda: fscache.find(root, watched.key))

    def _enter(self, cached: CacheFile) -> File:
        file = File(cached)
        with self._lock:
            self.files[cached.hex] = file
            self.by_ino[cached.ino] = file
            for chunk in range(cached.chunks):
                if chunk in cached:
                    self._fetcher.known.setdefault(cached.sum(chunk), (file, chunk))
        return file

    @contextlib.contextmanager
    def claimed(self, watched: Watched) -> Iterator[File]:
        """The file of an image, made unless it is there; meanwhile it is not forgotten."""
        with self._turn:
            file = self.files.get(watched.key) or self._new(watched)
            file.claims += 1
        try:
            yield file
        finally:
            with self._turn:
                file.claims -= 1

    def _new(self, watched: Watched) -> File:
        sums = Path(watched.sums).read_bytes()
        if watched.metadata:
            return self._enter(self._ondemand(watched, sums))
        kept = self._config.cache / f"{watched.hex}.sums"
        kept.with_suffix(".new").write_bytes(sums)
        kept.with_suffix(".new").rename(kept)  # before the file it is about: a file without sums is nobody's
        cached = CacheFile(self._config.cache, self._config.run, watched.hex, sums)
        return self._add(cached, watched.data_size)

    def forget_if_empty(self, file: File) -> None:
        with self._turn, self._lock:
            if file.watched or file.marked or file.claims or file.wanted or file.cached.count or file.cached.in_use():
                return
            del self.files[file.cached.hex], self.by_ino[file.cached.ino]
            self._fetcher.forget(file)
            file.cached.remove()

    def note(self) -> None:
        """Write down who watches what."""
        notes = [
            Note(watched, file.latched, file.mounted)
            for file in self.files.values()
            for watched in file.watched.values()
        ]
        new = self._config.run / "watched.json.new"
        new.write_bytes(msgspec.json.encode(notes))
        new.rename(self._config.run / "watched.json")

    def notes(self) -> list[Note]:
        """Of this server or the one before."""
        try:
            return msgspec.json.decode((self._config.run / "watched.json").read_bytes(), type=list[Note])
        except (FileNotFoundError, msgspec.DecodeError):
            return []
