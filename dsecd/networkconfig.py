"""`[network]` of the configuration: addresses of sandboxes, resolvers, and services that rules may name."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from dsecd.configtables import described, wrong_in_table

ServiceName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class Service(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One service, mirrors included: host names (`*.example.org`: all below it) and networks, and its ports."""

    hosts: Annotated[tuple[Annotated[str, Meta(max_length=255)], ...], Meta(min_length=1, max_length=256)]
    ports: Annotated[tuple[Annotated[str, Meta(max_length=20)], ...], Meta(max_length=32)] = ("80/tcp", "443/tcp")


class NetworkConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All keys of [network]."""

    subnet4: Annotated[
        str, Meta(description="Addresses of sandboxes, a /18 that this host does not use: only the host sees them.")
    ] = "100.88.0.0/18"
    subnet6: Annotated[str, Meta(description="The same for IPv6, a /112.")] = "fd64:7365:6364::/112"
    resolvers: Annotated[
        list[str], Meta(description="DNS servers, `address` or `address#port`. Empty: the host's /etc/resolv.conf.")
    ] = []
    internal: Annotated[
        list[str],
        Meta(
            description="Private networks that names may lead to, as those of a mirror of your own. An answer with "
            "another private address is left out."
        ),
    ] = []
    widest4: Annotated[
        int, Meta(description="Shortest prefix of an IPv4 network that a rule may name.", ge=0, le=32)
    ] = 8
    widest6: Annotated[
        int, Meta(description="Shortest prefix of an IPv6 network that a rule may name.", ge=0, le=128)
    ] = 16
    services: Annotated[
        dict[ServiceName, Service],
        Meta(description="What rules may call by name: [network.services.NAME] with `hosts` and `ports`."),
    ] = {}


EXAMPLE = """#
# [network.services.pypi]
# hosts = ["packages.example.org", "*.files.example.org", "10.20.0.0/24"]
# ports = ["443/tcp"]
"""


def documented() -> str:
    """The defaults as TOML, all of it as comments: what is written below a table that is open would be its."""
    out = ["# Networks of sandboxes.", "# [network]"]
    for name, meta in described(NetworkConfig):
        out += ["#", f"# {meta.description}"]
        if name != "services":
            out.append(f"# {name} = {msgspec.json.encode(getattr(NetworkConfig(), name)).decode()}")
    return "\n".join(out) + "\n" + EXAMPLE


def wrong(table: object) -> tuple[str, str] | None:
    """The first thing wrong with a parsed `network` table, as (key, what is wrong)."""
    return wrong_in_table("network", table, NetworkConfig) or _networks(msgspec.convert(table, NetworkConfig))


def _networks(config: NetworkConfig) -> tuple[str, str] | None:
    for key, version, length in (("subnet4", 4, 18), ("subnet6", 6, 112)):
        if (net := _network(getattr(config, key))) is None or net.version != version or net.prefixlen != length:
            return key, f"network.{key} = {getattr(config, key)!r} is not an IPv{version} network of /{length}"
    for one in config.internal:
        if _network(one) is None:
            return "internal", f"network.internal: {one!r} is not a network (address/length)"
    for one in config.resolvers:
        if resolver(one) is None:
            return "resolvers", f"network.resolvers: {one!r} is not an address, or address#port"
    return None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def resolver(text: str) -> tuple[str, int] | None:
    """Address and port of a DNS server; None: it is none."""
    host, _, port = text.partition("#")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    if not port:
        return host, 53
    return (host, int(port)) if port.isdecimal() and 0 < int(port) < 65536 else None
