"""Network rules: their grammar, what is never reachable, and what the packet filter is told."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.errors import DsecError
from dsecd.net import filter as packet_filter
from dsecd.net.addresses import NEVER, Plan
from dsecd.net.rules import Compiler, Policy, matches
from dsecd.networkconfig import NetworkConfig, Service, wrong

CONFIG = NetworkConfig(
    internal=["10.20.0.0/16"],
    services={
        "pypi": Service(hosts=("packages.example.org", "*.files.example.org", "10.20.0.0/24"), ports=("443/tcp",)),
        "dns-over-there": Service(hosts=("[2001:db8:53::]/48",), ports=("53",)),
    },
)
PLAN = Plan(CONFIG.subnet4, CONFIG.subnet6, CONFIG.internal)
COMPILER = Compiler(CONFIG, PLAN)


def one(key: str) -> Policy:
    return COMPILER.policy("box", {key: True})


@pytest.mark.parametrize(
    ("key", "names", "networks", "ports"),
    [
        ("example.org", ["example.org"], [], []),
        ("EXAMPLE.org", ["example.org"], [], []),
        ("example.org:443", ["example.org"], [], ["443-443/tcp", "443-443/udp"]),
        ("*.example.org:8000-8100/tcp", ["*.example.org"], [], ["8000-8100/tcp"]),
        ("_srv.a-b.example.org:53/udp", ["_srv.a-b.example.org"], [], ["53-53/udp"]),
        ("10.1.2.3", [], ["10.1.2.3/32"], []),
        ("10.1.2.0/24:443/tcp", [], ["10.1.2.0/24"], ["443-443/tcp"]),
        ("[2001:db8::]/32:53/udp", [], ["2001:db8::/32"], ["53-53/udp"]),
        ("[2001:db8::7]", [], ["2001:db8::7/128"], []),
        ("pypi", ["packages.example.org", "*.files.example.org"], ["10.20.0.0/24"], ["443-443/tcp"]),
        ("dns-over-there", [], ["2001:db8:53::/48"], ["53-53/tcp", "53-53/udp"]),
    ],
)
def test_a_rule_says_what_it_means(key: str, names: list[str], networks: list[str], ports: list[str]) -> None:
    (grant,) = one(key).allowed
    assert list(grant.names) == names
    assert [str(net) for net in grant.networks] == networks
    assert [f"{p.first}-{p.last}/{p.protocol}" for p in grant.ports] == ports


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("npm", "known: dns-over-there, pypi"),
        ("0.0.0.0/0", "wider than this host allows"),
        ("[::]/0", "wider than this host allows"),
        ("128.0.0.0/1", "wider than this host allows"),
        ("169.254.169.254:80", "never reachable"),
        ("127.0.0.1", "never reachable"),
        ("127.8.0.0/16", "never reachable"),
        ("[::1]", "never reachable"),
        ("[::ffff:127.0.0.1]", "never reachable"),
        ("[fd00:ec2::254]:80", "never reachable"),
        ("[64:ff9b::a9fe:a9fe]", "never reachable"),
        ("224.0.0.0/8", "never reachable"),
        ("100.88.0.9", "never reachable"),
        ("10.1.2.3/24", "host bits"),
        ("999.1.1.1", "not appear to be"),
        ("1.2.3", "not appear to be"),
        ("10.0.0.0/33", "not appear to be"),
        ("example.org:0", "is no port"),
        ("example.org:70000", "is no port"),
        ("example.org:9-8", "is no port"),
        ("example.org:443/icmp", "is no port"),
        ("example.org:", "is no rule"),
        ("a:b:c", "is no rule"),
        ("2001:db8::1", "is no rule"),
        ("*", "neither a host name"),
        ("*.", "neither a host name"),
        ("*.org", "neither a host name"),
        ("a.*.org", "neither a host name"),
        ("example.123", "neither a host name"),
        ("-a.example.org", "neither a host name"),
        (f"{'a.' * 130}org", "neither a host name"),
    ],
)
def test_a_bad_rule_is_one_clear_sentence(key: str, said: str) -> None:
    with pytest.raises(DsecError) as caught:
        one(key)
    assert caught.value.kind == "invalid"
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@given(st.text(max_size=80))
def test_no_text_gives_a_traceback(key: str) -> None:
    try:
        one(key)
    except DsecError as exc:
        assert exc.kind == "invalid"


def test_false_takes_away_from_what_others_allow() -> None:
    policy = COMPILER.policy("box", {"*.example.org": True, "evil.example.org": False, "example.net": True})
    assert policy.for_name("good.example.org")
    assert not policy.for_name("evil.example.org")
    assert not policy.for_name("example.org")
    assert policy.for_name("example.net")
    with pytest.raises(DsecError, match="names are denied whole"):
        COMPILER.policy("box", {"evil.example.org:443": False})


def test_a_wildcard_is_all_below_and_not_the_name_itself() -> None:
    assert matches("*.example.org", "a.b.example.org")
    assert not matches("*.example.org", "example.org")
    assert not matches("*.example.org", "badexample.org")
    assert not matches("*.example.org", ".example.org")


def test_marks_are_a_sandboxs_own_and_stay_with_the_meaning() -> None:
    first, again = COMPILER.policy("a", {"pypi": True}), COMPILER.policy("a", {"pypi": True, "example.org": True})
    assert first.allowed[0].mark == again.allowed[0].mark != 0
    assert first.allowed[0].mark != COMPILER.policy("b", {"pypi": True}).allowed[0].mark


def test_addresses_follow_from_slots_and_back() -> None:
    seen: set[object] = set()
    for slot in (1, 2, 77, 4094):
        pair = PLAN.of(slot)
        assert PLAN.slot(str(pair.far4)) == slot
        assert PLAN.slot(str(pair.near4)) is None  # the router asks nobody
        seen |= {pair.near4, pair.far4, pair.near6, pair.far6}
    assert len(seen) == 16
    assert PLAN.slot(str(PLAN.uplink(1).far4)) is None
    assert PLAN.slot("8.8.8.8") is None
    assert PLAN.slot("x") is None


def test_what_no_name_may_lead_to() -> None:
    for text in ("127.0.0.1", "169.254.169.254", "10.1.1.1", "192.168.0.1", "::1", "fd00:ec2::254", "fc00::1",
                 "100.64.0.1", "::ffff:8.8.8.8", "224.0.0.1", "100.88.0.1", "0.0.0.0"):  # fmt: skip
        assert not PLAN.answerable(text), text
    for text in ("203.0.113.1", "2001:db8::1", "10.20.1.1"):
        assert PLAN.answerable(text), text


def test_every_forbidden_address_is_dropped_before_anything_is_let_through() -> None:
    policy = COMPILER.policy("box", {"10.0.0.0/8": True, "example.org": True})
    text, _ = packet_filter.rules(7, policy, PLAN, [], log=True)
    lines = [line for line in text.splitlines() if line.startswith("add rule inet dsecd out7 ")]
    first_accept = next(number for number, line in enumerate(lines) if line.endswith("accept"))
    assert sum("@never" in line for line in lines[:first_accept]) == 2
    assert any('oifname != "out"' in line for line in lines[:first_accept])
    assert lines[-1].endswith("goto refuse7")
    for network in NEVER:
        assert any(network.version == found.version and network.subnet_of(found)  # type: ignore[arg-type]
                   for found in PLAN.forbidden(network.version))  # fmt: skip


def test_sets_of_rules_that_stay_are_not_touched() -> None:
    _, before = packet_filter.rules(7, COMPILER.policy("box", {"pypi": True, "example.org": True}), PLAN, [], log=True)
    text, after = packet_filter.rules(7, COMPILER.policy("box", {"pypi": True}), PLAN, before, log=True)
    assert set(after) < set(before)
    assert {line.split()[-1] for line in text.splitlines() if line.startswith("delete set")} == set(before) - set(after)
    assert "flush set" not in text


def test_no_rule_has_a_set_without_a_name() -> None:
    """While rules are exchanged such a set is empty for packets that go by the old ones."""
    rules = {
        "pypi": True,
        "10.1.0.0/16:80": True,
        "10.2.0.0/16": False,
        "[2001:db8::]/32:1-9": True,
        "a.example.org": True,
    }
    text, _ = packet_filter.rules(7, COMPILER.policy("box", rules), PLAN, [], log=True)
    assert not [line for line in text.splitlines() if line.startswith("add rule") and "{" in line]
    inner = [line for line in packet_filter.base(PLAN).splitlines() if line.startswith(" " * 8)]
    assert inner
    assert not [line for line in inner if "{" in line]


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"subnet4": "10.0.0.0/24"}, "subnet4"),
        ({"subnet6": "fd00::/64"}, "subnet6"),
        ({"internal": ["10.0.0.1/8"]}, "internal"),
        ({"resolvers": ["example.org"]}, "resolvers"),
        ({"resolvers": ["127.0.0.1#99999"]}, "resolvers"),
        ({"services": {"x": {"hosts": []}}}, "hosts"),
        ({"services": {"x": {"host": ["a.example.org"]}}}, "services"),
        ({"widest4": 33}, "widest4"),
        ([], "network"),
    ],
)
def test_a_bad_configuration_is_found(table: object, key: str) -> None:
    found = wrong(table)
    assert found is not None
    assert found[0] == key


def test_a_good_configuration_is_taken() -> None:
    assert wrong({"resolvers": ["127.0.0.1#5353", "::1"], "services": {"x": {"hosts": ["a.example.org"]}}}) is None
    assert ipaddress.ip_network(NetworkConfig().subnet4).prefixlen == 18


def test_a_service_with_a_bad_host_is_refused_when_the_daemon_starts() -> None:
    with pytest.raises(DsecError, match=r"network\.services\.x"):
        Compiler(NetworkConfig(services={"x": Service(hosts=("169.254.169.254",))}), PLAN)
