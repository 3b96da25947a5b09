"""A burst of tasks, and the two sides that run it: sandboxes of ours, and `podman run` after `podman pull`.

A task is over when its command has printed what it must. Its first command is one that only prints; in the same way on
both sides, it is answered before the real one begins.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsecd.client import DSecClient, DSecContainerRunArgs
from dsecd.wire import images as image_wire
from tests.bench.images_content import CONTENTS, Content

TASKS: Final = 24
PULLS: Final = 3  # at once; more only share the line and the lock of podman's storage
TASK_S: Final = 600.0


@dataclass
class Burst:
    """Seconds since the burst began, by task, in the order in which they got there."""

    first: list[float] = field(default_factory=list)
    over: list[float] = field(default_factory=list)
    own: dict[str, list[float]] = field(default_factory=dict)  # by image: from first command to the end

    @property
    def took(self) -> float:
        return self.over[-1]


async def burst(task: Callable[[Content, Callable[[], None]], Awaitable[str]]) -> Burst:
    """All tasks at once, the images in turn. task(content, first): runs one, calls `first`, returns what it printed."""
    result = Burst()
    began = time.monotonic()

    async def one(content: Content) -> None:
        at: list[float] = []

        def first() -> None:
            at.append(time.monotonic() - began)
            result.first.append(at[0])

        said = await asyncio.wait_for(task(content, first), TASK_S)
        if content.right not in said:
            raise RuntimeError(f"a task of image {content.name} went wrong: {said[-500:]}")
        result.over.append(time.monotonic() - began)
        result.own.setdefault(content.name, []).append(result.over[-1] - at[0])

    async with asyncio.TaskGroup() as group:
        for number in range(TASKS):
            group.create_task(one(CONTENTS[number % len(CONTENTS)]))
    return result


class OnceEach:
    """What must be done once for each image, a few at a time, before its tasks."""

    def __init__(self, do: Callable[[str], Awaitable[object]]) -> None:
        self._do = do
        self._slots = asyncio.Semaphore(PULLS)
        self._doing: dict[str, asyncio.Task[None]] = {}

    async def ready(self, name: str) -> None:
        if name not in self._doing:
            self._doing[name] = asyncio.create_task(self._one(name))
        await self._doing[name]

    async def _one(self, name: str) -> None:
        async with self._slots:
            await self._do(name)


# -- ours --------------------------------------------------------------------------------------------------------------
def image_name(content: Content) -> str:
    return f"{content.name}:1"


async def ours(client: DSecClient, registry: str = "") -> Burst:
    """registry: import each image from there first, whole."""

    async def fetch(name: str) -> None:
        await client.import_image(
            image_wire.Import(name=f"{name}:1", format="registry", reference=f"docker://{registry}/{name}:1")
        )

    once = OnceEach(fetch)

    async def task(content: Content, first: Callable[[], None]) -> str:
        if registry:
            await once.ready(content.name)
        sandbox = await client.run_container(
            DSecContainerRunArgs(
                container_image=image_name(content), memory_limit_mb=2048, cpu_cores_limit=2.0, disk_limit_mb=1024
            ),
            timeout=TASK_S,
        )
        try:
            await sandbox.run_shell("echo first", timeout=TASK_S)
            first()
            done = await sandbox.run_shell(content.task, timeout=TASK_S)
            return done.stdout + ("" if done.ok else f" (status {done.exit_code}) {done.stderr}")
        finally:
            await sandbox.stop()

    return await burst(task)


# -- podman ------------------------------------------------------------------------------------------------------------
class Podman:
    """Debian's, with an empty storage of its own on overlayfs, and what a host without systemd needs."""

    def __init__(self, top: Path, registry: str) -> None:
        self._registry = registry
        self._base = [
            "podman", "--root", f"{top}/storage", "--runroot", f"{top}/run", "--tmpdir", f"{top}/tmp",
            "--storage-driver=overlay", "--cgroup-manager=cgroupfs", "--events-backend=none", "--runtime=crun",
        ]  # fmt: skip
        self._limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000", "--network=none"]
        self._env = os.environ | {"TMPDIR": f"{top}/big"}  # where it puts blobs: on the disk that is counted
        (top / "big").mkdir(exist_ok=True)

    async def run(self) -> Burst:
        once = OnceEach(lambda name: self._said("pull", "-q", "--tls-verify=false", self._image(name)))

        async def task(content: Content, first: Callable[[], None]) -> str:
            await once.ready(content.name)
            argv = ["run", "--rm", "--pull=never", *self._limits, self._image(content.name)]
            return await self._said(*argv, "sh", "-c", f"echo first; {content.task}", first=first)

        return await burst(task)

    async def clear(self) -> None:
        """Unmount what is left; the storage goes with its disk."""
        await self._said("rm", "-f", "-a", "-t", "0")

    def _image(self, name: str) -> str:
        return f"{self._registry}/{name}:1"

    async def _said(self, *words: str, first: Callable[[], None] | None = None) -> str:
        process = await asyncio.create_subprocess_exec(
            *self._base, *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=self._env,
        )  # fmt: skip
        assert process.stdout is not None
        if first is not None:
            await process.stdout.readline()
            first()
        out, err = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"podman {words[0]} failed: {err.decode(errors='replace').strip()[-500:]}")
        return out.decode(errors="replace")
