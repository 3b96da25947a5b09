"""The table of languages: languages.toml of this package, and what the configuration adds."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dsecd.errors import DsecError
from dsecd.fncallconfig import Language


def languages(more: Mapping[str, Language]) -> dict[str, Language]:
    """By name; `more` replaces."""
    text = Path(__file__).with_name("languages.toml").read_text()
    return {**msgspec.convert(tomllib.loads(text), dict[str, Language]), **more}


def find(table: Mapping[str, Language], name: str) -> Language:
    """`invalid`, with what there is, for an unknown one."""
    try:
        return table[name]
    except KeyError:
        near = difflib.get_close_matches(name, table, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(table))}"
        raise DsecError("invalid", f"unknown language {name[:40]!r}: {hint}") from None
