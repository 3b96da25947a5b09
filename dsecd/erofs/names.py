"""Names of images: one file that says which digest each means. Who writes holds the image store's lock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from dsecd.erofs import files
from dsecd.errors import DsecError


def taken(name: str) -> DsecError:
    return DsecError("denied", f"the name {name} is taken, and names of images are everybody's: take another one")


class Names:
    """`names.json`: {name: digest}, replaced by a rename; read each time, so that nothing need be told of a change."""

    def __init__(self, root: Path) -> None:
        self._path = root / "names.json"

    def read(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as e:
            raise DsecError("internal", f"{self._path} is not the store's own: {e}") from e

    def by_digest(self) -> dict[str, tuple[str, ...]]:
        """In alphabetical order."""
        found: dict[str, tuple[str, ...]] = {}
        for name, digest in sorted(self.read().items()):
            found[digest] = (*found.get(digest, ()), name)
        return found

    def write(self, names: Mapping[str, str]) -> None:
        files.write_durably(self._path, msgspec.json.encode(dict(names), order="sorted"))

    def clear_half_written(self) -> None:
        """Its writer held the lock, and is dead."""
        self._path.with_name(self._path.name + ".new").unlink(missing_ok=True)
