"""create: from the call to the end of the first command, against bare crun's create, start and delete; then 400."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from dsecd.client import Sandbox
from tests.bench import peers
from tests.bench.frame import Bench, Bound, Outcome, Stage, clock, median, rounded, say, spread

ROUNDS: Final = 40
MANY, ABREAST = 400, 16


async def run(stage: Stage) -> Outcome:
    ours: list[float] = []
    crun: list[float] = []
    ready: list[float] = []
    keeper = await stage.client.run_container(stage.args())
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(peers.crun(stage.work))
        root = stack.enter_context(peers.overlay(peers.base_mount(stage, keeper), stage.work / "crun-root"))
        bundle = bare.bundle(stage.work / "bundle", root, "create", [peers.INIT, "true"])

        def whole_life() -> None:
            bare.create(bundle, "create")
            bare.start("create")
            bare.delete("create")

        for number in range(ROUNDS + 2):  # the first two warm up both
            with clock() as all_of_it:
                with clock() as creation:
                    sandbox = await stage.client.run_container(stage.args())
                await sandbox.exec(["true"])
            with clock() as peer:
                await asyncio.to_thread(whole_life)
            await sandbox.stop()
            if number >= 2:
                ours.append(all_of_it.ms)
                ready.append(creation.ms)
                crun.append(peer.ms)
    say(f"dsecd, to the end of the first command     {spread(ours)} ms")
    say(f"of that until it is running                {spread(ready)} ms")
    say(f"crun create + start + delete               {spread(crun)} ms")
    rate, stopping = await many(stage)
    await keeper.stop()
    return Outcome(
        {
            "create_p50_ms": median(ours), "vs_crun": rounded(median(ours) / median(crun)),
            "creates_per_s": rounded(rate),
        },
        {"crun_p50_ms": median(crun), "running_p50_ms": median(ready), "stops_per_s": rounded(stopping)},
    )  # fmt: skip


async def many(stage: Stage) -> tuple[float, float]:
    """Creates and stops per second, 16 at a time, none stopped before all are there."""
    limit = asyncio.Semaphore(ABREAST)

    async def one() -> Sandbox:
        async with limit:
            return await stage.client.run_container(stage.args())

    started = time.perf_counter()
    made = await asyncio.gather(*(one() for _ in range(MANY)))
    created = time.perf_counter()
    rate = MANY / (created - started)
    say(f"{MANY} creates, {ABREAST} at a time             {rate:.1f} per second")
    await stage.client.stop_many(made)
    stopping = MANY / (time.perf_counter() - created)
    say(f"{MANY} stops in one call                   {stopping:.1f} per second")
    return rate, stopping


BENCH: Final = Bench(
    "create", "a sandbox from nothing",
    (Bound("create_p50_ms", 35), Bound("vs_crun", 2.5), Bound("creates_per_s", 50, most=False)), run,
)  # fmt: skip
