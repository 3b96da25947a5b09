"""The packet filter as text for `nft -f`: one table in the router's namespace, one chain each way for each sandbox.

Pure; every text is one transaction, so no packet ever sees half of a change. All that varies is a number, a network or
a word of ours.

A connection that a rule lets through is marked with that rule (`Grant.mark`), and its packets pass, both ways, as long
as the sandbox's chains name the mark. So taking a rule away cuts what it had let through at once, and a name's
addresses may go from their set without cutting anything.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final

from dsecd.net.addresses import Network, Pair, Plan
from dsecd.net.rules import Grant, Policy, Ports

TABLE: Final = "dsecd"
UPLINK: Final = "out"
LOG_GROUP: Final = 1
LEARNT_MAX: Final = 4096  # addresses of one rule and family
CONNECTIONS: Final = 4096  # of one sandbox: the kernel's table of them is one for the whole host
DNS_PER_S: Final = 100  # packets to the forwarder


def link_name(slot: int) -> str:
    """The router's end of a sandbox's link."""
    return f"box{slot}"


def set_name(slot: int, mark: int, version: int) -> str:
    """Where addresses go that names of this rule were answered with."""
    return f"b{slot}_{mark:08x}_{version}"


# Said at once, so that nobody waits: a reset also ends what was let through before.
_REJECT: Final = ("meta l4proto tcp reject with tcp reset", "reject with icmpx type admin-prohibited")
_CHAINS: Final = {
    "guard": "filter hook prerouting priority raw; policy drop",
    "input": "filter hook input priority filter; policy drop",
    "forward": "filter hook forward priority filter; policy drop",
    "source": "nat hook postrouting priority srcnat; policy accept",
}


def base(plan: Plan) -> str:
    """The table without sandboxes; may be said again. What is of no sandbox is dropped, and so is what claims to come
    from another one."""
    lines = [f"add table inet {TABLE}"]
    lines += [f"add chain inet {TABLE} {name} {{ type {kind}; }}" for name, kind in _CHAINS.items()]
    lines += [f"flush chain inet {TABLE} {name}" for name in _CHAINS]
    return (
        "\n".join(lines)
        + f"""
table inet {TABLE} {{
    set bound4 {{ type ifname . ipv4_addr; }}
    set bound6 {{ type ifname . ipv6_addr; }}
    set never4 {{ type ipv4_addr; flags interval; }}
    set never6 {{ type ipv6_addr; flags interval; }}
    map from_box {{ type ifname : verdict; }}
    map to_box {{ type ifname : verdict; }}
    map ask {{ type ifname : verdict; }}
    chain guard {{
        iifname "lo" accept
        iifname "{UPLINK}" accept
        iifname . ip saddr @bound4 accept
        iifname . ip6 saddr @bound6 accept
    }}
    chain input {{
        iifname "lo" accept
        icmpv6 type nd-neighbor-solicit ip6 hoplimit 255 accept
        icmpv6 type nd-neighbor-advert ip6 hoplimit 255 accept
        iifname vmap @ask
    }}
    chain forward {{
        iifname vmap @from_box
        oifname vmap @to_box
    }}
    chain source {{
        oifname "{UPLINK}" masquerade
    }}
}}
{never(plan)}"""
    )


def never(plan: Plan) -> str:
    """The addresses that nobody may reach, as they are now."""
    lines = []
    for version in (4, 6):
        lines.append(f"flush set inet {TABLE} never{version}")
        lines.append(f"add element inet {TABLE} never{version} {_braces(plan.forbidden(version))}")
    return "\n".join(lines) + "\n"


def host(name: str, pair: Pair) -> str:
    """The host's own part: it lets the router out under its own address, and in nowhere. name: of link and table."""
    return f"""
add table inet {name}
delete table inet {name}
table inet {name} {{
    chain input {{
        type filter hook input priority filter - 5; policy accept;
        iifname "{name}" icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        iifname "{name}" drop
    }}
    chain source {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {pair.far4} masquerade
        ip6 saddr {pair.far6} masquerade
    }}
}}
"""


def open_box(slot: int, pair: Pair) -> str:
    """A sandbox that may nothing yet. Before its link is there."""
    name, table = link_name(slot), f"inet {TABLE}"
    return f"""
add counter {table} out{slot}
add counter {table} in{slot}
add counter {table} no{slot}
add chain {table} out{slot}
add chain {table} in{slot}
add chain {table} ask{slot}
add chain {table} refuse{slot}
add element {table} bound4 {{ "{name}" . {pair.far4} }}
add element {table} bound6 {{ "{name}" . {pair.far6} }}
add element {table} from_box {{ "{name}" : goto out{slot} }}
add element {table} to_box {{ "{name}" : goto in{slot} }}
add element {table} ask {{ "{name}" : goto ask{slot} }}
"""


