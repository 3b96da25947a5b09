"""Networks through a sandbox's life: rules that change without a gap, daemons that die, and nothing left at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemonkit import Daemon, asynchronous, container_args, init_pid, run, sandbox_of, started
from netkit import (
    CONNECT,
    DENIED4,
    DNS4,
    GOOD4,
    GOOD6,
    HOST4,
    LAN4,
    SERVICES,
    World,
    links,
    nothing_more,
    picture,
    router,
)

from dsecd.client import DSecContainerRunArgs, DSecSyncClient, Sandbox, SandboxFailed
from dsecd.errors import DsecError
from dsecd.net import netns

HAMMER = """
import socket, sys, time
made, refused, end = 0, [], time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for address in sys.argv[2:]:
        try:
            with socket.create_connection((address, 80), timeout=1):
                made += 1
                time.sleep(0.01)  # the far side's queue is short
        except OSError as exc:
            refused = [*refused[-9:], str(exc)]
print(made, refused)
"""
HOLD = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)
answered = 0
print("open", flush=True)
try:
    while True:
        sock.sendall(b"x")
        if not sock.recv(100):
            raise OSError("ended")
        answered += 1
        time.sleep(0.02)
except OSError as exc:
    print("cut after", answered, exc)
"""


async def reaches(sandbox: Sandbox, host: str, port: int = 80) -> bool:
    done = await sandbox.exec(["python3", "-c", CONNECT, host, str(port), "3"])
    assert done.stdout.startswith(("far:hello", "failed:")), done
    assert "timed out" not in done.stdout
    return done.stdout.strip() == "far:hello"


# -- other rules ------------------------------------------------------------------------------------------------------
@asynchronous
async def test_rules_change_while_it_runs(net_daemon: Daemon, far: World) -> None:
    async with sandbox_of(net_daemon) as sandbox:
        assert not await reaches(sandbox, "good.example.org")
        shown = await sandbox.set_network({"pypi": True})
        assert shown.attached
        assert shown.rules == {"pypi": True}
        assert await reaches(sandbox, "good.example.org")
        await sandbox.set_network({"npm": True})
        assert not await reaches(sandbox, "good.example.org")
        assert not await reaches(sandbox, GOOD4)
        assert await reaches(sandbox, "other.example.org")
        await sandbox.set_network({})
        assert not await reaches(sandbox, "other.example.org")
        assert (await sandbox.network()).attached  # the link stays, and leads nowhere
        await sandbox.set_network({"pypi": True})
        assert await reaches(sandbox, "good.example.org")


@asynchronous
async def test_a_rule_that_goes_cuts_what_it_let_through_and_nothing_else(net_daemon: Daemon, far: World) -> None:
    async with sandbox_of(net_daemon, network_rules={"pypi": True, f"{LAN4}:8080": True}) as sandbox:
        assert await reaches(sandbox, "good.example.org")
        first = await sandbox.start(["python3", "-c", HOLD, GOOD4, "80"])
        second = await sandbox.start(["python3", "-c", HOLD, LAN4, "8080"])
        await asyncio.sleep(0.7)
        began = time.monotonic()
        await sandbox.set_network({f"{LAN4}:8080": True, "npm": True})
        said = (await first.wait()).stdout
        assert time.monotonic() - began < 2
        assert "cut after" in said
        assert not said.endswith("cut after 0")
        assert far.connections.count((LAN4, 8080)) == 1
        await asyncio.sleep(0.3)
        await sandbox.set_network({})
        assert "cut after" in (await second.wait()).stdout


@asynchronous
async def test_case_31_deny_all_lets_no_question_out(net_daemon: Daemon, far: World) -> None:
    """Neither names nor addresses, IPv4 nor IPv6: with an empty link as without one."""
    async with sandbox_of(net_daemon) as none, sandbox_of(net_daemon, network_rules={"pypi": True}) as taken:
        await taken.set_network({})
        for sandbox in (none, taken):
            for host in ("good.example.org", "other.example.org", GOOD4, GOOD6, DNS4, "169.254.169.254"):
                assert not await reaches(sandbox, host), host
    assert far.connections == []
    assert far.questions == []


