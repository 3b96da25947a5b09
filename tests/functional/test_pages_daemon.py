"""Sandboxes on an image that is filled while they run: the daemon, its page server, and both of them dying."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemonkit import Daemon, asynchronous, container_args
from leftovers import command_lines

from dsecd.client import DSecClient, Sandbox
from dsecd.erofs.jobs import run_import
from dsecd.erofs.model import ImportJob, Manifest
from dsecd.erofs.pages.client import Pages
from dsecd.erofs.pages.model import PagesConfig, Stats
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError

LAZY = "base:lazy"
PROBE = "import argparse, subprocess, tempfile; print('ok')"


class LazyDaemon(Daemon):
    """Its one image lives on the store `far`, a directory that can be taken away."""

    @property
    def far(self) -> Path:
        return self.directory / "far"

    def write_config(self) -> Path:
        path = super().write_config()
        with path.open("a") as file:
            file.write(f'image_read_timeout_s = 3.0\n[stores.far]\nkind = "path"\npath = "{self.far}"\n')
        return path

    def put(self, base_tar: Path) -> Manifest:
        self.far.mkdir()
        store = ImageStore(self.state / "images", stores={"far": self.far}, data_store="far")
        with base_tar.open("rb") as tar:
            return asyncio.run(run_import(store, ImportJob(kind="base", name=LAZY), input_fd=tar.fileno()))

    def servers(self) -> list[int]:
        mine = os.fsencode(self.run_dir)
        return [pid for pid, found in command_lines().items() if b"dsecd.erofs.pages" in found and mine in found]

    def stats(self) -> Stats:
        pages = Pages(PagesConfig(run_dir=str(self.run_dir / "pages"), cache_dir=str(self.state / "cache")))
        pages._talk = pages._reach()  # as a guest: without the group, and without starting it
        stats = pages.peek()
        assert stats is not None and pages._talk is not None
        pages._talk.close()
        return stats


@pytest.fixture
def lazy(tmp_path_factory: pytest.TempPathFactory, watched: list[Path], base_tar: Path) -> Iterator[LazyDaemon]:
    one = LazyDaemon(tmp_path_factory.mktemp("lazy"))
    watched += [one.directory, one.run_dir]
    image = one.put(base_tar)
    assert (one.far / f"{image.hex}.data").stat().st_size == image.data_size
    one.start()
    yield one
    left = one.destroy()
    assert not left
    assert one.servers() == []


async def launch(client: DSecClient) -> Sandbox:
    return await client.run_container(container_args(container_image=LAZY), timeout=60)


@asynchronous
async def test_a_sandbox_reads_what_it_needs(lazy: LazyDaemon) -> None:
    async with lazy.client() as client:
        sandbox = await launch(client)
        done = await sandbox.exec(["python3", "-c", PROBE])
        assert done.stdout.strip() == "ok", done
        (image,) = lazy.stats().images
        assert 0 < image.cached_bytes < image.data_size
        await sandbox.stop()


@asynchronous
async def test_page_server_dies_under_commands(lazy: LazyDaemon) -> None:
    async with lazy.client() as client:
        sandbox = await launch(client)
        running = asyncio.gather(*(sandbox.exec(["sh", "-c", "cat /usr/lib/python3*/*.py /usr/bin/* | sha256sum"])
                                   for _ in range(4)))  # fmt: skip
        for _ in range(3):
            await asyncio.sleep(0.2)
            for pid in lazy.servers():
                os.kill(pid, signal.SIGKILL)
        assert len({done.stdout for done in await running}) == 1
        await sandbox.stop()


@asynchronous
async def test_daemon_is_killed_and_the_server_stays(lazy: LazyDaemon) -> None:
    async with lazy.client() as client:
        ident = (await launch(client)).id
    (server,) = lazy.servers()
    await asyncio.to_thread(lazy.restart, politely=False)
    assert lazy.servers() == [server]
    async with lazy.client() as client:
        sandbox = await client.get(ident)
        assert (await sandbox.exec(["python3", "-c", PROBE])).stdout.strip() == "ok"
        await sandbox.stop()


@asynchronous
async def test_both_are_killed(lazy: LazyDaemon) -> None:
    """Its reads may have met holes: the sandbox is over, and says why. The next one is fine."""
    async with lazy.client() as client:
        ident = (await launch(client)).id
    lazy.kill()
    for pid in lazy.servers():
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while lazy.servers() and time.monotonic() < until:
        await asyncio.sleep(0.02)
    await asyncio.to_thread(lazy.start)
    async with lazy.client() as client:
        sandbox = await client.get(ident)
        with pytest.raises(DsecError) as caught:
            await sandbox.exec(["true"])
        assert caught.value.kind == "sandbox_dead" and "holes" in caught.value.message and caught.value.infra
        other = await launch(client)
        assert (await other.exec(["python3", "-c", PROBE])).stdout.strip() == "ok"
        await other.stop()


@asynchronous
async def test_store_goes_away(lazy: LazyDaemon) -> None:
    """A command that fails for want of data: an event tells whose fault it was. When the store is back, it works."""
    async with lazy.client() as client:
        sandbox = await launch(client)
        await sandbox.exec(["cat", "/etc/hostname"])
        away = lazy.far.with_name("away")
        lazy.far.rename(away)
        with pytest.raises(DsecError) as caught:
            await sandbox.exec(["python3", "-c", PROBE])
        assert caught.value.kind == "image" and caught.value.infra
        done = await sandbox.exec(["cat", *[f"/usr/lib/python3.11/{name}.py" for name in ("argparse", "subprocess")]])
        assert done.exit_code == 1 and "Input/output error" in done.stderr
        away.rename(lazy.far)
        assert (await sandbox.exec(["python3", "-c", PROBE])).stdout.strip() == "ok"
        await sandbox.stop()
    assert "image_error" in lazy.tail()


@asynchronous
async def test_start_while_the_store_is_away(lazy: LazyDaemon) -> None:
    """It starts, as nothing of the image is needed for that, or fails as the platform's fault; then all is well."""
    away = lazy.far.with_name("away")
    lazy.far.rename(away)
    async with lazy.client() as client:
        with pytest.raises(DsecError) as caught:
            sandbox = await launch(client)
            await sandbox.exec(["python3", "-c", PROBE])
        assert caught.value.kind == "image" and caught.value.infra
        away.rename(lazy.far)
        sandbox = await launch(client)
        assert (await sandbox.exec(["python3", "-c", PROBE])).stdout.strip() == "ok"
