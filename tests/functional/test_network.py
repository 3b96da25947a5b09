"""What a sandbox may reach, and nothing else: by service, host, wildcard, network, port and protocol; IPv4 and IPv6.

The far side counts what comes to it (netkit.World), so that "refused" means that nothing left the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator

import pytest
from daemonkit import Daemon, asynchronous, sandbox_of
from netkit import CONNECT, DENIED4, GOOD4, GOOD6, HOST4, LAN4, OTHER4, World, router

from dsecd.client import Sandbox
from dsecd.errors import DsecError

UDP = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(1)
try:
    sock.connect((sys.argv[1], int(sys.argv[2])))
    sock.send(bytes.fromhex(sys.argv[3]))
    print(sock.recv(2000).hex())
except OSError as exc:
    print("failed:", exc)
"""
LISTEN = """
import socket
server = socket.create_server(("", 80))
while True:
    sock, _ = server.accept()
    sock.sendall(b"heard")
    sock.close()
"""
LOOK_UP = """
import socket, sys
try:
    print(sorted({one[4][0] for one in socket.getaddrinfo(sys.argv[1], 80, type=socket.SOCK_STREAM)}))
except OSError as exc:
    print("failed:", exc)
"""


@contextlib.asynccontextmanager
async def box(daemon: Daemon, **rules: bool) -> AsyncIterator[Sandbox]:
    async with sandbox_of(daemon, network_rules=rules) as sandbox:
        yield sandbox


async def python(sandbox: Sandbox, code: str, *words: object) -> str:
    done = await sandbox.exec(["python3", "-c", code, *map(str, words)])
    assert done.exit_code == 0, done.stderr
    return done.stdout.strip()


async def reaches(sandbox: Sandbox, host: str, port: int = 80, *, within: float = 3) -> bool:
    """Whether a connection is made and answered; a refusal must come at once."""
    said = await python(sandbox, CONNECT, host, port, within)
    assert said == "far:hello" or said.startswith("failed:"), said
    assert "timed out" not in said, said
    return said == "far:hello"


# -- what is allowed --------------------------------------------------------------------------------------------------
@asynchronous
async def test_a_service_is_its_hosts_and_ports(net_daemon: Daemon, far: World) -> None:
    async with box(net_daemon, pypi=True, npm=False) as sandbox:
        assert await reaches(sandbox, "good.example.org", 80)
        assert await reaches(sandbox, "good.example.org", 443)
        assert await reaches(sandbox, "files.good.example.org", 443)
        assert not await reaches(sandbox, "good.example.org", 8080)
        assert not await reaches(sandbox, "other.example.org", 80)
    assert set(far.connections) <= {(GOOD4, 80), (GOOD4, 443), (GOOD6, 80), (GOOD6, 443), (OTHER4, 443)}
    assert "other.example.org" not in {name for name, _ in far.questions}


@asynchronous
async def test_hosts_wildcards_networks_ports_and_protocols(net_daemon: Daemon, far: World) -> None:
    rules = {"*.example.org:80/tcp": True, "denied.example.org": False, "10.55.0.0/24:8080": True}
    async with box(net_daemon, **rules) as sandbox:
        assert await reaches(sandbox, "good.example.org", 80)
        assert await reaches(sandbox, "other.example.org", 80)
        assert not await reaches(sandbox, "good.example.org", 443)
        assert not await reaches(sandbox, "denied.example.org", 80)
        assert not await reaches(sandbox, DENIED4, 80)
        assert await reaches(sandbox, LAN4, 8080)
        assert not await reaches(sandbox, LAN4, 80)
    assert not [one for one in far.connections if one[0] == DENIED4]


@asynchronous
async def test_ipv6_has_the_same_rules(net_daemon: Daemon, far: World) -> None:
    async with box(net_daemon, **{"good.example.org:80": True, f"[{GOOD6}]:8080/tcp": True}) as sandbox:
        assert not await reaches(sandbox, GOOD6, 80)  # nobody asked for its name yet
        assert GOOD6 in await python(sandbox, LOOK_UP, "good.example.org")
        assert await reaches(sandbox, GOOD6, 80)
        assert await reaches(sandbox, GOOD6, 8080)
        assert not await reaches(sandbox, GOOD6, 443)
    assert sorted(far.connections) == [(GOOD6, 80), (GOOD6, 8080)]


@asynchronous
async def test_ipv6_goes_on_when_neighbours_forget_each_other(net_daemon: Daemon, far: World) -> None:
    """Seen in CI: some seconds after a first connection the host forgot the router, and could not ask for it again."""
    async with box(net_daemon, **{f"[{GOOD6}]:80/tcp": True}) as sandbox:
        assert await reaches(sandbox, GOOD6)
        for pin in (far.host, router(net_daemon)):
            subprocess.run(["nsenter", f"--net={pin}", "ip", "-6", "neighbour", "flush", "all"], check=True)
        assert await reaches(sandbox, GOOD6)


