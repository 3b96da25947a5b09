"""All devices that the CDI files of this host describe, read again when one changes. One bad file hides no other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from dsecd.devices import cdi
from dsecd.devices.model import Grant, merged
from dsecd.devices.resolve import host_nodes, resolve
from dsecd.errors import DsecError

MAX_FILES: Final = 256
SUFFIXES: Final = (".json", ".yaml")  # CDI says: others are not read, so that editors may leave theirs


class Device(Struct, frozen=True):
    """One device, and which file describes it. common: what the file gives with each of its devices."""

    name: str
    file: Path
    own: cdi.Edits
    common: cdi.Edits

    @property
    def nodes(self) -> frozenset[str]:
        """The host's nodes that are this device's, and not those of all its kind."""
        return host_nodes(self.own)

    def grant(self, *, hooks: bool) -> Grant:
        """What it gives now. `not_found` when it is gone, `unsupported` when it wants what is refused."""
        return merged([resolve(self.name, edits, hooks=hooks) for edits in (self.common, self.own)])


class Problem(Struct, frozen=True):
    """What is wrong with a file or a directory."""

    file: Path
    text: str


class Catalog:
    """`refresh` blocks; the rest is what it found. Directories that are not there are empty."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        self._seen: tuple[object, ...] | None = None
        self.devices: dict[str, Device] = {}
        self.problems: list[Problem] = []

    def refresh(self) -> None:
        """Read everything anew if any file is another than before."""
        problems: list[Problem] = []
        levels = [_files(directory, problems) for directory in self._directories]
        seen = tuple((path, *_state(path)) for level in levels for path in level)
        if seen == self._seen:
            return
        devices: dict[str, Device] = {}
        for level in levels:
            devices |= _level(level, problems)
        self._seen, self.devices, self.problems = seen, devices, problems


def _files(directory: Path, problems: list[Problem]) -> list[Path]:
    try:
        found = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES)
    except FileNotFoundError:
        return []
    except OSError as exc:
        problems.append(Problem(directory, f"{directory} cannot be read: {exc.strerror}"))
        return []
    if len(found) > MAX_FILES:
        problems.append(Problem(directory, f"{directory} has more than {MAX_FILES} files: the rest is not read"))
    return found[:MAX_FILES]


def _state(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _level(files: list[Path], problems: list[Problem]) -> dict[str, Device]:
    """The devices of one directory. Two files that describe one device: nobody knows which is right."""
    found: dict[str, Device] = {}
    twice: set[str] = set()
    for path in files:
        try:
            file = cdi.read(path)
        except DsecError as exc:
            problems.append(Problem(path, exc.message))
            continue
        for one in file.devices:
            device = Device(f"{file.kind}={one.name}", path, one.container_edits, file.container_edits)
            if (other := found.setdefault(device.name, device)) is not device:
                twice.add(device.name)
                problems.append(Problem(path, f"{device.name} is in {os.fspath(other.file)} too: it is not used"))
    for name in twice:
        del found[name]
    return found
