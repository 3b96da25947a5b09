"""A full VM asks for its address as any machine does, and then has the network of all sandboxes."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
from pathlib import Path

import pytest
from daemonkit import run, started
from netkit import DNS4, GOOD4, HOST4, LAN4, SERVICES, World, links, nothing_more, router
from test_fullvm import debian as debian
from test_fullvm_daemon import ARGS, equip

from dsecd.client import Sandbox
from dsecd.vmm.disks import DiskStore, VmImage

CONNECT = 'exec 3<>/dev/tcp/{}/{} && echo hello >&3 && read -r -t 60 line <&3 && echo "$line"'


async def reaches(box: Sandbox, host: str, port: int = 80) -> bool:
    """The image has no Python; its bash has sockets."""
    done = await box.run_shell("timeout 60 bash -c " + shlex.quote(CONNECT.format(host, port)))
    assert done.exit_code != 124, f"{host}: neither reached nor refused"
    return done.stdout == "far:hello\n"


@pytest.mark.slow
@pytest.mark.network
def test_a_full_vm_is_told_its_address_and_reaches_what_it_may(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path], debian: tuple[DiskStore, VmImage], world: World
) -> None:
    args = dataclasses.replace(ARGS, network_rules={"pypi": True}, profile="server")
    config = {"network": {"resolvers": [DNS4]}, "services": SERVICES, "netns": world.host}
    with started(tmp_path_factory.mktemp("own"), watched, **config) as one, nothing_more(world, one):
        equip(one, debian[0])

        async def before() -> str:
            async with one.client() as client:
                box = await client.run_fullvm(args, timeout=400)
                async with asyncio.timeout(120):  # it was told its address, and is about to take it
                    while not await reaches(box, "good.example.org"):
                        await asyncio.sleep(0.5)
                for host in ("other.example.org", LAN4, HOST4, "169.254.169.254"):
                    assert not await reaches(box, host), host
                (address,) = (await box.network()).addresses
                assert f" {address}/32 " in (await box.run_shell("ip -4 addr show scope global")).stdout
                await box.set_network({f"{LAN4}:8080": True})
                assert not await reaches(box, GOOD4)
                assert await reaches(box, LAN4, 8080)
                await box.pause()
                return box.id

        async def after(ident: str) -> None:
            """The next daemon answers, too: one that loses its address asks anew."""
            async with one.client() as client:
                box = await client.get(ident)
                assert await reaches(box, LAN4, 8080)
                (link,) = [item.split()[1] for item in links(router(one)) if "box" in item]
                assert link == f"box{one.config['id_first_slot']}"
                card = "$(basename /sys/class/net/e*)"
                anew = f"ip addr flush dev {card}; systemctl restart systemd-networkd; "
                anew += f"for n in $(seq 100); do ip -4 addr show dev {card} | grep -q inet && break; sleep 0.2; done"
                assert (await box.run_shell(anew)).exit_code == 0
                assert await reaches(box, LAN4, 8080)
                await box.stop()

        ident = run(before())
        one.kill()
        one.start()
        run(after(ident))
