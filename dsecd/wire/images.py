"""Messages of `image.*`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dsecd.wire.base import Params, Result, Text

ImageKind = Literal["base", "workspace", "toolkit", "vm"]
Profile = Literal["server", "desktop", "android"]
ImageName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-z0-9][a-z0-9._/:-]*$")]
StoreName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
Reference = Annotated[str, Meta(pattern=r"^docker://", max_length=512)]
Package = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9+.-]{0,127}$")]


class Import(Params):
    """`image.import`: from a stream of a tar (tar, oci, docker; auto: told by its members), or a registry (`docker://…`).

    prefix: put a plain tar below this directory of the layer. store: of the config, where the data goes; `local`: this
    host's disk. kind `vm`: the stream is a disk, raw or qcow2, perhaps compressed; it has a name, a profile, no more.
    agent: of kind `vm`: dsec-agent is in it as a service (docs/agent-protocol.md says how), of this daemon's version.
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
    profile: Profile = "server"
    agent: bool = False


class Bootstrap(Params):
    """`image.bootstrap`: a Debian base by mmdebstrap from the host's own apt sources.

    kind `vm`: a disk of `disk_mb` MiB with systemd, dsec-agent and QEMU's guest agent.
    """

    name: ImageName
    kind: Literal["base", "vm"] = "base"
    disk_mb: Annotated[int, Meta(ge=512, le=1 << 22)] = 8192
    suite: Annotated[str, Meta(pattern=r"^[a-z]{2,24}$")] | None = None
    include: Annotated[list[Package], Meta(max_length=256)] = []


class Reads(Struct, kw_only=True, omit_defaults=True):
    """What runs of an image read of its data, as far as that was filled on demand. Sizes in bytes.

    runs: mounts that were recorded. touched_percent: of the data. hit_rate: the share of reads, 0 to 1, that found all
    they asked for in the cache; None: no read was seen. cached_bytes: of its data in the cache, while it is mounted;
    None: it is not. denied: reads that failed since the page server started, and why the last one did.
    """

    runs: int = 0
    touched_bytes: int = 0
    touched_percent: float = 0.0
    hit_rate: float | None = None
    cached_bytes: int | None = None
    denied: int = 0
    why: str = ""


class ImageBuilder(Struct, omit_defaults=True):
    """Who packed an environment: the user id of his connection, and the label that he gave."""

    uid: int
    label: str = ""


class Image(Result):
    """An immutable image. Sizes in bytes. store: where its data is: `local`, or a store of the config.

    reads: of `image.get`, for an image that was filled on demand; None: it never was, or was not asked for.
    disk_mb, profile, agent: of a VM image: the disk that its guest sees, in MiB, what it is for, and whether dsec-agent
    is in it. below, builder: of an environment: digests of its other layers, topmost first, and who packed it.
    """

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
    reads: Reads | None = None
    disk_mb: int = 0
    profile: str = ""
    agent: bool = False
    below: list[str] = []
    builder: ImageBuilder | None = None


class ByRef(Params):
    ref: Annotated[str, Meta(min_length=1, max_length=200)]


class Verified(Result):
    """data_bytes: of data that was read and compared; none of an image on a server, whose readers compare it."""

    digest: str
    data_bytes: int = 0


class Collapse(Params):
    """`image.collapse`: one image of consecutive layers, topmost first; they stay. It is of the bottom one's kind.

    An environment stands for all its layers, and may be the only one.

    max_mb: refuse layers that hold more data together. store: where the new image's data goes.
    """

    name: ImageName
    layers: Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(min_length=1, max_length=64)]
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
