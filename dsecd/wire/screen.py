"""Messages of `screen.*`: what a full VM shows, and its keyboard and pointer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from dsecd.wire.base import Id, Params, Result

Key = Annotated[str, Meta(min_length=1, max_length=64)]
Button = Literal["left", "middle", "right", "wheel-up", "wheel-down"]


class Capture(Params):
    """`screen.capture`: the screen as it is now."""

    id: Id


class Picture(Result):
    """A PNG; width and height in pixels."""

    png: bytes
    width: int
    height: int


class Input(Params):
    """`screen.input`: in this order, as far as given: move the pointer to pixel (x, y), click, type text, press keys.

    text: what a US keyboard has. keys: one after the other, each a key or a chord (`ctrl+alt+delete`, `F2`).
    """

    id: Id
    x: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    y: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    button: Button | None = None
    clicks: Annotated[int, Meta(ge=1, le=3)] = 1
    text: Annotated[str, Meta(max_length=4096)] = ""
    keys: Annotated[list[Key], Meta(max_length=256)] = []
