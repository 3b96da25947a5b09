"""exec: a command that does nothing, in a sandbox that runs, against `crun exec` and `podman exec`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from tests.bench import peers
from tests.bench.frame import Bench, Bound, Outcome, Stage, clock, median, rounded, say, spread

ROUNDS: Final = 20
OURS, CRUN, PODMAN = 50, 10, 2  # in each round


async def run(stage: Stage) -> Outcome:
    sandbox = await stage.client.run_container(stage.args())
    ours: list[float] = []
    crun: list[float] = []
    podman: list[float] = []
    lower = peers.base_mount(stage, sandbox)
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(peers.crun(stage.work))
        root = stack.enter_context(peers.overlay(lower, stage.work / "crun-root"))
        bundle = bare.bundle(stage.work / "bundle", root, "exec", [peers.INIT, "sleep", "999999"])
        stack.enter_context(bare.running(bundle, "exec"))
        pod = None
        if peers.has_podman():
            pod = peers.Podman(stage.work)
            root = stack.enter_context(peers.overlay(lower, stage.work / "podman-root"))
            stack.enter_context(pod.running(root, "bench-exec"))
        for _ in range(20):
            await sandbox.exec(["true"])
        for _ in range(ROUNDS):
            for _ in range(OURS):
                with clock(ours):
                    result = await sandbox.exec(["true"])
                assert result.ok
            for _ in range(CRUN):
                with clock(crun):
                    await asyncio.to_thread(bare.exec, "exec", "true")
            for _ in range(PODMAN if pod is not None else 0):
                with clock(podman):
                    await asyncio.to_thread(pod.exec, "bench-exec", "true")  # type: ignore[union-attr]
    await sandbox.stop()
    say(f"dsecd        {spread(ours)} ms")
    say(f"crun exec    {spread(crun)} ms")
    outcome = Outcome({"exec_p50_ms": median(ours), "vs_crun_exec": rounded(median(ours) / median(crun))})
    outcome.versus["crun_exec_p50_ms"] = median(crun)
    if podman:
        say(f"podman exec  {spread(podman)} ms")
        outcome.figures["vs_podman_exec"] = rounded(median(ours) / median(podman))
        outcome.versus["podman_exec_p50_ms"] = median(podman)
    return outcome


BENCH: Final = Bench(
    "exec", "`true` in a running sandbox",
    (Bound("exec_p50_ms", 1.5), Bound("vs_crun_exec", 0.25), Bound("vs_podman_exec", 0.02)), run,
)  # fmt: skip