def rules(slot: int, policy: Policy, plan: Plan, old_sets: Iterable[str], *, log: bool) -> tuple[str, list[str]]:
    """All rules of a sandbox in place of those it had, and the names of its sets then. old_sets: those it has.

    Sets have the rule's mark in their names and never change with the rules: a packet that is looked at while these are
    exchanged goes by the old rules, but sees sets as they are afterwards. For the same reason no rule has a set without
    a name (`{ 80, 443 }`), which would be empty for it.
    """
    table = f"inet {TABLE}"
    lines, sets = [], []
    for grant in (*policy.allowed, *policy.denied):
        for version in (4, 6):
            if grant.names and grant in policy.allowed:
                name = set_name(slot, grant.mark, version)
                lines.append(f"add set {table} {name} {{ type ipv{version}_addr; flags timeout; size {LEARNT_MAX}; }}")
                sets.append(name)
            if networks := [one for one in grant.networks if one.version == version]:
                name = _static_name(slot, grant, version)
                merged = list(ipaddress.collapse_addresses(networks))  # type: ignore[type-var]  # all of one version
                lines.append(f"add set {table} {name} {{ type ipv{version}_addr; flags interval; }}")
                if name not in old_sets:
                    lines.append(f"add element {table} {name} {_braces(merged)}")
                sets.append(name)
    for chain, body in (
        ("out", _out(slot, policy)),
        ("in", _in(slot, policy)),
        ("ask", _ask(slot, plan)),
        ("refuse", _refuse(slot, log)),
    ):
        lines.append(f"flush chain {table} {chain}{slot}")
        lines += [f"add rule {table} {chain}{slot} {rule}" for rule in body]
    lines += [f"delete set {table} {name}" for name in old_sets if name not in sets]
    return "\n".join(lines) + "\n", sets


def close_box(slot: int, pair: Pair, sets: Iterable[str]) -> str:
    """Nothing of it is left."""
    name, table = link_name(slot), f"inet {TABLE}"
    lines = [
        f'delete element {table} from_box {{ "{name}" }}',
        f'delete element {table} to_box {{ "{name}" }}',
        f'delete element {table} ask {{ "{name}" }}',
        f'delete element {table} bound4 {{ "{name}" . {pair.far4} }}',
        f'delete element {table} bound6 {{ "{name}" . {pair.far6} }}',
    ]
    chains = [f"{chain}{slot}" for chain in ("out", "in", "ask", "refuse")]
    lines += [f"flush chain {table} {chain}" for chain in chains]
    lines += [f"delete chain {table} {chain}" for chain in chains]
    lines += [f"delete set {table} {one}" for one in sets]
    lines += [f"delete counter {table} {counter}{slot}" for counter in ("out", "in", "no")]
    return "\n".join(lines) + "\n"


def _out(slot: int, policy: Policy) -> list[str]:
    refuse = f"goto refuse{slot}"
    lines = [f"counter name out{slot}"]
    lines += [f"{match} {refuse}" for grant in policy.denied for match in _static(slot, grant)]
    # Before anything is let through, whatever a name was answered with and a network contains.
    lines += [f"ip daddr @never4 {refuse}", f"ip6 daddr @never6 {refuse}", f'oifname != "{UPLINK}" {refuse}']
    lines += [f"{match} accept" for match in _known(policy, "ct state established,related")]
    lines += [f"ct state != new {refuse}", f"ct count over {CONNECTIONS} {refuse}"]
    for grant in policy.allowed:
        matches = [*_static(slot, grant), *_learnt(slot, grant)]
        lines += [f"{match} ct mark set {grant.mark:#x} accept" for match in matches]
    return [*lines, refuse]


def _in(slot: int, policy: Policy) -> list[str]:
    """Answers alone: nobody outside begins anything."""
    match = f'iifname "{UPLINK}" ct direction reply ct state established,related'
    return [f"{one} counter name in{slot} accept" for one in _known(policy, match)]


def _ask(slot: int, plan: Plan) -> list[str]:
    lines = [f"counter name out{slot}"]
    for protocol in ("tcp", "udp"):
        asks = f"ip daddr {plan.resolver} {protocol} dport 53"
        lines += [f"{asks} limit rate over {DNS_PER_S}/second burst {4 * DNS_PER_S} packets drop", f"{asks} accept"]
    return [*lines, f"goto refuse{slot}"]


def _refuse(slot: int, log: bool) -> list[str]:
    said = f'limit rate 5/second burst 20 packets log group {LOG_GROUP} snaplen 64 prefix "{slot}"'
    return [f"counter name no{slot}", *([said] if log else []), *_REJECT]


def _known(policy: Policy, match: str) -> list[str]:
    return [f"{match} ct mark {mark:#x}" for mark in sorted({grant.mark for grant in policy.allowed})]


def _static(slot: int, grant: Grant) -> list[str]:
    """Matches for the networks that the rule names."""
    versions = {network.version for network in grant.networks}
    return [f"{word} daddr @{_static_name(slot, grant, version)} {ports}"
            for version, word in ((4, "ip"), (6, "ip6")) if version in versions
            for ports in _ports(grant.ports)]  # fmt: skip


def _static_name(slot: int, grant: Grant, version: int) -> str:
    return f"n{slot}_{grant.mark:08x}_{version}"


def _learnt(slot: int, grant: Grant) -> list[str]:
    if not grant.names:
        return []
    return [
        f"{word} daddr @{set_name(slot, grant.mark, version)} {ports}"
        for version, word in ((4, "ip"), (6, "ip6"))
        for ports in _ports(grant.ports)
    ]


def _ports(ports: Sequence[Ports]) -> list[str]:
    """One match for each range."""
    if not ports:
        return ["meta l4proto tcp", "meta l4proto udp"]
    found = sorted({(one.protocol, one.first, one.last) for one in ports})
    return [f"{protocol} dport {first}-{last}" if first < last else f"{protocol} dport {first}"
            for protocol, first, last in found]  # fmt: skip


def _braces(networks: Iterable[Network]) -> str:
    return "{ " + ", ".join(map(str, networks)) + " }"
