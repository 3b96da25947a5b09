"""Environments as one file: a tar of an OCI layout, in which each layer is the artifact that `push` would make of it.

    python -m dsecd.erofs.layout WORK-DIRECTORY export OUTPUT-FD JOB-AS-JSON
    python -m dsecd.erofs.layout WORK-DIRECTORY list INPUT-FD LIMITS-AS-JSON       keeps the stream as `spool`
    python -m dsecd.erofs.layout WORK-DIRECTORY load SPOOL-FD LIMITS-AS-JSON NUMBER

    oci-layout
    blobs/sha256/<hex>    files of images, their configs and manifests
    index.json            manifests, topmost layer first

Like the importer these give up root before they read a byte of what others wrote, and believe only digests.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from dsecd.erofs import artifact, oci
from dsecd.erofs.artifact import OCI_MANIFEST, Described, Descriptor, sha256, small_blob
from dsecd.erofs.collapse import Layer
from dsecd.erofs.compose import MAX_LOWERS
from dsecd.erofs.importer import Reporter, create_files, drop_privileges, end_with, spool_all, write_all
from dsecd.erofs.model import CHUNK, Built, Limits, Listed, Pushed
from dsecd.erofs.remote import Body
from dsecd.erofs.streams import FdSource, RegionSource, decompressed
from dsecd.erofs.sys import PR_SET_PDEATHSIG, prctl
from dsecd.erofs.tar import bad
from dsecd.erofs.transfer import Opened, TransferJob, described_by, pull

_MARKER: Final = b'{"imageLayoutVersion":"1.0.0"}'
_BLOCK: Final = 512


class Exported(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One image of a stack."""

    layer: Layer
    described: Described


class ExportJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """images: topmost first."""

    images: tuple[Exported, ...]


class Index(Struct, rename="camel"):
    manifests: list[Descriptor]
    schema_version: int = 0
    media_type: str = ""


# -- out ---------------------------------------------------------------------------------------------------------------
class LayoutSink:
    """Writes the tar. What is in it already is not written again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._there: set[str] = set()
        self._manifests: list[Descriptor] = []
        self.written = 0
        self._whole("oci-layout", _MARKER)

    def put_blob(self, digest: str, size: int, body: Callable[[], Body]) -> bool:
        if digest in self._there:
            return False
        self._there.add(digest)
        self._header(_member(digest), size)
        reader, left = body(), size
        while left:
            piece = reader.read(min(left, CHUNK))
            self._put(piece)
            left -= len(piece)
        self._put(bytes(-size % _BLOCK))
        return True

    def put_manifest(self, data: bytes) -> None:
        self._whole(_member(sha256(data)), data)
        self._manifests.append(Descriptor(OCI_MANIFEST, sha256(data), len(data)))

    def finish(self) -> None:
        index = Index(self._manifests, 2, "application/vnd.oci.image.index.v1+json")
        self._whole("index.json", msgspec.json.encode(index))
        self._put(bytes(2 * _BLOCK))

    def _whole(self, name: str, data: bytes) -> None:
        self._header(name, len(data))
        self._put(data + bytes(-len(data) % _BLOCK))

    def _header(self, name: str, size: int) -> None:
        member = tarfile.TarInfo(name)
        member.size = size
        self._put(member.tobuf(tarfile.GNU_FORMAT))

    def _put(self, data: bytes) -> None:
        write_all(self._fd, data)
        self.written += len(data)


def export(fd: int, job: ExportJob, reporter: Reporter) -> Pushed:
    with contextlib.ExitStack() as held:
        opened = [Opened(one.layer, one.described, held) for one in job.images]
        drop_privileges()
        sink = LayoutSink(fd)
        for one in opened:
            one.send(sink, reporter)
        sink.finish()
        return Pushed(digest=job.images[0].described.digest, sent_bytes=sink.written)


# -- in ----------------------------------------------------------------------------------------------------------------
class LayoutOrigin:
    """One artifact of the layout."""

    def __init__(self, regions: oci.Regions, manifest: Descriptor) -> None:
        self._regions, self._manifest = regions, manifest

    def manifest(self, limit: int) -> bytes:
        return self.whole(self._manifest.digest, self._manifest.size, limit)

    def whole(self, digest: str, size: int, limit: int) -> bytes:
        return small_blob(lambda: self.blob(digest, size), digest, size, limit)

    def blob(self, digest: str, size: int) -> Iterator[bytes]:
        region = self._regions.get(_member(digest))
        if region is None or region.size != size:
            found = "is not there" if region is None else f"has {region.size} bytes, and {size} in the manifest"
            raise bad(f"blob {digest[:19]} {found}")
        source = RegionSource(*region)
        while piece := source.read(CHUNK):
            yield piece

    def has(self, digest: str) -> int | None:
        region = self._regions.get(_member(digest))
        return None if region is None else region.size


def origins(fd: int) -> list[LayoutOrigin]:
    """The artifacts of an exported environment, topmost first."""
    regions = oci.scan(fd, os.fstat(fd).st_size)
    index = regions.get("index.json")
    if index is None or "oci-layout" not in regions or index.size > artifact.MAX_JSON:
        raise bad("this is no exported environment: it has no OCI layout")
    try:
        found = msgspec.json.decode(os.pread(fd, index.size, index.offset), type=Index)
    except msgspec.DecodeError as e:
        raise bad(f"index.json is not what an exported environment has there ({e})") from e
    if not 0 < len(found.manifests) <= MAX_LOWERS:
        raise bad(f"the layout has {len(found.manifests)} images, and an environment has 1 to {MAX_LOWERS}")
    return [LayoutOrigin(regions, manifest) for manifest in found.manifests]


def receive(work: Path, fd: int, limits: Limits, reporter: Reporter) -> Listed:
    """Keep the stream, and say what is in it."""
    with contextlib.ExitStack() as held:
        (spool,) = create_files(work, held, "spool")
        drop_privileges()
        seen = FdSource(fd)
        spool_all(decompressed(seen, limits.max_bytes), spool, seen, None, reporter)
        found = [described_by(origin, limits)[0] for origin in origins(spool)]
        top, digests = found[0], tuple(one.digest for one in found)
        if top.below != digests[1:]:
            raise bad("the layers of the environment are not those that it names")
        return Listed(digests=digests, name=top.name)


def load(work: Path, fd: int, limits: Limits, number: int, reporter: Reporter) -> Built:
    return pull(work, TransferJob(action="pull", reference="exported"), limits, origins(fd)[number], reporter)


def _member(digest: str) -> str:
    return "blobs/sha256/" + digest.removeprefix("sha256:")


def main(argv: list[str]) -> int:
    prctl(PR_SET_PDEATHSIG, 9)
    os.nice(5)
    work, action, fd = Path(argv[1]), argv[2], int(argv[3])
    if action == "export":
        job = msgspec.json.decode(argv[4], type=ExportJob)
        return end_with(lambda reporter: export(fd, job, reporter))
    limits = msgspec.json.decode(argv[4], type=Limits)
    if action == "list":
        return end_with(lambda reporter: receive(work, fd, limits, reporter))
    return end_with(lambda reporter: load(work, fd, limits, int(argv[5]), reporter))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
