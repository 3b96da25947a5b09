"""rollout: what it costs that a rollout outlives its trainer."""

from __future__ import annotations

from typing import Final

from tests.bench import rollout_log, rollout_net, rollout_packs, rollout_pause
from tests.bench.frame import Bench, Bound, Outcome, Stage


async def run(stage: Stage) -> Outcome:
    outcome = Outcome()
    await rollout_log.figures(stage, outcome)
    pause = await rollout_pause.figures(stage)
    outcome.figures |= pause.figures
    outcome.versus |= pause.versus
    outcome.figures |= await rollout_packs.figures(stage)
    outcome.figures |= await rollout_net.figures(stage)
    return outcome


BENCH: Final = Bench(
    "rollout", "the log, pauses, packs, forks, networks",
    (
        Bound("durable_ratio", 1.5), Bound("replay_1000_s", 0.5), Bound("pause_freed_pct", 70, most=False),
        Bound("resume_first_p50_ms", 50), Bound("pack_200mb_s", 3), Bound("fork_p50_ms", 60), Bound("policy_ms", 20),
        Bound("dns_p50_ms", 2),
    ),
    run,
)  # fmt: skip
