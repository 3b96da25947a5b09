"""Whether the files of an image are what its manifest says: at a glance, by samples, and byte for byte."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from dsecd.erofs import files, meta
from dsecd.erofs.files import Alive, altered_at, read_head
from dsecd.erofs.model import BLOCK, Manifest, identity_of
from dsecd.erofs.shared import Shared
from dsecd.erofs.tar import bad
from dsecd.errors import DsecError

T = TypeVar("T")

SAMPLES: Final = (
    16  # pieces of the data (`SUM` bytes each) that are compared before it is mounted straight from a store
)


class ImageFiles:
    """Of one image. top: its directory. data: its data file, or None: not looked at. shared: the store it is on."""

    def __init__(self, manifest: Manifest, top: Path, data: Path | None, shared: Shared | None) -> None:
        self._manifest = manifest
        self._top, self._data, self._shared = top, data, shared
        self._what = f"image {short(manifest)}"

    def check(self) -> None:
        """Files, sizes and superblock; of data on a shared store also samples. DsecError `image` says what is wrong.

        Nothing checks what the kernel reads from a store that is mounted straight, and somebody else writes to it. The
        first piece, the last and some in between tell a blob that was replaced, cut and padded, or zeroed by a crash.
        """
        manifest = self._manifest
        head = read_head(self._top / "meta.erofs", manifest.meta_size, f"{self._what}: its metadata")
        if self._data is not None:
            data = self._data
            self._at_data(lambda alive: read_head(data, manifest.data_size, f"{self._what}: its data"))
            if self._shared is not None:
                self._compare_data(self._sums(), _samples(manifest))
        try:
            found = meta.Superblock(head)
        except DsecError as e:
            raise bad(f"{self._what}: {e.message}") from e
        if found.blocks * BLOCK != manifest.meta_size or found.data_digest != manifest.data_digest:
            raise bad(f"{self._what}: its metadata is another image's")

    def compare(self) -> None:
        """Read and compare every byte."""
        manifest = self._manifest
        if identity_of(manifest) != manifest.digest:
            raise bad(f"{self._what}: its manifest is altered")
        if files.sha256_of(self._top / "meta.erofs") != manifest.meta_digest:
            raise bad(f"{self._what}: its metadata is altered")
        sums = self._sums()
        if self._data is not None:
            self._compare_data(sums, None)

    def trust(self) -> None:
        """`check`, and `compare` when a file was touched since its bytes were last compared."""
        self.check()
        if self._stamp() != self._sealed():
            self.compare()
            self.seal()

    def seal(self) -> None:
        """Its bytes are known to be right now."""
        (self._top / "seal").write_bytes(self._stamp())  # torn, it only costs a comparison

    def _sums(self) -> bytes:
        try:
            sums = (self._top / "data.sums").read_bytes()
        except OSError as e:
            raise bad(f"{self._what}: its list of sums cannot be read: {e.strerror}") from e
        if "sha256:" + hashlib.sha256(sums).hexdigest() != self._manifest.data_digest:
            raise bad(f"{self._what}: its list of sums is altered")
        return sums

    def _compare_data(self, sums: bytes, pieces: list[int] | None) -> None:
        data, size = self._data, self._manifest.data_size
        assert data is not None
        try:
            at = self._at_data(lambda alive: altered_at(data, size, sums, alive, pieces))
        except OSError as e:
            raise bad(f"{self._what}: its data cannot be read: {e.strerror}") from e
        if at is not None:
            raise bad(f"{self._what}: its data is altered (in the piece at {at})")

    def _at_data(self, what: Callable[[Alive], T]) -> T:
        return what(files.still) if self._shared is None else self._shared.do(what)

    def _stamp(self) -> bytes:
        paths = [self._top / "meta.erofs", *([] if self._data is None else [self._data])]
        found = [path.stat() for path in paths]
        return msgspec.json.encode([(st.st_ino, st.st_size, st.st_mtime_ns) for st in found])

    def _sealed(self) -> bytes:
        try:
            return (self._top / "seal").read_bytes()
        except FileNotFoundError:
            return b""


def _samples(manifest: Manifest) -> list[int]:
    """The first piece, the last, and some in between, other ones each time."""
    count = -(-manifest.data_size // manifest.sum_size)
    ends = {0, count - 1} if count else set()
    return sorted(ends | set(random.sample(range(count), min(count, SAMPLES - len(ends)))))


def short(manifest: Manifest) -> str:
    return f"{manifest.name} ({manifest.hex[:12]})" if manifest.name else manifest.hex[:12]
