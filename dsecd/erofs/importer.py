"""The importer: a process of its own that turns an input into `meta.erofs` and `data` in a directory of the store.

    python -m dsecd.erofs.importer WORK-DIRECTORY INPUT-FD JOB-AS-JSON LIMITS-AS-JSON

It gets what it needs open (the input, the two files), or fetches it as root with skopeo or mmdebstrap, and then gives
up root for good *before it parses a byte*. Lines of JSON (`model.Report`) on standard output say how far it is and how
it ended. It never commits; the daemon does (`jobs.run_import`). Killing it and its process group is always safe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from dsecd.erofs import blob, fetch, meta, oci
from dsecd.erofs.model import Built, Failed, ImageConfig, ImportJob, Limits, Listed, Progress, Pushed, Report
from dsecd.erofs.streams import FdSource, decompressed, peek
from dsecd.erofs.sys import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl
from dsecd.erofs.tar import Entry, Source, TarReader, Truncated, bad
from dsecd.erofs.tree import Node, Tree, split_path
from dsecd.errors import DsecError

NOBODY: Final = 65534
REPORT_EVERY_S: Final = 0.1
ARCHIVE_MEMBERS: Final = (b"oci-layout", b"index.json", b"manifest.json", b"repositories", b"blobs")


class Reporter:
    """Writes progress, not too often; the last state of a phase is always written."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._next = 0.0

    def progress(self, phase: str, done: int, total: int | None = None, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now >= self._next:
            self._next = now + REPORT_EVERY_S
            self.write(Report(progress=msgspec.convert({"phase": phase, "done": done, "total": total}, Progress)))

    def write(self, report: Report) -> None:
        os.write(self._fd, msgspec.json.encode(report) + b"\n")


class Builder:
    """Layers go in, an image comes out. Counts entries and bytes of all layers against the limits."""

    def __init__(self, job: ImportJob, limits: Limits, data_fd: int, spare_fd: int, reporter: Reporter) -> None:
        self._limits, self._reporter = limits, reporter
        self._data_fd, self._spare_fd = data_fd, spare_fd
        prefix = job.prefix.encode("utf-8", "surrogateescape")
        self._tree = Tree(keep_whiteouts=job.kind != "base", prefix=prefix)
        self._data = blob.DataFile(data_fd)
        self._entries = self._bytes = self._names = 0

    def plain_tar(self, source: Source, total: int | None = None, seen: FdSource | None = None) -> None:
        self._tree.begin_layer()
        tar = TarReader(source, need_end=True)
        self._unpack(tar, seen, total)
        tar.drain()
        self._tree.end_layer()

    def picture(self, picture: oci.Picture) -> None:
        """The layers of an image are one tree; a whiteout that hides nothing in it hides nothing at all."""
        self._tree = Tree()
        total = sum(layer.size for layer in picture.layers)
        done = 0
        for layer in picture.layers:
            self._reporter.progress("unpack", done, total)
            layer.verify()
            self._tree.begin_layer()
            tar = TarReader(layer.open(), need_end=False)
            self._unpack(tar, None, None)
            layer.finish(tar)
            self._tree.end_layer()
            done += layer.size
        self._reporter.progress("unpack", done, total, force=True)

    def _unpack(self, tar: TarReader, seen: FdSource | None, total: int | None) -> None:
        while (entry := tar.next()) is not None:
            self._charge(entry)
            node = self._tree.add(entry)
            if entry.type == "file" and node is not None:
                blob.store_file(self._data, tar, node, entry.size, entry.extents)
            if seen is not None:
                self._reporter.progress("unpack", seen.seen, total)

    def _charge(self, entry: Entry) -> None:
        self._entries += 1
        stored = entry.size if entry.extents is None else sum(n for _, n in entry.extents)
        # A hole takes no data and still some metadata: 8 bytes for each 1 MiB.
        self._bytes += stored + (entry.size >> 8)
        self._names += len(entry.name) + len(entry.link) + sum(len(k) + len(v) for k, v in entry.xattrs.items())
        if self._names > self._limits.max_names_bytes:
            raise bad(f"the image has more than {self._limits.max_names_bytes} bytes of names and xattrs")
        if self._entries > self._limits.max_entries:
            raise bad(f"the image has more than {self._limits.max_entries} entries")
        if self._bytes > self._limits.max_bytes:
            raise bad(f"the image unpacks to more than {self._limits.max_bytes} bytes")

    def finish(self, meta_fd: int, sums_fd: int, config: ImageConfig, source: str) -> Built:
        nodes = [node for node in self._tree.nodes() if node.chunks]
        self._data.flush()
        data, name = self._data, "data"
        if blob.live_bytes(nodes) != data.size:
            # Upper layers replaced some of it: copy what is left, so that no image carries what nobody can read.
            data, name = self._compacted(nodes), "spare"
        sums, data_digest = data.sums.finish()
        self._reporter.progress("write", data.size, data.size, force=True)
        image = meta.Image(self._tree, data_size=data.size, data_digest=data_digest)
        write_all(meta_fd, image.content)
        write_all(sums_fd, sums)
        for fd in (meta_fd, sums_fd, self._data_fd if name == "data" else self._spare_fd):
            os.fsync(fd)
        return Built(
            config=config, files=image.files, meta_size=len(image.content), meta_digest=image.digest,
            data_size=data.size, data_digest=data_digest, data_file=name, source=source,
        )  # fmt: skip

    def _compacted(self, nodes: list[Node]) -> blob.DataFile:
        data = blob.DataFile(self._spare_fd)
        blob.compact(self._data_fd, data, nodes)
        data.flush()
        return data


def run(work: Path, input_fd: int, job: ImportJob, limits: Limits, reporter: Reporter) -> Built:
    with contextlib.ExitStack() as opened:
        data, spare, meta_fd, sums_fd, spool = create_files(
            work, opened, "data", "spare", "meta.erofs", "data.sums", "spool"
        )
        builder = Builder(job, limits, data, spare, reporter)
        config, source = _fill(builder, work, input_fd, job, limits, spool, reporter)
        return builder.finish(meta_fd, sums_fd, config.overridden_by(job.config), job.source or source)


def create_files(work: Path, opened: contextlib.ExitStack, *names: str) -> list[int]:
    """New files of the work directory, open for reading and writing."""
    fds = []
    for name in names:
        fds.append(os.open(work / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))
        opened.callback(os.close, fds[-1])
    return fds


def _fill(
    builder: Builder, work: Path, input_fd: int, job: ImportJob, limits: Limits, spool: int, reporter: Reporter
) -> tuple[ImageConfig, str]:
    """Put the input's layers in; (the config that it brings, what to call its source)."""
    if job.origin == "registry":
        regions = oci.open_layout(fetch.skopeo(job, limits, work, reporter.progress))
        drop_privileges()
        picture = oci.read_oci(regions, "", limits.max_bytes)
        builder.picture(picture)
        return picture.config, job.reference
    if job.origin == "bootstrap":
        bootstrap = fetch.mmdebstrap(job, work)
        drop_privileges()
        _bootstrapped(builder, bootstrap, reporter)
        return ImageConfig(), f"debian {job.suite} by mmdebstrap"
    drop_privileges()
    return _stream(builder, job, limits, input_fd, spool, reporter), ""


def _bootstrapped(builder: Builder, bootstrap: fetch.Bootstrap, reporter: Reporter) -> None:
    try:
        builder.plain_tar(_reporting(FdSource(bootstrap.tar), reporter))
    except Truncated:
        fetch.check_bootstrap(bootstrap)  # its own words come first
        raise
    fetch.check_bootstrap(bootstrap)


def _reporting(source: FdSource, reporter: Reporter) -> Source:
    class Reporting:
        def read(self, n: int) -> bytes:
            data = source.read(n)
            reporter.progress("bootstrap", source.seen)
            return data

    return Reporting()


def _stream(builder: Builder, job: ImportJob, limits: Limits, fd: int, spool: int, reporter: Reporter) -> ImageConfig:
    """Unpack a stream, whatever it is; the config that it brings."""
    total = _size_of(fd)
    seen = FdSource(fd)
    plain = decompressed(seen, limits.max_bytes)
    kind = job.format
    head, source = peek(plain, 512)
    if not head:
        raise bad("the input is empty")
    if kind == "auto" and not _may_be_archive(head):
        kind = "tar"
    if kind == "tar":
        builder.plain_tar(source, total, seen)
        return ImageConfig()
    size = spool_all(source, spool, seen, total, reporter)
    return _archive(builder, job, limits, spool, size, kind)


def _archive(
    builder: Builder, job: ImportJob, limits: Limits, spool: int, size: int, kind: Literal["auto", "oci", "docker"]
) -> ImageConfig:
    regions = oci.scan(spool, size)
    found = oci.looks_like_archive(regions)
    if kind == "auto" and found is None:
        os.lseek(spool, 0, os.SEEK_SET)
        builder.plain_tar(FdSource(spool), size)
        return ImageConfig()
    if job.prefix:
        raise DsecError("invalid", "prefix is for plain tars only, and this is an image's archive")
    if kind == "docker" or (kind == "auto" and found == "docker"):
        if "manifest.json" not in regions:
            raise bad("not a docker archive: it has no manifest.json")
        picture = oci.read_docker(regions, job.tag, limits.max_bytes)
    else:
        if found != "oci":
            raise bad("not an OCI layout: it has no oci-layout or no index.json")
        picture = oci.read_oci(regions, job.tag, limits.max_bytes)
    builder.picture(picture)
    return picture.config


def _may_be_archive(head: bytes) -> bool:
    """By the first member's name: only what may be an image's archive is worth a copy on disk."""
    name = head[:100].split(b"\0", 1)[0]
    parts = split_path(name)[:1] if not name.startswith(b"/") and b".." not in name else []
    first = parts[0] if parts else b""
    hexadecimal = len(first) >= 64 and all(c in b"0123456789abcdef" for c in first[:64])
    # "./" says nothing yet: `tar -C layout .` begins so, and so does every plain tree.
    return first in ARCHIVE_MEMBERS or hexadecimal or not parts


def spool_all(source: Source, spool: int, seen: FdSource, total: int | None, reporter: Reporter) -> int:
    """Copy a stream into a file; its size."""
    size = 0
    while data := source.read(1 << 20):
        write_all(spool, data)
        size += len(data)
        reporter.progress("receive", seen.seen, total)
    return size


def _size_of(fd: int) -> int | None:
    found = os.fstat(fd)
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def write_all(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def drop_privileges() -> None:
    """From here on the process can write to the descriptors it holds and do nothing else to this host."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel forgets it when the ids change


def failure(e: BaseException) -> Failed:
    """Map what ended an import to what the caller is told; a bug stays one, and its traceback goes to stderr."""
    if isinstance(e, DsecError):
        return Failed(kind=e.kind, message=e.message, detail=e.detail)
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Failed(kind="disk_full", message="no space left for the image in the store")
    if isinstance(e, MemoryError):
        return Failed(kind="image", message="the image's metadata does not fit in the importer's memory")
    raise e


def end_with(what: Callable[[Reporter], Built | Pushed | Listed | None]) -> int:
    """Do it and report how it ended; the exit status. For this process and for those that are made like it."""
    reporter = Reporter(os.dup(1))
    os.dup2(2, 1)  # what else prints, prints to the log
    try:
        done = what(reporter)
        match done:
            case Built():
                report = Report(built=done)
            case Listed():
                report = Report(listed=done)
            case _:
                report = Report(pushed=done)
    except (DsecError, OSError, MemoryError) as e:
        report = Report(failed=failure(e))
    reporter.write(report)
    return 1 if report.failed else 0


def main(argv: list[str]) -> int:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(5)  # sandboxes that run now matter more than one that may start a moment later
    work, input_fd = Path(argv[1]), int(argv[2])
    job = msgspec.json.decode(argv[3], type=ImportJob)
    limits = msgspec.json.decode(argv[4], type=Limits)
    return end_with(lambda reporter: run(work, input_fd, job, limits, reporter))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
