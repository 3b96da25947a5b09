"""layers: sandboxes from base, workspace and toolkit as layers, against the same as tar.gz unpacked into each one.

The content is the demo's: click's sdist, and pytest and git. The peer finds its archives in a layer too, so that it
pays for unpacking and for writing, and for no transfer.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import shutil
import tarfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from dsecd.client import DSecContainerRunArgs, Sandbox, SandboxFailed
from dsecd.wire import images as image_wire
from tests.bench import host
from tests.bench.frame import Bench, Bound, Outcome, Stage, clock, median, rounded, say
from tests.demo import layers
from tests.own import chunks_of

SANDBOXES: Final = 32
ROUNDS: Final = 3
UNPACK: Final = (
    "mkdir -p /workspace && tar -xzf /archives/workspace.tar.gz -C /workspace && tar -xzf /archives/toolkit.tar.gz -C /"
)
USE: Final = "git --version && cd /workspace/click-* && python3 -c 'import pytest, click'"
ENV: Final = {"PYTHONPATH": f"src:{layers.PYTHONPATH}"}


class Writes:
    """Bytes written by the sandboxes' disk and by the daemon itself; those of the disk below hold other work too."""

    def __init__(self, stage: Stage) -> None:
        self._pool = stage.daemon.state / "pool"
        self._device = host.device_of(self._pool)
        self._below = host.device_of(stage.daemon.state)
        self._pid = stage.daemon.pid

    def now(self) -> tuple[int, int]:
        for path in (self._pool, self._pool.parent):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        os.sync()
        ours = host.written_bytes(self._device) + host.process_written_bytes(self._pid)
        return ours, host.written_bytes(self._below)


async def run(stage: Stage) -> Outcome:
    await images(stage)
    layered = stage.args(workspace="workspace:bench", toolkits=["toolkit:bench"], disk_limit_mb=1024)
    unpacked = stage.args(toolkits=["archives:bench"], disk_limit_mb=1024)
    writes = Writes(stage)
    seconds: dict[str, list[float]] = {"layers": [], "tar.gz": []}
    written: dict[str, list[float]] = {"layers": [], "tar.gz": []}
    below: dict[str, list[float]] = {"layers": [], "tar.gz": []}
    for _ in range(ROUNDS):
        for name, args, line in (("layers", layered, USE), ("tar.gz", unpacked, f"{UNPACK} && {USE}")):
            before = await asyncio.to_thread(writes.now)
            with clock() as took:
                made = await set_up(stage, args, line)
            after = await asyncio.to_thread(writes.now)
            await stage.client.stop_many(made)
            seconds[name].append(took.ms / 1000)
            written[name].append((after[0] - before[0]) / 2**20)
            below[name].append((after[1] - before[1]) / 2**20)
            say(f"{name:7} {seconds[name][-1]:6.2f} s, {written[name][-1]:8.1f} MiB written "
                f"({below[name][-1]:.0f} MiB by the disk below, others' included)")  # fmt: skip
    return Outcome(
        {
            "speedup": rounded(median(seconds["tar.gz"]) / median(seconds["layers"])),
            "disk_write_ratio": rounded(median(written["layers"]) / median(written["tar.gz"])),
        },
        {
            "layers_s": median(seconds["layers"]), "tar_gz_s": median(seconds["tar.gz"]),
            "layers_written_mib": median(written["layers"]), "tar_gz_written_mib": median(written["tar.gz"]),
            "disk_below_ratio": rounded(median(below["layers"]) / median(below["tar.gz"])),
        },
    )  # fmt: skip


async def set_up(stage: Stage, args: DSecContainerRunArgs, line: str) -> list[Sandbox]:
    """All created in one call; then each is ready when its tools and its project answer."""

    async def ready(sandbox: Sandbox) -> None:
        done = await sandbox.run_shell(line, env=ENV, timeout=300)
        if not done.ok:
            raise RuntimeError(f"set-up failed: {done.stderr[-300:]}")

    made = await stage.client.run_containers(args, SANDBOXES)
    sandboxes = [one for one in made if isinstance(one, Sandbox)]
    for one in made:
        if isinstance(one, SandboxFailed):
            raise RuntimeError(f"not made: {one.message}")
    await together([ready(sandbox) for sandbox in sandboxes])
    return sandboxes


async def together(work: list[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


async def images(stage: Stage) -> None:
    """Three images: the two layers, and one that holds both as archives."""
    probe = await stage.client.run_container(stage.args())
    status = await probe.read_file("/var/lib/dpkg/status")
    await probe.stop()
    sdist = await asyncio.to_thread(layers.sdist, stage.work)
    toolkit, _ = await asyncio.to_thread(layers.toolkit, stage.work, status)
    packed = stage.work / "archives.tar"
    await asyncio.to_thread(archives, sdist, toolkit, packed)
    for name, kind, path, prefix in (
        ("workspace:bench", "workspace", sdist, "workspace"), ("toolkit:bench", "toolkit", toolkit, ""),
        ("archives:bench", "toolkit", packed, ""),
    ):  # fmt: skip
        with clock() as took:
            image = await stage.client.import_image(
                image_wire.Import(name=name, kind=kind, prefix=prefix), chunks_of(path)  # type: ignore[arg-type]
            )  # fmt: skip
        say(f"{name}: {image.files} files, {image.data_size >> 20} MiB, imported in {took.ms / 1000:.1f} s")


def archives(sdist: Path, toolkit: Path, target: Path) -> None:
    small = target.with_name("toolkit.tar.gz")
    with open(toolkit, "rb") as source, gzip.open(small, "wb", compresslevel=6) as out:
        shutil.copyfileobj(source, out, 1 << 20)
    with tarfile.open(target, "w") as tar:
        tar.add(sdist, "archives/workspace.tar.gz")
        tar.add(small, "archives/toolkit.tar.gz")


BENCH: Final = Bench(
    "layers", f"{SANDBOXES} sandboxes with a project and its tools",
    (Bound("speedup", 3, most=False), Bound("disk_write_ratio", 0.1)), run,
)  # fmt: skip
