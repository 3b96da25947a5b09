"""`make demo-rollout`: sixteen rollouts of mini-swe-agent, undisturbed, and once more with everything taken away.

The second time the trainer is killed three times, the job is paused while it is away, and the daemon is killed. The
last line is JSON; exit status 0 when diffs and rewards are the same, no command ran twice and no step was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

from dsecd.client import DSecClient
from dsecd.wire import rollouts as wire
from tests.demo.faults import FAULTS
from tests.demo.main import Steps, make_images, run
from tests.demo.policy import UNSOLVED, commands, mark
from tests.demo.scaffold import MARK, import_toolkits, scaffold_tar
from tests.own import TREE, Base, OwnDaemon

ALL_S: Final = 1200.0
AWAY_S: Final = 3.0
STEPS: Final = sum(len(commands(number)) for number in range(len(FAULTS)))


class Trainer:
    """The process of tests.demo.trainer, on one job."""

    def __init__(self, daemon: OwnDaemon, job: str, base: str, directory: str, work: Path) -> None:
        self.results = work / f"{job}.jsonl"
        self.log = work / f"{job}.log"
        self._argv = [sys.executable, "-m", "tests.demo.trainer", daemon.url, job, base, directory, str(self.results)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=TREE, start_new_session=True
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def check(self) -> bool:
        """Whether it has all results; RuntimeError when it failed."""
        assert self._process is not None
        status = self._process.poll()
        if status not in (None, 0):
            raise RuntimeError(f"the trainer failed:\n{self.log.read_text()[-2000:]}")
        return status == 0


@contextlib.contextmanager
def training(*args: Any) -> Iterator[Trainer]:
    trainer = Trainer(*args)
    try:
        yield trainer
    finally:
        trainer.kill()


class Run:
    """One job from its start to its sixteen results."""

    def __init__(self, daemon: OwnDaemon, job: str, trainer: Trainer) -> None:
        self._daemon, self._job, self._trainer = daemon, job, trainer
        self.killed: list[int] = []  # steps that were asked for when the trainer was killed
        self.freed: dict[str, Any] = {}

    async def undisturbed(self) -> None:
        self._trainer.start()
        await self._until(len(FAULTS) * 1000)

    async def disturbed(self, moments: list[int]) -> None:
        """Kill the trainer at each of these numbers of steps; what happens while it is away differs."""
        for moment, meanwhile in zip(moments, (self._pause, self._kill_daemon, self._nothing), strict=True):
            self._trainer.start()
            await self._until(moment)
            self._trainer.kill()
            async with self._daemon.client() as client:
                self.killed.append(sum(one.steps for one in await client.rollouts(self._job, STATES)))
                await meanwhile(client)
        self._trainer.start()
        await self._until(len(FAULTS) * 1000)

    async def _until(self, steps: int) -> None:
        """So many steps were asked for, or the trainer is done."""
        deadline = time.monotonic() + ALL_S
        async with self._daemon.client() as client:
            while not self._trainer.check():
                if sum(one.steps for one in await client.rollouts(self._job, STATES)) >= steps:
                    await asyncio.sleep(random.uniform(0, 0.5))
                    return
                if time.monotonic() > deadline:
                    raise RuntimeError(f"job {self._job} did not end within {ALL_S:g} s")
                await asyncio.sleep(0.1)

    async def _pause(self, client: DSecClient) -> None:
        boxes = await client.list(job=self._job)
        before = sum([(await box.stats()).memory_bytes for box in boxes])
        await client.pause_job(self._job)
        await asyncio.sleep(AWAY_S)
        after = sum([(await box.stats()).memory_bytes for box in boxes])
        self.freed = {"sandboxes": len(boxes), "before_mb": before >> 20, "paused_mb": after >> 20}
        print(f"{'':9} trainer killed after {self.killed[-1]} steps; {len(boxes)} sandboxes paused for {AWAY_S:g} s: "
              f"{before >> 20} MiB before, {after >> 20} MiB while paused", flush=True)  # fmt: skip

    async def _kill_daemon(self, client: DSecClient) -> None:
        self._daemon.restart(politely=False)
        print(f"{'':9} trainer killed after {self.killed[-1]} steps; daemon killed and started again", flush=True)

    async def _nothing(self, client: DSecClient) -> None:
        await asyncio.sleep(random.uniform(0, 1))
        print(f"{'':9} trainer killed after {self.killed[-1]} steps", flush=True)


STATES: Final[tuple[wire.State, ...]] = (
    "starting", "running", "waiting_model", "finishing", "done", "failed", "stopped",
)  # fmt: skip


async def report(daemon: OwnDaemon, job: str) -> dict[int, dict[str, Any]]:
    """By task: what its rollout came to, from the daemon's records and its trajectory alone."""
    found: dict[int, dict[str, Any]] = {}
    async with daemon.client() as client:
        for one in await client.rollouts(job, STATES):
            outcome = one.outcome or wire.Outcome()
            diff, _, lines = outcome.diff.decode().partition(f"{MARK}\n")
            steps = [step async for step in all_steps(client, one.id)]
            bodies = [json.loads(bytes(step.body)) for step in steps]
            number = int(json.dumps(bodies[0]).partition("Task ")[2].partition(":")[0]) if bodies else -1
            found[number] = {
                "state": one.state, "reason": one.reason, "exit": outcome.exit_code, "diff": diff,
                "reward": outcome.reward, "ran": lines.split(), "error": outcome.error,
                "turns": [sum(m["role"] == "assistant" for m in body["messages"]) for body in bodies],
                "counted": counted(bodies[-1]) if bodies else [],
                "unanswered": [step.step for step in steps if not step.answer_seq],
                "logprobs": [step.logprobs for step in steps],
            }  # fmt: skip
    return found


