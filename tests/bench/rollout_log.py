"""What it costs to write down what is done, and how fast a client that comes back is where it was."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from dsecd.client import DSecClient, Sandbox
from tests.bench.frame import BASE, ROOMY, Outcome, Stage, clock, median, rounded, say, spread
from tests.own import OwnDaemon, own_daemon

CLIENTS: Final = 64
ROUNDS: Final = 5
EACH: Final = 8  # commands of each client in a round
CALLS: Final = 1000


class Unlogged(OwnDaemon):
    program = (str(Path(__file__).with_name("unlogged.py")),)


async def figures(stage: Stage, outcome: Outcome) -> None:
    """durable_ratio and replay_1000_s."""
    await _durable(stage, outcome)
    await _replay(stage, outcome)


async def _durable(stage: Stage, outcome: Outcome) -> None:
    """p50 of a command with the log to one without; 64 clients at once, each with a sandbox, the daemons in turns."""
    logged: list[float] = []
    plain: list[float] = []
    with own_daemon("plain", BASE, kind=Unlogged, id_first_slot=1000, id_last_slot=1999, **ROOMY) as other:
        async with DSecClient(other.url) as beside:
            boxes = {id(logged): await _boxes(stage, stage.client), id(plain): await _boxes(stage, beside)}
            for number in range(ROUNDS + 1):
                for times in (logged, plain):
                    taken = await asyncio.gather(*(_commands(box) for box in boxes[id(times)]))
                    if number:  # the first warms up
                        times += [one for each in taken for one in each]
            await asyncio.gather(*(box.stop() for both in boxes.values() for box in both))
    say(f"with the log     {spread(logged)} ms, {CLIENTS} at once")
    say(f"without          {spread(plain)} ms")
    outcome.figures["durable_ratio"] = rounded(median(logged, 6) / median(plain, 6))
    outcome.versus |= {"exec_logged_p50_ms": median(logged), "exec_unlogged_p50_ms": median(plain)}


async def _boxes(stage: Stage, client: DSecClient) -> list[Sandbox]:
    made = await client.run_containers(stage.args(memory_limit_mb=64, disk_limit_mb=64), CLIENTS)
    return [one for one in made if isinstance(one, Sandbox)]


async def _commands(box: Sandbox) -> list[float]:
    times: list[float] = []
    for _ in range(EACH):
        with clock(times):
            await box.exec(["true"])
    return times


async def _replay(stage: Stage, outcome: Outcome) -> None:
    """A new client fast-forwards over 1,000 completed calls in one call."""
    box = await stage.client.run_container(stage.args())
    for start in range(0, CALLS, 50):
        calls = (box.run_shell(f"echo step {n}", request_id=f"r{n}") for n in range(start, start + 50))
        await asyncio.gather(*calls)
    times: list[float] = []
    async with DSecClient(stage.client.url) as fresh:
        for _ in range(5):
            began = time.perf_counter()
            found = await fresh.trajectory(box.id)
            times.append(time.perf_counter() - began)
            assert sum(entry.method == "exec.run" for entry in found.entries) == CALLS
        twin = await fresh.get(box.id)
        began = time.perf_counter()
        again = await asyncio.gather(*(twin.run_shell(f"echo step {n}", request_id=f"r{n}") for n in range(CALLS)))
        by_key = time.perf_counter() - began
        assert all(one.replayed and one.stdout == f"step {n}\n" for n, one in enumerate(again))
    await box.stop()
    say(f"fast-forward     {spread(times)} s over {CALLS} calls; asked for again one by one {by_key:.2f} s")
    outcome.figures["replay_1000_s"] = median(times)
    outcome.versus["replay_1000_by_request_id_s"] = rounded(by_key)
