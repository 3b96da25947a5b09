"""Which keys of a US keyboard write which characters, by QEMU's names of keys (QKeyCode in its qapi/ui.json)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from dsecd.errors import DsecError

SHIFT: Final = "shift"

_SIGNS: Final = {
    " ": "spc", "\n": "ret", "\t": "tab", "\b": "backspace", "\x1b": "esc", "-": "minus", "=": "equal",
    "[": "bracket_left", "]": "bracket_right", "\\": "backslash", ";": "semicolon", "'": "apostrophe",
    "`": "grave_accent", ",": "comma", ".": "dot", "/": "slash",
}  # fmt: skip
_SHIFTED: Final = {
    "!": "1", "@": "2", "#": "3", "$": "4", "%": "5", "^": "6", "&": "7", "*": "8", "(": "9", ")": "0", "_": "minus",
    "+": "equal", "{": "bracket_left", "}": "bracket_right", "|": "backslash", ":": "semicolon", '"': "apostrophe",
    "~": "grave_accent", "<": "comma", ">": "dot", "?": "slash",
}  # fmt: skip

# Character: keys to hold down together.
CHARACTERS: Final[Mapping[str, tuple[str, ...]]] = {
    **{one: (one,) for one in "abcdefghijklmnopqrstuvwxyz0123456789"},
    **{one.upper(): (SHIFT, one) for one in "abcdefghijklmnopqrstuvwxyz"},
    **{one: (key,) for one, key in _SIGNS.items()},
    **{one: (SHIFT, key) for one, key in _SHIFTED.items()},
}

# What people call keys: QEMU's names.
_NAMES: Final = {
    "enter": "ret", "return": "ret", "space": "spc", "escape": "esc", "del": "delete", "ins": "insert",
    "control": "ctrl", "super": "meta_l", "win": "meta_l", "meta": "meta_l", "pageup": "pgup", "pagedown": "pgdn",
    "printscreen": "print", "capslock": "caps_lock", "numlock": "num_lock", "altgr": "alt_r",
}  # fmt: skip
_KEY: Final = re.compile(r"[a-z0-9_]{1,32}")


def keys_for(character: str) -> tuple[str, ...]:
    """DsecError `invalid` for what a US keyboard has no key for."""
    keys = CHARACTERS.get(character)
    if keys is None:
        raise DsecError("invalid", f"there is no key for {character!r}: only what a US keyboard has can be typed")
    return keys


def chord(text: str) -> tuple[str, ...]:
    """`ctrl+alt+delete`, `F2`, `shift+a`: the keys to hold down together, in QEMU's names."""
    keys: list[str] = []
    for part in text.split("+") if text != "+" else ["+"]:
        word = part.strip()
        if len(word) == 1:
            keys += keys_for(word)
        else:
            keys.append(_NAMES.get(word.lower(), word.lower()))
    if not keys or len(keys) > 8 or not all(_KEY.fullmatch(key) for key in keys):
        raise DsecError("invalid", f"{text[:80]!r} is no key or keys joined by +, as ctrl+alt+delete or F2")
    return tuple(keys)
