"""The configurations of the images bench: where the images are when the burst begins, and what was measured of each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsecd import __version__
from dsecd.client import DSecClient
from dsecd.erofs.model import FORMAT
from dsecd.erofs.stores import squeezed
from dsecd.wire import images as image_wire
from tests.bench import images_content, peers
from tests.bench.images_burst import Burst, Podman, ours
from tests.bench.images_content import CONTENTS
from tests.bench.images_disk import Disk, Meter
from tests.bench.images_link import Link
from tests.lab import cache
from tests.own import OwnDaemon, uninterrupted

STORE: Final = "far"
CONFIG: Final[dict[str, Any]] = {
    "host_tag": "images", "log_level": "warning", "id_first_slot": 3000, "id_last_slot": 3999, "disk_pool_mb": 16384,
    "cpu_overcommit": 1000.0, "memory_overcommit": 100.0, "disk_overcommit": 100.0,
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One configuration's burst. Bytes over the line, and bytes that its disk wrote until all was flushed. load: of the
    whole machine, over the last minute: rounds at very different ones say little about each other."""

    burst: Burst
    line: int
    disk: int
    samples: list[tuple[float, int]]
    load: float


async def measured(disk: Disk, link: Link, run: Callable[[], Awaitable[Burst]]) -> Measured:
    meter = await asyncio.to_thread(Meter, disk)
    before = link.received()
    try:
        burst = await run()
        line, load = link.received() - before, os.getloadavg()[0]
    finally:
        written = await asyncio.to_thread(meter.end)
    return Measured(burst, line, written, meter.samples, load)


# -- ours --------------------------------------------------------------------------------------------------------------
def imported(registry: Path) -> Path:
    """The images in our format, made of those in the registry once: `images/`, metadata; `far/`, data and its twins."""

    def make(product: Path) -> None:
        (product / STORE).mkdir()
        with images_content.serving(registry, images_content.free_port()) as address:
            asyncio.run(_import(product, address))

    found = cache.product("benchimages", cache.key_of([registry.parent.name, str(FORMAT), __version__]), make)
    squeezed.main([str(found / STORE)])  # not in the key: what is there stays, and a new format of twins is minutes
    return found


async def _import(product: Path, address: str) -> None:
    stores = {STORE: {"kind": "path", "path": str(product / STORE)}}
    async with daemon(product / "daemon", stores=stores) as (own, client):
        for content in CONTENTS:
            await client.import_image(
                image_wire.Import(
                    name=f"{content.name}:1", format="registry", store=STORE,
                    reference=f"docker://{address}/{content.name}:1",
                )
            )  # fmt: skip
        await asyncio.to_thread(shutil.copytree, own.state / "images", product / "images")


@contextlib.asynccontextmanager
async def daemon(directory: Path, **config: Any) -> AsyncIterator[tuple[OwnDaemon, DSecClient]]:
    """One whose state is there; its state stays behind if the directory was there before, and nothing else does."""
    own = OwnDaemon(directory, **CONFIG, **config)
    try:
        await asyncio.to_thread(own.start)
        async with DSecClient(own.url) as client:
            yield own, client
    finally:
        with uninterrupted():
            left = await asyncio.to_thread(own.end)
    if left:
        raise RuntimeError("left behind: " + "; ".join(left))


class Sides:
    """Each method is one configuration on a disk of its own. work: holds the disks."""

    def __init__(self, work: Path, link: Link, images: Path) -> None:
        self._work, self._link, self._images = work, link, images
        self._traces: dict[str, bytes] = {}

    def _disk(self, name: str) -> Disk:
        return Disk(self._work / f"{name}.img", self._work / name)

    async def podman_pull(self) -> Measured:
        disk = self._disk("podman")
        before = peers.groups_named("libpod_parent")
        with disk.attached() as top:
            podman = Podman(top, self._link.registry)
            try:
                return await measured(disk, self._link, podman.run)
            finally:
                await podman.clear()
                peers.remove_groups(peers.groups_named("libpod_parent") - before)

    async def eager(self) -> Measured:
        """The images come whole from the registry; their data stays for `cached`."""
        disk = self._disk("whole")
        registry = self._link.registry
        with disk.attached() as top:
            async with daemon(top / "daemon", insecure_registries=[registry]) as (own, client):
                found = await measured(disk, self._link, lambda: ours(client, registry))
                subprocess.run(["cp", "-al", own.state / "images", top / "images"], check=True)
            return found

    async def cached(self) -> Measured:
        disk = self._disk("whole")
        with disk.attached() as top:
            subprocess.run(["cp", "-al", top / "images", _state(top) / "images"], check=True)
            async with daemon(top / "daemon") as (_, client):
                return await measured(disk, self._link, lambda: ours(client))

    async def lazy(self) -> Measured:
        """A cold cache, and nothing known of what runs read."""
        return await self._on_demand({})

    async def lazy_trace(self) -> Measured:
        """A cold cache, and the traces of the last `lazy`."""
        return await self._on_demand(self._traces)

    async def _on_demand(self, traces: dict[str, bytes]) -> Measured:
        disk = self._disk("lazy")
        with disk.attached() as top:
            images = _state(top) / "images"
            await asyncio.to_thread(shutil.copytree, self._images / "images", images)
            for name, trace in traces.items():
                (images / name / "trace").write_bytes(trace)
            stores = {STORE: {"kind": "http", "url": self._link.blobs, "squeezed": True}}
            async with daemon(top / "daemon", stores=stores) as (own, client):
                found = await measured(disk, self._link, lambda: ours(client))
                await asyncio.to_thread(own.stop)  # which unmounts, and so writes the traces
                if not traces:
                    self._traces = {path.parent.name: path.read_bytes() for path in images.glob("*/trace")}
        (self._work / "lazy.img").unlink()
        return found


def _state(top: Path) -> Path:
    state = top / "daemon/state"
    state.mkdir(parents=True)
    return state
