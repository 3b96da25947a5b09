"""boot: microVMs, from the call to the end of the first command; clones of a running one; resuming a saved one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from dsecd.client import DSecMicroVMRunArgs, Sandbox
from tests.bench.frame import BASE, Bench, Bound, Outcome, Stage, clock, median, say, spread
from tests.own import guest_kernels

ROUNDS: Final = 5
CLONES: Final = 8


def args(root: str) -> DSecMicroVMRunArgs:
    return DSecMicroVMRunArgs(container_image=BASE.name, memory_limit_mb=256, disk_limit_mb=512, root=root)  # type: ignore[arg-type]


async def run(stage: Stage) -> Outcome:
    await asyncio.to_thread(guest_kernels)
    stage.daemon.link_kernels()
    times: dict[str, list[float]] = {name: [] for name in ("pmem", "blk", "clone", "resume", "pause")}
    for number in range(ROUNDS + 1):  # the first warms up
        kept = times if number else {name: [] for name in times}
        for root in ("pmem", "blk"):
            with clock(kept[root]):
                box = await stage.client.run_microvm(args(root), timeout=300)
                await box.exec(["true"])
            await box.stop()
    async with contextlib.AsyncExitStack() as stack:
        source = await stage.client.run_microvm(args("pmem"), timeout=300)
        stack.push_async_callback(source.stop)
        await source.exec(["python3", "-c", "import json, socket, ssl"])
        for _ in range(CLONES):
            with clock(times["clone"]):
                (copy,) = await source.fork(1)
                assert isinstance(copy, Sandbox), copy
                await copy.exec(["true"])
            await copy.stop()
        for _ in range(ROUNDS):
            with clock(times["pause"]):
                await source.pause()
            with clock(times["resume"]):
                await source.exec(["true"])
    for name, what in (("pmem", "a microVM on pmem"), ("blk", "a microVM on blk"), ("clone", "one copy by fork"),
                       ("resume", "the first command of a saved one"), ("pause", "saving it")):  # fmt: skip
        say(f"{what:40} {spread(times[name])} ms")
    return Outcome(
        {
            "microvm_pmem_s": median(times["pmem"]) / 1000, "microvm_blk_s": median(times["blk"]) / 1000,
            "clone_s": median(times["clone"]) / 1000, "resume_s": median(times["resume"]) / 1000,
        },
        {"pause_s": median(times["pause"]) / 1000},
    )  # fmt: skip


BENCH: Final = Bench(
    "boot", "microVMs: boot, clone, resume",
    (Bound("microvm_pmem_s", 5), Bound("microvm_blk_s", 5), Bound("clone_s", 1), Bound("resume_s", 1)), run,
)  # fmt: skip
