"""Devices in real containers, by CDI files made for the tests: what is given, who gets it, and when it comes back."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from daemonkit import Daemon, asynchronous, container_args, container_values, started

from dsecd.client import DSecClient, DsecError, DSecMicroVMRunArgs, Sandbox
from dsecd.wire import sandbox as wire

PYTHON = "/usr/bin/python3"
HOOK = """
import json, os, sys
bundle = json.load(sys.stdin)["bundle"]
root = json.load(open(f"{bundle}/config.json"))["root"]["path"]
open(f"{root}/etc/hooked", "w").write(str(os.getuid()))
"""  # as vendors' tools do: the container's root file system by way of its bundle
DSECCTL = Path(sys.executable).parent / "dsecctl"
FUSE, CONTROL = "/dev/fuse", "/dev/loop-control"  # of every host, harmless to open, and tenants do not get them
POOLS: dict[str, dict[str, Any]] = {
    "fuse": {"match": ["example.org/fuse=*"]},
    "pair": {"match": ["example.org/pair=*"]},
    "shared": {"match": ["example.org/shared=?"], "share": 2},
    "hooked": {"match": ["example.org/hooked=*"], "hooks": True},
    "empty": {"match": ["example.org/none=*"]},
}


def put(directory: Path, kind: str, devices: dict[str, dict[str, Any]], **more: Any) -> None:
    entries = [{"name": name, "containerEdits": edits} for name, edits in devices.items()]
    document = {"cdiVersion": "0.6.0", "kind": f"example.org/{kind}", "devices": entries, **more}
    (directory / f"{kind}.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def cdi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's files, and what they share."""
    directory = tmp_path_factory.mktemp("cdi")
    for path in (*directory.parents, directory):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)  # what is shared must be readable to sandboxes' users
    (directory / "lib").mkdir()
    (directory / "lib/libthing.so").write_text("library")
    put(
        directory, "fuse",
        {"0": {"deviceNodes": [{"path": FUSE, "fileMode": 0o666}], "env": ["THING=device"]}},
        containerEdits={
            "env": ["THING=file", "THING_LIB=/opt/thing/lib"],
            "deviceNodes": [{"path": "/dev/thing-ctl", "hostPath": CONTROL, "permissions": "r", "fileMode": 0o666}],
            "mounts": [
                {"hostPath": str(directory / "lib"), "containerPath": "/opt/thing/lib", "options": ["ro", "rbind"]},
                {"hostPath": str(directory / "lib/libthing.so"), "containerPath": "/usr/lib/libthing.so"},
            ],
        },
    )  # fmt: skip
    nodes = {"0": "/dev/null", "1": "/dev/zero"}
    put(directory, "pair", {
        name: {"deviceNodes": [{"path": f"/dev/pair{name}", "hostPath": host}], "env": [f"PAIR{name}=1"]}
        for name, host in nodes.items()
    })  # fmt: skip
    put(directory, "shared", {"a": {"env": ["SHARED=a"]}})
    hook = {"hookName": "createRuntime", "path": "/bin/sh", "args": ["sh", "-c", f"id -u > {directory}/hook.out"]}
    (directory / "hook.py").write_text(HOOK)
    inside = {"hookName": "createContainer", "path": PYTHON, "args": ["python3", f"{directory}/hook.py"]}
    put(directory, "hooked", {"0": {"hooks": [hook, inside]}})
    (directory / "broken.json").write_text("{")
    return directory


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon, cdi: Path) -> Iterator[Daemon]:
    """A daemon with device pools."""
    images = daemon.state / "images"
    with started(tmp_path_factory.mktemp("devices"), watched, images, devices=POOLS, cdi_dirs=[str(cdi)]) as one:
        yield one


@asynccontextmanager
async def box(client: DSecClient, *devices: str, wait: float = 20, **more: Any) -> AsyncIterator[Sandbox]:
    sandbox = await client.run_container(container_args(devices=list(devices), device_wait_s=wait, **more), timeout=60)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def refused(work: Coroutine[Any, Any, Any], kind: str) -> DsecError:
    with pytest.raises(DsecError) as caught:
        await work
    assert caught.value.kind == kind, caught.value
    return caught.value


async def until(check: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.05)


def users(host: Daemon, pool: str) -> dict[str, list[str]]:
    """By device of that pool: the sandboxes that have it."""
    (found,) = [one for one in host.ask("device.list")["result"]["pools"] if one["name"] == pool]
    return {one["name"].partition("=")[2]: one.get("sandboxes", []) for one in found["devices"]}


