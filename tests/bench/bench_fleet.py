"""fleet: what a coordinator costs, on real daemons; and how it places, on simulated ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from sshd_kit import Sshd

from dsecd.client import DSecClient, Sandbox
from dsecd.fleet import Fleet
from dsecd.fleethosts import Host, HostConfig, Inventory
from dsecd.wire import base, sandbox
from tests.bench.frame import BASE, ROOMY, Bench, Bound, Outcome, Stage, clock, median, rounded, say, spread
from tests.fleetsim import HOSTS, Choose, Simulation, at_random, ours, round_robin
from tests.own import own_daemon

DAEMONS: Final = 4
CREATES: Final = 160
ROUNDS: Final = 4
CALLS: Final = 400


@contextlib.asynccontextmanager
async def coordinator(work: Path, urls: dict[str, str]) -> AsyncIterator[str]:
    """A dsec-fleet process over these hosts; its url."""
    work.mkdir()
    inventory, sock = work / "fleet.toml", work / "sock"
    inventory.write_text("".join(f"[hosts.{name}]\nurl = {json.dumps(url)}\n" for name, url in urls.items()))
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsecd.fleet", "-i", inventory, "-s", sock], stdout=log, stderr=log, cwd="/"
        )
    try:
        while not sock.exists():
            if process.poll() is not None:
                raise RuntimeError((work / "log").read_text())
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        yield f"unix://{sock}"
    finally:
        process.terminate()
        process.wait(20)


async def run(stage: Stage) -> Outcome:
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        daemons = [
            stack.enter_context(
                own_daemon(
                    f"f{n}", BASE, id_first_slot=1000 + 200 * n, id_last_slot=1199 + 200 * n,
                    **{**ROOMY, "disk_pool_mb": 8192},
                )
            )
            for n in range(DAEMONS)
        ]  # fmt: skip
        urls = {f"f{n}": one.url for n, one in enumerate(daemons)}
        async with coordinator(stage.work / "fleet", urls) as url:
            await _through(stage, url, list(urls.values()), outcome)
            await _added(stage, url, urls["f0"], "local", outcome)
        sshd = Sshd(_made(stage.work / "ssh"))
        stack.callback(sshd.stop)
        with _environment("DSEC_SSH", sshd.command):
            far = f"ssh://root@127.0.0.1:{sshd.port}{daemons[0].socket}"
            async with coordinator(stage.work / "far", {"f0": far}) as url:
                await _added(stage, url, urls["f0"], "ssh", outcome)
    await _many(outcome)
    _simulated(outcome)
    return outcome


async def _through(stage: Stage, url: str, direct: list[str], outcome: Outcome) -> None:
    """Creates a second: by the coordinator, and by clients of the daemons themselves, in turns."""
    rates: dict[str, list[float]] = {"fleet": [], "direct": []}
    async with contextlib.AsyncExitStack() as stack:
        front = await stack.enter_async_context(DSecClient(url))
        each = [await stack.enter_async_context(DSecClient(one)) for one in direct]
        for number in range(ROUNDS + 1):
            for name, clients in (("fleet", [front]), ("direct", each)):
                began = time.perf_counter()
                count = CREATES // len(clients)
                made = await asyncio.gather(
                    *(client.run_container(stage.args()) for client in clients for _ in range(count))
                )
                if number:
                    rates[name].append(CREATES / (time.perf_counter() - began))
                await asyncio.gather(*(one.stop() for one in made))
    say(f"creates/s        {spread(rates['fleet'])} by the fleet, {spread(rates['direct'])} without")
    outcome.figures["through_ratio"] = rounded(median(rates["fleet"], 6) / median(rates["direct"], 6))
    outcome.versus |= {"creates_per_s": median(rates["fleet"]), "direct_creates_per_s": median(rates["direct"])}


async def _added(stage: Stage, url: str, direct: str, name: str, outcome: Outcome) -> None:
    """What the way through the coordinator adds to `true` in one sandbox, in turns."""
    times: dict[str, list[float]] = {"fleet": [], "direct": []}
    async with DSecClient(url) as front, DSecClient(direct) as straight:
        made = await straight.run_container(stage.args())
        ends: dict[str, Sandbox] = {"fleet": await front.get(made.id), "direct": made}
        for number in range(CALLS):
            for way, box in ends.items():
                with clock(times[way] if number > 20 else None):
                    await box.exec(["true"])
        await made.stop()
    say(f"{name:16} {spread(times['fleet'])} ms by the fleet, {spread(times['direct'])} without")
    outcome.figures[f"{name}_added_p50_ms"] = rounded(median(times["fleet"], 6) - median(times["direct"], 6))


class _Instant(Host):
    """A simulated host: whatever is asked of it is there at once."""

    @property
    def problem(self) -> str:
        return ""

    async def call(self, method: str, params: base.Params, notified: Any = None) -> Any:
        assert isinstance(params, sandbox.CreateMany)
        made = [
            sandbox.CreateOne(sandbox=sandbox.Sandbox(id="x", state="running", backend="container", image=one.image))
            for one in params.specs
        ]
        return sandbox.Created(results=made)


async def _many(outcome: Outcome) -> None:
    """CPU seconds of the coordinator for 10,000 sandboxes in one call: read, placed on 160 hosts, answered."""
    inventory = Inventory(Path("/dev/null"))
    for n in range(HOSTS):
        host = _Instant(f"h{n}", HostConfig("unix:///x"), {})
        host.view.why = ""
        host.view.cpu_max, host.view.memory_max_mb = 12_288.0, 6 << 20
        inventory.hosts[host.name] = host
    fleet = Fleet(inventory, seed=1)
    specs = [sandbox.Spec(image="debian:12", labels={"n": str(n)}) for n in range(10_000)]
    line = base.encode(sandbox.CreateMany(specs=specs))
    times = []
    for _ in range(3):
        began = time.process_time()
        params = msgspec.json.decode(line, type=sandbox.CreateMany)
        done = await fleet.methods["sandbox.create_many"](None, params)
        base.encode(done)
        times.append(time.process_time() - began)
        assert all(one.error is None for one in done.results)
    outcome.figures["create_many_10k_cpu_s"] = median(times)


def _simulated(outcome: Outcome) -> None:
    """160 hosts: a burst of 32,000, then 5,000/s to 380,000 alive, two hosts lost, views a second old."""
    ways: dict[str, Choose] = {"ours": ours, "random": at_random, "round_robin": round_robin()}
    for name, choose in ways.items():
        result = Simulation(choose).run()
        p99 = sorted(result.place_us)[int(0.99 * len(result.place_us))] / 1000
        outcome.versus[name] = {**result.public(), "p99_place_ms": rounded(p99)}
        say(f"{name:16} {outcome.versus[name]}")
        if name == "ours":
            outcome.figures |= {"balance_max_over_mean": rounded(result.balance, 4), "sim_p99_place_ms": rounded(p99)}


def _made(path: Path) -> Path:
    path.mkdir()
    return path


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


BENCH: Final = Bench(
    "fleet", "a coordinator over four daemons, and 160 simulated hosts",
    (
        Bound("through_ratio", 0.85, most=False), Bound("local_added_p50_ms", 1), Bound("ssh_added_p50_ms", 3),
        Bound("create_many_10k_cpu_s", 2), Bound("balance_max_over_mean", 1.15),
    ),
    run,
)  # fmt: skip
