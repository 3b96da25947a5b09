"""What goes wrong with virtual machines as they are booted, saved, loaded and copied: one clear error, nothing left.

What the driver of Firecracker does then is in test_firecracker.py; hostile files in test_microvm.py and test_fullvm.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_box import NATIVE
from daemonkit import BASE, Daemon, asynchronous, guest_kernels, init_pid, launch, sandbox_of
from vmkit import kernel

from dsecd.agent.link import AgentLink
from dsecd.cgroup.groups import Cgroups
from dsecd.client import DsecError, DSecMicroVMRunArgs, Sandbox
from dsecd.damon.policy import Policy
from dsecd.vmm import backend
from dsecd.vmm.backend import VmBackend, VmPlan
from dsecd.vmm.host import VmHost
from dsecd.vmm.initramfs import write_initramfs
from dsecd.vmm.machine import MachineSpec
from dsecd.vmm.qemu import QemuDriver
from dsecd.vmm.qemu_args import CONSOLE_BYTES

MIB = 1 << 20
UID = 71_000_017


# -- through the daemon ------------------------------------------------------------------------------------------------
@pytest.fixture
def kernels(daemon: Daemon) -> None:
    guest_kernels()
    daemon.link_kernels()


def state_of(daemon: Daemon, sandbox: Sandbox) -> Path:
    return daemon.state / "vms" / sandbox.id


async def until(sandbox: Sandbox, state: str) -> None:
    async with asyncio.timeout(30):
        while (await sandbox.refresh()).state != state:
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("kernels")
@asynchronous
async def test_what_fails_or_is_given_up_half_way_changes_nothing(daemon: Daemon) -> None:
    """A pause that fails leaves it running, a load that fails paused, and a caller who leaves harms neither."""
    async with sandbox_of(daemon, "microvm") as sandbox:
        await sandbox.run_shell("echo kept > /root/file")
        saved = state_of(daemon, sandbox) / "saved"
        saved.write_text("in the way")
        with pytest.raises(DsecError) as caught:
            await sandbox.pause()
        assert caught.value.infra
        assert (await sandbox.refresh()).state == "running"
        assert (await sandbox.run_shell("cat /root/file")).stdout == "kept\n"
        saved.unlink()

        await sandbox.pause()
        (saved / "ram").rename(saved / "away")
        for _ in range(2):
            with pytest.raises(DsecError, match="cannot be read") as caught:
                await sandbox.run_shell("true")
            assert (caught.value.kind, caught.value.infra) == ("vmm", True)
            assert (await sandbox.refresh()).state == "paused"
        (saved / "away").rename(saved / "ram")

        error = daemon.ask("file.stat", {"id": sandbox.id, "path": "/", "timeout_s": 0.01})["error"]
        assert error["data"]["kind"] == "timeout"
        assert (await sandbox.run_shell("cat /root/file")).stdout == "kept\n"
        error = daemon.ask("sandbox.pause", {"id": sandbox.id, "timeout_s": 0.01})["error"]
        assert error["data"]["kind"] == "timeout"
        await until(sandbox, "paused")
        assert (await sandbox.run_shell("cat /root/file")).stdout == "kept\n"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("step", ["saved", "copied"])
@asynchronous
async def test_the_vmm_killed_while_it_is(daemon: Daemon, step: str) -> None:
    """It is over, copies that were asked for never were, and nothing is left (the fixtures look, too)."""
    async with daemon.client() as client:
        sandbox = await launch(client, "microvm")
        pid, state = init_pid(daemon, sandbox), state_of(daemon, sandbox)
        os.kill(pid, signal.SIGSTOP)  # so that the step waits for it
        work: asyncio.Task[Any] = asyncio.create_task(sandbox.pause() if step == "saved" else sandbox.fork(2))
        async with asyncio.timeout(20):
            while not [*state.glob("saved"), *state.glob("template-*")]:
                await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DsecError) as caught:
            await work
        assert caught.value.kind in ("vmm", "sandbox_dead")
        assert caught.value.infra
        await until(sandbox, "failed")
        assert not state.exists()
        assert sandbox.id not in daemon.sandboxes()


@pytest.mark.usefixtures("kernels")
@asynchronous
async def test_the_vmm_killed_while_it_is_loaded(daemon: Daemon) -> None:
    """It is still saved and goes on with the next call; if its guest ran already, it is over."""
    async with sandbox_of(daemon, "microvm") as sandbox:
        await sandbox.run_shell("echo kept > /root/file")
        await sandbox.pause()
        work = asyncio.create_task(sandbox.run_shell("cat /root/file"))
        note = daemon.run_dir / "sandboxes" / sandbox.id / "vmm.pid"
        async with asyncio.timeout(20):
            while not (note.exists() and note.read_text()):
                await asyncio.sleep(0.002)
        os.kill(int(note.read_text().split()[0]), signal.SIGKILL)
        with pytest.raises(DsecError) as caught:
            await work
        assert caught.value.infra
        if caught.value.kind == "vmm":
            assert (await sandbox.refresh()).state == "paused"
            assert (await sandbox.run_shell("cat /root/file")).stdout == "kept\n"
        else:
            assert caught.value.kind == "sandbox_dead"
            await until(sandbox, "failed")


@pytest.mark.parametrize(("lacks", "root"), [("erofs", "pmem"), ("pmem", "pmem"), ("blk", "blk")])
def test_a_kernel_that_cannot_is_named(fresh_daemon: Daemon, lacks: str, root: Any) -> None:
    """Before anything is made of it."""
    guest_kernels()
    fresh_daemon.link_kernels()
    for note in (fresh_daemon.state / "kernels").glob("*/kernel.json"):
        told = msgspec.json.decode(note.read_bytes())
        told["features"][lacks] = "absent"
        note.unlink()  # a link to the tests' own
        note.write_bytes(msgspec.json.encode(told))

    async def ask() -> DsecError:
        async with fresh_daemon.client() as client:
            with pytest.raises(DsecError, match=f"has no {lacks}: get another") as caught:
                await client.run_microvm(DSecMicroVMRunArgs(container_image=BASE, root=root), timeout=60)
            return caught.value

    error = asyncio.run(ask())
    assert (error.kind, error.infra) == ("vmm", True)


# -- guests that are no agent's ----------------------------------------------------------------------------------------
@pytest.fixture
def host() -> Iterator[VmHost]:
    """VMs without a daemon; at the end nothing of them may be there."""
    cgroups = Cgroups.detect(base=f"/dsecd-test-{os.getpid()}-faults")
    cgroups.prepare()
    memory = Path(f"/dev/shm/dsecd-faults-{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(prefix="dsecd-f", dir="/tmp") as top:
            run, state = Path(top, "run"), Path(top, "state")
            run.mkdir()
            yield VmHost(QemuDriver.find(kvm=False), run, state, memory, cgroups)
            left = [*run.iterdir(), *(path for path in state.iterdir() if path.name != ".templates")]
            assert not left
            assert not memory.exists()
    finally:
        cgroups.remove_base()


@asynccontextmanager
async def refused(host: VmHost, tmp_path: Path, initrd: Path) -> AsyncIterator[DsecError]:
    """A start with that as its initramfs fails."""
    plan = VmPlan(
        id="fault", kernel=kernel(), initrd=initrd, layers=(), scratch=tmp_path, uid=UID, hostname="x",
        memory=128 * MIB, memory_cost=0, disk=64 * MIB, pids=64, cpu=1.0,
    )  # fmt: skip
    try:
        with pytest.raises(DsecError) as caught:
            await VmBackend(host, [], Policy(enabled=False)).start(plan)
        yield caught.value
    finally:
        await host.end("fault")


@asynchronous
async def test_a_guest_that_never_answers(host: VmHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "READY_S", 0.2)  # no guest is so quick
    with (tmp_path / "initrd").open("wb") as out:
        write_initramfs(out, NATIVE / "dsec-agent")
    async with refused(host, tmp_path, tmp_path / "initrd") as error:
        assert error.kind == "vmm"
        assert "the guest did not come up (the agent did not greet within 0.2 s); its console's last" in error.message


@asynchronous
async def test_a_guest_that_panics_as_it_boots(host: VmHost, tmp_path: Path) -> None:
    """There is no init: noticed by its VMM's end, and not by the clock."""
    (tmp_path / "initrd").write_bytes(b"not an archive" * 100)
    async with asyncio.timeout(backend.READY_S - 5), refused(host, tmp_path, tmp_path / "initrd") as error:
        assert error.kind == "vmm"
        assert "the guest ended while it booted" in error.message