def waiting(host: Daemon, pool: str) -> int:
    (found,) = [one for one in host.ask("device.list")["result"]["pools"] if one["name"] == pool]
    return int(found["waiting"])


# -- what it gets -----------------------------------------------------------------------------------------------------
@asynchronous
async def test_node_environment_and_files(host: Daemon, cdi: Path) -> None:
    """The device opens, variables are there in every command, files are read-only, and others see none of it."""
    async with host.client() as client, box(client, "fuse", env={"THING": "caller", "MINE": "1"}) as sandbox:
        said = await sandbox.run_shell("stat -c '%F %t:%T %a %u:%g' /dev/fuse; echo $THING $THING_LIB $MINE")
        assert said.stdout == "character special file a:e5 666 0:0\ndevice /opt/thing/lib 1\n"
        opened = await sandbox.exec(["python3", "-c", f"import os; os.open({FUSE!r}, os.O_RDWR)"])
        assert opened.exit_code == 0, opened.stderr
        said = await sandbox.run_shell("cat /opt/thing/lib/libthing.so /usr/lib/libthing.so")
        assert said.stdout == "librarylibrary", said.stderr
        for line in ("echo x > /opt/thing/lib/libthing.so", "echo x > /usr/lib/libthing.so", "touch /opt/thing/lib/new",
                     "rm /usr/lib/libthing.so", "mount -o remount,rw /opt/thing/lib"):  # fmt: skip
            assert not (await sandbox.run_shell(line)).ok, line
        assert (cdi / "lib/libthing.so").read_text() == "library"
        # As another user, too.
        said = await sandbox.run_shell("cat /opt/thing/lib/libthing.so < /dev/fuse", user="1000:1000")
        assert said.stdout == "library", said.stderr
        info, stats = await sandbox.refresh(), await sandbox.stats()
        assert info.devices == stats.devices == {"fuse": ("example.org/fuse=0",)}
        async with box(client) as other:
            said = await other.run_shell("ls /dev/fuse /opt/thing; echo $THING")
            assert said.stdout == "\n" and other.info.devices == {}
    assert users(host, "fuse") == {"0": []}


@asynchronous
async def test_the_device_group_holds_whatever_root_does_to_the_node(host: Daemon) -> None:
    """A right to read is no right to write, and a node's mode is no way to more; both cgroup layouts."""
    async with host.client() as client, box(client, "fuse") as sandbox:
        code = (
            "import os, errno\nos.chmod('/dev/thing-ctl', 0o777)\nos.close(os.open('/dev/thing-ctl', os.O_RDONLY))\n"
            "try: os.open('/dev/thing-ctl', os.O_RDWR)\n"
            "except OSError as e: print(errno.errorcode[e.errno])\n"
            "try: os.mknod('/dev/mine', 0o20666, os.makedev(10, 229))\n"
            "except OSError as e: print(errno.errorcode[e.errno])"
        )
        said = await sandbox.exec(["python3", "-c", code])
        assert said.stdout == "EPERM\nEPERM\n", said.stderr
        async with box(client, "pair") as other:  # made the same way, and its rights are only its own
            said = await other.exec(["python3", "-c", "open('/dev/pair0', 'r+b', 0).write(b'x')"])
            assert said.ok, said.stderr
            assert (await other.run_shell("ls /dev/thing-ctl /dev/pair1")).stdout == ""
    assert not os.stat(CONTROL).st_mode & 0o007, "the host's own node is another"


@asynchronous
async def test_the_same_under_runc(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon, cdi: Path
) -> None:
    """Another OCI runtime: the node opens, its right to write is not there where it was not given, files are there."""
    images, directory = daemon.state / "images", tmp_path_factory.mktemp("runc")
    with started(directory, watched, images, devices=POOLS, cdi_dirs=[str(cdi)], runtime="runc") as one:
        async with one.client() as client, box(client, "fuse") as sandbox:
            said = await sandbox.run_shell(
                "exec 3<>/dev/fuse && cat /opt/thing/lib/libthing.so && exec 4</dev/thing-ctl"
            )
            assert said.ok and said.stdout == "library", said.stderr
            assert not (await sandbox.run_shell("exec 3<>/dev/thing-ctl")).ok
            assert not (await sandbox.run_shell("echo x > /usr/lib/libthing.so")).ok


