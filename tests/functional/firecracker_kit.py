"""Stand-ins for firecracker and jailer as programs in a directory, and machines on them that leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from leftovers import command_lines

from dsecd import proc
from dsecd.vmm import firecracker, firecracker_api, firecracker_machine
from dsecd.vmm.firecracker import FirecrackerDriver
from dsecd.vmm.machine import Drive, Limits, MachineSpec

HERE = Path(__file__).parent
MIB = 1 << 20

# Takes the real one's options, but keeps its user and its view of the files: the program is not static.
JAILER = """#!/bin/sh
[ "$1" = --version ] && {{ echo "Jailer v{release}"; exit; }}
while [ "$1" != -- ]; do
    case "$1" in
    --id) id=$2;; --exec-file) program=$2;; --chroot-base-dir) base=$2;; --uid|--gid) [ "$2" -gt 0 ] || exit 3;;
    --resource-limit) case "$2" in fsize=*) ;; *) exit 3;; esac;;
    *) echo "unexpected argument $1" >&2; exit 3;;
    esac
    shift 2
done
shift
cd "$base/$(basename "$program")/$id/root" && exec "$program" --id "$id" "$@"
"""


@dataclass
class Bench:
    """A directory with the two programs, the files of machines, and the stand-in's log."""

    directory: Path
    plan: dict[str, Any] = field(default_factory=dict)
    made: int = 0

    def __post_init__(self) -> None:
        self.bin = self.directory / "bin"
        self.bin.mkdir()
        for name in ("kernel", "initrd"):
            (self.directory / name).write_bytes(name.encode())
        (self.directory / "layer").write_bytes(bytes(2 * MIB))

    def driver(self, **plan: Any) -> FirecrackerDriver:
        """Programs that keep to `plan` (see fake_firecracker.py), found as the daemon finds them."""
        self.plan = {"log": str(self.directory / "requests"), **plan}
        quoted = json.dumps(self.plan).replace("'", "'\\''")
        self.program(
            "firecracker", f"#!/bin/sh\nexec {sys.executable} -S {HERE}/fake_firecracker.py --plan '{quoted}' \"$@\"\n"
        )
        self.program("jailer", JAILER.format(release=plan.get("jailer", plan.get("release", "1.15.1"))))
        return FirecrackerDriver.find(str(self.bin / "firecracker"), str(self.bin / "jailer"))

    def program(self, name: str, text: str) -> None:
        new = self.bin / f".{name}"
        new.write_text(text)
        new.chmod(0o755)
        new.rename(self.bin / name)

    def spec(self, **changes: Any) -> MachineSpec:
        self.made += 1
        ident = f"m{self.made}"
        directory, disk = self.directory / ident, self.directory / f"{ident}.disk"
        directory.mkdir(mode=0o700)
        disk.write_bytes(bytes(4096))
        values: dict[str, Any] = {
            "id": ident, "directory": directory, "vcpus": 1, "memory": 64 * MIB, "kernel": self.directory / "kernel",
            "initrd": self.directory / "initrd", "cmdline": ("dsec.link=vsock:1024",),
            "pmem": (self.directory / "layer",), "drives": (Drive(disk),),
        }  # fmt: skip
        return MachineSpec(**{**values, **changes})

    def requests(self) -> list[dict[str, Any]]:
        """What was asked since the last call."""
        path = self.directory / "requests"
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            return []
        path.unlink()
        return [json.loads(line) for line in lines]

    def left(self) -> list[str]:
        """Processes that are here in any way, and what their machines' directories still have."""
        mine = os.fsencode(self.directory)
        found = [
            f"process {pid}"
            for pid, command in command_lines().items()
            if mine in command and pid != os.getpid() and proc.start_time(pid) is not None
        ]
        for directory in self.directory.glob("m*"):
            if directory.is_dir():
                found += [str(path) for path in directory.iterdir()]
        return found


@contextlib.asynccontextmanager
async def started(driver: FirecrackerDriver, spec: MachineSpec) -> AsyncIterator[Any]:
    try:
        yield await driver.start(spec)
    finally:
        await driver.end(spec)


async def echo(machine: Any, text: bytes) -> bytes:
    """Through the vsock and back."""
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_unix_connection(str(machine.agent.path))
        try:
            writer.write(b"CONNECT %d\n" % machine.agent.vsock_port)
            assert (await reader.readline()).startswith(b"OK ")
            writer.write(text)
            return await reader.readexactly(len(text))
        finally:
            writer.close()


def jailed(uid: int = 61_234, groups: tuple[Path, ...] = ()) -> Limits:
    return Limits(uid=uid, gid=uid, groups=groups)


def directory_of(bench: Bench, name: str) -> Path:
    """A new one for a snapshot."""
    path = bench.directory / name
    path.mkdir(mode=0o700)
    return path


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(firecracker_api, "CALL_S", 0.7)
    monkeypatch.setattr(firecracker, "BOOT_S", 0.7)
    monkeypatch.setattr(firecracker, "LOAD_S", 0.7)
    monkeypatch.setattr(firecracker_machine, "_SAVE_S", 0.7)
    monkeypatch.setattr(firecracker_machine, "_SAVE_BYTES_A_SECOND", 1 << 40)


def run(coroutine: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))