@asynchronous
async def test_an_address_is_open_only_for_whom_its_name_was_asked(net_daemon: Daemon, far: World) -> None:
    async with box(net_daemon, pypi=True) as one, box(net_daemon, pypi=True) as two:
        assert not await reaches(one, GOOD4)
        assert await reaches(one, "good.example.org")
        assert await reaches(one, GOOD4)
        assert not await reaches(two, GOOD4)
        assert (await one.network()).open[:1] == [min(GOOD4, GOOD6)]
        assert (await two.network()).open == []


@asynchronous
async def test_aliases_are_followed_and_long_answers_come(net_daemon: Daemon, far: World) -> None:
    async with box(net_daemon, **{"alias.example.org": True, "many.example.org": True}) as sandbox:
        assert await reaches(sandbox, "alias.example.org")
        assert not await reaches(sandbox, "good.example.org")  # an alias allows its target's address, not its name
        assert (await python(sandbox, LOOK_UP, "many.example.org")).count("203.0.113.") == 30


# -- what never is ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["metadata", "loopback", "host", "lan"])
@asynchronous
async def test_a_name_that_leads_where_nobody_may_go_opens_nothing(net_daemon: Daemon, far: World, name: str) -> None:
    async with box(net_daemon, **{"*.example.org": True}) as sandbox:
        assert (await python(sandbox, LOOK_UP, f"{name}.example.org")).startswith("failed:")
        assert (await sandbox.network()).open == []
        log = [one.what for one in await sandbox.network_log()]
        assert any(f"name {name}.example.org leads to" in what for what in log), log
    assert far.connections == []


@asynchronous
async def test_of_a_mixed_answer_only_what_may_be_reached_is_told(net_daemon: Daemon, far: World) -> None:
    async with box(net_daemon, **{"mixed.example.org": True}) as sandbox:
        assert await python(sandbox, LOOK_UP, "mixed.example.org") == f"['{GOOD4}']"
        assert (await sandbox.network()).open == [GOOD4]


@asynchronous
async def test_host_metadata_and_other_sandboxes_are_out_of_reach_whatever_is_allowed(
    net_daemon: Daemon, far: World
) -> None:
    rules = {"wide": True, "203.0.113.0/24": True, "100.0.0.0/8": True, "169.0.0.0/8": True}
    async with box(net_daemon, **rules) as one, box(net_daemon, **rules) as two:
        assert await reaches(one, DENIED4)  # the rules are as wide as they look
        (other, *_) = (await two.network()).addresses
        await two.exec(["sh", "-c", f"python3 -c '{LISTEN}' >/dev/null 2>&1 &"])
        await python(two, "import time; time.sleep(0.5)")
        assert (await python(two, CONNECT, "127.0.0.1", 80, 1)) == "heard"  # it would answer
        for address in (HOST4, "169.254.169.254", other, "100.88.0.1", "100.100.100.200"):
            for port in (22, 53, 80):
                assert not await reaches(one, address, port), (address, port)
    assert {address for address, _ in far.connections} == {DENIED4}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("npn", "known: npm, pypi, wide"),
        ("0.0.0.0/0", "wider than this host allows"),
        ("169.254.169.254", "never reachable"),
        (f"{HOST4}:80", "never reachable"),
        ("127.0.0.1", "never reachable"),
        ("not a rule", "rules"),
    ],
)
@asynchronous
async def test_a_bad_rule_makes_no_sandbox_and_changes_none(
    net_daemon: Daemon, far: World, rule: str, said: str
) -> None:
    async with box(net_daemon, pypi=True) as sandbox:
        with pytest.raises(DsecError, match=said) as caught:
            async with box(net_daemon, **{rule: True}):
                pass
        assert caught.value.kind == "invalid"
        with pytest.raises(DsecError, match=said):
            await sandbox.set_network({"npm": True, rule: True})
        assert (await sandbox.network()).rules == {"pypi": True}
        assert await reaches(sandbox, "good.example.org")
        assert not await reaches(sandbox, "other.example.org")


@asynchronous
async def test_a_port_scan_from_inside_finds_nothing(net_daemon: Daemon, far: World) -> None:
    scan = """
import socket, sys
found = []
for address in sys.argv[1:]:
    for port in [*range(1, 1025), 2049, 3128, 6443, 8080, 9090, 10250]:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
            sock.settimeout(0.5)
            if sock.connect_ex((address, port)) == 0:
                found.append((address, port))
print(found)
"""
    async with box(net_daemon, pypi=True) as sandbox:
        gateway = "100.88.63.254"
        route = await python(sandbox, "print(open('/proc/net/route').read().split('\\n')[1].split()[2])")
        near = ".".join(str(byte) for byte in reversed(bytes.fromhex(route)))
        assert await python(sandbox, scan, near, HOST4, DENIED4) == "[]"
        # The forwarder's own port takes questions for names, and is the one thing there.
        assert await python(sandbox, scan, gateway) == f"[('{gateway}', 53)]"
        assert (await sandbox.stats()).network_refused > 2000
    assert far.connections == []