@asynchronous
async def test_several_and_shared_ones(host: Daemon) -> None:
    async with host.client() as client, box(client, "pair:2", "shared") as one:
        said = await one.run_shell("ls /dev/pair0 /dev/pair1; echo $PAIR0$PAIR1 $SHARED")
        assert said.stdout == "/dev/pair0\n/dev/pair1\n11 a\n"
        async with box(client, "shared") as two:
            assert users(host, "shared") == {"a": sorted([one.id, two.id])}
            error = await refused(client.run_container(container_args(devices=["shared"], device_wait_s=0)), "capacity")
            assert error.retryable and error.infra and "shared" in error.message
    assert users(host, "pair") == {"0": [], "1": []} and users(host, "shared") == {"a": []}


@asynchronous
async def test_hooks_where_the_pool_allows_them(host: Daemon, cdi: Path) -> None:
    """Those of the runtime's namespaces are the host's root, and reach its files; those of the container are in it."""
    async with host.client() as client, box(client, "hooked") as sandbox:
        assert (cdi / "hook.out").read_text() == "0\n", "which is why they are not the default"
        assert (await sandbox.run_shell("cat /etc/hooked; stat -c %u /etc/hooked")).stdout == "00\n"


# -- what is refused --------------------------------------------------------------------------------------------------
@asynchronous
async def test_refusals_are_one_sentence_each(host: Daemon, cdi: Path) -> None:
    async with host.client() as client:

        def ask(*devices: str) -> Coroutine[Any, Any, Sandbox]:
            return client.run_container(container_args(devices=list(devices)))

        assert "no device pool 'gpu'" in (await refused(ask("gpu"), "not_found")).message
        assert "has 2 usable devices, and 3 were asked" in (await refused(ask("pair:3"), "not_found")).message
        assert "has 0 usable devices" in (await refused(ask("empty"), "not_found")).message
        for text in ("fuse:0", "fuse:-1", "fuse:x", "../fuse", "example.org/fuse=0", "/dev/fuse", "fuse\n", ""):
            await refused(ask(text), "invalid")
        await refused(ask(*["fuse"] * 17), "invalid")
        micro = DSecMicroVMRunArgs(**container_values({"devices": ["fuse"]}))
        assert "gets no device of the host" in (await refused(client.run_microvm(micro), "unsupported")).message
        # A device that is gone, and back.
        put(cdi, "none", {"0": {"deviceNodes": [{"path": "/dev/dsec-gone"}]}})
        assert "/dev/dsec-gone: No such file" in (await refused(ask("empty"), "not_found")).message
        put(cdi, "none", {"0": {"deviceNodes": [{"path": "/dev/dsec-back", "hostPath": "/dev/full"}]}})
        async with box(client, "empty") as sandbox:
            assert (await sandbox.run_shell("head -c1 /dev/dsec-back")).ok
        (cdi / "none.json").unlink()
        found = await client.devices()
        assert ["broken.json is no CDI file" in one.text for one in found.problems] == [True]
        assert [one for one in await client.list(states=["failed"]) if "no device pool" in one.info.reason] == []
        assert all(not one.sandboxes for pool in found.pools for one in pool.devices), "refusals leave nothing"
        checks = host.ask("daemon.doctor")["result"]["checks"]
        (check,) = [one for one in checks if one["name"] == "devices"]
        assert check["level"] == "warn" and "broken.json" in check["text"] and check["text"].startswith("5 in 5 pools")


# -- who gets it ------------------------------------------------------------------------------------------------------
@asynchronous
async def test_contention_is_first_come_first_served(host: Daemon) -> None:
    """Eight want one device: one after the other has it, in the order they asked, and never two."""
    order: list[int] = []
    async with host.client() as client:

        async def one(number: int) -> None:
            async with box(client, "fuse", wait=120) as sandbox:
                order.append(number)
                assert users(host, "fuse") == {"0": [sandbox.id]}

        tasks = []
        async with box(client, "fuse"):
            for number in range(8):
                tasks.append(asyncio.create_task(one(number)))
                await until(lambda number=number: waiting(host, "fuse") == number + 1)
            await refused(client.run_container(container_args(devices=["fuse"], device_wait_s=0.1)), "capacity")
        await asyncio.gather(*tasks)
    assert order == list(range(8)) and users(host, "fuse") == {"0": []}


@asynchronous
async def test_who_waits_can_be_stopped(host: Daemon) -> None:
    async with host.client() as client, box(client, "fuse"):
        task = asyncio.create_task(client.run_container(container_args(devices=["fuse"], name="waits")))
        await until(lambda: waiting(host, "fuse") == 1)
        began = time.monotonic()
        await (await client.get("waits")).stop()
        assert time.monotonic() - began < 15, "the minute that it would wait is not waited for"
        assert "ended while it waited" in (await refused(task, "conflict")).message
        assert waiting(host, "fuse") == 0


