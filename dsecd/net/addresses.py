"""Which addresses belong to whom, and which nobody may ever reach. Pure.

A sandbox's addresses follow from its slot (the one that its user ids come from), so that nothing is allotted, nothing
is kept and nothing can be given twice: slot n has the pair 2n (the router's end) and 2n+1 (its own) of both subnets.
The pairs from 4096 on are the routers' own ways out, by the first slot that each serves; in the last pair is the
forwarder.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

SLOTS: Final = 4096
# Local to every machine, to a link, to nobody; where clouds keep their machines' secrets; IPv4 in disguise.
NEVER: Final[tuple[Network, ...]] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4",
        "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32",
        "::/128", "::1/128", "fe80::/10", "ff00::/8", "fd00:ec2::/32",
        "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32",
    )
)  # fmt: skip
# What a public name has no business leading to (DNS rebinding), unless the configuration says that it may.
PRIVATE: Final[tuple[Network, ...]] = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10")
)


# Whoever hands on packets of others asks for its neighbours under a link-local address, or not at all (Linux,
# ndisc_send_ns). So the near end of each link has one, and both ends of the link to the host.
LINK_NEAR: Final = "fe80::1"
LINK_FAR: Final = "fe80::2"


class Pair(Struct, frozen=True):
    """Both ends of a link, IPv4 (/31) and IPv6 (/127)."""

    near4: ipaddress.IPv4Address
    far4: ipaddress.IPv4Address
    near6: ipaddress.IPv6Address
    far6: ipaddress.IPv6Address


class Plan:
    """The addresses of one daemon."""

    def __init__(self, subnet4: str, subnet6: str, internal: Iterable[str]) -> None:
        self.subnet4 = ipaddress.IPv4Network(subnet4)
        self.subnet6 = ipaddress.IPv6Network(subnet6)
        self._internal = [ipaddress.ip_network(one) for one in internal]
        self.resolver = self.subnet4[-2]
        self.host: frozenset[Address] = frozenset()  # the host's own, as they are now

    def of(self, slot: int) -> Pair:
        """near: the router's end; far: the sandbox's."""
        return self._pair(slot)

    def uplink(self, first: int) -> Pair:
        """Of the router for sandboxes from that slot on. near: the host's end; far: the router's."""
        return self._pair(SLOTS + first)

    @property
    def resolv_conf(self) -> bytes:
        return f"nameserver {self.resolver}\noptions timeout:3 attempts:2\n".encode()

    def _pair(self, number: int) -> Pair:
        four, six = self.subnet4, self.subnet6
        return Pair(four[2 * number], four[2 * number + 1], six[2 * number], six[2 * number + 1])

    def slot(self, address: str) -> int | None:
        """Whose address that is."""
        try:
            number = int(ipaddress.IPv4Address(address)) - int(self.subnet4.network_address)
        except ValueError:
            return None
        return number // 2 if 0 < number < 2 * SLOTS and number % 2 else None

    def taken(self) -> Address | None:
        """An address of the host that sandboxes should have. The ways out of other daemons' routers are none."""
        for address in self.host:
            base = (self.subnet4 if address.version == 4 else self.subnet6).network_address
            if 0 <= int(address) - int(base) < 2 * SLOTS:
                return address
        return None

    def never(self, network: Network) -> bool:
        """Whether all of it is what nobody may reach."""
        return any(_within(network, one) for one in self.forbidden(network.version))

    def forbidden(self, version: int) -> list[Network]:
        """What nobody may reach, the host's own addresses included; sorted, nothing twice."""
        found = [one for one in (*NEVER, self.subnet4, self.subnet6) if one.version == version]
        found += [ipaddress.ip_network(one) for one in self.host if one.version == version]
        return list(ipaddress.collapse_addresses(found))  # type: ignore[type-var]  # all of one version

    def answerable(self, text: str) -> bool:
        """Whether a name may lead to this address."""
        address = ipaddress.ip_network(text)
        if self.never(address):
            return False
        private = any(_within(address, one) for one in PRIVATE)
        return not private or any(_within(address, one) for one in self._internal)


def _within(inner: Network, outer: Network) -> bool:
    return inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]