@asynchronous
async def test_case_31_a_thousand_flips_under_fire(net_daemon: Daemon, far: World) -> None:
    """A client hammers hosts that no rule allows while the rules change a thousand times: zero connections."""
    async with sandbox_of(net_daemon, network_rules={"pypi": True}) as sandbox:
        hammer = await sandbox.start(["python3", "-c", HAMMER, "600", DENIED4, GOOD6, "denied.example.org"])
        began = time.monotonic()
        for number in range(500):
            await sandbox.set_network({"npm": True, f"{LAN4}:{number + 1}": True})
            await sandbox.set_network({"wide": True} if number % 2 else {})
        took = time.monotonic() - began
        assert far.connections == []
        assert "denied.example.org" not in {name for name, _ in far.questions}
        assert took < 60
        await hammer.signal(9)
        stats = await sandbox.stats()
        assert stats.network_refused > 1000, "it was not under fire"


@asynchronous
async def test_what_stays_allowed_has_no_gap_while_rules_change(net_daemon: Daemon, far: World) -> None:
    async with sandbox_of(net_daemon, network_rules={"wide": True}) as sandbox:
        hold = await sandbox.start(["python3", "-c", HOLD, GOOD4, "8080"])
        hammer = asyncio.ensure_future(
            sandbox.exec(["python3", "-c", HAMMER.replace("80)", "8080)"), "3", GOOD4, DENIED4])
        )
        for number in range(150):
            await sandbox.set_network({"wide": True, "npm": bool(number % 2)})
        made, refused = (await hammer).stdout.strip().split(maxsplit=1)
        assert int(made) > 50
        assert refused == "[]"
        await hold.signal(9)
        assert "cut" not in (await hold.wait()).stdout


def test_the_same_request_is_answered_once(net_daemon: Daemon, far: World) -> None:
    with DSecSyncClient(net_daemon.url) as client, client.run_container(container_args()) as sandbox:
        sandbox.set_network({"pypi": True}, request_id="first")
        sandbox.set_network({"npm": True}, request_id="second")
        sandbox.set_network({"pypi": True}, request_id="first")  # a repetition changes nothing
        assert sandbox.network().rules == {"npm": True}
        with pytest.raises(DsecError) as caught:
            sandbox.set_network({"wide": True}, request_id="first")
        assert caught.value.kind == "conflict"
        assert [one.name for one in client.network_services()] == sorted(SERVICES)


@asynchronous
async def test_a_paused_one_takes_rules_and_a_stopped_one_does_not(net_daemon: Daemon, far: World) -> None:
    async with sandbox_of(net_daemon, network_rules={"pypi": True}) as sandbox:
        assert await reaches(sandbox, "good.example.org")
        await sandbox.pause()
        await sandbox.set_network({"npm": True})
        assert (await sandbox.refresh()).state == "paused"
        await sandbox.resume()
        assert not await reaches(sandbox, GOOD4)
        assert await reaches(sandbox, "other.example.org")
        async with sandbox_of(net_daemon) as other:
            await other.pause()
            with pytest.raises(DsecError, match="resume it first"):
                await other.set_network({"npm": True})
            await other.set_network({"npm": False})
        await sandbox.stop()
        with pytest.raises(DsecError) as caught:
            await sandbox.set_network({})
        assert caught.value.kind == "sandbox_dead"


# -- daemons that die -------------------------------------------------------------------------------------------------
@pytest.fixture
def own_daemon(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon, world: World
) -> Iterator[Daemon]:
    config = {"network": {"resolvers": [DNS4]}, "services": SERVICES, "netns": world.host}
    with started(tmp_path_factory.mktemp("own"), watched, daemon.state / "images", **config) as one:
        yield one
    assert not [item for item in links(world.host) if str(one.config["id_first_slot"]) in item]


