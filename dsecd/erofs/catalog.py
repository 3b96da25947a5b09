"""Which images are here: their directories, their manifests, and the names that point at them. Reads; never changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from dsecd.erofs.model import CHUNK, DIGEST, FORMAT, LOCAL, SUM, Manifest
from dsecd.erofs.names import Names
from dsecd.erofs.stores.directory import BLOB
from dsecd.erofs.tar import bad
from dsecd.errors import DsecError

log: Final = logging.getLogger(__name__)

Manifests = list[Manifest]  # inside the class, `list` is a method
Strings = list[str]
_HEX: Final = frozenset("0123456789abcdef")


class Catalog:
    """Manifests never change, so they are read once; names are read each time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.names = Names(root)
        self._read: dict[str, Manifest] = {}

    def list(self) -> Manifests:
        """Every image whose manifest can be read, newest first."""
        names = self.names.by_digest()
        found = []
        for hexa in self.hexes():
            try:
                found.append(self._named(hexa, names))
            except DsecError as e:
                log.warning("%s, ignoring", e.message)
        return sorted((m for m in found if m is not None), key=lambda m: (m.created, m.digest), reverse=True)

    def resolve(self, ref: str) -> Manifest:
        """By name, digest, or a digest's unique prefix of at least 8 hex digits (with `sha256:` or without)."""
        manifest = self._named(self.find(ref), self.names.by_digest())
        if manifest is None:
            raise _not_found(ref)
        return manifest

    def find(self, ref: str) -> str:
        """The one image that a reference means, as hex; it may be damaged."""
        digest = self.names.read().get(ref)
        if digest is not None:
            return digest.removeprefix("sha256:")
        found = self._matching(ref.removeprefix("sha256:"))
        if len(found) > 1:
            raise DsecError("not_found", f"{len(found)} images begin with {ref[:80]!r}: give more of the digest")
        if not found:
            raise _not_found(ref)
        return found[0]

    def hexes(self) -> Strings:
        return [p.name for p in self._root.iterdir() if len(p.name) == 64 and _HEX.issuperset(p.name)]

    def load(self, hexa: str) -> Manifest | None:
        """As it is used here: data that was brought to this host makes any image a local one."""
        manifest = self.stored(hexa)
        if manifest is not None and manifest.store != LOCAL and (self._root / hexa / "data").exists():
            return msgspec.structs.replace(manifest, store=LOCAL, blob="")
        return manifest

    def stored(self, hexa: str) -> Manifest | None:
        """As it is on disk. None: there is no such image (any more). A manifest that cannot be read is an image that
        cannot be used."""
        path = self._root / hexa / "manifest.json"
        known = self._read.get(hexa)
        try:
            if known is not None and path.exists():
                return known
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as e:
            raise bad(f"image {hexa[:12]}: its manifest is altered ({e})") from e
        _check(manifest, hexa)
        self._read[hexa] = manifest
        return manifest

    def on_store(self, store: str) -> tuple[Strings, Strings]:
        """(images whose data is there by their manifest, damaged ones, of which nobody can tell)."""
        there: Strings = []
        damaged: Strings = []
        for hexa in self.hexes():
            try:
                manifest = self.stored(hexa)
            except DsecError:
                damaged.append(hexa)
                continue
            if manifest is not None and manifest.store == store:
                there.append(hexa)
        return there, damaged

    def forget(self, hexa: str) -> None:
        """Its directory goes."""
        self._read.pop(hexa, None)

    def _matching(self, hexa: str) -> Strings:
        if not 8 <= len(hexa) <= 64 or not _HEX.issuperset(hexa):
            return []
        return [h for h in self.hexes() if h.startswith(hexa)]

    def _named(self, hexa: str, names: dict[str, tuple[str, ...]]) -> Manifest | None:
        manifest = self.load(hexa)
        if manifest is None:
            return None
        current = names.get(manifest.digest, ())
        shown = manifest.name if manifest.name in current else (current[0] if current else "")
        return msgspec.structs.replace(manifest, name=shown, names=current)


def _check(manifest: Manifest, hexa: str) -> None:
    """What a manifest says goes into paths and divisions."""
    if manifest.digest != f"sha256:{hexa}" or manifest.format != FORMAT or not DIGEST.fullmatch(manifest.digest):
        raise bad(f"image {hexa[:12]}: its manifest is another image's, or of another version; import it again")
    if (manifest.chunk_size, manifest.sum_size) != (CHUNK, SUM):
        sizes = f"chunks of {manifest.chunk_size} and sums of {manifest.sum_size} bytes"
        raise bad(f"image {hexa[:12]}: its manifest says {sizes}, and an image's are {CHUNK} and {SUM}")
    if manifest.blob and not (BLOB.fullmatch(manifest.blob) or DIGEST.fullmatch(manifest.blob)):
        raise bad(f"image {hexa[:12]}: its manifest names the data {manifest.blob[:80]!r}, which no store can have")
    if manifest.data_size < 0 or manifest.meta_size <= 0:
        raise bad(f"image {hexa[:12]}: its manifest says {manifest.data_size} and {manifest.meta_size} bytes")


def _not_found(ref: str) -> DsecError:
    return DsecError("not_found", f"there is no image {ref[:160]!r}")
