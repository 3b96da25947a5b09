"""OCI layouts and docker archives: which layers an image has, in which order, and whether they are what they claim.

Both arrive as a set of named byte regions (members of a tar, or files that skopeo fetched) and never as paths. Every
blob's size and sha256 are checked against the descriptor that named it; a docker archive's layers against the diff ids
of its config.
"""

from __future__ import annotations

import hashlib
import os
import platform
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from dsecd.erofs.model import DIGEST, ImageConfig
from dsecd.erofs.streams import HashingSource, RegionSource, decompressed
from dsecd.erofs.tar import Source, TarReader, bad

T = TypeVar("T")

MAX_JSON: Final = 4 << 20
MAX_LAYERS: Final = 512

_INDEXES: Final = {
    "application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json",
}  # fmt: skip
_MANIFESTS: Final = {
    "application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json",
}  # fmt: skip
_LAYERS: Final = {
    "application/vnd.oci.image.layer.v1.tar", "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd", "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar", "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
}  # fmt: skip
_ARCH: Final = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


class Region(NamedTuple):
    """Some bytes of a seekable descriptor."""

    fd: int
    offset: int
    size: int


Regions = dict[str, Region]


class _Platform(Struct):
    architecture: str = ""
    os: str = ""


class _Descriptor(Struct, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] = {}
    platform: _Platform | None = None


class _Index(Struct):
    manifests: list[_Descriptor]


class _ManifestDoc(Struct):
    config: _Descriptor
    layers: list[_Descriptor]


class _Exec(Struct, rename="pascal"):
    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None


class _Rootfs(Struct):
    diff_ids: list[str] = []


class _ConfigDoc(Struct):
    config: _Exec | None = None
    rootfs: _Rootfs = msgspec.field(default_factory=_Rootfs)


