"""Pause of a job: 100 containers that hold 50 MiB each; how long, how much comes back, and the first command after it.

What they hold is the heap of an ordinary Python program (dicts, strings, numbers). Where the host has no swap, that has
nowhere to go; so 50 MiB of page cache are looked at beside it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dsecd.client import Sandbox
from dsecd.zram import swap
from tests.bench.frame import Outcome, Stage, clock, median, rounded, say, spread
from tests.bench.host import meminfo

COUNT: Final = 100
HELD_MIB: Final = 50
AT_ONCE: Final = 4  # that fill their memory side by side
FIRST: Final = 40  # containers whose first command is timed
JOB: Final = "bench-pause"
HEAP: Final = f"""
import time
held = []
def own():
    words = open('/proc/self/statm').read().split()
    return (int(words[1]) - int(words[2])) * 4096
while own() < {HELD_MIB} << 20:
    for n in range(len(held), len(held) + 1000):
        held.append({{'id': n, 'name': 'item-%d' % n, 'score': n * 0.5, 'tags': ['a%d' % n, 'b'], 'ok': n % 3 == 0}})
open('/holds', 'w').close()
time.sleep(100000)
"""
CACHE: Final = f"head -c {HELD_MIB << 20} /dev/urandom > /file && sync && cat /file > /dev/null"


async def figures(stage: Stage) -> Outcome:
    """Bounds: pause_freed_pct at least 70 with zram; resume_first_p50_ms at most 50."""
    boxes = await _boxes(stage)
    before, free = await _held(boxes), meminfo()["MemAvailable"]
    with clock() as pausing:
        outcomes = await stage.client.pause_job(JOB)
    assert all(one.error is None for one in outcomes), outcomes
    after, gained = await _held(boxes), (meminfo()["MemAvailable"] - free) << 10
    first: list[float] = []
    for box in boxes[:FIRST]:
        with clock(first):
            await box.run_shell("true")
    cached = await _page_cache(boxes[0])
    await stage.client.stop_job(JOB)
    freed = 100 * (before - after) / before
    say(f"{COUNT} containers held {before >> 20} MiB, {after >> 20} MiB after a pause of {pausing.ms / 1000:.2f} s")
    say(
        f"the host has {gained >> 20} MiB more; of page cache alone {cached:.0f} % went; swap: {swap().total >> 20} MiB"
    )
    say(f"first command after a resume: {spread(first)} ms")
    return Outcome(
        {
            "pause_100_s": rounded(pausing.ms / 1000),
            "pause_freed_pct": rounded(freed),
            "resume_first_p50_ms": median(first),
        },
        {
            "pause_host_freed_pct": rounded(100 * gained / before),
            "pause_cache_freed_pct": rounded(cached),
            "swap_mb": swap().total >> 20,
        },
    )


async def _boxes(stage: Stage) -> list[Sandbox]:
    made = await stage.client.run_containers(stage.args(memory_limit_mb=128, disk_limit_mb=128, job=JOB), COUNT)
    boxes = [box for box in made if isinstance(box, Sandbox)]
    assert len(boxes) == COUNT, f"{COUNT - len(boxes)} were not made"
    for at in range(0, COUNT, AT_ONCE):
        some = boxes[at : at + AT_ONCE]
        for box in some:
            await box.start(["python3", "-c", HEAP])
        for box in some:
            async with asyncio.timeout(120):
                while (await box.run_shell("test -e /holds")).exit_code:
                    await asyncio.sleep(0.05)
    return boxes


async def _held(boxes: list[Sandbox]) -> int:
    return sum([(await box.stats()).memory_bytes for box in boxes])


async def _page_cache(box: Sandbox) -> float:
    """Per cent of 50 MiB of files that come back. The heap of the same container stays out of it."""
    assert (await box.run_shell(CACHE)).ok
    await box.pause()
    return 100 * min((await box.stats()).reclaimed_bytes / (HELD_MIB << 20), 1.0)
