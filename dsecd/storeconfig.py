"""`[stores.NAME]` of the configuration: where the data of images may live besides the local disk."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

Kind = Literal["path", "http", "registry"]

NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
RESERVED: Final = ("local",)  # what an image's manifest calls the host's own disk
REPOSITORY: Final = re.compile(r"[A-Za-z0-9.-]+(?::\d+)?/[a-z0-9]+(?:[._/-][a-z0-9]+)*")


class StoreConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One store. Which of `path` and `url` it needs, its kind says; the other stays empty."""

    kind: Annotated[Kind, Meta(description="path (any mounted file system), http, or registry.")]
    path: Annotated[str, Meta(description="Kind path: the absolute path of a directory that hosts may share.")] = ""
    url: Annotated[
        str,
        Meta(description="Kind http: http(s)://host/prefix, blobs below it; kind registry: host[:port]/repository."),
    ] = ""
    direct: Annotated[bool, Meta(description="Kind path: mount images straight on it; nothing checks its bytes.")] = (
        False
    )
    insecure: Annotated[bool, Meta(description="Kind registry: plain HTTP. Loopback ones are always spoken to so.")] = (
        False
    )
    redirects: Annotated[
        tuple[str, ...], Meta(description="Hosts (host:port) that the server may send us to, as an object store.")
    ] = ()
    authfile: Annotated[str, Meta(description="Kind registry: a containers-auth.json(5) file with its login.")] = ""


def wrong(stores: object) -> tuple[str, str, str] | None:
    """The first thing wrong with a parsed `stores` table, as (name, key, what is wrong and what is accepted)."""
    if not isinstance(stores, dict):
        return "", "", "stores is a table of tables: [stores.NAME]"
    for name, table in stores.items():
        if not NAME.fullmatch(name) or name in RESERVED:
            return name, "", f"{name!r} is no name for a store: [a-z0-9][a-z0-9-]*, at most 32, and not `local`"
        if not isinstance(table, dict):
            return name, "", f"stores.{name} is a table: [stores.{name}]"
        if (found := next(_of_one(name, table), None)) is not None:
            return name, *found
    return None


def _of_one(name: str, table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in table:
        if key not in StoreConfig.__struct_fields__:
            near = difflib.get_close_matches(key, StoreConfig.__struct_fields__, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield key, f"store {name}: unknown key {key!r}{hint}"
    if table.get("kind") not in get_args(Kind):
        given = f"kind = {table['kind']!r} is" if "kind" in table else "kind is missing; it is"
        yield "kind", f"store {name}: {given} one of {', '.join(get_args(Kind))}"
    try:
        store = msgspec.convert(table, StoreConfig)
    except msgspec.ValidationError as e:
        key = str(e).rpartition("$.")[2].rstrip("`").partition("[")[0]
        yield key, f"store {name}: {key} = {table.get(key)!r}: {str(e).partition(' - at')[0]}"
        return
    needed, other = ("path", "url") if store.kind == "path" else ("url", "path")
    if getattr(store, other):
        yield other, f"store {name}: {other} is not for kind {store.kind}, which has {needed}"
    url = urlsplit(store.url)
    accepted = {
        "path": (store.path.startswith("/") and "\0" not in store.path, "an absolute path"),
        "http": (url.scheme in ("http", "https") and bool(url.netloc), "http(s)://host/prefix"),
        "registry": (REPOSITORY.fullmatch(store.url) is not None, "host[:port]/repository"),
    }
    good, what = accepted[store.kind]
    if not good:
        value = getattr(store, needed)
        given = f"{needed} = {value!r} is not {what}" if value else f"{needed} is missing; it is {what}"
        yield needed, f"store {name}: {given}"
    if store.direct and store.kind != "path":
        yield "direct", f"store {name}: direct is for kind path only"


def line_of(text: str, name: str, key: str) -> int:
    """Where that key of that table stands; the table's own line where it has no such key."""
    header = re.compile(rf'\s*\[\s*"?stores"?\s*\.\s*["\']?{re.escape(name)}["\']?\s*\]')
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
    return next((number for number, line in lines if re.match(r"\s*\[?\s*stores\b", line)), 1)


def documented() -> str:
    """Every key, as a commented example: no store is there by default."""
    out = [
        "# Where the data of images may live besides the local disk; as many tables as there are stores.",
        "# [stores.NAME]",
    ]
    examples = {"kind": '"path"', "path": '"/srv/dsec-images"'}
    for key, hint in get_type_hints(StoreConfig, include_extras=True).items():
        meta = next(m for m in get_args(hint) if isinstance(m, Meta))
        default = msgspec.json.encode(getattr(StoreConfig(kind="path"), key)).decode()
        out += [f"#   {meta.description}", f"# {key} = {examples.get(key, default)}"]
    return "\n".join(out) + "\n"