@pytest.mark.parametrize("politely", [True, False])
def test_a_daemon_that_ends_leaves_networks_as_they_are(own_daemon: Daemon, world: World, politely: bool) -> None:
    """Connections go on, rules hold, and the next daemon answers names and takes changes again."""
    world.forget()

    async def before() -> tuple[str, str]:
        async with own_daemon.client() as client:
            sandbox = await client.run_container(container_args(network_rules={"pypi": True, f"{LAN4}:8080": True}))
            offline = await client.run_container(container_args())
            assert await reaches(sandbox, "good.example.org")
            await sandbox.start(["python3", "-c", HOLD, LAN4, "8080"])
            await sandbox.start(["python3", "-c", HAMMER, "600", DENIED4])
            await asyncio.sleep(0.3)
            return sandbox.id, offline.id

    async def after(ident: str, offline: str) -> None:
        async with own_daemon.client() as client:
            sandbox = await client.get(ident)
            shown = await sandbox.network()
            assert shown.rules == {"pypi": True, f"{LAN4}:8080": True}
            assert shown.attached
            assert not (await (await client.get(offline)).network()).attached
            assert await reaches(sandbox, GOOD4)  # learnt by the daemon before
            assert await reaches(sandbox, "files.good.example.org", 443)
            assert not await reaches(sandbox, "other.example.org")
            assert (LAN4, 8080) in world.connections
            assert world.connections.count((LAN4, 8080)) == 1, "the connection did not last"
            assert (await sandbox.stats()).network_refused > 10
            await sandbox.set_network({"npm": True})
            assert not await reaches(sandbox, GOOD4)
            assert await reaches(sandbox, "other.example.org")

    ident, offline = run(before())
    _ = own_daemon.stop() if politely else own_daemon.kill()
    time.sleep(1.0)  # nobody is there, and the hammer goes on
    own_daemon.start()
    run(after(ident, offline))
    assert DENIED4 not in {address for address, _ in world.connections}


def test_what_nobody_owns_is_swept(own_daemon: Daemon, world: World) -> None:
    """The sandbox died while no daemon was there: its network goes, and with the last one the router."""
    with nothing_more(world, own_daemon):

        async def before() -> list[Sandbox]:
            async with own_daemon.client() as client:
                return [await client.run_container(container_args(network_rules={"pypi": True})) for _ in range(2)]

        first, second = run(before())
        pids = [init_pid(own_daemon, one) for one in (first, second)]
        own_daemon.kill()
        os.kill(pids[0], signal.SIGKILL)
        own_daemon.start()
        assert [state for ident, state in own_daemon.sandboxes().items()] == ["running"]
        assert sum("box" in item for item in links(router(own_daemon))) == 1
        own_daemon.kill()
        os.kill(pids[1], signal.SIGKILL)
        own_daemon.start()
        assert not router(own_daemon).exists()


def test_a_service_that_is_gone_from_the_configuration_is_gone_from_rules(own_daemon: Daemon, world: World) -> None:
    async def before() -> str:
        async with own_daemon.client() as client:
            made = await client.run_container(container_args(network_rules={"pypi": True, "npm": True}))
            assert await reaches(made, "other.example.org")
            return made.id

    async def after(ident: str) -> None:
        async with own_daemon.client() as client:
            sandbox = await client.get(ident)
            assert await reaches(sandbox, "good.example.org")
            assert not await reaches(sandbox, "other.example.org")

    ident = run(before())
    own_daemon.stop()
    own_daemon.services = {"pypi": SERVICES["pypi"]}
    own_daemon.start()
    run(after(ident))


