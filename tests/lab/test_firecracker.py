"""The driver with the real Firecracker, under the lab VM's KVM: boot, exec, pmem, balloon, saving, clones, jailer.

A guest of a guest under emulation is slow, so one machine goes through a whole life in each test. Skipped where this
machine has no Firecracker to send along (delivery.py says where it is looked for).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsecd import proc
from dsecd.agent.command import Command
from dsecd.agent.files import guest_stats, wake
from dsecd.agent.frames import Field, Tag
from dsecd.agent.link import AgentLink
from dsecd.cgroup.groups import Cgroups
from dsecd.container.seccomp import caps_mask, command_filter
from dsecd.damon.policy import Policy
from dsecd.errors import DsecError
from dsecd.vmm import kvm
from dsecd.vmm.backend import VmBackend, VmLayer, VmPlan
from dsecd.vmm.firecracker import FirecrackerDriver
from dsecd.vmm.host import VmHost
from dsecd.vmm.initramfs import write_initramfs
from dsecd.vmm.machine import Drive, Limits, Machine, MachineSpec

pytestmark = pytest.mark.lab

MIB = 1 << 20
PMEM_UNIT = 2 * MIB
MEMORY = 256 * MIB
BIG = 24 * MIB
UID = 612_340
AGENT = Path("/usr/lib/dsecd/dsec-agent")
KERNEL = Path("/srv/vmlinux")
WORK = Path("/var/tmp/fc")  # on the disk, as snapshots are
UP_S = 120.0
NAMES = (f"m{n}" for n in itertools.count())  # of machines: each test has its own
RELEASES = sorted(Path("/srv/bin").glob("*/firecracker"))


def found(program: Path | None) -> FirecrackerDriver:
    if program is None:
        pytest.skip("no Firecracker was sent along: put firecracker and jailer into ~/.cache/dsecd/bin")
    return FirecrackerDriver.find(str(program), str(program.with_name("jailer")))


@pytest.fixture(params=RELEASES or [None], ids=[path.parent.name for path in RELEASES] or ["none"])
def each(request: pytest.FixtureRequest) -> FirecrackerDriver:
    """Every release that is here."""
    return found(request.param)


@pytest.fixture
def driver() -> FirecrackerDriver:
    """One of them."""
    return found(RELEASES[-1] if RELEASES else None)


@pytest.fixture(scope="module")
def parts() -> Iterator[Path]:
    """A layer (busybox and a large file) as two pmem files, an initramfs, an empty ext4 disk."""
    WORK.mkdir(mode=0o755)
    tree = WORK / "tree"
    for name in ("bin", "dev", "proc", "sys", "tmp", "etc", "root"):
        (tree / name).mkdir(parents=True)
    (tree / "bin/busybox").write_bytes(Path("/usr/bin/busybox").read_bytes())
    (tree / "bin/busybox").chmod(0o755)
    for name in ("sh", "cat", "echo", "grep", "dd", "sleep", "head", "id", "date", "mount"):
        (tree / "bin" / name).symlink_to("busybox")
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tree / "big").write_bytes(secrets.token_bytes(BIG))
    run = ["mkfs.erofs", "--quiet", "--chunksize=1048576", f"--blobdev={WORK}/data", str(WORK / "meta"), str(tree)]
    subprocess.run(run, check=True)
    for name in ("meta", "data"):
        path = WORK / name
        os.truncate(path, -(-path.stat().st_size // PMEM_UNIT) * PMEM_UNIT)
        path.chmod(0o444)
    with (WORK / "initrd").open("w+b") as out:
        write_initramfs(out, AGENT)
    (WORK / "empty").write_bytes(b"")
    os.truncate(WORK / "empty", 64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(WORK / "empty")], check=True)
    yield WORK
    subprocess.run(["rm", "-rf", str(WORK)], check=True)


@pytest.fixture
def group() -> Iterator[Any]:
    cgroups = Cgroups.detect(base="/dsecd-fc")
    cgroups.prepare()
    made: list[Any] = []

    def make(name: str) -> tuple[Path, ...]:
        one = cgroups.sandbox(name)
        one.create_all()
        made.append(one)
        return tuple(one.paths())

    yield make
    for one in made:
        assert not one.is_populated(), (one.unified / "cgroup.procs").read_text()
        one.remove()
    cgroups.remove_base()


def machine_of(parts: Path, name: str, groups: tuple[Path, ...], uid: int, disk: Path | None = None) -> MachineSpec:
    directory, copy = parts / name, parts / f"{name}.disk"
    directory.mkdir(mode=0o700)
    subprocess.run(["cp", "--sparse=always", str(disk or parts / "empty"), str(copy)], check=True)
    return MachineSpec(
        id=name,
        directory=directory,
        vcpus=1,
        memory=MEMORY,
        kernel=KERNEL,
        initrd=parts / "initrd",
        cmdline=("dsec.lower=pmem0:pmem1", "dsec.upper=vda", "dsec.pids=128", "dsec.link=vsock:1024"),
        pmem=(parts / "meta", parts / "data"),
        drives=(Drive(copy),),
        limits=Limits(cgroup=name, groups=groups, uid=uid, gid=uid),
    )


@contextlib.asynccontextmanager
async def linked(machine: Machine) -> AsyncIterator[AgentLink]:
    """A link to its agent. One that comes too early after a load is reset with the guest's vsock: once more, then."""
    hello: list[Field] = [(Tag.SECCOMP, command_filter()), (Tag.CAPS, caps_mask())]
    deadline = time.monotonic() + UP_S
    while True:
        try:
            link = await AgentLink.connect(machine.agent, hello, UP_S)
            break
        except DsecError as exc:
            if time.monotonic() > deadline or proc.start_time(machine.pid) is None:
                raise AssertionError(f"{exc}\n{(await machine.console()).decode(errors='replace')[-3000:]}") from exc
            await asyncio.sleep(0.2)
    try:
        yield link
    finally:
        await link.close()