@asynchronous
async def test_a_client_that_dies_gives_back_its_place_and_its_device(host: Daemon) -> None:
    """Killed while it waits: out of the queue at once. Killed while it has the device: back when its lease runs out."""
    code = (
        "import asyncio, sys\nfrom dsecd.client import DSecClient, DSecContainerRunArgs\n"
        "async def main():\n"
        "    async with DSecClient(sys.argv[1]) as client:\n"
        "        args = DSecContainerRunArgs(container_image=sys.argv[2], memory_limit_mb=256, disk_limit_mb=512,\n"
        "                                    devices=['fuse'], lease_s=2, device_wait_s=600)\n"
        "        await client.run(args)\n"
        "        print('has it', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    argv = [sys.executable, "-c", code, host.url, str(container_values({})["container_image"])]
    async with host.client() as client:
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
            try:
                assert holder.stdout is not None and await asyncio.to_thread(holder.stdout.readline) == b"has it\n"
                with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as waiter:
                    try:
                        await until(lambda: waiting(host, "fuse") == 1)
                    finally:
                        waiter.kill()
                await until(lambda: waiting(host, "fuse") == 0)
                assert users(host, "fuse")["0"], "its owner lives, and renews"
            finally:
                holder.kill()
        async with box(client, "fuse", wait=60) as sandbox:  # waits for the lease to run out
            assert users(host, "fuse") == {"0": [sandbox.id]}


@asynchronous
async def test_leases_outlive_the_daemon(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon, cdi: Path
) -> None:
    """Killed and started again: who had a device has it, with its rights, until that sandbox is stopped."""
    images = daemon.state / "images"
    with started(tmp_path_factory.mktemp("again"), watched, images, devices=POOLS, cdi_dirs=[str(cdi)]) as one:
        async with one.client() as client:
            ident = (await client.run_container(container_args(devices=["fuse", "shared"]))).id
        one.restart(politely=False)
        async with one.client() as client:
            sandbox = await client.get(ident)
            held: wire.Held = {"fuse": ("example.org/fuse=0",), "shared": ("example.org/shared=a",)}
            assert sandbox.info.devices == held
            said = await sandbox.run_shell("echo $THING; exec 3<>/dev/fuse")
            assert said.stdout == "device\n" and said.ok, said.stderr
            await refused(client.run_container(container_args(devices=["fuse"], device_wait_s=0)), "capacity")
            async with box(client, "shared", wait=0):
                assert len(users(one, "shared")["a"]) == 2
            await sandbox.stop()
            async with box(client, "fuse", wait=0):
                pass


@pytest.mark.parametrize(
    "node", ["", "c", "c:1:3:666:0", "c:1:3:666:0:0:", "p:1:3:666:0:0", "c:1:3:4777:0:0", "c:x:3:666:0:0"]
)
def test_the_launcher_takes_no_nonsense(node: str, tmp_path: Path) -> None:
    launcher = Path(__file__).resolve().parents[2] / "build/native/dsec-launch"
    argv = [launcher, "--stage", tmp_path, "--scratch", tmp_path, "--ids", "1048576:1", "--lower", "/", "--node", node]
    done = subprocess.run([*argv, "--", "/bin/true"], capture_output=True, text=True)
    assert done.returncode == 120 and "--node takes" in done.stderr


# -- dsecctl ----------------------------------------------------------------------------------------------------------
def test_on_the_command_line(host: Daemon) -> None:
    def dsecctl(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([DSECCTL, "-H", host.url, *words], capture_output=True, text=True, timeout=120)

    image = str(container_values({})["container_image"])
    done = dsecctl("run", "--memory", "256m", "--disk", "512m", "--device", "pair:2", image, "--", "ls", "/dev/pair1")
    assert done.stdout == "/dev/pair1\n", done.stderr
    lines = dsecctl("devices").stdout.splitlines()
    assert lines[0].split() == ["POOL", "DEVICE", "USED", "BY"]
    assert ["fuse", "example.org/fuse=0", "0/1", "-"] in [line.split() for line in lines]
    assert any(line.startswith("empty: no device") for line in lines)
    assert any("broken.json" in line for line in lines)
    found = json.loads(dsecctl("devices", "--json").stdout)
    assert [pool["name"] for pool in found["pools"]] == list(POOLS)
    done = dsecctl("run", "--device", "gpu", image, "--", "true")
    assert done.returncode == 125 and "no device pool 'gpu'" in done.stderr
