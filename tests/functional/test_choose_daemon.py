"""`backend: "auto"` on a real host: what it becomes, what it never becomes, and how that is said."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import daemonkit
import pytest
from daemonkit import BASE, Daemon, asynchronous, container_args, started

from dsecd.client import DSecClient, DsecError, DSecFullVMRunArgs, DSecMicroVMRunArgs, DSecNeeds, DSecSyncClient
from dsecd.wire import sandbox as wire

DSECCTL = Path(sys.executable).parent / "dsecctl"
HOSTILE = DSecNeeds(trust="hostile")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon) -> Iterator[Daemon]:
    """A host that cannot run VMs: no kernels, and a VMM that is not there."""
    images = daemon.state / "images"
    with started(tmp_path_factory.mktemp("bare"), watched, images, vm_driver="firecracker") as one:
        yield one


async def refused(client: DSecClient, kind: str, *, auto: bool = True, **args: object) -> str:
    with pytest.raises(DsecError) as caught:
        await client.run(container_args(**args), backend="auto" if auto else None)
    assert caught.value.kind == kind, caught.value
    return caught.value.message


@asynchronous
async def test_the_lightest_that_fits(bare: Daemon) -> None:
    """Nothing declared, or a call that nobody makes here: a container, and the reason says why."""
    async with bare.client() as client:
        plain = await client.run(container_args(), backend="auto")
        call = await client.run(container_args(needs=DSecNeeds(stateless=True, life_s=5)), backend="auto")
        named = await client.run(container_args())
        assert (plain.info.backend, call.info.backend, named.info.backend) == ("container",) * 3
        assert plain.info.choice is not None and call.info.choice is not None and named.info.choice is None
        assert plain.info.choice.reason.startswith("container is the lightest that fits: fncall keeps nothing")
        assert "fncall.run makes it" in call.info.choice.reason
        assert (await plain.run_shell("echo hi")).stdout == "hi\n"
        await client.stop_many([plain, call, named])


@asynchronous
async def test_it_is_remembered(fresh_daemon: Daemon) -> None:
    async with fresh_daemon.client() as client:
        made = await client.run(container_args(), backend="auto")
    fresh_daemon.restart(politely=False)
    async with fresh_daemon.client() as client:
        again = await client.get(made.id)
        assert again.info.choice is not None and again.info.choice == made.info.choice
        await again.stop()


@asynchronous
async def test_hostile_is_never_a_container(bare: Daemon) -> None:
    """Where no VM can be had it is refused, with what is missing; also one of many, and when a container is named."""
    async with bare.client() as client:
        said = await refused(client, "unsupported", needs=HOSTILE)
        assert (
            "container shares the host's kernel, which hostile code must not" in said and "microvm cannot run" in said
        )
        said = await refused(client, "unsupported", needs=HOSTILE, auto=False)
        assert said.startswith("backend container was asked for, but it shares the host's kernel")
        specs = [container_args(needs=needs).spec() for needs in (None, HOSTILE)]
        for spec in specs:
            spec.backend = "auto"
        made: wire.Created = await client.call("sandbox.create_many", wire.CreateMany(specs=specs))
        kinds = [one.error.kind if one.error else one.sandbox and one.sandbox.backend for one in made.results]
        assert kinds == ["container", "unsupported"]
        await client.stop_many(await client.list())
        assert "no image" in await refused(client, "not_found", container_image="no-such:1")
        for args in (DSecMicroVMRunArgs(container_image=BASE), DSecFullVMRunArgs(vm_image="x")):
            with pytest.raises(DsecError, match="these arguments ask for a"):
                await client.run(args, backend="auto")
        assert "disk image" in await refused(client, "unsupported", needs=DSecNeeds(gui=True))


@asynchronous
async def test_one_name_is_one_sandbox(bare: Daemon) -> None:
    """Eight ask for the same name at once, while the host is asked what it can do."""
    async with bare.client() as client:
        boxes = await asyncio.gather(
            *(client.run(container_args(name="one"), backend="auto", timeout=60) for _ in range(8))
        )
        assert len({box.id for box in boxes}) == 1
        said = await refused(client, "conflict", name="one", needs=HOSTILE)
        assert said == "the container named 'one' shares the host's kernel, which hostile code must not"
        with pytest.raises(DsecError, match="shares the host's kernel"):
            await client.run_microvm(DSecMicroVMRunArgs(container_image=BASE, name="one"))
        assert (await client.get("one")).info.state == "running"
        await boxes[0].stop()


@pytest.mark.slow
def test_hostile_is_a_microvm_where_there_are_kernels(daemon: Daemon) -> None:
    daemonkit.guest_kernels()
    daemon.link_kernels()
    with DSecSyncClient(daemon.url) as client:
        with client.run_auto(container_args(needs=HOSTILE), timeout=180) as box:
            assert box.info.backend == "microvm" and box.info.choice is not None
            assert "microvm" in box.info.choice.reason and "is the lightest that fits" in box.info.choice.reason
            assert (
                box.run_shell("uname -r", timeout=60).stdout.strip() != Path("/proc/sys/kernel/osrelease").read_text()
            )
        chosen = client.choose(DSecNeeds(system=True), image=BASE)
        assert chosen.backend == "" and "fullvm starts from a disk image" in chosen.reason


def test_explained_on_the_command_line(bare: Daemon) -> None:
    def dsecctl(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([DSECCTL, "-H", bare.url, *words], capture_output=True, text=True, timeout=120)

    done = dsecctl("choose")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith("container is the lightest that fits")
    assert ["container", "chosen"] in [line.split() for line in lines]
    assert any(line.startswith("nothing: if it were hostile") for line in lines)
    assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]
    done = dsecctl("choose", "--trust", "hostile", "--image", BASE, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["backend"] == "" and "cannot run here" in found["reason"]
    assert {"what": "it were trusted to share the host's kernel", "backend": "container"} in found["changes"]
    options = ("--backend", "auto", "--memory", "256m", "--disk", "512m")
    done = dsecctl("run", *options, BASE, "--", "echo", "hi")
    assert done.stdout == "hi\n" and "container is the lightest that fits" in done.stderr
    done = dsecctl("run", *options, "--trust", "hostile", BASE, "--", "echo", "hi")
    assert done.returncode == 125 and done.stdout == "" and "[unsupported]" in done.stderr