async def sh(link: AgentLink, line: str, timeout: float = 120) -> str:
    command = Command(link)
    arguments: list[Field] = [(Tag.ARG, word) for word in (b"/bin/sh", b"-c", line.encode())]
    command.start([*arguments, (Tag.ENV, b"PATH=/bin"), (Tag.TIMEOUT_MS, int(timeout * 1000)), (Tag.CAP, 1 << 20)])
    async with asyncio.timeout(timeout + 30):
        ended = await command.ended
        await command.fetch()
    out, err = (command.kept(stream, ended).head.decode() for stream in (1, 2))
    command.forget()
    assert ended.code == 0, f"{line}: {ended.code} {out} {err}"
    return out.strip()


async def until(what: str, holds: Any, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.5)


def resident(pid: int, what: str = "RssAnon") -> int:
    """Bytes of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) << 10


def test_the_probe_finds_kvm_usable() -> None:
    assert kvm.usable() == ""


@pytest.mark.nested
def test_a_life(each: FirecrackerDriver, parts: Path, group: Any) -> None:
    """Boot, exec, DAX, balloon, pause, save, resume there, load elsewhere, clones side by side; all jailed."""
    driver, name = each, f"{next(NAMES)}-"
    specs = [machine_of(parts, f"{name}{n}", group(f"{name}{n}"), UID + n) for n in range(3)]
    mounts = Path("/proc/self/mountinfo").read_text()

    async def scenario() -> None:
        try:
            await _life(driver, parts / f"{name}.saved", specs)
        finally:
            for spec in specs:
                await driver.end(spec)
                assert list(spec.directory.iterdir()) == []

    asyncio.run(scenario())
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert subprocess.run(["pgrep", "-x", "firecracker|jailer"], capture_output=True).stdout == b""


async def _life(driver: FirecrackerDriver, saved: Path, specs: list[MachineSpec]) -> None:
    began = time.monotonic()
    machine = await driver.start(specs[0])
    print(f"started after {time.monotonic() - began:.1f} s")
    status = Path(f"/proc/{machine.pid}/status").read_text()
    uid = specs[0].limits.uid
    assert f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in status
    assert "CapEff:\t0000000000000000" in status
    # (os.readlink would show "/" for the root of another mount namespace.)
    assert os.stat(f"/proc/{machine.pid}/root").st_ino == machine.root.path.stat().st_ino
    assert os.readlink(f"/proc/{machine.pid}/ns/net") != os.readlink("/proc/self/ns/net")

    async with linked(machine) as link:
        print(f"agent ready after {time.monotonic() - began:.1f} s")
        assert await sh(link, "echo $((6 * 7)); id -u") == "42\n0"
        await _reads_without_cache(link)
        await _gives_memory_back(machine, link)
        await machine.pause()
        await machine.pause()
        await machine.resume()
        assert await sh(link, "echo resumed > /note; cat /note") == "resumed"  # on the same connection
    async with linked(machine) as link:  # a new one: what 1.16 loses after a plain pause and resume
        assert await sh(link, "cat /note") == "resumed"
        await sh(link, "echo in memory > /tmp/x; echo on disk > /root/x")

    await machine.pause()
    saved.mkdir(mode=0o700)
    print(f"used and paused after {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    snapshot = await machine.snapshot(saved)
    print(f"saved in {time.monotonic() - began:.1f} s, {(saved / 'memory').stat().st_blocks >> 11} MiB on disk")
    for spec in specs[1:]:
        subprocess.run(["cp", "--sparse=always", str(specs[0].drives[0].path), str(spec.drives[0].path)], check=True)
    await machine.resume()
    async with linked(machine) as link:
        await wake(link, time.time_ns(), secrets.token_bytes(64))
        assert await sh(link, "cat /tmp/x /root/x") == "in memory\non disk"

    # An altered file is refused before anything runs.
    with (saved / "memory").open("r+b") as file:
        file.seek(MEMORY // 2)
        byte = file.read(1)
        file.seek(MEMORY // 2)
        file.write(bytes([byte[0] ^ 1]))
        file.flush()
        with pytest.raises(DsecError, match="not what was saved"):
            await driver.restore(specs[1], snapshot, saved, clone=True)
        file.seek(MEMORY // 2)
        file.write(byte)

    clones = []
    for spec in specs[1:]:
        began = time.monotonic()
        clone = await driver.restore(spec, snapshot, saved, clone=True)
        await clone.resume()
        async with linked(clone) as link:
            print(f"clone answered after {time.monotonic() - began:.1f} s, {resident(clone.pid) >> 20} MiB of its own")
            await wake(link, time.time_ns(), secrets.token_bytes(64), spec.id)
            assert await sh(link, "cat /tmp/x /root/x") == "in memory\non disk"
            await sh(link, f"echo {spec.id} > /root/who; echo {spec.id} > /tmp/who")
            assert abs(int(await sh(link, "date +%s")) - time.time()) < 30
        clones.append(clone)
    seeds = set()
    for spec, clone in zip(specs[1:], clones, strict=True):
        async with linked(clone) as link:
            assert await sh(link, "cat /root/who /tmp/who /proc/sys/kernel/hostname") == f"{spec.id}\n" * 2 + spec.id
            seeds.add(await sh(link, "cat /proc/sys/kernel/random/uuid"))
    assert len(seeds) == len(clones)
    await _ends(machine, clones)


async def _reads_without_cache(link: AgentLink) -> None:
    """DAX: a large file of a layer is read, and the guest's page cache does not grow by it."""
    cached = "grep ^Cached: /proc/meminfo"
    before = int((await sh(link, cached)).split()[1]) << 10
    await sh(link, "cat /big > /dev/null")
    after = int((await sh(link, cached)).split()[1]) << 10
    assert after - before < BIG // 4, f"the page cache grew by {after - before} of {BIG}"


