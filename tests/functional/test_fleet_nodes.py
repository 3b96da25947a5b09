"""Ten daemons with views of machines of their own, behind real sshds, and all that can go wrong at once.

DSECD_NODES_SANDBOXES=500 is the number of the issue; fewer by default, for the time that it takes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from daemonkit import Daemon, asynchronous, container_args
from fleetkit import Fleet, Node, nodes

from dsecd.client import DSecClient, DsecError
from dsecd.wire import sandbox as wire

HOSTS = 10
said: dict[str, list[str]] = {}  # why creates were asked for again
CLIENTS = 25
SANDBOXES = int(os.environ.get("DSECD_NODES_SANDBOXES", "500"))
UNSURE = ("network", "outcome_unknown", "sandbox_dead", "shutting_down", "timeout", "capacity")


async def create(fleet: Fleet, number: int) -> str:
    """Asked again with its key until there is an answer. That one is final."""
    while True:
        try:
            async with DSecClient(fleet.url) as client:
                args = container_args(labels={"n": str(number)}, memory_limit_mb=32, disk_limit_mb=16)
                return (await client.run_container(args, request_id=f"many-{number}")).id
        except DsecError as exc:
            assert exc.kind in UNSURE, exc
            said.setdefault(str(number), []).append(f"{time.time() % 1000:.2f} {exc}")
        await asyncio.sleep(0.2)


def test_ten_nodes_three_lost_a_coordinator_killed_and_a_link_cut(tmp_path: Path, daemon: Daemon) -> None:
    with nodes(tmp_path, daemon.state / "images", HOSTS, SANDBOXES // 5) as hosts:
        inventory = {f"node{n}": {"url": one.url_there} for n, one in enumerate(hosts)}
        fleets = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            fleets.append(Fleet(tmp_path / name, inventory).start())
        try:
            work(hosts, fleets)
        finally:
            for one in fleets:
                one.end()


@asynchronous
async def work(hosts: list[Node], fleets: list[Fleet]) -> None:
    first, second = fleets
    await asyncio.gather(*(one.ready(HOSTS) for one in fleets))
    idents: dict[int, str] = {}
    begun: set[int] = set()
    left = iter(range(SANDBOXES))

    async def client(number: int) -> None:
        for n in left:
            begun.add(n)
            idents[n] = await create(fleets[number % 2], n)

    async def reached(part: float) -> None:
        while len(idents) < SANDBOXES * part:
            await asyncio.sleep(0.05)

    clients = asyncio.gather(*map(client, range(CLIENTS)))
    async with asyncio.timeout(400):
        await reached(0.2)
        first.end(signal.SIGKILL)
        first.start()
        # What a coordinator forgets it finds on the hosts: not, when these are lost at the same moment.
        under_way = begun - idents.keys()
        await first.ready(HOSTS)
        while not under_way <= idents.keys():
            await asyncio.sleep(0.05)
        await reached(0.5)
        for n in (1, 2):
            hosts[n].kill()
        await asyncio.to_thread(hosts[3].lose)
        await asyncio.sleep(1)
        hosts[4].plug(plugged=False)
        await asyncio.sleep(5)
        hosts[4].plug(plugged=True)
        for n in (1, 2):
            await asyncio.to_thread(hosts[n].start)
        await asyncio.to_thread(hosts[3].boot)
        await clients
        await asyncio.gather(*(one.ready(HOSTS) for one in fleets))
    assert len(set(idents.values())) == SANDBOXES, "every create has one answer"
    alive = [one for host in hosts for one in host.ask("sandbox.list")["result"]["sandboxes"]]
    twice = {n: count for n, count in Counter(one["labels"]["n"] for one in alive).items() if count > 1}
    both = {n: [one["id"] for one in alive if one["labels"]["n"] == n] for n in twice}
    assert not twice, "\n".join(f"{n}: {both[n]} {idents[int(n)]} {said.get(n)}" for n in twice)
    here = {one["id"] for one in alive}
    lost = [ident for ident in idents.values() if ident not in here]
    assert {ident.partition("-")[0] for ident in lost} <= {"n3"}, "only the machine that ended took any with it"
    async with DSecClient(second.url) as through:
        found: wire.Sandboxes = await through.call("sandbox.list", wire.List())
        assert {one.id for one in found.sandboxes} == here
        assert not found.missing
        for ident in lost:
            with pytest.raises(DsecError) as caught:
                await (await through.get(ident)).run_shell("true")
            assert (caught.value.kind, caught.value.infra) == ("sandbox_dead", True), caught.value
        some = list(here & set(idents.values()))[:: max(1, SANDBOXES // 20)]
        for ident in some:
            assert (await (await through.get(ident)).run_shell("echo on")).stdout == "on\n"
    print(f"{SANDBOXES} creates, {len(lost)} lost with their machine, {len(alive)} alive")
