"""Pushes and pulls: a process of its own that carries one image to a registry or from there.

    python -m dsecd.erofs.transfer WORK-DIRECTORY JOB-AS-JSON LIMITS-AS-JSON

Like the importer it opens what it needs, gives up root before it hears a word from the registry, and reports on
standard output. What is pulled is believed only as far as digests go, and metadata (which the kernel will parse) only
if it is byte for byte what an import here would have written for the same tree.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from dsecd.erofs import artifact, read
from dsecd.erofs.artifact import DATA, META, SUMS, Described
from dsecd.erofs.blob import altered_at
from dsecd.erofs.collapse import Layer, LayerData
from dsecd.erofs.importer import Reporter, create_files, drop_privileges, end_with, write_all
from dsecd.erofs.model import CHUNK, Built, Limits, Pushed
from dsecd.erofs.remote import Body, Reference, Remote
from dsecd.erofs.sys import PR_SET_PDEATHSIG, prctl
from dsecd.erofs.tar import bad


class TransferJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """layer, described: the image to push. lazy: of a pull, without its data."""

    action: Literal["push", "pull"]
    reference: str
    lazy: bool = False
    layer: Layer | None = None
    described: Described | None = None


# -- push --------------------------------------------------------------------------------------------------------------
class _Counting:
    """The bytes of an image's data from the start, checked, and counted for the progress."""

    def __init__(self, data: LayerData, size: int, reporter: Reporter, phase: str) -> None:
        self._data, self._size, self._reporter, self._phase = data, size, reporter, phase
        self._at = 0

    def read(self, n: int) -> bytes:
        piece = self._data.read(self._at, min(n, CHUNK - self._at % CHUNK, self._size - self._at))
        self._at += len(piece)
        self._reporter.progress(self._phase, self._at, self._size, force=self._at == self._size)
        return piece


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def read(self, n: int) -> bytes:
        piece, self._left = self._left[:n], self._left[n:]
        return bytes(piece)


class Sink(Protocol):
    """Where images go as artifacts."""

    def put_blob(self, digest: str, size: int, body: Callable[[], Body]) -> bool:
        """Whether it had to be sent."""

    def put_manifest(self, data: bytes) -> None: ...


class Opened:
    """An image whose files are open, so that root is no longer needed."""

    def __init__(self, layer: Layer, described: Described, held: contextlib.ExitStack) -> None:
        self._layer, self._described = layer, described
        self._small = {META: Path(layer.meta).read_bytes(), SUMS: Path(layer.sums).read_bytes()}
        if artifact.sha256(self._small[META]) != layer.meta_digest:
            raise bad(f"image {layer.shown}: its metadata is altered")
        self._data = LayerData(layer, held)

    def send(self, sink: Sink, reporter: Reporter) -> Pushed:
        """All of it that is not there."""
        size, small = self._layer.data_size, dict(self._small)
        if not size:
            del small[SUMS]
        small["config"] = msgspec.json.encode(self._described, order="deterministic")
        files = {name: (artifact.sha256(content), len(content)) for name, content in small.items()}
        sent = 0
        if size:
            hashed = hashlib.sha256()
            reading = _Counting(self._data, size, reporter, "read")
            while piece := reading.read(CHUNK):
                hashed.update(piece)
            files[DATA] = ("sha256:" + hashed.hexdigest(), size)
            new = sink.put_blob(*files[DATA], lambda: _Counting(self._data, size, reporter, "push"))
            sent += size * new
        for name, content in small.items():
            sent += len(content) * sink.put_blob(*files[name], lambda content=content: _Bytes(content))  # type: ignore[misc]
        manifest = artifact.write_manifest(small["config"], files)
        sink.put_manifest(manifest)
        return Pushed(digest=artifact.sha256(manifest), sent_bytes=sent + len(manifest))


def push(layer: Layer, described: Described, remote: Remote, reporter: Reporter) -> Pushed:
    with contextlib.ExitStack() as held:
        opened = Opened(layer, described, held)
        drop_privileges()
        return opened.send(remote, reporter)


