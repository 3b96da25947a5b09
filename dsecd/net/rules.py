"""What a sandbox may reach: `network_rules` as people write them, and as the packet filter and the forwarder need them.

One rule is `{key: allowed}`. A key is one of

    pypi                        a service of the configuration: its hosts, networks and ports
    example.org                 one host, every port of TCP and UDP
    example.org:443             one port, TCP and UDP
    *.example.org:443/tcp       every host below that domain (not itself)
    10.1.2.0/24:8000-8100/tcp   a network, and a range of ports
    [2001:db8::]/32:53/udp      IPv6 in brackets

What no rule allows is denied. A rule with `false` takes away from what others allow: addresses, or names as a whole.
Pure: no I/O, no state.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.net.addresses import Network, Plan
from dsecd.networkconfig import NetworkConfig, Service

PROTOCOLS: Final = ("tcp", "udp")
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})+")
_SERVICE: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_PORTS: Final = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/(tcp|udp))?")
_SPLIT: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\](?:/\d{1,3})?|[^:\[\]]+)(?::(?P<ports>[^:]+))?")
MAX_NAME: Final = 253


class Ports(Struct, frozen=True):
    """A range of one protocol, both ends included."""

    protocol: str
    first: int
    last: int


class Grant(Struct, frozen=True):
    """One rule of one sandbox, taken apart. names: lower case, `*.` in front for all below. ports empty: all of TCP
    and UDP. mark: what connections that it let through are known by; the same for the same meaning, and never 0."""

    key: str
    names: tuple[str, ...]
    networks: tuple[Network, ...]
    ports: tuple[Ports, ...]
    mark: int = 0

    def marked(self, owner: str) -> Grant:
        """For this sandbox: who gets its addresses after it does not get its connections."""
        text = repr((owner, self.names, [str(net) for net in self.networks], self.ports))
        mark = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFF_FFFF | 1
        return Grant(self.key, self.names, self.networks, self.ports, mark)


class Policy(Struct, frozen=True):
    """All rules of one sandbox."""

    allowed: tuple[Grant, ...] = ()
    denied: tuple[Grant, ...] = ()

    def for_name(self, name: str) -> tuple[Grant, ...]:
        """The rules that allow this name (lower case, no dot at the end); none when it is denied."""
        if any(matches(pattern, name) for grant in self.denied for pattern in grant.names):
            return ()
        return tuple(grant for grant in self.allowed if any(matches(pattern, name) for pattern in grant.names))


def matches(pattern: str, name: str) -> bool:
    return name.endswith(pattern[1:]) and len(name) > len(pattern) - 1 if pattern.startswith("*.") else name == pattern


class Compiler:
    """Turns rules into policies, by the services of the configuration and what this host never lets anybody reach."""

    def __init__(self, config: NetworkConfig, plan: Plan) -> None:
        self._plan = plan
        self._widest = {4: config.widest4, 6: config.widest6}
        self.services = {name: self._service(name, one) for name, one in config.services.items()}

    def policy(self, owner: str, rules: Mapping[str, bool]) -> Policy:
        """Of that sandbox. `invalid` for the first rule that cannot be, with what to write instead.

        Where nothing is allowed, a service may be denied that this host does not know: there is nothing it could open.
        """
        if not any(rules.values()):
            rules = {key: False for key in rules if key in self.services or not _SERVICE.fullmatch(key)}
        grants = [(self._grant(key, allowed).marked(owner), allowed) for key, allowed in rules.items()]
        return Policy(
            allowed=tuple(grant for grant, allowed in grants if allowed),
            denied=tuple(grant for grant, allowed in grants if not allowed),
        )

    def _grant(self, key: str, allowed: bool) -> Grant:
        if key in self.services:
            return self.services[key]
        if _SERVICE.fullmatch(key):
            known = ", ".join(sorted(self.services)) or "none: [network.services.NAME] in the daemon's configuration"
            raise DsecError("invalid", f"no network service {key!r}; known: {known}")
        split = _SPLIT.fullmatch(key)
        if split is None:
            raise _bad(key, "is no rule: SERVICE, HOST[:PORT[/tcp|udp]] or ADDRESS/LENGTH[:PORT[/tcp|udp]], IPv6 in []")
        names, networks = self._targets([split["host"]], key)
        ports = _ports(split["ports"], key) if split["ports"] is not None else ()
        if names and ports and not allowed:
            raise _bad(key, "denies one port of a name; names are denied whole: leave the port out")
        return Grant(key, names, networks, ports)

    def _service(self, name: str, service: Service) -> Grant:
        where = f"network.services.{name}"
        names, networks = self._targets(service.hosts, where)
        return Grant(name, names, networks, tuple(one for text in service.ports for one in _ports(text, where)))

    def _targets(self, hosts: Iterable[str], key: str) -> tuple[tuple[str, ...], tuple[Network, ...]]:
        names, networks = [], []
        for host in hosts:
            name = host.lower().rstrip(".")
            if (network := _network(host, key)) is not None:
                self._check(network, key)
                networks.append(network)
            elif _NAME.fullmatch(name) and len(name) <= MAX_NAME and not name.rpartition(".")[2].isdecimal():
                names.append(name)
            else:
                raise _bad(key, f"{host!r} is neither a host name nor a network")
        return tuple(names), tuple(networks)

    def _check(self, network: Network, key: str) -> None:
        widest = self._widest[network.version]
        if network.prefixlen < widest:
            raise _bad(key, f"/{network.prefixlen} is wider than this host allows (/{widest}): name what is needed")
        if self._plan.never(network):
            raise _bad(key, "is the host's own, a metadata service's, another sandbox's, or local: never reachable")


def _network(host: str, key: str) -> Network | None:
    text = host.replace("[", "").replace("]", "")
    if not re.fullmatch(r"[0-9.]+(/\d+)?", text) and ":" not in text:
        return None
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        raise _bad(key, str(exc)) from exc


def _ports(text: str, key: str) -> tuple[Ports, ...]:
    found = _PORTS.fullmatch(text)
    first = int(found[1]) if found else 0
    last = int(found[2]) if found and found[2] else first
    if found is None or not 0 < first <= last < 65536:
        raise _bad(key, f"{text!r} is no port: 1 to 65535, or FIRST-LAST, with /tcp or /udp")
    return tuple(Ports(protocol, first, last) for protocol in ([found[3]] if found[3] else PROTOCOLS))


def _bad(key: str, why: str) -> DsecError:
    return DsecError("invalid", f"network rule {key[:120]!r}: {why}")
