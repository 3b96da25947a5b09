"""Networks of machines under Firecracker: the tap is opened where the VMM lives, and then it is the router's alone."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from firecracker_kit import Bench, directory_of, jailed, started
from netkit import GOOD4, World, ip, links

from dsecd.errors import DsecError
from dsecd.net import netns
from dsecd.net.network import Network
from dsecd.net.segment import Card
from dsecd.networkconfig import NetworkConfig
from dsecd.vmm.machine import MachineSpec, Nic

SLOT = 3000  # daemons of other tests on that host have others


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path)
    yield one
    assert one.left() == []


def on(world: World, scenario: Callable[[Network], Coroutine[Any, Any, None]], directory: Path) -> None:
    """With the networks of a host that is that namespace."""

    async def work() -> None:
        network = Network(NetworkConfig(resolvers=["203.0.113.53"]), directory, SLOT)
        try:
            async with asyncio.timeout(120):
                await scenario(network)
        finally:
            await network.close()

    World.inside(world.host, lambda: asyncio.run(work()))


def inside(pid: int) -> list[str]:
    """Interfaces of a process's namespace."""
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [name for _, name in netns.inside(fd, socket.if_nameindex)]
    finally:
        os.close(fd)


def mac(pin: Path, link: str) -> str:
    """Of the router's end of a link."""
    command = ["nsenter", f"--net={pin}", "ip", "-o", "link", "show", link]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return shown.partition("link/ether ")[2].split()[0]


async def asked(machine: Any, times: int) -> None:
    """The guest has so many answers from the router's end of its link."""
    while (await machine.console()).count(b" has it\n") < times:
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("limits", [None, jailed()], ids=["root", "jailed"])
def test_a_tap_is_lent_for_the_start_and_for_each_load(bench: Bench, world: World, tmp_path: Path, limits: Any) -> None:
    directory, pin = tmp_path / "net", tmp_path / f"net/router{SLOT}"

    async def scenario(network: Network) -> None:
        card: Card = await network.attach_tap("one", SLOT, "tap", {GOOD4: True})
        far, near = card.words.split("/")[:2]
        driver = bench.driver(arp=[far, near])
        driver.lend = network.lend_tap
        spec: MachineSpec = bench.spec(nics=(Nic(card.tap, card.mac),))
        spec = msgspec.structs.replace(spec, limits=limits or spec.limits)
        try:
            saved = directory_of(bench, "saved")
            async with started(driver, spec) as machine:
                await asked(machine, 1)
                assert inside(machine.pid) == ["lo"], "who breaks out of the VMM finds a network"
                assert f"link {card.tap} of {pin.name}" in links(pin)
                near_mac = mac(pin, card.tap)
                await machine.pause()
                kept = await machine.snapshot(saved)
            machine = await driver.restore(spec, kept, saved, clone=False)
            try:
                await machine.resume()
                await asked(machine, 1)
                assert inside(machine.pid) == ["lo"]
                assert mac(pin, card.tap) == near_mac, "a saved guest sends to the address that it knows"
            finally:
                await driver.end(spec)
            # Its rules have been there all the time, and go with it.
            assert network.has("one")
            ip(pin, f"link show {card.tap}")
        finally:
            await network.detach("one")
        assert not [item for item in links(pin) if "box" in item]

    on(world, scenario, directory)


def test_a_start_that_fails_leaves_no_tap_and_the_next_one_has_one(bench: Bench, world: World, tmp_path: Path) -> None:
    pin = tmp_path / f"net/router{SLOT}"

    async def scenario(network: Network) -> None:
        card = await network.attach_tap("one", SLOT, "tap", {GOOD4: True})
        spec = bench.spec(nics=(Nic(card.tap, card.mac),))
        for fault in ({"PUT /network-interfaces/eth0": "400"}, {"PUT /vsock": "die:1"}, {"PUT /actions": "400"}):
            driver = bench.driver(at=fault)
            driver.lend = network.lend_tap
            with pytest.raises(DsecError):
                await driver.start(spec)
            await driver.end(spec)
        driver = bench.driver(arp=card.words.split("/")[:2])
        driver.lend = network.lend_tap
        try:
            async with started(driver, spec) as machine:
                await asked(machine, 1)
        finally:
            await network.detach("one")
        assert not [item for item in links(pin) if "box" in item]

    on(world, scenario, tmp_path / "net")
