"""Which layers a sandbox's root is stacked from, and how its processes are started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from dsecd.erofs.model import ImageConfig, ImageKind, Manifest
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError

MAX_LOWERS: Final = 64  # overlayfs takes 500; nobody needs them, and each one costs every lookup


class Stack(Struct, frozen=True):
    """lowers: topmost first, as overlayfs wants them: toolkits (the first named on top), workspace, base."""

    lowers: tuple[Manifest, ...]
    config: ImageConfig

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(manifest.digest for manifest in self.lowers)


def compose(store: ImageStore, base: str, workspace: str | None = None, toolkits: Sequence[str] = ()) -> Stack:
    """References to a stack. Configs lie over each other as the layers do: the topmost toolkit's over all.

    base: a base, or an environment, which brings the layers that it was packed on.
    """
    if len(toolkits) + 2 > MAX_LOWERS:
        raise DsecError("invalid", f"{len(toolkits)} toolkits: a sandbox has at most {MAX_LOWERS} layers")
    bottom = stack_of(store, base)
    if bottom[0].kind != "environment":
        _of_kind(store, base, "base")
    middle = [_of_kind(store, workspace, "workspace")] if workspace is not None else []
    tops = [_of_kind(store, ref, "toolkit") for ref in toolkits]
    lowers = (*tops, *middle, *bottom)
    if len(lowers) > MAX_LOWERS:
        raise DsecError("invalid", f"{len(lowers)} layers: a sandbox has at most {MAX_LOWERS}; `image collapse` some")
    if len({manifest.digest for manifest in lowers}) != len(lowers):
        raise DsecError("invalid", "the same layer is there twice")  # overlayfs refuses a layer on itself
    config = ImageConfig()
    for manifest in reversed(lowers):
        config = config.overridden_by(manifest.config)
    return Stack(lowers, config)


def stack_of(store: ImageStore, ref: str) -> tuple[Manifest, ...]:
    """An image with all that it is stacked on, topmost first. Only environments are stacked on anything."""
    manifest = store.resolve(ref)
    return (manifest, *(store.resolve(digest) for digest in manifest.below))


def _of_kind(store: ImageStore, ref: str, kind: ImageKind) -> Manifest:
    manifest = store.resolve(ref)
    if manifest.kind != kind:
        raise DsecError("invalid", f"image {ref[:160]!r} is a {manifest.kind}, and a {kind} is needed there")
    return manifest
