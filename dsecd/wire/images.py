"""Messages of `image.*`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from dsecd.wire.base import Params, Result, Text

ImageKind = Literal["base", "workspace", "toolkit"]
ImageName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-z0-9][a-z0-9._/:-]*$")]
Package = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9+.-]{0,127}$")]


class Import(Params):
    """`image.import`: from a stream of a tar (tar, oci, docker; auto: told by its members), or a registry (`docker://…`).

    prefix: put a plain tar below this directory of the layer.
    """

    name: ImageName
    kind: ImageKind = "base"
    format: Literal["auto", "tar", "oci", "docker", "registry"] = "auto"
    reference: Text | None = None
    prefix: Annotated[str, Meta(max_length=1024)] = ""
    env: Annotated[dict[str, str], Meta(max_length=256)] = {}
    workdir: Annotated[str, Meta(max_length=1024)] | None = None
    user: Annotated[str, Meta(max_length=128)] | None = None


class Bootstrap(Params):
    """`image.bootstrap`: a Debian base by mmdebstrap from the host's own apt sources."""

    name: ImageName
    suite: Annotated[str, Meta(pattern=r"^[a-z]{2,24}$")] | None = None
    include: Annotated[list[Package], Meta(max_length=256)] = []


class Image(Result):
    """An immutable image. Sizes in bytes. names: references that point at it now."""

    digest: str
    kind: str
    name: str
    names: list[str] = []
    source: str = ""
    created: str = ""
    files: int = 0
    meta_size: int = 0
    data_size: int = 0
    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    used_by: int = 0


class ByRef(Params):
    ref: Annotated[str, Meta(min_length=1, max_length=200)]


class ListImages(Params):
    """`image.list`."""


class Images(Result):
    images: list[Image]


class Gc(Params):
    """`image.gc`: unnamed images that nothing uses, and what crashed imports left."""

    min_age_s: Annotated[float, Meta(ge=0)] = 0.0


class Collected(Result):
    removed: list[str]
    freed_bytes: int = 0
