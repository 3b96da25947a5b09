"""microVMs have the same networks as containers, behind a tap instead of a veth."""

from __future__ import annotations

import contextlib
from pathlib import Path

import daemonkit
import pytest
from daemonkit import Daemon, asynchronous, run, sandbox_of, started
from netkit import CONNECT, DENIED4, DNS4, GOOD4, GOOD6, LAN4, SERVICES, World, links, nothing_more, router

from dsecd.client import Sandbox
from dsecd.errors import DsecError

ADDRESSES = """
import fcntl, socket, struct
with socket.socket() as sock:
    found = fcntl.ioctl(sock, 0x8915, struct.pack("256s", b"eth0"))  # SIOCGIFADDR
print(socket.inet_ntoa(found[20:24]))
for line in open("/proc/net/if_inet6"):
    word = line.split()
    if word[5] == "eth0":
        print(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(word[0])))
"""


async def reaches(sandbox: Sandbox, host: str, port: int = 80) -> bool:
    done = await sandbox.exec(["python3", "-c", CONNECT, host, str(port), "20"])
    assert done.stdout.startswith(("far:hello", "failed:")), done
    assert "timed out" not in done.stdout
    return done.stdout.strip() == "far:hello"


@pytest.fixture
def vm_daemon(net_daemon: Daemon) -> Daemon:
    daemonkit.guest_kernels()
    net_daemon.link_kernels()
    return net_daemon


@asynchronous
async def test_a_microvm_reaches_what_it_may_also_after_a_pause(vm_daemon: Daemon, far: World) -> None:
    async with sandbox_of(vm_daemon, "microvm", network_rules={"pypi": True, "wide": False}) as sandbox:
        assert await reaches(sandbox, "good.example.org")
        assert await reaches(sandbox, GOOD6)
        for host in ("other.example.org", DENIED4, "100.88.63.254", "169.254.169.254"):
            assert not await reaches(sandbox, host), host
        assert {address for address, _ in far.connections} == {GOOD4, GOOD6}
        await sandbox.set_network({"npm": True})
        await sandbox.pause()
        await sandbox.set_network({f"{LAN4}:8080": True})  # saved: the rules are the router's
        await sandbox.resume()
        assert not await reaches(sandbox, GOOD4)
        assert await reaches(sandbox, LAN4, 8080)
        assert (await sandbox.stats()).network_refused > 0


async def addresses(sandbox: Sandbox) -> set[str]:
    """Of its card, as its own kernel shows them."""
    done = await sandbox.exec(["python3", "-c", ADDRESSES])
    return set(done.stdout.split())


async def copies(sandbox: Sandbox, count: int = 1) -> list[Sandbox]:
    made = await sandbox.fork(count)
    assert all(isinstance(one, Sandbox) for one in made), made
    return [one for one in made if isinstance(one, Sandbox)]


@asynchronous
async def test_copies_of_a_microvm_have_networks_of_their_own(vm_daemon: Daemon, far: World) -> None:
    async with (
        sandbox_of(vm_daemon, "microvm", network_rules={"pypi": True}) as first,
        contextlib.AsyncExitStack() as stack,
    ):
        assert await reaches(first, "good.example.org")
        made = await copies(first, 2)
        made += await copies(made[1])
        for one in made:
            stack.push_async_callback(one.stop)
        own = [await addresses(one) for one in (first, *made)]
        assert [set((await one.network()).addresses) for one in (first, *made)] == own
        assert len(set.union(*own)) == 2 * len(own), "IPv4 and IPv6, and each another"
        await made[0].set_network({"npm": True})
        assert not await reaches(made[0], GOOD4)
        for one in (first, made[1], made[2]):
            assert await reaches(one, "good.example.org")
            assert await reaches(one, GOOD6)
        assert (await made[1].stats()).network_out_bytes > 0
        # Saved and loaded, it keeps what it has now, and not what it was copied with.
        await made[1].pause()
        await made[1].resume()
        assert await addresses(made[1]) == own[2]
        assert await reaches(made[1], "good.example.org")
        # One whose rules allow nothing any more has a card all the same, and so has its copy.
        await first.set_network({})
        (last,) = await copies(first)
        stack.push_async_callback(last.stop)
        assert not await reaches(last, GOOD4)
        await last.set_network({"pypi": True})
        assert await reaches(last, "good.example.org")


@asynchronous
async def test_a_microvm_with_a_network_is_packed(vm_daemon: Daemon, far: World) -> None:
    async with sandbox_of(vm_daemon, "microvm", network_rules={"pypi": True}) as sandbox:
        await sandbox.write_file("/srv/found", b"by the solver")
        await sandbox.pack_diff("env:networked")
        assert await reaches(sandbox, "good.example.org")
        connections = len(far.connections)
        await sandbox.pause()
        await sandbox.pack_diff("env:networked-paused")
        assert len(far.connections) == connections
    for name in ("env:networked", "env:networked-paused"):
        async with sandbox_of(vm_daemon, "microvm", container_image=name) as again:
            assert await again.read_file("/srv/found") == b"by the solver"


@asynchronous
async def test_a_microvm_without_a_card_says_when_it_gets_one(vm_daemon: Daemon, far: World) -> None:
    async with sandbox_of(vm_daemon, "microvm") as sandbox:
        with pytest.raises(DsecError, match="when it is made") as caught:
            await sandbox.set_network({"pypi": True})
        assert caught.value.kind == "unsupported"
        assert not (await sandbox.set_network({"pypi": False})).attached
        names = "import socket; print([n for _, n in socket.if_nameindex()])"
        assert (await sandbox.exec(["python3", "-c", names])).stdout.strip() == "['lo']"


def test_microvms_keep_their_networks_when_the_daemon_is_killed(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon, world: World
) -> None:
    config = {"network": {"resolvers": [DNS4]}, "services": SERVICES, "netns": world.host}
    daemonkit.guest_kernels()
    with started(tmp_path_factory.mktemp("own"), watched, daemon.state / "images", **config) as one:

        async def before() -> str:
            async with one.client() as client:
                made = await daemonkit.launch(client, "microvm", network_rules={"pypi": True})
                assert await reaches(made, "good.example.org")
                return made.id

        async def after(ident: str) -> None:
            async with one.client() as client:
                sandbox = await client.get(ident)
                assert await reaches(sandbox, "good.example.org")
                await sandbox.set_network({"npm": True})
                assert not await reaches(sandbox, GOOD4)

        with nothing_more(world, one):
            ident = run(before())
            one.kill()
            one.start()
            run(after(ident))
            one.ask("sandbox.stop", {"id": ident})
            assert not [item for item in links(router(one)) if "box" in item]
