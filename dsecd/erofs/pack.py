"""The packer: a process of its own that makes a layer of what a container wrote.

    python -m dsecd.erofs.pack WORK-DIRECTORY JOB-AS-JSON

It reads the upper directory of an overlay (a snapshot, which nobody writes to) from inside: it changes its root to it,
so that no name in it can lead anywhere else, and keeps two capabilities: to read what belongs to others, and, until the
names are read, to see overlayfs's own marks. Of a microVM it reads what the agent of a copy streams, with no right at
all (`packstream.py`). Owners become what the sandbox sees. Rules are held while it reads; what breaks one ends the pack
with `denied`, and nothing of it is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from dsecd.envconfig import EnvConfig
from dsecd.erofs import meta, read
from dsecd.erofs.blob import DataFile, compact, live_bytes
from dsecd.erofs.importer import Reporter, create_files, drop_privileges, end_with, write_all
from dsecd.erofs.merge import merge
from dsecd.erofs.model import CHUNK, Built, ImageConfig
from dsecd.erofs.packnode import OPAQUE, Judge, inside, kept_xattr, packed_xattr, whiteout
from dsecd.erofs.packrules import Checker, compile_globs, shown
from dsecd.erofs.packstream import SearchedData, StreamScan
from dsecd.erofs.streams import FdSource
from dsecd.erofs.sys import CAP_DAC_READ_SEARCH, CAP_SYS_ADMIN, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, keep_caps, prctl
from dsecd.erofs.tar import bad
from dsecd.erofs.tree import HOLE, MAX_PATH, Node, Tree


class Lower(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata of a layer below."""

    shown: str
    meta: str
    meta_digest: str


class PackJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """upper: the directory; or, if that is empty, stream: a descriptor.

    id_base: the host's id of root inside. answers: globs of what must not be seen in it, not
    even from `lowers` (topmost first; needed for answers only). config: of the whole stack.
    """

    upper: str = ""
    stream: int = -1
    id_base: int
    rules: EnvConfig
    answers: tuple[str, ...] = ()
    lowers: tuple[Lower, ...] = ()
    config: ImageConfig
    source: str


def run(work: Path, job: PackJob, reporter: Reporter) -> Built:
    with contextlib.ExitStack() as held:
        data_fd, meta_fd, sums_fd, spare_fd = create_files(work, held, "data", "meta.erofs", "data.sums", "spare")
        answers = compile_globs(job.answers)
        below = _lowers(job.lowers) if answers is not None else None
        judge = Judge(Checker(job.rules), answers)
        read_all = _from_directory if job.upper else _from_stream
        tree, data = read_all(job, judge, data_fd, reporter)
        if answers is not None and below is not None:
            judge.left_out += _hide(tree, below, answers)
        data.flush()
        name, kept_fd = "data", data_fd
        nodes = [node for node in tree.nodes() if node.chunks]
        if live_bytes(nodes) != data.size:
            compact(data_fd, spare := DataFile(spare_fd), nodes)
            spare.flush()
            name, kept_fd, data = "spare", spare_fd, spare
        sums, digest = data.sums.finish()
        image = meta.Image(tree, data_size=data.size, data_digest=digest)
        write_all(meta_fd, image.content)
        write_all(sums_fd, sums)
        reporter.progress("write", data.size, data.size, force=True)
        for fd in (meta_fd, sums_fd, kept_fd):
            os.fsync(fd)
        return Built(
            config=job.config, files=image.files, meta_size=len(image.content), meta_digest=image.digest,
            data_size=data.size, data_digest=digest, data_file=name, source=job.source, left_out=judge.left_out,
        )  # fmt: skip


def _from_directory(job: PackJob, judge: Judge, data_fd: int, reporter: Reporter) -> tuple[Tree, DataFile]:
    os.chdir(job.upper)
    os.chroot(".")
    os.setgroups([])
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    keep_caps(CAP_DAC_READ_SEARCH, CAP_SYS_ADMIN)
    scan = _Scan(job.id_base, judge, reporter)
    tree = scan.tree()
    keep_caps(CAP_DAC_READ_SEARCH)
    data = DataFile(data_fd)
    _store(tree, scan, data, reporter)
    return tree, data


def _from_stream(job: PackJob, judge: Judge, data_fd: int, reporter: Reporter) -> tuple[Tree, DataFile]:
    drop_privileges()
    data = SearchedData(data_fd)
    return StreamScan(judge, data, reporter).tree(FdSource(job.stream)), data


