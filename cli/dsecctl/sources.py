"""What `dsecctl image import` may be given, and how it becomes a stream."""

from __future__ import annotations

import asyncio
import re
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, Literal

from dsecctl import terminal
from dsecd.errors import DsecError
from dsecd.trees import pack

Format = Literal["auto", "tar", "oci", "docker", "registry"]

PIECE: Final = 1 << 20
REGISTRY: Final = "docker://"
# First components of the names in an OCI layout or a docker archive; any other name makes it a plain tree.
_ARCHIVE: Final = re.compile(r"oci-layout|index\.json|manifest\.json|repositories|blobs|[0-9a-f]{64}(\.json)?")


@dataclass
class Source:
    """issues: what could not be read, known when the stream has been read. total: bytes of the stream, if known."""

    format: Format
    stream: AsyncIterator[bytes] | None = None
    reference: str | None = None
    total: int | None = None
    issues: list[str] = field(default_factory=list)


def open_source(text: str, form: str) -> Source:
    """Find out what it is, and open it. form: `auto` or what the user says it is."""
    said: Format | None = form if form in ("tar", "oci", "docker") else None  # type: ignore[assignment]
    if text.startswith(REGISTRY):
        return Source("registry", reference=text)
    if text == "-":
        if terminal.is_terminal():
            raise DsecError("invalid", "an image does not come from a terminal: give a file, or `-` with a pipe")
        return Source(said or "tar", _stdin())
    path = Path(text)
    if path.is_dir():
        return _directory(path, said)
    file = path.open("rb")
    return Source(said or detect(path), _file(file), total=path.stat().st_size)


def open_disk(text: str) -> Source:
    """A disk of a virtual machine: a file or stdin as it is; the importer finds out what is in it."""
    if text == "-" and not terminal.is_terminal():
        return Source("auto", _stdin())
    path = Path(text)
    if not path.is_file():
        raise DsecError("invalid", f"{text}: a disk is a file, raw or qcow2, or `-` with a pipe")
    return Source("auto", _file(path.open("rb")), total=path.stat().st_size)


def _directory(path: Path, said: Format | None) -> Source:
    issues: list[str] = []
    if said in ("oci", "docker") or (said is None and (path / "oci-layout").is_file()):
        return Source(said or "oci", pack(path, issues), issues=issues)
    return Source("tar", pack(path, issues, name=".", xattrs=True), issues=issues)


def detect(path: Path) -> Format:
    """Of a tar, by the names in it. Reads no further than the first name that tells."""
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                parts = Path(member.name).parts
                if not parts:
                    continue  # "./" says nothing yet
                if _ARCHIVE.fullmatch(parts[0]) is None:
                    return "tar"
                if parts == ("oci-layout",):
                    return "oci"
                if parts in (("manifest.json",), ("repositories",)):
                    return "docker"
    except (tarfile.TarError, EOFError, OSError):
        pass  # the importer says better what is wrong; it may also know a compression that we do not
    return "tar"


async def _file(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while data := await asyncio.to_thread(file.read, PIECE):
            yield data


async def _stdin() -> AsyncIterator[bytes]:
    source = terminal.Stdin()
    while data := await source.read():
        yield data
