"""density: a thousand idle sandboxes. Memory, CPU, whether commands get slower, and a daemon that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from dsecd.client import DSecClient, Sandbox
from tests.bench import host, peers
from tests.bench.frame import Bench, Bound, Outcome, Stage, clock, rounded, say

BATCHES, BATCH = 9, 111
ALIVE: Final = 1 + BATCHES * BATCH
SETTLE_S: Final = 3.0
PEERS: Final = 100
PARTS: Final = ("AnonPages", "SReclaimable", "SUnreclaim", "PageTables", "KernelStack", "Percpu", "Shmem")
IDLE_S: Final = 10.0


async def run(stage: Stage) -> Outcome:
    outcome = Outcome()
    first = await stage.client.run_container(stage.args())
    outcome.versus["crun_kib_each"] = rounded(await asyncio.to_thread(bare_containers, stage, first))
    alone = await exec_p50([first], 300)
    sandboxes = [first]
    at = [await settled()]
    with clock() as creating:
        for _ in range(BATCHES):
            sandboxes += await batch(stage)
            at.append(await settled())
    say(f"{len(sandboxes) - 1} created in {BATCHES} calls: {creating.ms / 1000 - BATCHES * SETTLE_S:.1f} s")
    memory(outcome, at)
    outcome.figures["daemon_rss_mib"] = rounded(host.rss_mib(stage.daemon.pid))
    await idle(stage, outcome)
    some = random.Random(1).sample(sandboxes, 50)
    crowded = await exec_p50(some, 300)
    say(f"exec p50: {alone:.3g} ms with 1 alive, {crowded:.3g} ms with {ALIVE} (in 50 of them)")
    outcome.figures["exec_p50_ratio"] = rounded(crowded / alone)
    outcome.versus |= {"exec_p50_ms_of_1": rounded(alone), "exec_p50_ms_of_1000": rounded(crowded)}
    await restart(stage, outcome)
    return outcome


async def batch(stage: Stage) -> list[Sandbox]:
    made = await stage.client.run_containers(stage.args(), BATCH)
    for one in made:
        if not isinstance(one, Sandbox):
            raise RuntimeError(f"one was not made: {one.message}")
    return [one for one in made if isinstance(one, Sandbox)]


async def settled() -> dict[str, int]:
    """What the kernel frees by and by is freed."""
    await asyncio.sleep(SETTLE_S)
    return host.meminfo()


def memory(outcome: Outcome, at: list[dict[str, int]]) -> None:
    """The median of the batches: whatever else starts or ends on this host spoils one of them, not the figure."""

    def each(what: Callable[[dict[str, int]], int]) -> float:
        return statistics.median((what(after) - what(before)) / BATCH for before, after in pairwise(at))

    kib = each(host.used_kib)
    if kib <= 0:
        raise RuntimeError("other work on this host frees memory faster than sandboxes take it: measure again")
    available = -each(lambda info: info["MemAvailable"])
    parts = {name: each(lambda info, name=name: info[name]) for name in PARTS}  # type: ignore[misc]
    overall = (host.used_kib(at[-1]) - host.used_kib(at[0])) / (BATCH * BATCHES)
    say(f"memory of each: {kib:.0f} KiB, everything counted (from first to last: {overall:.0f}); "
        f"{available:.0f} KiB by MemAvailable")  # fmt: skip
    say("of that " + ", ".join(f"{name} {value:.0f}" for name, value in parts.items()))
    outcome.figures["kib_each"] = rounded(kib, 4)
    outcome.versus["kib_each_first_to_last"] = rounded(overall, 4)
    outcome.versus["kib_each_by_available"] = rounded(available, 4)
    outcome.versus["kib_each_parts"] = {name: rounded(value) for name, value in parts.items()}


def bare_containers(stage: Stage, first: Sandbox) -> float:
    """KiB for each of some idle containers of bare crun, each with an overlay of its own on the same base."""
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(peers.crun(stage.work))
        lower = peers.base_mount(stage, first)
        time.sleep(2)
        before = host.used_kib(host.meminfo())
        for number in range(PEERS):
            root = stack.enter_context(peers.overlay(lower, stage.work / f"root-{number}"))
            name = f"idle-{number}"
            bundle = bare.bundle(stage.work / name, root, name, [peers.INIT, "sleep", "999999"])
            stack.enter_context(bare.running(bundle, name))
        time.sleep(2)
        each = (host.used_kib(host.meminfo()) - before) / PEERS
    say(f"memory of each of {PEERS} idle containers of bare crun: {each:.0f} KiB")
    return each


async def exec_p50(sandboxes: list[Sandbox], count: int) -> float:
    """Each one warm, then in turns."""
    for sandbox in sandboxes:
        await sandbox.exec(["true"])
    times: list[float] = []
    for number in range(count):
        with clock(times):
            await sandboxes[number % len(sandboxes)].exec(["true"])
    return statistics.median(times)


async def idle(stage: Stage, outcome: Outcome) -> None:
    def spent() -> tuple[float, float]:
        return host.cpu_s(stage.daemon.pid), host.agents_cpu_s(stage.daemon.cgroup_base)

    daemon, agents = spent()
    started = time.perf_counter()
    await asyncio.sleep(IDLE_S)
    elapsed = time.perf_counter() - started
    daemon, agents = ((now - then) / elapsed * 100 for now, then in zip(spent(), (daemon, agents), strict=True))
    say(f"idle CPU over {elapsed:.0f} s: daemon {daemon:.3f} %, agents {agents:.3f} % of one core")
    outcome.figures["idle_cpu_pct"] = rounded(daemon + agents)


async def restart(stage: Stage, outcome: Outcome) -> None:
    """SIGKILL, start, list, run something; then all of them must still be usable."""
    with clock() as gap:
        await asyncio.to_thread(stage.daemon.kill)
        await asyncio.to_thread(stage.daemon.start, 60.0)
        client = await DSecClient(stage.daemon.url).open()
        listed = await client.list()
        running = sum(one.info.state == "running" for one in listed)
        answered = (await listed[-1].exec(["true"])).ok
    try:
        if running != ALIVE or not answered:
            raise RuntimeError(f"{running} of {ALIVE} were taken back")
        limit = asyncio.Semaphore(16)

        async def usable(sandbox: Sandbox) -> bool:
            async with limit:
                return (await sandbox.exec(["true"])).ok

        usables = sum(await asyncio.gather(*(usable(one) for one in listed)))
        say(f"killed; all listed and a command done {gap.ms / 1000:.2f} s later; {usables} of {ALIVE} are usable")
        if usables != ALIVE:
            raise RuntimeError(f"{usables} of {ALIVE} could run a command after the restart")
        with clock() as stopping:
            await client.stop_many(listed)
        say(f"all stopped in {stopping.ms / 1000:.1f} s")
        outcome.figures["restart_ready_s"] = rounded(gap.ms / 1000)
    finally:
        await client.close()


BENCH: Final = Bench(
    "density", f"{ALIVE} idle sandboxes",
    (
        Bound("kib_each", 1200), Bound("daemon_rss_mib", 150), Bound("exec_p50_ratio", 2), Bound("idle_cpu_pct", 2),
        Bound("restart_ready_s", 3),
    ), run,
)  # fmt: skip