async def _gives_memory_back(machine: Any, link: AgentLink) -> None:
    """The guest frees what it used: reporting gives it to the host. The balloon takes more."""
    empty = resident(machine.pid)
    await sh(link, "dd if=/dev/zero of=/dev/shm/fill bs=1M count=24 2>&1")
    full = resident(machine.pid)
    assert full - empty > 16 * MIB
    await sh(link, "echo > /dev/shm/fill")

    async def reported() -> bool:
        return resident(machine.pid) < full - 12 * MIB

    await until("free memory is reported", reported)

    available = (await guest_stats(link)).integer(Tag.MEM_AVAILABLE)
    await machine.set_balloon(MEMORY - 64 * MIB)

    async def inflated() -> bool:
        return (await guest_stats(link)).integer(Tag.MEM_AVAILABLE) < available - 48 * MIB

    await until("the balloon takes memory", inflated)
    await machine.set_balloon(MEMORY)

    async def deflated() -> bool:
        return (await guest_stats(link)).integer(Tag.MEM_AVAILABLE) > available - 16 * MIB

    await until("the balloon gives it back", deflated)


async def _ends(machine: Any, clones: list[Any]) -> None:
    """A guest that ends, and a process that is killed, are both `sandbox_dead`, with the reason."""
    os.kill(clones[0].pid, 9)
    with pytest.raises(DsecError) as caught:
        await clones[0].set_balloon(MIB)
    assert caught.value.kind == "sandbox_dead" and "signal 9" in caught.value.message
    await machine.release()
    driver_again = FirecrackerDriver.find(str(machine_program(machine)), str(machine_program(machine, "jailer")))
    again = await driver_again.adopt(machine.spec, machine.pid, machine.started)
    try:
        async with linked(again) as link:
            assert await sh(link, "cat /root/x") == "on disk"
    finally:
        await driver_again.end(machine.spec)
    with pytest.raises(DsecError) as caught:
        await driver_again.adopt(machine.spec, machine.pid, machine.started)
    assert caught.value.kind == "sandbox_dead"


