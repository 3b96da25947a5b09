"""The demo's trainer, a process that may be killed at any time: starts its rollouts, is their model, takes results.

Usage: python -m tests.demo.trainer URL JOB BASE DIRECTORY RESULTS. It keeps nothing but the file RESULTS; whoever is
started after it under the same job goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from dsecd.client import DSecClient, DsecError
from dsecd.client_rollout import Step
from dsecd.wire import rollouts as wire
from tests.demo import policy
from tests.demo.faults import FAULTS
from tests.demo.scaffold import agent_args, task, worker_args

GONE = ("network", "shutting_down", "outcome_unknown")


class Trainer:
    """One life of it."""

    def __init__(self, job: str, base: str, directory: str, results: Path) -> None:
        self._job, self._base, self._directory, self._results = job, base, directory, results
        self._model = policy.serve()
        lines = results.read_text().splitlines() if results.exists() else []
        self._taken = {json.loads(line)["id"] for line in lines if line.endswith("}")}

    @property
    def finished(self) -> bool:
        return len(self._taken) == len(FAULTS)

    async def serve(self, client: DSecClient) -> None:
        """Until all results are here."""
        async with asyncio.TaskGroup() as group:
            model = group.create_task(self._be_the_model(client))
            await asyncio.gather(*(self._start(client, number) for number in range(len(FAULTS))))
            while not self.finished:
                for one in await client.rollout_results(self._job, wait_s=5):
                    self._take(one)
                    await client.acknowledge([one.id])
            model.cancel()

    async def _start(self, client: DSecClient, number: int) -> None:
        await client.start_rollout(
            agent_args(self._base), worker_args(self._base), task=task(number, self._directory), job=self._job,
            request_id=f"{self._job}-{number}",
        )  # fmt: skip

    async def _be_the_model(self, client: DSecClient) -> None:
        async with asyncio.TaskGroup() as group:
            async for step in client.attach(self._job):
                group.create_task(self._answer(step))

    async def _answer(self, step: Step) -> None:
        await step.forward(self._model)

    def _take(self, one: wire.Delivered) -> None:
        """Written before it is acknowledged: what is delivered twice has the same id."""
        if one.id in self._taken:
            return
        with open(self._results, "a") as file:
            file.write(json.dumps(msgspec.to_builtins(one)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._taken.add(one.id)


async def main(url: str, *args: Any) -> None:
    job, base, directory, results = args
    trainer = Trainer(job, base, directory, Path(results))
    while not trainer.finished:
        try:
            async with DSecClient(url) as client:
                await trainer.serve(client)
        except* DsecError as group:
            if any(exc.kind not in GONE for exc in leaves(group)):
                raise
            await asyncio.sleep(0.2)


def leaves(group: BaseExceptionGroup[DsecError]) -> list[DsecError]:
    found: list[DsecError] = []
    for exc in group.exceptions:
        found += leaves(exc) if isinstance(exc, BaseExceptionGroup) else [exc]
    return found


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
