"""Firecracker's snapshots and its jailer, against the stand-in (fake_firecracker.py)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from firecracker_kit import MIB, Bench, directory_of, echo, hasten, jailed, run, started

from dsecd.errors import DsecError
from dsecd.vmm.firecracker import FirecrackerDriver


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path)
    yield one
    assert one.left() == []


# -- snapshots --------------------------------------------------------------------------------------------------------
def test_snapshot_restore_and_clones_side_by_side(bench: Bench) -> None:
    driver = bench.driver()
    saved = directory_of(bench, "saved")
    specs = [bench.spec() for _ in range(4)]

    async def scenario() -> None:
        async with started(driver, specs[0]) as machine:
            with pytest.raises(DsecError, match="pause the machine"):
                await machine.snapshot(saved)
            await machine.pause()
            (machine.root.path / "save").mkdir()  # of a daemon that died there
            (machine.root.path / "save/memory").write_text("old")
            snapshot = await machine.snapshot(saved)
            assert (saved / "memory").stat().st_blocks * 512 < 8 * MIB  # zeros are holes
            assert not list(specs[0].directory.rglob("save"))
            await machine.resume()
            bench.requests()
            for spec in specs[1:]:
                clone = await driver.restore(spec, snapshot, saved, clone=True)
                await clone.resume()
                assert await echo(clone, b"clone") == b"clone"
            assert await echo(machine, b"original") == b"original"
        for spec in specs[1:]:
            await driver.end(spec)

    run(scenario())
    asked = [entry for entry in bench.requests() if entry["path"] != "/vm"]
    assert [entry["path"] for entry in asked] == ["/snapshot/load"] * 3
    body = asked[0]["body"]
    assert body["snapshot_path"] == "state" and body["mem_backend"] == {
        "backend_type": "File",
        "backend_path": "memory",
    }


@dataclass
class Saved:
    """A snapshot on disk, for tests that spoil it."""

    driver: FirecrackerDriver
    snapshot: Any
    directory: Path


@pytest.fixture
def saved(bench: Bench) -> Saved:
    driver, spec, directory = bench.driver(), bench.spec(), directory_of(bench, "saved")

    async def scenario() -> Any:
        async with started(driver, spec) as machine:
            await machine.pause()
            return await machine.snapshot(directory)

    return Saved(driver, asyncio.run(scenario()), directory)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _alter(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"!")


@pytest.mark.parametrize("name", ["state", "memory"])
@pytest.mark.parametrize("spoil", [_truncate, _alter, Path.unlink])
def test_a_spoilt_snapshot_is_refused_before_it_is_loaded(
    bench: Bench, saved: Saved, name: str, spoil: Callable[[Path], None]
) -> None:
    spoil(saved.directory / name)
    bench.requests()
    assert _refused(bench, saved, saved.snapshot).kind == "vmm"
    assert bench.requests() == []


def test_a_snapshot_of_another_kind_is_refused(bench: Bench, saved: Saved) -> None:
    change = msgspec.structs.replace
    for other in (
        change(saved.snapshot, version="8.0.0"),
        change(saved.snapshot, cpu="an 8086"),
        change(saved.snapshot, driver="qemu"),
        change(saved.snapshot, memory=saved.snapshot.memory * 2),
        change(saved.snapshot, files={**saved.snapshot.files, "../../etc/shadow": "0" * 64}),
    ):
        bench.requests()
        assert _refused(bench, saved, other).kind == "vmm"
        assert bench.requests() == []


def _refused(bench: Bench, saved: Saved, snapshot: Any) -> DsecError:
    spec = bench.spec()

    async def scenario() -> DsecError:
        with pytest.raises(DsecError) as caught:
            await saved.driver.restore(spec, snapshot, saved.directory, clone=True)
        return caught.value

    return asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["400", "hang", "die:2"])
def test_a_load_that_fails_leaves_nothing(
    bench: Bench, saved: Saved, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasten(monkeypatch)
    saved.driver = bench.driver(at={"PUT /snapshot/load": fault})
    assert _refused(bench, saved, saved.snapshot).kind == ("sandbox_dead" if fault == "die:2" else "vmm")
    assert bench.left() == []


@pytest.mark.parametrize("memory", ["link", "pipe", "short", "moved"])
def test_a_snapshot_with_something_else_in_place_of_the_memory(bench: Bench, memory: str) -> None:
    driver, spec, directory = bench.driver(memory=memory), bench.spec(), directory_of(bench, "saved")

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            await machine.pause()
            with pytest.raises(DsecError) as caught:
                await machine.snapshot(directory)
            assert caught.value.kind == "vmm" and "saved no" in caught.value.message
        assert not (directory / "memory").exists()
        assert Path("/etc/passwd").exists()

    run(scenario())


# -- the jailer -------------------------------------------------------------------------------------------------------
def test_a_jailed_machine_sees_its_files_and_the_host_no_mounts(bench: Bench) -> None:
    driver = bench.driver()
    spec = msgspec.structs.replace(bench.spec(), limits=jailed())

    async def scenario() -> None:
        async with started(driver, spec) as machine:
            assert await echo(machine, b"jailed") == b"jailed"
            assert str(bench.directory) not in Path("/proc/self/mountinfo").read_text()
            theirs = Path(f"/proc/{machine.pid}/mountinfo").read_text()
            root = spec.directory / "jail/firecracker/vm/root"
            for name in ("kernel", "initrd", "pmem0", "drive0"):
                assert f" {root}/{name} " in theirs
            assert spec.drives[0].path.stat().st_uid == 61_234
            assert spec.kernel.stat().st_uid == 0
            # From inside, a socket that stands for another is not what the daemon connects to.
            (root / "vsock").unlink()
            (root / "vsock").symlink_to("/run/elsewhere.sock")
            assert await echo(machine, b"still") == b"still"
            await machine.pause()
            saved = directory_of(bench, "saved")
            snapshot = await machine.snapshot(saved)
            clone = msgspec.structs.replace(bench.spec(), limits=jailed(61_235))
            try:
                copy = await driver.restore(clone, snapshot, saved, clone=True)
                await copy.resume()
                assert await echo(copy, b"clone") == b"clone"
            finally:
                await driver.end(clone)

    run(scenario())


def test_what_a_jailed_machine_cannot_have_is_named(bench: Bench) -> None:
    driver = bench.driver()
    spec = msgspec.structs.replace(bench.spec(), limits=jailed())

    async def scenario() -> None:
        spec.kernel.chmod(0o600)
        with pytest.raises(DsecError, match="chmod o"):
            await driver.start(spec)
        spec.kernel.chmod(0o644)
        spec.drives[0].path.unlink()
        with pytest.raises(DsecError) as caught:
            await driver.start(spec)
        assert caught.value.kind == "vmm" and str(spec.drives[0].path) in caught.value.message
        assert list(spec.directory.iterdir()) == []

    run(scenario())


def test_a_socket_that_is_none_is_refused(bench: Bench) -> None:
    """Firecracker is believed about its sockets no more than about anything else."""
    driver, spec = bench.driver(at={"PUT /vsock": "slow:0.5"}), bench.spec()

    async def scenario() -> None:
        task = asyncio.create_task(driver.start(spec))
        root = spec.directory / "jail/firecracker/vm/root"
        while not (spec.directory / "api.sock").exists():
            await asyncio.sleep(0.005)
        (root / "vsock").symlink_to(spec.directory / "api.sock")
        with pytest.raises(DsecError) as caught:
            await task
        assert caught.value.kind == "vmm"

    run(scenario())
