"""What the tables of the configuration share: finding what is wrong in one, where it stands, and writing an example.

For tables of tables, `[stores.NAME]` and `[devices.NAME]`, and for single ones, `[fncall]`; `did_you_mean` and `reason`
for every other key as well.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

Found = Iterator[tuple[str, str]]  # (key, what is wrong and what is accepted)


def did_you_mean(key: str, struct: type[Struct]) -> str:
    """The end of a sentence about a key that the struct does not have; "" when none is near."""
    near = difflib.get_close_matches(key, struct.__struct_fields__, 1)
    return f"; did you mean {near[0]}?" if near else ""


def reason(error: msgspec.ValidationError) -> str:
    """What msgspec says, without where."""
    return str(error).partition(" - at")[0]


def unknown_keys(table: Mapping[str, Any], struct: type[Struct], what: str) -> Found:
    for key in table:
        if key not in struct.__struct_fields__:
            yield key, f"{what}: unknown key {key!r}{did_you_mean(key, struct)}"


def first_wrong(
    top: str, tables: object, name_trouble: Callable[[str], str], of_one: Callable[[str, dict[str, Any]], Found]
) -> tuple[str, str, str] | None:
    """The first thing wrong with a parsed table of tables, as (name, key, what is wrong and what is accepted)."""
    if not isinstance(tables, dict):
        return "", "", f"{top} is a table of tables: [{top}.NAME]"
    for name, table in tables.items():
        if trouble := name_trouble(name):
            return name, "", trouble
        if not isinstance(table, dict):
            return name, "", f"{top}.{name} is a table: [{top}.{name}]"
        if (found := next(of_one(name, table), None)) is not None:
            return name, *found
    return None


def line_of(text: str, top: str, name: str, key: str) -> int:
    """Where that key of table [top.name] stands; the table's own line where it has no such key."""
    header = re.compile(rf'\s*\[\s*"?{top}"?\s*\.\s*["\']?{re.escape(name)}["\']?\s*\]')
    table = 0
    for number, line in enumerate(text.splitlines(), 1):
        if header.match(line):
            table = number
        elif table and line.lstrip().startswith("["):
            break
        elif table and key and re.match(rf'\s*"?{re.escape(key)}"?\s*=', line):
            return number
    if table:
        return table
    lines = enumerate(text.splitlines(), 1)
    return next((number for number, line in lines if re.match(rf"\s*\[?\s*{top}\b", line)), 1)


def described(struct: type[Struct]) -> Iterator[tuple[str, Meta]]:
    """Its keys, and what is said of each."""
    for key, hint in get_type_hints(struct, include_extras=True).items():
        yield key, next(meta for meta in get_args(hint) if isinstance(meta, Meta))


def example(about: str, top: str, defaults: Struct, values: Mapping[str, str]) -> str:
    """Every key of a table of tables as comments, since none is there by default. values: in place of the defaults."""
    out = [f"# {about}", f"# [{top}.NAME]"]
    for key, meta in described(type(defaults)):
        default = msgspec.json.encode(getattr(defaults, key)).decode()
        out += [f"#   {meta.description}", f"# {key} = {values.get(key, default)}"]
    return "\n".join(out) + "\n"


def wrong_in_table(top: str, table: object, struct: type[Struct]) -> tuple[str, str] | None:
    """The first thing wrong with a parsed single table, as (key, what is wrong)."""
    if not isinstance(table, dict):
        return top, f"{top} is a table: [{top}]"
    try:
        msgspec.convert(table, struct)
    except msgspec.ValidationError as exc:
        key = str(exc).rpartition("$")[2].strip("`.").replace("[...]", "")
        value: Any = table
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        said = f" = {value!r}" if value is not None and not isinstance(value, dict) else ""
        return key.rpartition(".")[2] or top, f"{top}.{key}{said}: {reason(exc)}"
    return None


def table_example(about: str, top: str, defaults: Struct, *, without: tuple[str, ...] = ()) -> str:
    """Every key of a single table as comments. without: keys that are named, and whose default is not shown."""
    out = [f"# {about}", f"# [{top}]"]
    for key, meta in described(type(defaults)):
        out += ["#", f"# {meta.description}"]
        if key not in without:
            out += [
                f"# {key} = {line}" if not at else f"# {line}" for at, line in enumerate(_toml(getattr(defaults, key)))
            ]
    return "\n".join(out) + "\n"


def _toml(value: object) -> list[str]:
    """A value in TOML; a list that is long, one item a line; a table of texts inline."""
    if isinstance(value, dict):
        return ["{ " + ", ".join(f"{key} = {_text(one)}" for key, one in value.items()) + " }"] if value else ["{}"]
    text = msgspec.json.encode(value).decode()
    if isinstance(value, list | tuple) and len(text) > 80:
        return ["[", *(f"    {_text(one)}," for one in value), "]"]
    return [text]


def _text(value: object) -> str:
    """Literal where it has backslashes, as regular expressions do."""
    if isinstance(value, str) and "\\" in value and "'" not in value:
        return f"'{value}'"
    return msgspec.json.encode(value).decode()
