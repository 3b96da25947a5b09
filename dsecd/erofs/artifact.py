"""An image as an artifact of an OCI registry: what `push` writes and what `pull` believes of it.

    manifest (artifactType application/vnd.dsecd.image.v1)
        config                       Described, JSON
        layer titled `meta.erofs`
        layer titled `data.sums`     sha256 of each 256 KiB of data; absent with the data when there is none
        layer titled `data`          stays there when the image is pulled lazily, and is read by ranges

Everything is compared with everything else before anything is fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from dsecd.erofs.model import (
    BLOCK,
    CHUNK,
    DIGEST,
    FORMAT,
    NAME,
    SUM,
    Builder,
    ImageConfig,
    ImageKind,
    Limits,
    Manifest,
    identity,
)
from dsecd.erofs.tar import bad

T = TypeVar("T")

OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT: Final = "application/vnd.dsecd.image.v1"
CONFIG: Final = "application/vnd.dsecd.image.config.v1+json"
META, SUMS, DATA = "meta.erofs", "data.sums", "data"
MEDIA: Final = {name: f"application/vnd.dsecd.image.{name}.v1" for name in (META, SUMS, DATA)}
TITLE: Final = "org.opencontainers.image.title"
MAX_JSON: Final = 4 << 20


class Descriptor(Struct, rename="camel", omit_defaults=True):
    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}


class ArtifactManifest(Struct, rename="camel", omit_defaults=True):
    config: Descriptor
    layers: list[Descriptor]
    schema_version: int = 0
    media_type: str = ""
    artifact_type: str = ""


class Described(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The config: an image's manifest without what is the host's own."""

    format: int
    digest: str
    kind: ImageKind
    name: str
    source: str
    created: str
    config: ImageConfig
    files: int
    meta_size: int
    meta_digest: str
    data_size: int
    data_digest: str
    chunk_size: int
    sum_size: int
    below: tuple[str, ...] = ()
    builder: Builder | None = None


Files = dict[str, Descriptor]


def describe(image: Manifest) -> Described:
    return Described(
        format=image.format, digest=image.digest, kind=image.kind, name=image.name, source=image.source,
        created=image.created, config=image.config, files=image.files, meta_size=image.meta_size,
        meta_digest=image.meta_digest, data_size=image.data_size, data_digest=image.data_digest,
        chunk_size=image.chunk_size,
        sum_size=image.sum_size, below=image.below, builder=image.builder,
    )  # fmt: skip


def sha256(data: bytes | bytearray) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def small_blob(pieces: Callable[[], Iterator[bytes]], digest: str, size: int, limit: int) -> bytes:
    """A blob that fits into memory, checked; asked for only when its size is within the limit."""
    if size > limit:
        raise bad(f"blob {digest[:19]} is {size} bytes long (at most {limit})")
    data = b"".join(pieces())
    if sha256(data) != digest:
        raise bad(f"blob {digest[:19]} is altered: its sha256 is another")
    return data


def write_manifest(config: bytes, files: dict[str, tuple[str, int]]) -> bytes:
    """files: (digest, size) by name."""
    document = ArtifactManifest(
        schema_version=2, media_type=OCI_MANIFEST, artifact_type=ARTIFACT,
        config=Descriptor(CONFIG, sha256(config), len(config)),
        layers=[Descriptor(MEDIA[name], *files[name], {TITLE: name}) for name in MEDIA if name in files],
    )  # fmt: skip
    return msgspec.json.encode(document)


def read_manifest(data: bytes) -> tuple[Descriptor, Files]:
    """(config, files by name) of an artifact, or DsecError `image` with what is wrong with it."""
    found = _decode(data, ArtifactManifest, "the artifact's manifest")
    if found.media_type not in ("", OCI_MANIFEST) or found.artifact_type != ARTIFACT:
        what = found.artifact_type or found.config.media_type
        raise bad(f"an artifact of type {what[:128]!r}, and not an image that was pushed (`image import` takes others)")
    if found.config.media_type != CONFIG:
        raise bad(f"the artifact's config is of unknown type {found.config.media_type[:128]!r}")
    files: Files = {}
    for one in (found.config, *found.layers):
        if not DIGEST.fullmatch(one.digest) or one.size < 0:
            raise bad(f"the artifact's manifest has {one.digest[:80]!r} of {one.size} bytes, which is no blob")
    for layer in found.layers:
        title = layer.annotations.get(TITLE, "")
        if title not in MEDIA or title in files:
            raise bad(f"the artifact has a file {title[:128]!r}, which no image has" + " twice" * (title in files))
        if layer.media_type != MEDIA[title]:
            raise bad(f"the artifact's {title} is of unknown type {layer.media_type[:128]!r}")
        files[title] = layer
    if META not in files or (DATA in files) != (SUMS in files):
        raise bad("the artifact lacks " + ", ".join(name for name in MEDIA if name not in files))
    if found.config.size > MAX_JSON:
        raise bad(f"the artifact's config is {found.config.size} bytes long (at most {MAX_JSON})")
    return found.config, files


def read_config(data: bytes, files: Files, limits: Limits) -> Described:
    """The image that the artifact claims to be; sizes and digests agree, and nothing is larger than allowed."""
    found = _decode(data, Described, "the artifact's config")
    if found.format != FORMAT:
        raise bad(f"the artifact is of format {found.format}, and {FORMAT} is known here")
    if found.chunk_size != CHUNK:
        raise bad(f"the artifact has chunks of {found.chunk_size} bytes, and an image's are {CHUNK}")
    if found.sum_size != SUM:
        raise bad(f"the artifact has sums of {found.sum_size} bytes each, and an image's are of {SUM}")
    if found.name and not NAME.fullmatch(found.name):
        raise bad(f"the artifact's name {found.name[:128]!r} is none that an image can have")
    if found.data_size < 0 or found.data_size % BLOCK or found.meta_size <= 0 or found.meta_size % BLOCK:
        raise bad("the artifact's sizes are not whole blocks")
    if found.data_size > limits.max_bytes or found.meta_size > limits.max_names_bytes:
        raise bad(f"the image is larger than {limits.max_bytes} bytes, or its metadata than {limits.max_names_bytes}")
    sizes = {META: found.meta_size}
    if found.data_size:
        sizes |= {SUMS: 32 * -(-found.data_size // SUM), DATA: found.data_size}
    for name in MEDIA:
        size = files[name].size if name in files else 0
        if size != sizes.get(name, 0):
            raise bad(f"the artifact's {name} has {size} bytes, and its config says {sizes.get(name, 0)}")
    if files[META].digest != found.meta_digest or (found.data_size and files[SUMS].digest != found.data_digest):
        raise bad("the artifact's config and its manifest are of two images")
    if (found.kind == "environment") != bool(found.below) or not all(DIGEST.fullmatch(one) for one in found.below):
        raise bad("the artifact is an environment without layers below it, or no environment and with some")
    told = identity(found.kind, found.config, found.meta_digest, found.data_digest, found.below, found.builder)
    if told != found.digest:
        raise bad("the artifact's config is altered: its digest is another image's")
    return found


def _decode(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as e:
        raise bad(f"{what} is not what an image has there ({e})") from e
