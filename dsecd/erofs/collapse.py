"""The collapser: a process of its own that merges consecutive layers into one image, offline.

    python -m dsecd.erofs.collapse WORK-DIRECTORY JOB-AS-JSON

It reads the layers' metadata, merges the trees, and copies what is still visible of their data, chunk by chunk: each
mebibyte of a layer is read once at most, and only if something in it is still seen. All that is read is held against
the layers' own sums, so that a damaged layer ends in an error and never in a new image with good sums over bad data.
Like the importer it opens what it needs, gives up root, and reports on standard output.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from dsecd.erofs import meta, read
from dsecd.erofs.blob import DataFile, altered_at
from dsecd.erofs.importer import Reporter, create_files, drop_privileges, end_with, write_all
from dsecd.erofs.merge import merge
from dsecd.erofs.model import BLOCK, CHUNK, Built, ImageConfig
from dsecd.erofs.stores import BlobStore, StoreConfig, open_store
from dsecd.erofs.sys import PR_SET_PDEATHSIG, prctl
from dsecd.erofs.tar import bad
from dsecd.erofs.tree import HOLE, Node, Tree
from dsecd.errors import DsecError

READ_S: Final = 60.0
FEW: Final = 4  # mebibytes kept of a layer: a file's chunk may begin in one and end in the next


class Layer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one layer is. data: a path; else `blob` of the store `config`."""

    shown: str
    meta: str
    meta_digest: str
    sums: str
    data_digest: str
    data_size: int
    data: str = ""
    store: str = ""
    blob: str = ""
    config: StoreConfig | None = None


class CollapseJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """layers: topmost first. base: the last one is, and nothing is below. config: of the stack."""

    layers: tuple[Layer, ...]
    base: bool
    config: ImageConfig
    source: str


class LayerData:
    """The bytes of a layer's data file, checked."""

    def __init__(self, layer: Layer, held: contextlib.ExitStack) -> None:
        self._layer = layer
        self._fd = -1
        self._store: BlobStore | None = None
        if layer.config is not None:
            self._store = open_store(layer.store, layer.config)
            held.callback(self._store.close)
        else:
            self._fd = _open(layer.data, layer.shown, "data", held)
        self._sums = Path(layer.sums).read_bytes()
        if "sha256:" + hashlib.sha256(self._sums).hexdigest() != layer.data_digest:
            raise bad(f"image {layer.shown}: its list of sums is altered")
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def read(self, at: int, size: int) -> bytes:
        parts = []
        while size:
            number, skip = divmod(at, CHUNK)
            part = self._mebibyte(number)[skip : skip + size]
            if not part:
                raise bad(f"image {self._layer.shown}: its metadata refers to what is beyond the end of its data")
            parts.append(part)
            at, size = at + len(part), size - len(part)
        return b"".join(parts)

    def _mebibyte(self, number: int) -> bytes:
        known = self._kept.get(number)
        if known is not None:
            return known
        size = max(0, min(CHUNK, self._layer.data_size - number * CHUNK))
        if self._store is not None:
            data = self._store.read(self._layer.blob, number * CHUNK, size, READ_S)
        else:
            data = os.pread(self._fd, size, number * CHUNK)
        if (at := altered_at(data, number * CHUNK, size, self._sums)) is not None:
            raise bad(f"image {self._layer.shown}: its data is altered (in the piece at {at})")
        self._kept[number] = data
        if len(self._kept) > FEW:
            self._kept.popitem(last=False)
        return data


Wanted = dict[tuple[int, int], list[tuple[Node, int]]]  # (block, length) -> the chunks of nodes that it is


def run(work: Path, job: CollapseJob, reporter: Reporter) -> Built:
    with contextlib.ExitStack() as held:
        data_fd, meta_fd, sums_fd = create_files(work, held, "data", "meta.erofs", "data.sums")
        files = [_open(layer.meta, layer.shown, "metadata", held) for layer in job.layers]
        sources = [LayerData(layer, held) for layer in job.layers]
        drop_privileges()
        trees = [_tree(layer, fd) for layer, fd in zip(job.layers, files, strict=True)]
        owned = [{id(node) for node in tree.nodes()} for tree in trees]
        merged = merge(trees, base=job.base)
        data = DataFile(data_fd)
        _copy(merged, owned, sources, data, reporter)
        data.flush()
        sums, digest = data.sums.finish()
        image = meta.Image(merged, data_size=data.size, data_digest=digest)
        write_all(meta_fd, image.content)
        write_all(sums_fd, sums)
        for fd in (meta_fd, sums_fd, data_fd):
            os.fsync(fd)
        return Built(
            config=job.config, files=image.files, meta_size=len(image.content), meta_digest=image.digest,
            data_size=data.size, data_digest=digest, data_file="data", source=job.source,
        )  # fmt: skip


def _tree(layer: Layer, fd: int) -> Tree:
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    if "sha256:" + hashlib.sha256(content).hexdigest() != layer.meta_digest:
        raise bad(f"image {layer.shown}: its metadata is altered")
    return read.read(content)


def _copy(
    merged: Tree, owned: Sequence[set[int]], sources: Sequence[LayerData], data: DataFile, reporter: Reporter
) -> None:
    """Layer by layer, in the order of the layer's data file."""
    wanted: list[Wanted] = [{} for _ in sources]
    for node in merged.nodes():
        if node.chunks is None:
            continue
        mine = next(number for number, ids in enumerate(owned) if id(node) in ids)
        for index, block in enumerate(node.chunks):
            if block != HOLE:
                length = min(CHUNK, node.size - index * CHUNK)
                wanted[mine].setdefault((block, length), []).append((node, index))
    total, done = sum(length for layer in wanted for _, length in layer), 0
    for source, layer in zip(sources, wanted, strict=True):
        for (block, length), places in sorted(layer.items(), key=lambda item: item[0]):
            now = data.append(source.read(block * BLOCK, length))
            for node, index in places:
                chunks: array[int] | None = node.chunks
                assert chunks is not None
                chunks[index] = now
            done += length
            reporter.progress("collapse", done, total)
    reporter.progress("collapse", done, total, force=True)


def _open(path: str, shown: str, what: str, held: contextlib.ExitStack) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise bad(f"image {shown}: its {what} cannot be read: {e.strerror}") from e
    held.callback(os.close, fd)
    return fd


def main(argv: list[str]) -> int:
    prctl(PR_SET_PDEATHSIG, 9)
    os.nice(5)
    job = msgspec.json.decode(argv[2], type=CollapseJob)
    return end_with(lambda reporter: run(Path(argv[1]), job, reporter))


def check_layers(kinds: Sequence[str]) -> None:
    """What can be one image: at least two layers, a base at the bottom only."""
    if len(kinds) < 2:
        raise DsecError("invalid", "a collapse needs two layers at least")
    if "base" in kinds[:-1]:
        raise DsecError("invalid", "a base is the bottom of every stack: name it last")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