def counted(body: Any) -> list[str]:
    """How often each command had run when it had, as the model was told then: from the trajectory, not the sandbox."""
    said = [json.loads(one["content"])["output"] for one in body["messages"] if one["role"] == "tool"]
    return [text.partition("\n")[0] for text in said]


async def all_steps(client: DSecClient, ident: str) -> AsyncIterator[wire.Step]:
    after = 0
    while page := await client.rollout_steps(ident, after=after, bodies=True):
        for step in page:
            yield step
        after = page[-1].step


def problems(found: dict[int, dict[str, Any]], name: str) -> list[str]:
    """What is not as it must be in one run, whatever the other one came to."""
    out = [f"{name}: task {number} has no rollout" for number in range(len(FAULTS)) if number not in found]
    for number, one in sorted(found.items()):
        expected = [mark(number, at) for at in range(len(commands(number)) - 1)]
        if one["state"] != "done" or one["exit"] != 0:
            out.append(f"{name}: task {number} {one['state']} {one['reason']} exit {one['exit']} {one['error'][-300:]}")
        if one["counted"] != ["1"] * len(expected):
            out.append(f"{name}: task {number} counted {one['counted']}")
        if one["ran"] != expected:
            out.append(f"{name}: task {number} ran {one['ran']}")
        if one["turns"] != list(range(len(expected) + 1)) or one["unanswered"]:
            out.append(f"{name}: task {number} asked for turns {one['turns']}, unanswered {one['unanswered']}")
        if one["reward"] != (0.0 if number in UNSOLVED else 1.0):
            out.append(f"{name}: task {number} has reward {one['reward']}")
    return out


async def demo(daemon: OwnDaemon, base: Base, work: Path, steps: Steps) -> dict[str, Any]:
    async with DSecClient(daemon.url) as client:
        directory = await make_images(daemon, client, base, work, steps)
        tar, cached = await asyncio.to_thread(scaffold_tar, work)
        await import_toolkits(client, tar)
    steps.done("scaffold", "toolkit: mini-swe-agent from PyPI, unmodified" + (" (from the cache)" if cached else ""))

    with training(daemon, "calm", base.name, directory, work) as trainer:
        await Run(daemon, "calm", trainer).undisturbed()
    calm = await report(daemon, "calm")
    steps.done("calm", f"undisturbed: {len(calm)} rollouts, {sum(len(one['turns']) for one in calm.values())} steps")

    seed = int.from_bytes(os.urandom(4))
    random.seed(seed)
    moments = sorted(random.sample(range(STEPS // 10, STEPS - STEPS // 10), 3))
    with training(daemon, "storm", base.name, directory, work) as trainer:
        run = Run(daemon, "storm", trainer)
        await run.disturbed(moments)
        taken = [json.loads(line) for line in trainer.results.read_text().splitlines()]
    storm = await report(daemon, "storm")
    steps.done("storm", f"disturbed: {len(storm)} rollouts, {sum(len(one['turns']) for one in storm.values())} steps")

    wrong = problems(calm, "undisturbed") + problems(storm, "disturbed")
    same = [n for n in calm if n in storm and all(calm[n][key] == storm[n][key] for key in ("diff", "reward"))]
    twice = [line for one in storm.values() for line in set(one["ran"]) if one["ran"].count(line) > 1]
    for line in wrong:
        print(f"{'':9} {line}", flush=True)
    return {
        "ok": not wrong and len(same) == len(FAULTS) and not twice and len(taken) == len(FAULTS),
        "rollouts": len(storm), "same_diff_and_reward": len(same),
        "rewards": sum(one["reward"] or 0.0 for one in storm.values()),
        "steps": sum(len(one["turns"]) for one in storm.values()), "steps_expected": STEPS,
        "commands": sum(len(one["ran"]) for one in storm.values()), "commands_twice": len(twice),
        "steps_lost": sum(len(one["unanswered"]) for one in storm.values()), "results": len(taken),
        "trainer_killed_at": run.killed, "daemon_killed": 1, "paused": run.freed, "seed": seed, "problems": wrong[:10],
    }  # fmt: skip


def main() -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return run(f"{len(FAULTS)} rollouts, twice", demo)


if __name__ == "__main__":
    sys.exit(main())
