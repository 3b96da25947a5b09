"""The Firecracker driver against a stand-in (fake_firecracker.py) that checks every request and misbehaves on demand.

The real program runs guests in tests/lab/test_firecracker.py.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from firecracker_kit import MIB, Bench, directory_of, echo, hasten, jailed, run, started

from dsecd import proc
from dsecd.cgroup.groups import Cgroups, SandboxCgroup
from dsecd.errors import DsecError
from dsecd.vmm import firecracker, firecracker_api, firecracker_process
from dsecd.vmm.firecracker import FirecrackerDriver
from dsecd.vmm.machine import Drive, Nic

BOOT = [
    "PUT /machine-config", "PUT /boot-source", "PUT /drives/drive0", "PUT /pmem/pmem0", "PUT /vsock", "PUT /balloon",
    "PUT /entropy", "PUT /actions",
]  # fmt: skip
RUNNING = ["PATCH /vm", "PATCH /balloon", "PUT /snapshot/create"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path)
    yield one
    assert one.left() == []


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SandboxCgroup]:
    cgroups = Cgroups.detect(base=f"/dsecd-fc-{os.getpid()}")
    cgroups.prepare()
    one = cgroups.sandbox("m")
    one.create_all()
    yield one
    one.kill()
    one.remove()
    cgroups.remove_base()


def failed(driver: FirecrackerDriver, spec: Any) -> DsecError:
    """Starting it fails, and leaves nothing even before `end`."""

    async def scenario() -> DsecError:
        with pytest.raises(DsecError) as caught:
            await driver.start(spec)
        assert list(spec.directory.iterdir()) == []
        await driver.end(spec)
        return caught.value

    return asyncio.run(asyncio.wait_for(scenario(), 60))


# -- a life -----------------------------------------------------------------------------------------------------------
def test_a_machine_is_configured_started_and_ended(bench: Bench) -> None:
    driver = bench.driver()
    disk = bench.directory / "second"
    disk.write_bytes(bytes(512))
    base = bench.spec()
    spec = msgspec.structs.replace(
        base, drives=(*base.drives, Drive(disk, read_only=True)), nics=(Nic("tap0", "02:00:00:00:00:01"),), vcpus=2
    )

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            assert driver.alive(spec) == (machine.pid, machine.started)
            assert await echo(machine, b"hello") == b"hello"
            assert driver.address(spec) == machine.agent
            await asyncio.sleep(0.2)
            assert (await machine.console()).endswith(b"guest: up\n")
        assert driver.alive(spec) is None
        await driver.end(spec)

    run(scenario())
    asked = bench.requests()
    assert [f"{entry['method']} {entry['path']}" for entry in asked] == [
        "PUT /machine-config", "PUT /boot-source", "PUT /drives/drive0", "PUT /drives/drive1", "PUT /pmem/pmem0",
        "PUT /network-interfaces/eth0", "PUT /vsock", "PUT /balloon", "PUT /entropy", "PUT /actions",
    ]  # fmt: skip
    bodies = {entry["path"]: entry["body"] for entry in asked}
    assert bodies["/machine-config"] == {"vcpu_count": 2, "mem_size_mib": 64}
    arguments = bodies["/boot-source"]["boot_args"].split()
    assert {"reboot=k", "panic=-1", "dsec.off=reboot", "dsec.link=vsock:1024"} <= set(arguments)
    assert bodies["/balloon"] == {"amount_mib": 0, "deflate_on_oom": True, "free_page_reporting": True}
    assert bodies["/pmem/pmem0"]["read_only"] and not bodies["/drives/drive0"]["is_read_only"]
    assert bodies["/drives/drive1"]["is_read_only"]


def test_pause_resume_and_balloon(bench: Bench) -> None:
    driver, spec = bench.driver(), bench.spec()

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            await machine.resume()
            await machine.pause()
            await machine.pause()
            await machine.resume()
            await machine.resume()
            # At once: the stand-in, like the real one, has one thread; calls wait for each other.
            await asyncio.gather(*(machine.set_balloon(target * MIB) for target in (32, 48, 64, 80)))

    run(scenario())
    asked = bench.requests()[-6:]
    assert [entry["body"] for entry in asked[:2]] == [{"state": "Paused"}, {"state": "Resumed"}]
    assert [entry["body"]["amount_mib"] for entry in asked[2:]] == [32, 16, 0, 0]


def test_the_network_namespace_is_its_own(bench: Bench) -> None:
    driver, spec = bench.driver(), bench.spec()

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            assert os.readlink(f"/proc/{machine.pid}/ns/net") != os.readlink("/proc/self/ns/net")

    run(scenario())


def test_what_firecracker_cannot_do_is_refused_before_anything_runs(bench: Bench) -> None:
    driver = bench.driver()
    (bench.bin / "jailer").unlink()
    bare = FirecrackerDriver.find(str(bench.bin / "firecracker"), str(bench.bin / "jailer"))
    spec = bench.spec()
    change = msgspec.structs.replace
    for one, bad, kind in [
        (driver, change(spec, display=True), "unsupported"),
        (driver, change(spec, drives=(Drive(spec.kernel, format="qcow2"),)), "unsupported"),
        (driver, change(spec, vcpus=33), "invalid"),
        (bare, change(spec, limits=jailed()), "unsupported"),
    ]:
        assert failed(one, bad).kind == kind
    assert bench.requests() == []


# -- faults -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", BOOT)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [("400", "vmm"), ("hang", "vmm"), ("die:148", "sandbox_dead"), ("kill:9", "sandbox_dead")],
)
def test_a_start_that_fails_at_any_step_leaves_nothing(
    bench: Bench, hasty: None, step: str, fault: str, kind: str
) -> None:
    error = failed(bench.driver(at={step: fault}), bench.spec())
    assert error.kind == kind, error
    assert len(error.message) < 600 and "\n" not in error.message
    said = {
        "400": f"refused {step}: no, because of this",
        "hang": f"did not answer {step} within",
        "die:148": "seccomp",
    }
    assert said.get(fault, "signal 9") in error.message


@pytest.mark.parametrize("fault", ["garbage", "close", "huge", "dribble"])
def test_a_garbled_answer_is_an_error_at_once(bench: Bench, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firecracker_api, "_SETTLE_S", 0.2)
    error = failed(bench.driver(at={"PUT /balloon": fault}), bench.spec())
    assert error.kind == "vmm" and "broke off its answer to PUT /balloon" in error.message


def test_a_slow_answer_is_waited_for(bench: Bench) -> None:
    driver, spec = bench.driver(at={"PUT /vsock": "slow:0.8"}), bench.spec()

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            assert await echo(machine, b"x") == b"x"

    run(scenario())


def test_a_program_that_never_opens_its_api(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "dying as told" in failed(bench.driver(start="die:1"), bench.spec()).message
    monkeypatch.setattr(firecracker, "START_S", 0.5)
    assert "did not come up within" in failed(bench.driver(start="hang"), bench.spec()).message


def test_a_missing_file_is_named(bench: Bench) -> None:
    driver, spec = bench.driver(), bench.spec()
    gone = failed(driver, msgspec.structs.replace(spec, kernel=bench.directory / "nothing"))
    assert gone.kind == "vmm" and "PUT /boot-source" in gone.message
    (bench.directory / "layer").write_bytes(bytes(4096))
    assert "PUT /pmem/pmem0" in failed(driver, spec).message


def test_a_body_that_is_too_large_is_not_sent(bench: Bench) -> None:
    spec = msgspec.structs.replace(bench.spec(), cmdline=("x" * 60_000,))
    error = failed(bench.driver(), spec)
    assert error.kind == "vmm" and "at most 51200" in error.message
    assert [entry["path"] for entry in bench.requests()] == ["/machine-config"]


@pytest.mark.parametrize("step", RUNNING)
@pytest.mark.parametrize(
    ("fault", "kind"), [("400", "vmm"), ("hang", "vmm"), ("die:149", "sandbox_dead"), ("kill:11", "sandbox_dead")]
)
def test_faults_of_a_running_machine(bench: Bench, hasty: None, step: str, fault: str, kind: str) -> None:
    driver, spec = bench.driver(at={step: fault}), bench.spec()

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            with pytest.raises(DsecError) as caught:
                if step == "PUT /snapshot/create":
                    await machine.pause()
                    await machine.snapshot(directory_of(bench, "saved"))
                elif step == "PATCH /balloon":
                    await machine.set_balloon(32 * MIB)
                else:
                    await machine.pause()
            assert caught.value.kind == kind, caught.value
            assert ("SIGBUS" in caught.value.message) == (fault == "die:149")
            assert not list(spec.directory.rglob("save"))

    run(scenario())


def test_a_machine_that_died_says_so_from_then_on(bench: Bench) -> None:
    driver, spec = bench.driver(), bench.spec()

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            os.kill(machine.pid, signal.SIGKILL)
            for call in (machine.pause, lambda: machine.set_balloon(MIB), machine.pause):
                with pytest.raises(DsecError) as caught:
                    await call()
                assert caught.value.kind == "sandbox_dead" and "signal 9" in caught.value.message
            assert proc.start_time(machine.pid) is None and not Path(f"/proc/{machine.pid}").exists()  # reaped

    run(scenario())


@pytest.mark.parametrize("turns", [1, 3, 10, 30, 100, 300])
def test_a_cancelled_start_leaves_nothing(bench: Bench, turns: int) -> None:
    """Cut off after so many turns of the loop: before the spawn, in it, in the calls."""
    driver, spec = bench.driver(), bench.spec()

    async def scenario() -> None:
        task = asyncio.create_task(driver.start(spec))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await driver.end(spec)

    run(scenario())


def test_ending_what_never_was(bench: Bench) -> None:
    driver, spec = bench.driver(), bench.spec()

    async def scenario() -> None:
        await driver.end(spec)
        (spec.directory / "vmm.pid").write_text("1 1\n")  # not ours: another start time
        await driver.end(spec)
        (spec.directory / "vmm.pid").write_text("nonsense")
        await driver.end(spec)
        shutil.rmtree(spec.directory)
        await driver.end(spec)

    run(scenario())


def test_a_vsock_that_resets(bench: Bench) -> None:
    driver, spec = bench.driver(vsock="reset"), bench.spec()

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            with pytest.raises((AssertionError, ConnectionResetError)):
                await echo(machine, b"x")
            await machine.pause()

    run(scenario())


# -- a daemon that comes back -----------------------------------------------------------------------------------------
def test_another_daemon_takes_it_back(bench: Bench) -> None:
    first, spec = bench.driver(), bench.spec()

    async def scenario() -> None:
        machine = await first.start(spec)
        await asyncio.sleep(0.2)
        await machine.pause()
        await machine.release()
        second = bench.driver()
        assert second.alive(spec) == (machine.pid, machine.started)
        with pytest.raises(DsecError) as caught:
            await second.adopt(spec, machine.pid, machine.started + 1)
        assert caught.value.kind == "sandbox_dead"
        again = await second.adopt(spec, machine.pid, machine.started)
        try:
            assert (await again.console()).endswith(b"guest: up\n")
            bench.requests()
            await again.pause()  # it knows
            await again.resume()
            assert [entry["body"] for entry in bench.requests()] == [{"state": "Resumed"}]
            assert await echo(again, b"x") == b"x"
        finally:
            await second.end(spec)
        with pytest.raises(DsecError) as caught:
            await second.adopt(spec, machine.pid, machine.started)
        assert caught.value.kind == "sandbox_dead"

    run(scenario())


# -- the console ------------------------------------------------------------------------------------------------------
def test_a_flood_on_the_console_is_bounded(bench: Bench) -> None:
    driver, spec = bench.driver(flood=20 * MIB), bench.spec()

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            most = 0
            for _ in range(20):
                await asyncio.sleep(0.05)
                most = max(most, len(await machine.console()))
                assert sum(path.stat().st_size for path in spec.directory.iterdir() if path.is_file()) < 4096
            assert 0 < most <= firecracker_process.CONSOLE_BYTES
            await machine.pause()  # the flood holds up nothing

    run(scenario())


def test_what_was_read_is_kept_for_the_next_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        console = firecracker_process.Console(tmp_path / "console")
        out = console.open_end()
        os.write(out, b"a" * 60_000 + b"END")
        assert console.text().endswith(b"aEND")
        console.keep()
        console.close()
        os.write(out, b"between")
        console = firecracker_process.Console(tmp_path / "console")
        assert console.text().endswith(b"aENDbetween") and console.last_line().endswith("aENDbetween")
        os.write(out, b"b" * 60_000)
        assert len(console.text()) == firecracker_process.CONSOLE_BYTES
        console.close()
        console.close()
        os.close(out)

    run(scenario())


# -- releases with the vsock fault ------------------------------------------------------------------------------------
@pytest.mark.parametrize("release", ["1.16.0", "1.16.1"])
def test_a_release_that_loses_its_vsock_is_not_paused_without_a_cgroup(bench: Bench, release: str) -> None:
    driver, spec = bench.driver(release=release), bench.spec()

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            with pytest.raises(DsecError) as caught:
                await machine.pause()
            assert caught.value.kind == "vmm" and "cgroup" in caught.value.message

    run(scenario())
    assert "/vm" not in [entry["path"] for entry in bench.requests()]


def test_such_a_release_is_frozen_instead(bench: Bench, group: SandboxCgroup) -> None:
    driver, base = bench.driver(release="1.16.1"), bench.spec()
    groups = tuple(group.paths())
    spec = msgspec.structs.replace(base, limits=msgspec.structs.replace(base.limits, groups=groups))

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            for path in groups:
                assert str(machine.pid) in (path / "cgroup.procs").read_text().split(), path
            await machine.pause()
            assert group.is_frozen()
            with pytest.raises(DsecError, match="frozen"):
                await machine.set_balloon(MIB)
            await machine.release()
            machine = await driver.adopt(spec, machine.pid, machine.started)
            assert group.is_frozen()
            await machine.resume()
            assert not group.is_frozen() and await echo(machine, b"x") == b"x"
            assert "/vm" not in [entry["path"] for entry in bench.requests()]
            # With a snapshot in between, Firecracker's own pause is sound.
            await machine.pause()
            await machine.snapshot(directory_of(bench, "saved"))
            assert not group.is_frozen()
            await machine.resume()
            states = [entry["body"]["state"] for entry in bench.requests() if entry["path"] == "/vm"]
            assert states == ["Paused", "Resumed"]
            await machine.pause()  # ended while it is frozen
            assert group.is_frozen()

    run(scenario())


# -- finding it -------------------------------------------------------------------------------------------------------
def test_find_refuses_what_does_not_fit(bench: Bench) -> None:
    names = itertools.cycle([str(bench.bin / "firecracker")])
    for plan, words in [
        ({"release": "1.13.9"}, "no virtio-pmem"),
        ({"says": "something else"}, "does not say what it is"),
        ({"jailer": "1.15.0"}, "of release 1.15.0"),
    ]:
        with pytest.raises(DsecError) as caught:
            bench.driver(**plan)
        assert caught.value.kind == "unsupported" and words in caught.value.message
    bench.program("firecracker", "#!/nowhere\n")
    with pytest.raises(DsecError, match="does not run"):
        FirecrackerDriver.find(next(names))
    with pytest.raises(DsecError, match="not installed"):
        FirecrackerDriver.find("firecracker-that-is-not-there")
    driver = bench.driver(release="1.15.1", format="9.0.0")
    assert (driver.release, driver.version) == ("1.15.1", "9.0.0")
