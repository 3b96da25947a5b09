"""Forks and packs of containers: a part of the bench `rollout`.

fork_p50_ms: from the call to a copy that runs, of a container with 200 changed files. pack_200mb_s: a container that
wrote 200 MB in 2,000 files, half of them text, becomes an environment, from the call to its name in the store.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dsecd.client import Sandbox
from dsecd.wire import images
from tests.bench.frame import Stage, clock, median, rounded, say, spread

FORKS: Final = 30
PACKS: Final = 3
_FILES: Final = "mkdir -p /many; cd /many; for i in $(seq 200); do echo $i > $i; done"
_DATA: Final = (
    "mkdir -p /data; cd /data; for i in $(seq 1000); do head -c 100000 /dev/urandom > $i; "
    "head -c 75000 /dev/urandom | base64 -w 76 | head -c 100000 > $i.txt; done"
)


async def figures(stage: Stage) -> dict[str, float]:
    """fork_p50_ms, fork_20k_ms, fork_8_ms, still_ms, pack_200mb_s."""
    return {**await forks(stage), **await packs(stage)}


async def forks(stage: Stage) -> dict[str, float]:
    source = await stage.client.run_container(stage.args())
    await source.run_shell(_FILES)
    one: list[float] = []
    for _ in range(FORKS):
        with clock(one):
            copies = await source.fork()
        await _stop(stage, copies)
    eight: list[float] = []
    for _ in range(5):
        with clock(eight):
            copies = await source.fork(8)
        await _stop(stage, copies)
    await source.run_shell("mkdir /more; cd /more; for i in $(seq 20000); do : > $i; done")
    large: list[float] = []
    for _ in range(3):
        with clock(large):
            copies = await source.fork()
        await _stop(stage, copies)
    await source.stop()
    say(f"fork of a container, 200 changed files     {spread(one)} ms")
    say(f"eight of it in one call                    {spread(eight)} ms")
    say(f"fork with 20,200 changed files             {spread(large)} ms")
    return {"fork_p50_ms": median(one), "fork_8_ms": median(eight), "fork_20k_ms": median(large)}


async def packs(stage: Stage) -> dict[str, float]:
    source = await stage.client.run_container(stage.args(disk_limit_mb=1024))
    await source.run_shell(_DATA, timeout=120)
    took: list[float] = []
    for number in range(PACKS):
        name = f"env:bench-{number}"
        with clock(took):
            await source.pack_diff(name)
        await stage.client.call("image.remove", images.ByRef(ref=name))
    still = await _still(source)
    await source.stop()
    say(f"pack of 200 MB in 2,000 files              {spread([ms / 1000 for ms in took])} s")
    say(f"of that the container stood still          {still:.3g} ms at most")
    return {"pack_200mb_s": rounded(median(took) / 1000), "pack_still_ms": rounded(still)}


async def _still(source: Sandbox) -> float:
    """The longest gap that a process inside sees, with 50 MB not yet on disk when the pack begins; ms."""
    spin = (
        "import time; worst, last = 0, time.monotonic(); end = last + 5\n"
        "open('/dirty', 'wb').write(b'x' * 50_000_000)\n"
        "last = time.monotonic()\n"
        "while last < end:\n time.sleep(0.0005); now = time.monotonic(); worst = max(worst, now - last); last = now\n"
        "print(worst)"
    )
    process = await source.start(["python3", "-c", spin])
    await asyncio.sleep(1)
    await source.pack_diff("env:bench-still")
    result = await process.wait()
    await source._client.call("image.remove", images.ByRef(ref="env:bench-still"))
    return float(result.stdout) * 1000


async def _stop(stage: Stage, copies: list[object]) -> None:
    made = [one for one in copies if isinstance(one, Sandbox)]
    assert len(made) == len(copies), copies
    await stage.client.stop_many(made)
