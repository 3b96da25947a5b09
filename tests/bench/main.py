"""`make bench [NAME=x]`: human lines, then one JSON line for each bench; without NAME all, into build/bench.json.

Exit status 0 when everything was measured (whatever came of it), 1 when not.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Final

from dsecd.client import DSecClient, DsecError
from tests.bench import (
    bench_api,
    bench_boot,
    bench_create,
    bench_density,
    bench_exec,
    bench_files,
    bench_fleet,
    bench_fncall,
    bench_images,
    bench_layers,
    bench_memory,
    bench_rollout,
)
from tests.bench.frame import BASE, ROOMY, Bench, Stage, as_line, record, say
from tests.own import TREE, own_daemon, stop_on_sigterm

BENCHES: Final = {
    module.BENCH.name: module.BENCH
    for module in (
        bench_exec,
        bench_create,
        bench_density,
        bench_layers,
        bench_files,
        bench_api,
        bench_images,
        bench_boot,
        bench_memory,
        bench_fncall,
        bench_rollout,
        bench_fleet,
    )
}


def measure(bench: Bench) -> dict[str, Any]:
    """One bench with a daemon of its own."""

    async def inside() -> dict[str, Any]:
        async with DSecClient(daemon.url) as client:
            if not BASE.cached:
                say("the base is made by mmdebstrap, half a minute or so, once")
            await BASE.make(daemon, client)
            return record(bench, await bench.run(Stage(daemon, client, Path(work))))

    print(f"{bench.name}: {bench.what}", flush=True)
    config = {**ROOMY, **bench.config}
    work_directory = tempfile.TemporaryDirectory(prefix="dsecd-bench-", dir="/var/tmp")
    with work_directory as work, own_daemon("bench", BASE, **config) as daemon:
        result = asyncio.run(inside())
    for bound in bench.bounds:
        say(bound.line(result["figures"]))
    print(as_line(result), flush=True)
    return result


def main(argv: list[str]) -> int:
    unknown = [name for name in argv if name not in BENCHES]
    if unknown:
        print(f"no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print("benches must be root: they run a daemon", file=sys.stderr)
        return 1
    stop_on_sigterm()
    results, status = [], 0
    try:
        for name in argv or BENCHES:
            try:
                results.append(measure(BENCHES[name]))
            except (DsecError, RuntimeError, OSError, AssertionError):
                traceback.print_exc()
                status = 1
    except KeyboardInterrupt:
        print("interrupted; everything was cleaned up", file=sys.stderr)
        return 130
    if not argv:
        (TREE / "build").mkdir(exist_ok=True)
        (TREE / "build/bench.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"all of it is in {TREE / 'build/bench.json'}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
