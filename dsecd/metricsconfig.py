"""`[metrics]` of the configuration: where metrics are read, and how many requests' traces are kept."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

from msgspec import Meta, Struct

from dsecd.configtables import table_example, wrong_in_table


class MetricsConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All keys of [metrics]."""

    socket: Annotated[
        str,
        Meta(
            description="Socket that answers HTTP with metrics (OpenMetrics). Empty: metrics.sock in run_dir.",
            pattern=r"^(/[^\0]{1,106})?$",
        ),
    ] = ""
    socket_mode: Annotated[
        str, Meta(description="Its mode, octal; its group is socket_group.", pattern=r"^0?[0-7]{3}$")
    ] = "0660"
    listen: Annotated[
        str,
        Meta(
            description="The same on a port: 127.0.0.1:9464 or [::1]:9464, for all users of this host; only loopback. "
            "Empty: none."
        ),
    ] = ""
    traces: Annotated[
        int, Meta(description="So many of the last requests can be asked for with `dsecctl trace`.", ge=0, le=100_000)
    ] = 2000


def documented() -> str:
    """The defaults as TOML, all of it as comments."""
    return table_example("Metrics and traces.", "metrics", MetricsConfig())


def wrong(table: object) -> tuple[str, str] | None:
    """The first thing wrong with a parsed `metrics` table, as (key, what is wrong)."""
    if (found := wrong_in_table("metrics", table, MetricsConfig)) is not None:
        return found
    said: Any = table.get("listen", "") if isinstance(table, dict) else ""
    return ("listen", why) if said and (why := not_loopback(said)) else None


def address(listen: str) -> tuple[str, int]:
    """Host and port. ValueError: it is not of that form."""
    host, _, port = listen.rpartition(":")
    found, number = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")), int(port)
    if not 0 < number < 65536:
        raise ValueError(f"port {number}")
    return str(found), number


def not_loopback(listen: str) -> str:
    """Why it may not be listened on; "" it may."""
    try:
        host, _ = address(listen)
    except ValueError:
        return f"metrics.listen = {listen!r} is no address and port such as 127.0.0.1:9464"
    if not ipaddress.ip_address(host).is_loopback:
        return (
            f"metrics.listen = {listen!r} is not a loopback address, and whoever reaches it may read it: take "
            "127.0.0.1, and let something that asks who is there pass it on"
        )
    return ""
