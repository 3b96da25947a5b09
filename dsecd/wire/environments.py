"""Messages of `sandbox.pack_diff` and `environment.*`: sandboxes that become images, and how these travel."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dsecd.wire.base import Id, Params, Result, Text
from dsecd.wire.images import Image, ImageName


class PackDiff(Params):
    """`sandbox.pack_diff`: what a running or paused container or microVM wrote becomes the environment `name`, a
    layer above its own.

    leave_out: paths inside, with `*`, `?` and `**`, that the environment must not show: answers. They are hidden also
    where a lower layer has them. label: of the builder, free text. The sandbox itself is not changed.
    """

    id: Id
    name: ImageName
    leave_out: Annotated[list[Annotated[str, Meta(pattern=r"^/", max_length=1024)]], Meta(max_length=256)] = []
    label: Text = ""


class Packed(Result):
    """left_out: entries that were not packed: residue of the builder, and what was to be left out."""

    image: Image
    left_out: int = 0


class Export(Params):
    """`environment.export`: the environment (or any image) with all layers below it, as a tar of an OCI layout."""

    ref: Annotated[str, Meta(min_length=1, max_length=200)]
    window: Annotated[int, Meta(ge=4096, le=8 << 20)] = 1 << 20


class Exported(Result):
    """size: bytes of the tar."""

    digest: str
    size: int = 0


class Load(Params):
    """`environment.import`: from the stream of an exported one. name: as it was exported, unless given.

    Only it gets a name; layers that it needs and that are not here come without one.
    """

    name: ImageName | None = None


class RulesParams(Params):
    """`environment.rules`."""


class Rule(Struct):
    """One rule that packs are held against, or one thing that no pack has."""

    rule: str
    value: str
    what: str


class Rules(Result):
    rules: list[Rule]
