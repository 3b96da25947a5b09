"""Real problems: all solutions of HumanEval are `ok`, and no broken one is that fails its tests outside."""

from __future__ import annotations

import asyncio

import humaneval
import pytest
from daemonkit import Daemon, run
from fnkit import judge, python

__all__ = ["judge"]


@pytest.mark.network
@pytest.mark.slow
def test_verdicts_of_humaneval_are_those_of_a_python_outside(judge: Daemon) -> None:
    problems = humaneval.problems()
    assert len(problems) == 164
    broken = [one.broken() for one in problems]
    limit = asyncio.Semaphore(16)

    async def verdict(client: object, code: str) -> str:
        async with limit:
            return (await client.fncall(python(code, cpu_s=5.0))).verdict  # type: ignore[attr-defined]

    async def work() -> tuple[list[str], list[str]]:
        async with judge.client() as client:
            good = await asyncio.gather(*(verdict(client, one.program(one.solution)) for one in problems))
            bad = await asyncio.gather(*(verdict(client, code or "") for code in broken if code))
            return good, bad

    good, bad = run(work())
    assert good == ["ok"] * 164
    assert len(bad) > 155
    passing = {n for n, one in enumerate(bad) if one == "ok"}
    programs = [code for code in broken if code]
    assert all(humaneval.passes_outside(programs[n]) for n in passing)
    # And not everything fails for a reason of ours.
    failing = [n for n in range(len(bad)) if n not in passing][::8]
    assert not any(humaneval.passes_outside(programs[n]) for n in failing)
    assert "infra" not in bad