# -- names -------------------------------------------------------------------------------------------------------------
class _Scan:
    """The tree of the upper directory, without data. paths: of files, by node."""

    def __init__(self, base: int, judge: Judge, reporter: Reporter) -> None:
        self._base, self._judge, self._reporter = base, judge, reporter
        self._inodes: dict[int, Node] = {}
        self.paths: dict[int, bytes] = {}

    @property
    def checker(self) -> Checker:
        return self._judge.checker

    def tree(self) -> Tree:
        tree = Tree()
        self._dress(tree.root, b".", os.lstat(b"."))
        queue = [(tree.root, b"")]
        names = 0
        for directory, path in queue:
            for name in os.listdir(path or b"."):
                names += 1
                below = path + b"/" + name if path else name
                if len(below) > MAX_PATH:
                    raise bad(f"{shown(below)} is longer than {MAX_PATH} bytes")
                child = self._child(directory, below)
                if child is not None:
                    directory.children[name] = child
                    if child.is_dir:
                        queue.append((child, below))
            self._reporter.progress("scan", names)
        self._reporter.progress("scan", names, names, force=True)
        return tree

    def _child(self, directory: Node, path: bytes) -> Node | None:
        found = os.lstat(path)
        fmt = stat.S_IFMT(found.st_mode)
        if fmt == stat.S_IFCHR and found.st_rdev == 0:
            self.checker.count(path)
            return whiteout(directory)
        if not self._judge.takes(path, fmt):
            return None
        node = self._inodes.get(found.st_ino)
        if node is None:
            node = Node(fmt)
            self._dress(node, path, found)
            if node.is_file:
                self.paths[id(node)] = path
                self.checker.size(path, min(found.st_size, found.st_blocks * 512), found.st_size)
            if not node.is_dir and found.st_nlink > 1:
                self._inodes[found.st_ino] = node
        return node

    def _dress(self, node: Node, path: bytes, found: os.stat_result) -> None:
        node.mode = 0o777 if node.fmt == stat.S_IFLNK else stat.S_IMODE(found.st_mode)
        node.uid, node.gid = inside(found.st_uid, self._base), inside(found.st_gid, self._base)
        node.mtime_ns = found.st_mtime_ns
        if node.fmt == stat.S_IFLNK:
            node.target = os.readlink(path)  # noqa: PTH115 (names are bytes)
            node.size = len(node.target)
        elif node.is_file:
            node.size = found.st_size
        elif node.fmt in (stat.S_IFCHR, stat.S_IFBLK):
            node.rdev = (os.major(found.st_rdev), os.minor(found.st_rdev))
        if node.fmt != stat.S_IFLNK:
            node.xattrs = self._xattrs(node, path) or None

    def _xattrs(self, node: Node, path: bytes) -> dict[bytes, bytes]:
        kept: dict[bytes, bytes] = {}
        for shown_name in os.listxattr(path, follow_symlinks=False):
            name = os.fsencode(shown_name)
            if not kept_xattr(node, path, name):
                continue
            value = packed_xattr(name, os.getxattr(path, name, follow_symlinks=False), self._base)
            if value is not None:
                kept[name] = value
        return kept


# -- answers that lie in lower layers ----------------------------------------------------------------------------------
def _lowers(lowers: Sequence[Lower]) -> Tree:
    """What the layers below show together."""
    trees = []
    for lower in lowers:
        content = Path(lower.meta).read_bytes()
        if "sha256:" + hashlib.sha256(content).hexdigest() != lower.meta_digest:
            raise bad(f"image {lower.shown}: its metadata is altered")
        trees.append(read.read(content))
    return merge(trees, base=True)


def _hide(tree: Tree, below: Tree, answers: re.Pattern[bytes]) -> int:
    """Whiteouts for what matches in the layers below and still shows through; how many."""
    return sum(_hide_one(tree.root, below.root, path) for path in _matches(below, answers))


def _matches(tree: Tree, answers: re.Pattern[bytes]) -> Iterator[bytes]:
    queue = [(tree.root, b"")]
    for node, path in queue:
        for name, child in node.children.items():
            at = path + b"/" + name if path else name
            if answers.match(at):
                yield at
            elif child.is_dir:
                queue.append((child, at))


def _hide_one(upper: Node, lower: Node, path: bytes) -> bool:
    *parents, name = path.split(b"/")
    for part in parents:
        lower = lower.children[part]
        over = upper.children.get(part)
        if over is None:
            over = upper.children[part] = _copy(lower)
        elif not over.is_dir or (over.xattrs or {}).get(OPAQUE) == b"y":
            return False  # it hides all of it already
        upper = over
    if name in upper.children:
        return False  # a whiteout: what else matches was left out
    upper.children[name] = whiteout(upper)
    return True


def _copy(directory: Node) -> Node:
    copy = Node(stat.S_IFDIR)
    copy.mode, copy.uid, copy.gid, copy.mtime_ns = directory.mode, directory.uid, directory.gid, directory.mtime_ns
    copy.xattrs = dict(directory.xattrs) if directory.xattrs else None
    return copy


# -- data --------------------------------------------------------------------------------------------------------------
def _store(tree: Tree, scan: _Scan, data: DataFile, reporter: Reporter) -> None:
    """The bytes of all files; holes stay holes."""
    nodes = [node for node in tree.nodes() if node.is_file and node.size]
    total, done = sum(node.size for node in nodes), 0
    for node in nodes:
        path = scan.paths[id(node)]
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            node.chunks = array("I", [HOLE]) * -(-node.size // CHUNK)
            for index, piece in _pieces(fd, node.size):
                if index == 0 and node.size <= scan.checker.search_below:
                    scan.checker.content(path, piece)
                node.chunks[index] = data.append(piece)
        finally:
            os.close(fd)
        done += node.size
        reporter.progress("pack", done, total)
    reporter.progress("pack", done, total, force=True)


def _pieces(fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    """(index, bytes) of the chunks that are no hole."""
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA) // CHUNK * CHUNK
        except OSError:  # ENXIO: a hole up to the end
            return
        length = min(CHUNK, size - at)
        piece = os.pread(fd, length, at)
        if len(piece) != length:
            raise bad("a file became shorter while it was packed")
        yield at // CHUNK, piece
        at += CHUNK


def main(argv: list[str]) -> int:
    prctl(PR_SET_PDEATHSIG, 9)
    os.nice(5)
    job = msgspec.json.decode(argv[2], type=PackJob)
    return end_with(lambda reporter: run(Path(argv[1]), job, reporter))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