class _DockerImage(Struct, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class _Marker(Struct, rename="camel"):
    image_layout_version: str


class Layer:
    """One layer: `verify`, then `open` for its plain tar, then `finish` to compare what was unpacked."""

    def __init__(self, region: Region, label: str, digest: str | None, diff_id: str, limit: int) -> None:
        self._region, self._label, self._digest, self._diff_id = region, label, digest, diff_id
        self._limit = limit
        self.size = region.size

    def verify(self) -> None:
        """Compare the digest before a byte is parsed, so that what is said is about the layer and not about its tar."""
        if self._digest is not None and _sha256(self._region) != self._digest:
            raise bad(f"layer {self._label} is altered: its sha256 is not the one in the manifest")

    def open(self) -> Source:
        self._plain = HashingSource(decompressed(RegionSource(*self._region), self._limit))
        return self._plain

    def finish(self, tar: TarReader) -> None:
        tar.drain()
        if self._plain.digest != self._diff_id:
            raise bad(f"layer {self._label} is altered: its unpacked sha256 is not the one in the image's config")


class Picture(NamedTuple):
    """An image as found: layers from the bottom up, and how it is started."""

    layers: list[Layer]
    config: ImageConfig


def scan(fd: int, size: int) -> Regions:
    """The regular files of a tar in a seekable descriptor, and where their bytes are. Links are followed by name."""
    source = _Counting(fd, size)
    tar = TarReader(source, need_end=True)
    found: Regions = {}
    while (entry := tar.next()) is not None:
        name = posixpath.normpath(entry.name.decode("utf-8", "surrogateescape"))
        if entry.type == "file" and entry.extents is None:
            found[name] = Region(fd, source.at - tar.buffered, entry.size)
        elif entry.type in ("symlink", "hardlink"):
            # docker save shares equal layers so: ID/layer.tar -> ../OTHER/layer.tar
            link = entry.link.decode("utf-8", "surrogateescape")
            base = posixpath.dirname(name) if entry.type == "symlink" else ""
            target = found.get(posixpath.normpath(posixpath.join(base, link)))
            if target is not None:
                found[name] = target
        if len(found) > 100_000:
            raise bad("the archive has too many members for an image")
    return found


class _Counting:
    """A region from the start of a file whose position is known; skipping costs no read."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size, self.at = fd, size, 0

    def read(self, n: int) -> bytes:
        data = os.pread(self._fd, min(n, self._size - self.at), self.at)
        self.at += len(data)
        return data

    def seek_by(self, n: int) -> bool:
        if self.at + n > self._size:
            return False
        self.at += n
        return True


def looks_like_archive(regions: Regions) -> str | None:
    if "oci-layout" in regions and "index.json" in regions:
        return "oci"
    return "docker" if "manifest.json" in regions else None


def open_layout(directory: Path) -> Regions:
    """The files of a layout on disk that we fetched ourselves, opened before privileges are dropped."""
    regions: Regions = {}
    for path in [*directory.glob("*"), *directory.glob("blobs/sha256/*")]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            regions[str(path.relative_to(directory))] = Region(fd, 0, os.fstat(fd).st_size)
    return regions


def read_oci(regions: Regions, tag: str, limit: int) -> Picture:
    """Refuses whatever is not an OCI image for this machine, in one sentence."""
    _decode(_json(regions, "oci-layout"), _Marker, "oci-layout")
    index = _decode(_json(regions, "index.json"), _Index, "index.json")
    descriptor = _choose(index, tag)
    for _ in range(4):
        if descriptor.media_type not in _INDEXES:
            break
        inner = _decode(_blob(regions, descriptor), _Index, "an image index")
        descriptor = _choose_platform(inner)
    if descriptor.media_type not in _MANIFESTS:
        raise bad(f"the image's manifest is of unknown media type {descriptor.media_type[:128]!r}")
    manifest = _decode(_blob(regions, descriptor), _ManifestDoc, "the image's manifest")
    config = _decode(_blob(regions, manifest.config), _ConfigDoc, "the image's config")
    return Picture(list(_oci_layers(regions, manifest, config, limit)), _start(config))


def read_docker(regions: Regions, tag: str, limit: int) -> Picture:
    images = _decode(_json(regions, "manifest.json"), list[_DockerImage], "manifest.json")
    if tag:
        images = [i for i in images if any(t == tag or t.endswith(":" + tag) for t in i.repo_tags or [])]
    if len(images) != 1:
        raise bad(f"the archive holds {len(images)} images{' of that tag' if tag else ''}; one is needed, name its tag")
    (image,) = images
    config = _decode(_json(regions, image.config), _ConfigDoc, "the image's config")
    diff_ids = config.rootfs.diff_ids
    if len(diff_ids) != len(image.layers) or len(diff_ids) > MAX_LAYERS:
        raise bad(f"the image's config lists {len(diff_ids)} layers and its manifest {len(image.layers)}")
    layers = []
    for number, (name, diff_id) in enumerate(zip(image.layers, diff_ids, strict=True), 1):
        layers.append(Layer(_region(regions, name), f"{number} ({name[:80]})", None, _digest(diff_id), limit))
    return Picture(layers, _start(config))


def _oci_layers(regions: Regions, manifest: _ManifestDoc, config: _ConfigDoc, limit: int) -> Iterator[Layer]:
    diff_ids: list[str] = config.rootfs.diff_ids
    if len(manifest.layers) > MAX_LAYERS:
        raise bad(f"the image has {len(manifest.layers)} layers (at most {MAX_LAYERS})")
    if len(diff_ids) != len(manifest.layers):
        raise bad(f"the image's config lists {len(diff_ids)} layers and its manifest {len(manifest.layers)}")
    for number, (descriptor, diff_id) in enumerate(zip(manifest.layers, diff_ids, strict=True), 1):
        if descriptor.media_type not in _LAYERS:
            raise bad(f"layer {number} is of unknown media type {descriptor.media_type[:128]!r}")
        region = _sized(regions, descriptor, f"layer {number}")
        label = f"{number} ({descriptor.digest[:19]})"
        yield Layer(region, label, _digest(descriptor.digest), _digest(diff_id), limit)


def _choose(index: _Index, tag: str) -> _Descriptor:
    found = index.manifests
    if tag:
        found = [d for d in found if d.annotations.get("org.opencontainers.image.ref.name") == tag]
    elif len(found) > 1:
        found = [d for d in found if d.platform is None or (d.platform.os, d.platform.architecture) == ("linux", _ARCH)]
    if len(found) != 1:
        raise bad(f"the layout holds {len(found)} images{' of that tag' if tag else ''}; one is needed, name its tag")
    return found[0]


def _choose_platform(index: _Index) -> _Descriptor:
    for descriptor in index.manifests:
        where = descriptor.platform
        if where is not None and (where.os, where.architecture) == ("linux", _ARCH):
            return descriptor
    if len(index.manifests) == 1 and index.manifests[0].platform is None:
        return index.manifests[0]
    raise bad(f"the image is not made for linux/{_ARCH}")


def _start(config: _ConfigDoc) -> ImageConfig:
    run = config.config or _Exec()
    env = dict(pair.split("=", 1) for pair in run.env or [] if "=" in pair)
    return ImageConfig(
        env=env, workdir=run.working_dir or "", user=run.user or "", entrypoint=tuple(run.entrypoint or ()),
        cmd=tuple(run.cmd or ()),
    )  # fmt: skip


def _region(regions: Regions, name: str) -> Region:
    region = regions.get(posixpath.normpath(name))
    if region is None:
        raise bad(f"the archive names {name[:128]!r} and does not hold it")
    return region


def _digest(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise bad(f"{digest[:80]!r} is not a sha256 digest")
    return digest


def _sized(regions: Regions, descriptor: _Descriptor, what: str) -> Region:
    region = regions.get("blobs/sha256/" + _digest(descriptor.digest).removeprefix("sha256:"))
    if region is None:
        raise bad(f"{what} ({descriptor.digest[:19]}) is missing from the image")
    if region.size != descriptor.size:
        raise bad(f"{what} ({descriptor.digest[:19]}) is truncated or altered: "
                  f"{region.size} bytes, and {descriptor.size} in the manifest")  # fmt: skip
    return region


def _blob(regions: Regions, descriptor: _Descriptor) -> bytes:
    region = _sized(regions, descriptor, "a blob")
    if region.size > MAX_JSON:
        raise bad(f"a manifest of {region.size} bytes (at most {MAX_JSON})")
    data = os.pread(region.fd, region.size, region.offset)
    if "sha256:" + hashlib.sha256(data).hexdigest() != descriptor.digest:
        raise bad(f"blob {descriptor.digest[:19]} is altered: its sha256 is another")
    return data


def _json(regions: Regions, name: str) -> bytes:
    region = _region(regions, name)
    if region.size > MAX_JSON:
        raise bad(f"{name[:64]} is {region.size} bytes long (at most {MAX_JSON})")
    return os.pread(region.fd, region.size, region.offset)


def _decode(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as e:
        raise bad(f"{what} is not what an image has there ({e})") from e


def _sha256(region: Region) -> str:
    source = HashingSource(RegionSource(*region))
    while source.read(1 << 20):
        pass
    return source.digest
