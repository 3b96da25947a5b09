"""`[devices.NAME]` of the configuration: pools of devices that containers may ask for by the pool's name."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from dsecd.configtables import Found, example, first_wrong, reason, unknown_keys

NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
MATCH: Final = r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+=\S+$"


class DevicePool(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One pool. Its devices are found by name in the CDI files of `cdi_dirs`."""

    match: Annotated[
        tuple[Annotated[str, Meta(max_length=256, pattern=MATCH)], ...],
        Meta(
            description="CDI names (vendor/class=device); `*` and `?` stand for any of the device's name.",
            min_length=1,
            max_length=64,
        ),
    ]
    share: Annotated[int, Meta(description="Sandboxes that may have one device at once; 1: it is theirs alone.", ge=1,
                               le=1000)] = 1  # fmt: skip
    hooks: Annotated[
        bool, Meta(description="Run the hooks of its CDI files: programs, as the host's root, at each start.")
    ] = False


def wrong(pools: object) -> tuple[str, str, str] | None:
    """As `configtables.first_wrong`, of a parsed `devices` table."""
    return first_wrong("devices", pools, _name_trouble, _of_one)


def _name_trouble(name: str) -> str:
    return "" if NAME.fullmatch(name) else f"{name!r} is no name for a device pool: [a-z0-9][a-z0-9-]*, at most 32"


def _of_one(name: str, table: dict[str, Any]) -> Found:
    yield from unknown_keys(table, DevicePool, f"device pool {name}")
    if "match" not in table:
        yield "", f'device pool {name}: match is missing; it is like ["vendor.com/class=*"]'
        return
    try:
        msgspec.convert(table, DevicePool)
    except msgspec.ValidationError as e:
        key = re.split(r"[\[`]", str(e).rpartition("$.")[2])[0]
        why = reason(e)
        if key == "match" and "regex" in why:
            why = "each is vendor.com/class=device"
        yield key, f"device pool {name}: {key} = {table.get(key)!r}: {why}"


def documented() -> str:
    """Every key, as a commented example."""
    about = "Pools of devices that sandboxes may ask for (docs/devices.md); as many tables as there are pools."
    return example(about, "devices", DevicePool(match=("v/c=d",)), {"match": '["nvidia.com/gpu=*"]'})
