"""Messages of `image.*`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from dsecd.wire.base import Params, Result, Text

ImageKind = Literal["base", "workspace", "toolkit"]
ImageName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-z0-9][a-z0-9._/:-]*$")]
StoreName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
Reference = Annotated[str, Meta(pattern=r"^docker://", max_length=512)]
Package = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9+.-]{0,127}$")]


class Import(Params):
    """`image.import`: from a stream of a tar (tar, oci, docker; auto: told by its members), or a registry (`docker://…`).

    prefix: put a plain tar below this directory of the layer. store: of the config, where the data goes; `local`: this
    host's disk.
    """

    name: ImageName
    kind: ImageKind = "base"
    format: Literal["auto", "tar", "oci", "docker", "registry"] = "auto"
    reference: Text | None = None
    prefix: Annotated[str, Meta(max_length=1024)] = ""
    env: Annotated[dict[str, str], Meta(max_length=256)] = {}
    workdir: Annotated[str, Meta(max_length=1024)] | None = None
    user: Annotated[str, Meta(max_length=128)] | None = None
    store: StoreName | None = None


class Bootstrap(Params):
    """`image.bootstrap`: a Debian base by mmdebstrap from the host's own apt sources."""

    name: ImageName
    suite: Annotated[str, Meta(pattern=r"^[a-z]{2,24}$")] | None = None
    include: Annotated[list[Package], Meta(max_length=256)] = []


class Image(Result):
    """An immutable image. Sizes in bytes. store: where its data is: `local`, or a store of the config."""

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
    store: str = "local"


class ByRef(Params):
    ref: Annotated[str, Meta(min_length=1, max_length=200)]


class Collapse(Params):
    """`image.collapse`: one image of consecutive layers, topmost first; they stay. It is of the bottom one's kind.

    max_mb: refuse layers that hold more data together. store: where the new image's data goes.
    """

    name: ImageName
    layers: Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(min_length=2, max_length=64)]
    max_mb: Annotated[int, Meta(ge=1)] = 3072
    store: StoreName | None = None


class Push(Params):
    """`image.push`: make an image an OCI artifact at `docker://HOST[:PORT]/NAME[:TAG]`."""

    ref: Annotated[str, Meta(min_length=1, max_length=200)]
    reference: Reference


class Pushed(Result):
    """digest: of the artifact. sent_bytes: what the registry did not have yet."""

    digest: str
    sent_bytes: int = 0


class Pull(Params):
    """`image.pull`: an image that was pushed. name: as it was pushed, unless given.

    lazy: without its data, which stays there and is read on demand; the config must have that repository as a store.
    store: where the data goes otherwise.
    """

    reference: Reference
    name: ImageName | None = None
    lazy: bool = False
    store: StoreName | None = None


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
