"""`make demo-fncall`: the 164 HumanEval problems, their solutions and as many broken ones, judged in sandboxes.

Every verdict is compared with what a python3 outside says. The last line is JSON; exit status 0 when all agree.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import Any, Final

from dsecd.client import DSecClient, DsecError, DSecFnCallArgs
from dsecd.wire.fncall import Judged
from tests.humaneval import Problem, passes_outside, problems
from tests.own import Base, own_daemon, stop_on_sigterm

IMAGE: Final = Base("base:judge", ["python3", "python3-numpy", "gcc", "g++", "libc6-dev"])
IN_FLIGHT: Final = 32


async def judged(client: DSecClient, programs: list[str]) -> tuple[list[Judged], float]:
    """All of them, and how many a second."""
    limit = asyncio.Semaphore(IN_FLIGHT)

    async def one(code: str) -> Judged:
        async with limit:
            return await client.fncall(DSecFnCallArgs(language="python", code=code, cpu_s=5.0))

    began = time.perf_counter()
    results = await asyncio.gather(*(one(code) for code in programs))
    return results, len(programs) / (time.perf_counter() - began)


async def demo(url: str, found: list[Problem], make_base: Any) -> dict[str, Any]:
    right = [one.program(one.solution) for one in found]
    wrong = [one.broken() or "" for one in found]
    async with DSecClient(url) as client:
        await make_base(client)
        good, rate = await judged(client, right)
        bad, bad_rate = await judged(client, wrong)
    print(f"{len(good)} solutions: {_table(good)}, {rate:.0f} calls/s", flush=True)
    print(f"{len(bad)} broken:    {_table(bad)}, {bad_rate:.0f} calls/s", flush=True)
    differ = []
    for problem, program, result in zip(found, wrong, bad, strict=True):
        outside = await asyncio.to_thread(passes_outside, program)
        if outside != (result.verdict == "ok"):
            differ.append(problem.name)
            print(f"{problem.name}: {result.verdict} here, {'passes' if outside else 'fails'} outside", flush=True)
    failed = [p.name for p, result in zip(found, good, strict=True) if result.verdict != "ok"]
    for name in failed:
        print(f"{name}: its solution is not ok")
    return {
        "ok": not differ and not failed, "solutions": dict(Counter(one.verdict for one in good)),
        "broken": dict(Counter(one.verdict for one in bad)), "differ": differ, "failed": failed,
        "calls_per_s": round(rate),
    }  # fmt: skip


def _table(results: list[Judged]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(one.verdict for one in results).most_common())


def main() -> int:
    if os.geteuid() != 0:
        print("the demo must be root: it runs a daemon that mounts images and makes namespaces", file=sys.stderr)
        return 1
    stop_on_sigterm()
    result: dict[str, Any] = {"ok": False}
    try:
        found = problems()
        with own_daemon("demo", IMAGE, disk_pool_mb=16384, fncall={"image": IMAGE.name}) as daemon:
            result = asyncio.run(demo(daemon.url, found, lambda client: IMAGE.make(daemon, client)))
    except KeyboardInterrupt:
        result["error"] = "interrupted; everything was cleaned up"
    except (DsecError, RuntimeError, OSError) as exc:
        result["error"] = str(exc)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
