"""What a microVM wrote becomes an environment: the same tree in a container, whether it ran or was paused."""

from __future__ import annotations

import asyncio
import time

import pytest
from daemonkit import Daemon, asynchronous, guest_kernels, launch, sandbox_of
from packkit import MESS, differences, tree
from test_restart import names_in, things

from dsecd.client import DsecError
from dsecd.wire import images as image_wire

# Where MESS writes. Reading all of the base takes a minute under emulation.
WRITTEN = ("/etc", "/work", "/usr/share/perl5", "/usr/lib/mime")


async def nothing_but(daemon: Daemon, ident: str) -> None:
    """This microVM alone has something on the host (disk spaces may follow a moment later)."""
    deadline = time.monotonic() + 30
    while any(found != {ident} for found in machines(daemon).values()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert machines(daemon) == {kind: {ident} for kind in machines(daemon)}


def machines(daemon: Daemon) -> dict[str, set[str]]:
    found = things(daemon) | {"machines": names_in(daemon.state / "vms")}
    del found["runtime states"]  # of containers
    return found


@asynchronous
async def test_a_microvms_tree_in_a_container(daemon: Daemon) -> None:
    """Running: the tree as it was; by a rule: nothing. Paused: it stays so, and what was never written to the disk is
    there. What was packed boots, too."""
    guest_kernels()
    daemon.link_kernels()
    async with sandbox_of(daemon, "microvm") as box:
        client = box._client
        images = {one.digest for one in await client.images()}
        made = await box.run_shell(MESS)
        assert made.exit_code == 0, made.stderr
        # The name outside /tmp keeps what has its first name there; a symlink, too.
        made = await box.run_shell("cd /tmp; echo kept > a; ln a /work/kept; ln -s x l; ln -P l /work/link; mkdir /x")
        assert made.exit_code == 0, made.stderr
        await box.write_file("/x/answer", "42")
        packed = await box.pack_diff("env:guest", leave_out=["/x/answer"])
        assert (packed.image.below, packed.left_out) == (box.info.layers, 3)
        before = await tree(box, *WRITTEN)
        await box.run_shell("mkdir -p /root/.ssh; echo late > /late; echo x > /root/.ssh/id_ed25519")
        with pytest.raises(DsecError) as caught:
            await box.pack_diff("env:refused")
        assert (caught.value.kind, caught.value.detail["path"]) == ("denied", "/root/.ssh/id_ed25519")
        await nothing_but(daemon, box.id)
        assert {one.digest for one in await client.images()} == images | {packed.image.digest}
        await box.run_shell("rm -r /root/.ssh; echo later >> /late")
        await box.pause()
        await box.pack_diff("env:paused")
        assert (await box.refresh()).state == "paused"
        await nothing_but(daemon, box.id)
    async with daemon.client() as client:
        copy = await launch(client, container_image="env:guest")
        after = await tree(copy, *WRITTEN)
        shown = await copy.run_shell("cat /work/kept; readlink /work/link; ls -A /tmp /x; ls -d /late")
        await copy.stop()
        before["links"] = [names for names in before["links"] if "/tmp/a" not in names]
        assert differences(before, after) == []
        assert shown.stdout.split() == ["kept", "x", "/tmp:", "/x:"]
        copy = await launch(client, "microvm", container_image="env:paused")
        assert await copy.read_file("/late") == b"late\nlater\n"
        assert (await copy.run_shell("cat /work/linked; ls -A /etc/cron.daily /usr/share/perl5; ls /etc/debian_version")
                ).stdout.split() == ["one", "/usr/share/perl5", "/etc/cron.daily:", "mine"]  # fmt: skip
        await copy.stop()
        for name in ("env:guest", "env:paused"):
            await client.call("image.remove", image_wire.ByRef(ref=name))


@asynchronous
async def test_killed_in_the_middle_of_a_microvms_pack(fresh_daemon: Daemon) -> None:
    """SIGKILL while its copy tells: the source runs on; the copy, its disk and what was half made go."""
    daemon = fresh_daemon
    guest_kernels()
    daemon.link_kernels()
    async with daemon.client() as client:
        box = await launch(client, "microvm", disk_limit_mb=1024)
        assert (await box.run_shell("head -c 80000000 /dev/zero > /big")).exit_code == 0
        told = asyncio.Event()
        work = asyncio.create_task(
            box.pack_diff("env:killed", progress=lambda at: told.set() if at.phase == "pack" else None)
        )
        await asyncio.wait_for(told.wait(), 120)
        daemon.kill()
        with pytest.raises(DsecError):
            await work
    daemon.start()
    async with daemon.client() as client:
        again = await client.get(box.id)
        assert (await again.run_shell("stat -c %s /big")).stdout == "80000000\n"
        await nothing_but(daemon, box.id)
        await client.call("image.gc", image_wire.Gc())
        assert "env:killed" not in {one.name for one in await client.images()}
        assert not [one.name for one in (daemon.state / "images").iterdir() if one.name.startswith(("tmp-", "trash-"))]
        await again.stop()