@asynchronous
async def test_a_sandbox_cannot_speak_for_another(net_daemon: Daemon, far: World) -> None:
    """Root inside has no capability to do so; were it to get one, the packet filter knows each link's address."""
    async with box(net_daemon, pypi=True) as sandbox:
        raw = "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"
        assert "PermissionError" in (await sandbox.exec(["python3", "-c", raw])).stderr
        bind = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).bind(('100.88.0.9', 0))"
        assert "Cannot assign" in (await sandbox.exec(["python3", "-c", bind])).stderr


@asynchronous
async def test_an_allowed_proxy_reaches_what_it_reaches(net_daemon: Daemon, far: World) -> None:
    """A rule is for a host and a port: what a proxy there does for its clients is the proxy's policy, not ours
    (docs/network.md). Nothing else opens because of it."""
    async with box(net_daemon, **{f"{LAN4}:3128/tcp": True}) as sandbox:
        assert await reaches(sandbox, LAN4, 3128)
        assert not await reaches(sandbox, LAN4, 80)
        assert not await reaches(sandbox, "good.example.org", 443)
    assert far.connections == [(LAN4, 3128)]


# -- names ------------------------------------------------------------------------------------------------------------
@asynchronous
async def test_other_questions_and_garbage_get_no_way_out(net_daemon: Daemon, far: World) -> None:
    header = "0001010000010000000000 00".replace(" ", "")
    name = "04676f6f64076578616d706c65036f726700"
    async with box(net_daemon, pypi=True) as sandbox:
        for kind in ("0010", "000f", "00ff", "0041", "000c", "00fc"):  # TXT, MX, ANY, HTTPS, PTR, AXFR
            answer = await python(sandbox, UDP, "100.88.63.254", 53, f"{header}{name}{kind}0001")
            assert answer[4:6] in ("81", "85"), answer
            assert answer[12:16] == "0000", answer  # no answer
        for garbage in ("00", "ff" * 12, header, f"{header}c00c00010001", f"{header}{'3f' * 60}00010001",
                        f"000181000001000000000000{name}00010001", "00" * 600):  # fmt: skip
            assert (await python(sandbox, UDP, "100.88.63.254", 53, garbage)).startswith("failed:"), garbage
        for server in (OTHER4, "203.0.113.53"):
            assert "failed" in await python(sandbox, UDP, server, 53, f"{header}{name}00010001")
        assert await reaches(sandbox, "good.example.org")
    assert {name for name, _ in far.questions} <= {"good.example.org"}


@asynchronous
async def test_a_flood_of_questions_costs_its_sender_only(net_daemon: Daemon, far: World) -> None:
    flood = """
import socket, time
forwarder = ("100.88.63.254", 53)
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end, sent = time.monotonic() + 3, 0
while time.monotonic() < end:
    try:
        sock.sendto(bytes.fromhex("000101000001000000000000") + b"\\4evil\\7example\\3net\\0\\0\\1\\0\\1", forwarder)
        sent += 1
    except OSError:
        pass
print(sent)
"""
    async with box(net_daemon, pypi=True) as hostile, box(net_daemon, pypi=True) as other:
        running = asyncio.ensure_future(python(hostile, flood))
        await asyncio.sleep(0.5)
        assert await reaches(other, "good.example.org", within=2)
        assert int(await running) > 5000
        log = {one.what: one.count for one in await hostile.network_log()}
        assert 0 < log["name evil.example.net"] < 2000
    assert "evil.example.net" not in {name for name, _ in far.questions}


# -- looking ----------------------------------------------------------------------------------------------------------
@asynchronous
async def test_use_and_refusals_are_counted_logged_and_told(net_daemon: Daemon, far: World) -> None:
    async with box(net_daemon, pypi=True) as sandbox:
        before = await sandbox.stats()
        assert await reaches(sandbox, "good.example.org")
        assert not await reaches(sandbox, DENIED4, 443)
        assert not await reaches(sandbox, "denied.example.org", 443)
        await asyncio.sleep(1.0)  # counters may be half a second old, packets wait a moment for more
        after = await sandbox.stats()
        assert after.network_out_packets > before.network_out_packets + 4
        assert after.network_in_bytes > before.network_in_bytes
        assert after.network_refused > before.network_refused
        log = {one.what: one for one in await sandbox.network_log()}
        assert log[f"{DENIED4} tcp 443"].count >= 1
        assert log["name denied.example.org"].count >= 1
        assert log["name denied.example.org"].first_at <= log["name denied.example.org"].last_at
    events = net_daemon.log_since(net_daemon.seen)
    assert f"network_refused: running {DENIED4} tcp 443" in events


@asynchronous
async def test_a_sandbox_without_rules_has_no_network_at_all(net_daemon: Daemon, far: World) -> None:
    async with box(net_daemon) as sandbox, box(net_daemon, pypi=False) as denied:
        for one in (sandbox, denied):
            assert await python(one, "import socket; print([n for _, n in socket.if_nameindex()])") == "['lo']"
            assert not (await one.network()).attached
            assert await one.network_log() == []