def machine_program(machine: Any, name: str = "firecracker") -> Path:
    return next(path for path in RELEASES if f"v{machine.release_name}" in _version(path)).with_name(name)


def _version(path: Path) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout


@pytest.mark.nested
def test_pause_to_disk_and_fork_as_the_daemon_does(driver: FirecrackerDriver, parts: Path) -> None:
    """Through the backend: a command outlives a pause that ends the VMM, and the original outlives a fork."""
    cgroups = Cgroups.detect(base="/dsecd-fc")
    cgroups.prepare()
    host = VmHost(driver, parts / "run", parts / "state", Path("/dev/shm"), cgroups)
    (parts / "run").mkdir(exist_ok=True)
    backend = VmBackend(host, [(Tag.SECCOMP, command_filter()), (Tag.CAPS, caps_mask())], Policy(enabled=False))
    name = next(NAMES)
    idents = [f"b{name}-{n}" for n in range(2)]
    for ident in idents:
        (parts / f"{ident}.scratch").mkdir()
    plan = VmPlan(
        id=idents[0], kernel=KERNEL, initrd=parts / "initrd",
        layers=(VmLayer(parts / "meta", parts / "data", pmem=True),), scratch=parts / f"{idents[0]}.scratch", uid=UID,
        hostname="first", memory=192 * MIB, memory_cost=8 * MIB, disk=64 * MIB, pids=64, cpu=1.0,
    )  # fmt: skip

    async def scenario() -> None:
        try:
            vm = await backend.start(plan)
            counting = Command(vm.link)
            line = b"for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 1; done; cat /proc/sys/kernel/hostname"
            arguments: list[Field] = [(Tag.ARG, word) for word in (b"/bin/sh", b"-c", line)]
            counting.start([*arguments, (Tag.ENV, b"PATH=/bin"), (Tag.TIMEOUT_MS, 600_000), (Tag.CAP, 4096)])
            await counting.started
            pid = vm.pid
            began = time.monotonic()
            await vm.pause()
            assert vm.machine is None and proc.start_time(pid) is None
            print(f"paused to disk in {time.monotonic() - began:.1f} s")
            began = time.monotonic()
            await vm.resume()
            print(f"resumed in {time.monotonic() - began:.1f} s")
            async with asyncio.timeout(UP_S):
                ended = await counting.ended
                await counting.fetch()
            assert counting.kept(1, ended).head == b"".join(b"%d\n" % i for i in range(1, 9)) + b"first\n"
            await sh(vm.link, "echo shared > /root/x")
            async with backend.template(vm) as template:
                disk = parts / f"{idents[1]}.scratch"
                subprocess.run(["cp", "--sparse=always", *(parts / f"{idents[0]}.scratch").iterdir(), disk], check=True)
            fork = await backend.clone(template, idents[1], UID + 1, "second", disk)
            for one, name in ((vm, "first"), (fork, "second")):
                assert await sh(one.link, "cat /root/x /proc/sys/kernel/hostname") == f"shared\n{name}"
            await vm.release()
            await fork.release()
            again = await backend.adopt(idents[0], vm.pid, vm.started)
            assert await sh(again.link, "cat /root/x") == "shared"
            await again.release()
        finally:
            for ident in idents:
                await host.end(ident)
        assert [path for name in ("run", "state") for path in (parts / name).glob("b*")] == []

    try:
        asyncio.run(scenario())
    finally:
        cgroups.remove_base()


@pytest.mark.nested
def test_a_guest_that_panics_ends_the_machine(driver: FirecrackerDriver, parts: Path, group: Any) -> None:
    """Without a layer the agent cannot build a root: it says so and turns the machine off. Not jailed, for a change."""
    spec = machine_of(parts, name := next(NAMES), group(name), 0)
    spec = msgspec.structs.replace(spec, cmdline=("dsec.lower=pmem7:pmem8", *spec.cmdline[1:]))

    async def scenario() -> None:
        try:
            machine = await driver.start(spec)
            async with asyncio.timeout(UP_S):
                reason = await asyncio.shield(machine.watch.ended)
            assert reason == "the guest shut down"
            assert b"dsec-agent: boot:" in await machine.console()
        finally:
            await driver.end(spec)

    asyncio.run(scenario())
