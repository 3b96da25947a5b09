"""fncall: calls in places that are there already, against a cold python3 in bubblewrap and in podman."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

from dsecd.client import DSecClient, DSecFnCallArgs
from tests.bench import peers
from tests.bench.frame import Bench, Bound, Outcome, Stage, clock, median, rounded, say, spread
from tests.own import Base, own_daemon

IMAGE: Final = Base("base:judge", ["python3", "python3-numpy", "gcc", "g++", "libc6-dev"])
ROUNDS: Final = 10
OURS, BWRAP, PODMAN = 20, 5, 1  # in each round
CALLS, CLIENTS = 3000, 32
SPREAD_S: Final = 10.0
IDLE: Final = 50
SETTLE_S: Final = 3.0
MIB: Final = 1 << 20
NUMPY: Final = "import numpy as np; a = np.ones((200, 200)); assert (a @ a)[0, 0] == 200"
EMPTY: Final = "int main() {}"


async def run(stage: Stage) -> Outcome:
    """On daemons of its own, which begin with the image as it was kept."""
    outcome = Outcome()
    if not IMAGE.cached:
        await IMAGE.make(stage.daemon, stage.client)
    with own_daemon("bench", IMAGE, **_config()) as daemon:
        async with DSecClient(daemon.url) as client:
            await measure(Stage(daemon, client, stage.work), outcome)
    return outcome


async def measure(stage: Stage, outcome: Outcome) -> None:
    python = DSecFnCallArgs(language="python", code="pass")
    cpp = await compiled(stage.client)
    await memory(stage, outcome)
    root = mounted(stage)
    await compare(stage, python, cpp, root, outcome)
    await many(stage, python, cpp, outcome)
    await numpy(root, outcome)


async def compiled(client: DSecClient) -> DSecFnCallArgs:
    """An empty C++ program as a caller has it who compiled it before."""
    made = await client.fncall(
        DSecFnCallArgs(argv=["g++", "-O2", "-o", "main", "main.cpp"], files={"main.cpp": EMPTY.encode()}, want=["main"])
    )
    return DSecFnCallArgs(argv=["./main"], files={"main": made.files["main"]})


async def called(client: DSecClient, args: DSecFnCallArgs) -> None:
    result = await client.fncall(args)
    assert result.verdict == "ok", result


def mounted(stage: Stage) -> Path:
    """Where the daemon has the image mounted for its places: the peers read the same files."""
    found = [path for path in (stage.daemon.run_dir / "images").iterdir() if (path / "usr/bin/g++").exists()]
    return found[0]


async def memory(stage: Stage, outcome: Outcome) -> None:
    """As many calls at once as there are to be places: each holds one while it waits for a CPU.

    What places hold is what their control groups are charged with, page cache aside: other work does not count.
    """
    slow = DSecFnCallArgs(language="python", code="import time; time.sleep(0.4)")
    await called(stage.client, slow)
    await asyncio.sleep(SETTLE_S)
    before, had = charged(stage), places(stage)
    for _ in range(ROUNDS):
        await asyncio.gather(*(called(stage.client, slow) for _ in range(IDLE)))
        if places(stage) >= IDLE:
            break
    await asyncio.sleep(SETTLE_S)
    made = places(stage) - had
    each = (charged(stage) - before) / MIB / made
    say(f"{made} more idle places with Python warm: {each:.1f} MiB each")
    outcome.figures["idle_mib_each"] = rounded(each)


def charged(stage: Stage) -> int:
    """Bytes without page cache of everything below the daemon's group."""
    base = stage.daemon.cgroup_base.lstrip("/")
    v1, v2 = Path("/sys/fs/cgroup/memory") / base, Path("/sys/fs/cgroup") / base
    group, prefix = (v1, "total_") if v1.exists() else (v2, "")
    usage = int((group / ("memory.usage_in_bytes" if prefix else "memory.current")).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return usage - sum(int(stat[f"{prefix}{name}_file"]) for name in ("active", "inactive"))


def places(stage: Stage) -> int:
    return len(list((stage.daemon.run_dir / "sandboxes").iterdir()))


async def compare(
    stage: Stage, python: DSecFnCallArgs, cpp: DSecFnCallArgs, root: Path, outcome: Outcome
) -> None:  # fmt: skip
    ours: list[float] = []
    binary: list[float] = []
    bwrap: list[float] = []
    podman: list[float] = []
    for one in (python, cpp) * 10:
        await called(stage.client, one)
    with contextlib.ExitStack() as stack:
        cold = stack.enter_context(bubble(root))
        pod = None
        if peers.has_podman():
            pod = peers.Podman(stage.work)
            rootfs = str(stack.enter_context(peers.overlay(root, stage.work / "podman-root")))
            before = peers.groups_named("libpod_parent")
            stack.callback(lambda: peers.remove_groups(peers.groups_named("libpod_parent") - before))
        for _ in range(ROUNDS):
            for _ in range(OURS):
                with clock(ours):
                    await called(stage.client, python)
                with clock(binary):
                    await called(stage.client, cpp)
            for _ in range(BWRAP):
                with clock(bwrap):
                    await asyncio.to_thread(peers.quick, [*cold, "python3", "-c", "pass"])
            for _ in range(PODMAN if pod is not None else 0):
                argv = [*pod.command, "run", "--rm", *pod.limits, "--rootfs", rootfs, "python3", "-c", "pass"]  # type: ignore[union-attr]
                with clock(podman):
                    await asyncio.to_thread(peers.quick, argv)
    say(f"warm Python          {spread(ours)} ms")
    say(f"C++, compiled        {spread(binary)} ms")
    say(f"bwrap, cold Python   {spread(bwrap)} ms")
    outcome.figures |= {
        "py_p50_ms": median(ours), "cpp_p50_ms": median(binary), "py_vs_bwrap": rounded(median(ours) / median(bwrap)),
    }  # fmt: skip
    outcome.versus["bwrap_p50_ms"] = median(bwrap)
    if podman:
        say(f"podman, cold Python  {spread(podman)} ms")
        outcome.figures["py_vs_podman"] = rounded(median(ours) / median(podman))
        outcome.versus["podman_p50_ms"] = median(podman)


@contextlib.contextmanager
def bubble(root: Path) -> Iterator[list[str]]:
    """bubblewrap with everything unshared, below a control group with a limit of memory, as a careful judge has it."""
    v1 = Path("/sys/fs/cgroup/memory")
    group = (v1 if (v1 / "cgroup.procs").exists() else Path("/sys/fs/cgroup")) / f"dsecd-peer-bwrap-{os.getpid()}"
    group.mkdir()
    limit = group / ("memory.limit_in_bytes" if group.parent == v1 else "memory.max")
    limit.write_text(str(256 << 20))
    enter = f'echo $$ >{group}/cgroup.procs && exec "$@"'
    flags = ["--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev", "--unshare-all", "--die-with-parent"]
    try:
        yield ["sh", "-c", enter, "sh", "bwrap", "--ro-bind", str(root), "/", *flags]
    finally:
        peers.remove_groups({group})


async def many(stage: Stage, python: DSecFnCallArgs, cpp: DSecFnCallArgs, outcome: Outcome) -> None:
    """Throughput of clients that ask again at once; then calls that come at 80 % of that."""
    left = list(range(CALLS))

    async def client() -> None:
        async with DSecClient(stage.daemon.url) as one:
            while left:
                await called(one, (python, cpp)[left.pop() % 2])

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    rate = CALLS / (time.perf_counter() - began)
    say(f"{CLIENTS} clients, Python and C++: {rate:.0f} calls/s")
    outcome.figures["calls_per_s"] = rounded(rate)
    await asyncio.sleep(SETTLE_S)  # 32 places make their next cells: that is the load before, not this one
    p50, p99 = await paced(0.8 * rate, lambda number: called(stage.client, (python, cpp)[number % 2]))
    say(f"at 80 % of that: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    outcome.figures["p99_over_p50"] = rounded(p99 / p50)
    outcome.versus |= {"p50_at_80_ms": rounded(p50), "p99_at_80_ms": rounded(p99)}
    p50, p99 = await bare(rate)
    say(f"the machine itself, as busy: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    outcome.versus["bare_p99_over_p50"] = rounded(p99 / p50)


async def paced(rate: float, one: Callable[[int], Awaitable[None]]) -> tuple[float, float]:
    """So many a second, at even distances: p50 and p99 in milliseconds."""
    times: list[float] = []

    async def timed(number: int) -> None:
        with clock(times):
            await one(number)

    tasks = []
    start = time.perf_counter()
    for number in range(int(SPREAD_S * rate)):
        await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        tasks.append(asyncio.ensure_future(timed(number)))
    await asyncio.gather(*tasks)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


async def bare(rate: float) -> tuple[float, float]:
    """The same pace without any of us: a process on each CPU that counts for as long as a call takes of both. A host
    whose CPUs are slow for a moment, at which nobody can look from inside, has this spread whatever it runs."""
    spin = "import sys\nfor line in sys.stdin:\n  n = int(line)\n  while n: n -= 1\n  print(flush=True)"
    async with contextlib.AsyncExitStack() as stack:
        free: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
        for cpu in os.sched_getaffinity(0):
            command = ("taskset", "-c", str(cpu), sys.executable, "-c", spin)
            process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
            stack.push_async_callback(process.wait)
            stack.callback(process.kill)
            free.put_nowait(process)

        async def count(steps: int) -> None:
            process = await free.get()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"%d\n" % steps)
            await process.stdout.readline()
            free.put_nowait(process)

        async def a_second(steps: int) -> float:
            began = time.perf_counter()
            await asyncio.gather(*(count(steps) for _ in range(CALLS // 10)))
            return CALLS / 10 / (time.perf_counter() - began)

        trial = 100_000
        steps = int(trial * await a_second(trial) / rate)
        busy = 0.8 * await a_second(steps)
        return await paced(busy, lambda _: count(steps))


async def numpy(root: Path, outcome: Outcome) -> None:
    """With a zygote that has it loaded: a daemon of its own, as it is configuration."""
    ours: list[float] = []
    bwrap: list[float] = []
    args = DSecFnCallArgs(language="python", code=NUMPY)
    with own_daemon("bench", IMAGE, **_config(preload=["numpy"])) as daemon, bubble(root) as cold:
        async with DSecClient(daemon.url) as client:
            for _ in range(20):
                await called(client, args)
            for _ in range(ROUNDS):
                for _ in range(OURS):
                    with clock(ours):
                        await called(client, args)
                for _ in range(BWRAP):
                    with clock(bwrap):
                        await asyncio.to_thread(subprocess.run, [*cold, "python3", "-c", NUMPY], check=True)
    say(f"numpy, loaded        {spread(ours)} ms")
    say(f"numpy, bwrap         {spread(bwrap)} ms")
    outcome.figures["numpy_vs_bwrap"] = rounded(median(ours) / median(bwrap))
    outcome.versus |= {"numpy_p50_ms": median(ours), "numpy_bwrap_p50_ms": median(bwrap)}


def _config(**more: Any) -> dict[str, Any]:
    return {"fncall": {"image": IMAGE.name, "boxes_max": IDLE + 6, **more}, "disk_pool_mb": 16384}


BENCH: Final = Bench(
    "fncall", "stateless calls",
    (
        Bound("py_p50_ms", 5), Bound("py_vs_bwrap", 0.4), Bound("py_vs_podman", 0.03), Bound("numpy_vs_bwrap", 0.15),
        Bound("cpp_p50_ms", 3), Bound("calls_per_s", 300, most=False), Bound("p99_over_p50", 4),
        Bound("idle_mib_each", 12),
    ),
    run,
)  # fmt: skip