@asynchronous
async def test_a_guest_that_floods_console_and_link(host: VmHost, tmp_path: Path) -> None:
    """What it says is neither believed nor kept, and shown in one short line."""
    init = tmp_path / "init"
    source = Path(__file__).with_name("vm_garbage.c")
    subprocess.run(["gcc", "-static", "-O1", "-Wall", "-Werror", "-o", init, source], check=True)
    with (tmp_path / "initrd").open("wb") as out:
        write_initramfs(out, init)
    spec = MachineSpec(
        id="fault", directory=host.directory("fault"), vcpus=1, memory=128 * MIB, kernel=kernel(),
        initrd=tmp_path / "initrd", memory_dir=host.memory_dir, limits=await host.place("fault", 128 * MIB, 1.0, UID),
    )  # fmt: skip
    host.note(spec)
    try:
        machine = await host.driver.start(spec)
        try:
            async with asyncio.timeout(backend.READY_S):
                while len(await machine.console()) < CONSOLE_BYTES:
                    await asyncio.sleep(0.2)
                reader, writer = await asyncio.open_unix_connection(machine.agent.path)
                assert await reader.read(4096), "the link has its share"
                writer.close()
            with pytest.raises(DsecError) as caught:
                await AgentLink.connect(machine.agent, [], 1.0)
            assert caught.value.kind == "sandbox_dead"
            error = await backend.silent(machine, caught.value)
            assert error.kind == "vmm"
            assert len(error.message) < 500
            assert error.message.isprintable()
            console = await machine.console()
            assert len(console) == CONSOLE_BYTES, "the last of it"
            assert b"\x07\x0e\x15" in console
        finally:
            await machine.release()
    finally:
        await host.end("fault")