# -- pull --------------------------------------------------------------------------------------------------------------
class Origin(Protocol):
    """Where one artifact comes from. Errors as of `remote.Remote`."""

    def manifest(self, limit: int) -> bytes: ...
    def whole(self, digest: str, size: int, limit: int) -> bytes: ...
    def blob(self, digest: str, size: int) -> Iterator[bytes]: ...
    def has(self, digest: str) -> int | None: ...


def pull(work: Path, job: TransferJob, limits: Limits, remote: Origin, reporter: Reporter) -> Built:
    with contextlib.ExitStack() as held:
        data_fd, meta_fd, sums_fd = create_files(work, held, "data", "meta.erofs", "data.sums")
        drop_privileges()
        found, files = described_by(remote, limits)
        content = remote.whole(files[META].digest, found.meta_size, limits.max_names_bytes)
        sums = b""
        if found.data_size:
            sums = remote.whole(files[SUMS].digest, files[SUMS].size, limits.max_names_bytes)
        if artifact.sha256(sums) != found.data_digest:
            raise bad("the artifact's list of sums is another image's")
        size, digest = found.data_size, found.data_digest
        tree = read.checked(content, data_size=size, data_digest=digest, base=found.kind == "base")
        entries = sum(1 for _ in tree.nodes())
        if entries > limits.max_entries:
            raise bad(f"the image has more than {limits.max_entries} entries")
        write_all(meta_fd, content)
        write_all(sums_fd, sums)
        lazy = job.lazy and size > 0
        if lazy:
            _check_there(remote, files[DATA])
        elif size:
            _fetch(remote, files[DATA], sums, data_fd, reporter)
        for fd in (meta_fd, sums_fd, data_fd):
            os.fsync(fd)
        return Built(
            config=found.config, files=entries, meta_size=found.meta_size, meta_digest=found.meta_digest,
            data_size=size, data_digest=digest, data_file="" if lazy else "data", source=job.reference,
            blob=files[DATA].digest if lazy else "", kind=found.kind, name=found.name, below=found.below,
            builder=found.builder,
        )  # fmt: skip


def described_by(remote: Origin, limits: Limits) -> tuple[Described, artifact.Files]:
    """What the artifact says that it is."""
    config, files = artifact.read_manifest(remote.manifest(artifact.MAX_JSON))
    return artifact.read_config(remote.whole(config.digest, config.size, artifact.MAX_JSON), files, limits), files


def _check_there(remote: Origin, blob: artifact.Descriptor) -> None:
    """An image whose data is missing is better found out now than at its first read."""
    size = remote.has(blob.digest)
    if size != blob.size:
        what = "is not there" if size is None else f"has {size} bytes, and {blob.size} in the manifest"
        raise bad(f"the artifact's data, blob {blob.digest[:19]}, {what}")


def _fetch(remote: Origin, blob: artifact.Descriptor, sums: bytes, fd: int, reporter: Reporter) -> None:
    done = 0
    whole = hashlib.sha256()
    for piece in remote.blob(blob.digest, blob.size):  # of 1 MiB, whole sums each
        if (at := altered_at(piece, done, len(piece), sums)) is not None:
            raise bad(f"the artifact's data is altered (in the piece at {at})")
        whole.update(piece)
        write_all(fd, piece)
        done += len(piece)
        reporter.progress("pull", done, blob.size, force=done == blob.size)
    if "sha256:" + whole.hexdigest() != blob.digest:
        raise bad(f"blob {blob.digest[:19]} is altered: its sha256 is another")


def run(work: Path, job: TransferJob, limits: Limits, reporter: Reporter) -> Built | Pushed:
    actions = "pull,push" if job.action == "push" else "pull"
    remote = Remote(Reference.parse(job.reference), limits, actions)
    if job.action == "pull":
        return pull(work, job, limits, remote, reporter)
    assert job.layer is not None and job.described is not None
    return push(job.layer, job.described, remote, reporter)


def main(argv: list[str]) -> int:
    prctl(PR_SET_PDEATHSIG, 9)
    os.nice(5)
    job = msgspec.json.decode(argv[2], type=TransferJob)
    limits = msgspec.json.decode(argv[3], type=Limits)
    return end_with(lambda reporter: run(Path(argv[1]), job, limits, reporter))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