@asynchronous
async def test_resolv_conf_is_covered_or_written_and_an_offline_one_is_the_images(
    net_daemon: Daemon, far: World
) -> None:
    """A mount over the image's own file leaves nothing on the disk; where there is none, it is a file."""
    async with sandbox_of(net_daemon) as sandbox:
        images = (await sandbox.exec(["cat", "/etc/resolv.conf"])).stdout
        await sandbox.exec(["sh", "-c", "rm /etc/resolv.conf; ln -s ../run/nowhere/stub.conf /etc/resolv.conf"])
        await sandbox.set_network({"pypi": True})
        assert await reaches(sandbox, "good.example.org")
        assert "nameserver 100.88.63.254" in (await sandbox.exec(["cat", "/etc/resolv.conf"])).stdout
    async with sandbox_of(net_daemon) as sandbox:
        before = (await sandbox.exec(["sha256sum", "/etc/resolv.conf"])).stdout
        assert (await sandbox.exec(["cat", "/etc/resolv.conf"])).stdout == images
        await sandbox.set_network({"pypi": True})
        assert await reaches(sandbox, "good.example.org")
        assert (await sandbox.exec(["sha256sum", "/etc/resolv.conf"])).stdout != before
        (upper,) = net_daemon.state.rglob(f"{sandbox.id}/upper")
        assert not (upper / "etc/resolv.conf").exists()


@asynchronous
async def test_a_reloaded_firewall_of_the_host_opens_nothing_and_is_mended(net_daemon: Daemon, far: World) -> None:
    """`nft flush ruleset`, as Debian's nftables.service does: refused is refused, and soon it works again."""
    async with sandbox_of(net_daemon, network_rules={"pypi": True}) as sandbox:
        assert await reaches(sandbox, "good.example.org")
        subprocess.run(["nsenter", f"--net={far.host}", "nft", "flush", "ruleset"], check=True)
        for address in (HOST4, DENIED4, "169.254.169.254"):
            assert not await reaches(sandbox, address)
        deadline = time.monotonic() + 10
        while not any(
            "dsec" in item for item in picture(far, net_daemon) if item.endswith(" of host") and "nft" in item
        ):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        assert await reaches(sandbox, GOOD4)
        assert far.connections.count((DENIED4, 80)) == 0


# -- nothing left -----------------------------------------------------------------------------------------------------
@asynchronous
async def test_fifty_come_and_go_and_leave_nothing(net_daemon: Daemon, far: World) -> None:
    async with net_daemon.client() as client:
        args = DSecContainerRunArgs(
            container_image="base:test", memory_limit_mb=64, disk_limit_mb=64, network_rules={"pypi": True}
        )
        made = await client.run_containers(args, 50)
        sandboxes = [one for one in made if not isinstance(one, SandboxFailed)]
        try:
            assert len(sandboxes) == 50, [str(one) for one in made if isinstance(one, SandboxFailed)]
            addresses = {(await one.network()).addresses[0] for one in sandboxes}
            assert len(addresses) == 50
            for one in sandboxes[::5]:
                assert await reaches(one, "good.example.org")
            assert sum("link box" in item for item in picture(far, net_daemon)) == 50
        finally:
            await asyncio.gather(*(one.stop() for one in sandboxes))


@asynchronous
async def test_a_start_that_is_given_up_leaves_nothing(net_daemon: Daemon, far: World) -> None:
    async with net_daemon.client() as client:
        for delay in (0.01, 0.03, 0.05, 0.08, 0.12):
            work = asyncio.ensure_future(client.run_container(container_args(network_rules={"pypi": True})))
            await asyncio.sleep(delay)
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await work).stop()
        await asyncio.sleep(0.5)
        for one in await client.list():
            await one.stop()


def test_a_host_that_cannot_says_what_to_do(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon
) -> None:
    """One that does not forward: a sentence, and everything else works."""
    directory = tmp_path_factory.mktemp("unable")
    pin = directory / "alone"
    netns.make(pin)
    try:
        with started(directory / "daemon", watched, daemon.state / "images", netns=pin) as one:

            async def use() -> None:
                async with sandbox_of(one) as sandbox:
                    with pytest.raises(DsecError, match=r"sysctl -w net\.ipv4\.ip_forward=1") as caught:
                        await sandbox.set_network({GOOD4: True})
                    assert caught.value.kind == "unsupported"
                    assert (await sandbox.exec(["true"])).exit_code == 0
                    with pytest.raises(DsecError, match="known: none"):
                        await sandbox.set_network({"pypi": True})

            run(use())
            assert links(pin) == {"link lo of alone"}
    finally:
        netns.unmake(pin)
