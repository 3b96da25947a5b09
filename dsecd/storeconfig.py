"""`[stores.NAME]` of the configuration: where the data of images may live besides the local disk."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from dsecd.configtables import Found, example, first_wrong, reason, unknown_keys

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
    direct: Annotated[
        bool, Meta(description="Kind path: mount images straight on it; a few samples are checked then.")
    ] = False
    squeezed: Annotated[
        bool,
        Meta(description="Kinds path and http: blobs may have squeezed twins, made by `dsecd.erofs.stores.squeezed`."),
    ] = False
    insecure: Annotated[bool, Meta(description="Kind registry: plain HTTP. Loopback ones are always spoken to so.")] = (
        False
    )
    redirects: Annotated[
        tuple[str, ...], Meta(description="Hosts (host:port) that the server may send us to, as an object store.")
    ] = ()
    authfile: Annotated[str, Meta(description="Kind registry: a file as `registry_authfile`, for it alone.")] = ""


def wrong(stores: object) -> tuple[str, str, str] | None:
    """As `configtables.first_wrong`, of a parsed `stores` table."""
    return first_wrong("stores", stores, _name_trouble, _of_one)


def _name_trouble(name: str) -> str:
    if NAME.fullmatch(name) and name not in RESERVED:
        return ""
    return f"{name!r} is no name for a store: [a-z0-9][a-z0-9-]*, at most 32, and not `local`"


def _of_one(name: str, table: dict[str, Any]) -> Found:
    yield from unknown_keys(table, StoreConfig, f"store {name}")
    if table.get("kind") not in get_args(Kind):
        given = f"kind = {table['kind']!r} is" if "kind" in table else "kind is missing; it is"
        yield "kind", f"store {name}: {given} one of {', '.join(get_args(Kind))}"
    try:
        store = msgspec.convert(table, StoreConfig)
    except msgspec.ValidationError as e:
        key = str(e).rpartition("$.")[2].rstrip("`").partition("[")[0]
        yield key, f"store {name}: {key} = {table.get(key)!r}: {reason(e)}"
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
    if store.squeezed and (store.direct or store.kind == "registry"):
        yield "squeezed", f"store {name}: squeezed is for kinds path and http, and not with direct"


def with_login(store: StoreConfig, authfile: str) -> StoreConfig:
    """With the daemon's logins, where it is a registry and has none of its own."""
    if store.kind != "registry" or store.authfile:
        return store
    return msgspec.structs.replace(store, authfile=authfile)


def documented() -> str:
    """Every key, as a commented example."""
    about = "Where the data of images may live besides the local disk; as many tables as there are stores."
    values = {"kind": '"path"', "path": '"/srv/dsec-images"'}
    return example(about, "stores", StoreConfig(kind="path"), values)
