"""`dsecctl top`: what sandboxes use now, again and again."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import click
from msgspec import Struct

from dsecctl import output, terminal
from dsecctl.app import App, command, pass_app
from dsecctl.table import cut, layout, printable, size, span
from dsecctl.values import DURATION
from dsecd.client import DSecClient
from dsecd.errors import DsecError
from dsecd.wire import daemon, sandbox

HEAD: Final = ("SANDBOX", "JOB", "STATE", "CPU", "MEMORY", "PIDS", "DISK", "AGE")
AT_ONCE: Final = 64  # questions under way: the daemon has others to answer
FIRST_S: Final = 1.0  # between the first two looks: before the second nobody knows what CPU is used
ANSWER_S: Final = 30.0  # a look that takes longer is none
SHARE: Final = 4  # so many times as long as a look took, it is not looked again
OVER: Final = ("not_found", "conflict", "sandbox_dead")  # it ended since it was listed


class Row(Struct):
    """One sandbox. cpu: cores used since the last look; None: it was not there then."""

    id: str
    name: str | None
    job: str | None
    state: str
    backend: str
    cpu: float | None
    memory_bytes: int
    memory_limit_bytes: int
    pids: int
    disk_bytes: int
    age_s: float


class Look(Struct):
    """One look at a host or a fleet. missing: hosts that did not answer."""

    at: float
    host: daemon.Info
    missing: list[str]
    sandboxes: list[Row]


# What is greatest stands first; names and states from A to Z.
SORTS: Final[dict[str, Callable[[Row], tuple[object, ...]]]] = {
    "cpu": lambda row: (-(row.cpu or 0.0), -row.memory_bytes, row.id),
    "memory": lambda row: (-row.memory_bytes, row.id),
    "disk": lambda row: (-row.disk_bytes, row.id),
    "pids": lambda row: (-row.pids, row.id),
    "age": lambda row: (-row.age_s, row.id),
    "state": lambda row: (row.state, -(row.cpu or 0.0), row.id),
    "job": lambda row: (row.job is None, row.job or "", -(row.cpu or 0.0), row.id),
}


@command(
    "top",
    examples="""
    dsecctl top
    dsecctl top --once -n 10 --sort memory
    dsecctl -H unix:///run/dsecd/fleet.sock top --json | jq '.sandboxes[0]'
    """,
)
@click.option("--once", is_flag=True, help="One table; also without a terminal.")
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="Time between two looks.")
@click.option("-n", "limit", type=click.IntRange(1, 100_000), help="Show so many.  [default: what fits the terminal]")
@click.option("--sort", type=click.Choice([*SORTS]), default="cpu", show_default=True, help="What stands first.")
@pass_app
async def top(app: App, once: bool, interval: float, limit: int | None, sort: str) -> None:
    """Show what a host or a fleet is doing, until Ctrl-C.

    CPU is in per cent of one core since the last look. The lines above the table say how busy the host is (waiting:
    part of the last ten seconds in which something could have run and had to wait) and what it has promised; of a
    fleet all hosts together, and the longest waits. With --json each look is one line.
    """
    live = sys.stdout.isatty() and not once and not app.json
    view = _View(live, app.json, limit, sort)
    looks = Looks()
    with view.redrawn_at_resize():
        while True:
            try:
                async with app.client() as client:
                    if not live:  # the first look has no CPU: it is not shown
                        await looks.look(client)
                        await asyncio.sleep(min(FIRST_S, interval))
                    while True:
                        began = time.monotonic()
                        async with asyncio.timeout(ANSWER_S):
                            found = await looks.look(client)
                        took = time.monotonic() - began
                        first = view.last is None
                        view.show(found)
                        if not live and (once or not app.json):
                            return
                        await view.pause(max(min(FIRST_S, interval) if first else interval, SHARE * took))
            except TimeoutError:
                view.trouble(DsecError("timeout", f"no answer within {ANSWER_S:g} s"))
            except DsecError as exc:
                view.trouble(exc)
            await view.pause(max(FIRST_S, interval))


class Looks:
    """Looks, and remembers what each sandbox had used of CPU."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}

    async def look(self, client: DSecClient) -> Look:
        host: daemon.Info = await client.call("daemon.info", daemon.InfoParams())
        listed: sandbox.Sandboxes = await client.call("sandbox.list", sandbox.List())
        few = asyncio.Semaphore(AT_ONCE)

        async def one(box: sandbox.Sandbox) -> tuple[float, sandbox.Stats] | None:
            async with few:
                try:
                    return time.monotonic(), await client.call("sandbox.stats", sandbox.ById(id=box.id))
                except DsecError as exc:
                    if exc.kind in OVER:
                        return None
                    raise

        used = await asyncio.gather(*map(one, listed.sandboxes))
        rows, now = [], time.time()
        for box, found in zip(listed.sandboxes, used, strict=True):
            if found is not None:
                rows.append(self._row(box, *found, now))
        self._before = {found[1].id: (found[0], found[1].cpu_usec) for found in used if found is not None}
        return Look(now, host, listed.missing, rows)

    def _row(self, box: sandbox.Sandbox, at: float, stats: sandbox.Stats, now: float) -> Row:
        before = self._before.get(box.id)
        cpu = None
        if before is not None and at > before[0]:
            cpu = max(0.0, round((stats.cpu_usec - before[1]) / 1e6 / (at - before[0]), 4))
        return Row(
            box.id, box.name, box.job, box.state, box.backend, cpu, stats.memory_bytes, stats.memory_limit_bytes,
            stats.pids, stats.disk_bytes, round(max(0.0, now - box.created_at), 1),
        )  # fmt: skip


class _View:
    """Where looks are shown: a terminal that is written over, or one after the other."""

    def __init__(self, live: bool, json: bool, limit: int | None, sort: str) -> None:
        self._live, self._json, self._limit, self._sort = live, json, limit, sort
        self._resized = asyncio.Event()
        self._trouble = ""
        self.last: Look | None = None

    def redrawn_at_resize(self) -> _Resizes:
        return _Resizes(self._resized if self._live else None)

    def show(self, look: Look) -> None:
        look.sandboxes.sort(key=SORTS[self._sort])
        self.last, self._trouble = look, ""
        self._draw()

    def trouble(self, exc: DsecError) -> None:
        """Whoever watches goes on, and sees the last that was known; everybody else gets the error."""
        if self.last is None or not self._live:
            raise exc
        self._trouble = exc.message
        self._draw()

    async def pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (left := deadline - loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._resized.wait()
            except TimeoutError:
                return
            self._resized.clear()
            self._draw()

    def _draw(self) -> None:
        if self.last is None:
            return
        if self._json:
            output.emit(Look(self.last.at, self.last.host, self.last.missing, self.last.sandboxes[: self._limit]))
            output.flush()
        elif self._live:
            rows, columns = terminal.size()
            output.screen(page(self.last, self._limit, columns, rows, self._trouble)[: rows - 1])
        else:
            output.lines(page(self.last, self._limit, output.columns(), None, ""))


class _Resizes:
    """Sets an event when the terminal gets another size."""

    def __init__(self, event: asyncio.Event | None) -> None:
        self._event = event

    def __enter__(self) -> None:
        if self._event is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, self._event.set)

    def __exit__(self, *_exc: object) -> None:
        if self._event is not None:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGWINCH)


def page(look: Look, limit: int | None, width: int, height: int | None, trouble: str) -> list[str]:
    """All lines; those of the host are cut at `width`. height: of the terminal."""
    lines = [cut(printable(line), width) for line in _host_lines(look, trouble)]
    room = len(look.sandboxes) if height is None else max(0, height - len(lines) - 3)
    shown = look.sandboxes[: min(room, limit) if limit else room]
    lines += ["", *layout(HEAD, [_cells(row) for row in shown], (0, 1), width)]
    if left := len(look.sandboxes) - len(shown):
        lines.append(f"and {left} more")
    return lines


def _host_lines(look: Look, trouble: str) -> Iterator[str]:
    host = look.host
    waits = " ".join(f"{name} {part:.0f}%" for name, part in host.waits.items()) or "not known"
    states: dict[str, int] = {}
    for row in look.sandboxes:
        states[row.state] = states.get(row.state, 0) + 1
    clock = time.strftime("%H:%M:%S", time.localtime(look.at))
    yield f"{host.host}  {clock}  load {host.load1:.2f} on {host.cpus} CPUs, waiting: {waits}"
    memory = f"{size(host.memory_committed_mb << 20)} of {size(host.memory_max_mb << 20)}"
    yield f"promised: CPU {host.cpu_committed:g} of {host.cpu_max:g}, memory {memory}"
    yield f"free: memory {size(host.memory_free_mb << 20)}, disk {size(host.disk_free_mb << 20)}"
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield f"sandboxes: {host.sandboxes} of {host.sandboxes_max}" + (f": {counts}" if counts else "")
    if host.cordoned or host.pressure:
        yield f"takes no new sandboxes: {'cordoned' if host.cordoned else host.pressure}"
    if look.missing:
        yield f"hosts that do not answer: {', '.join(look.missing)}"
    if trouble:
        yield f"no news: {trouble}"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name or row.id, row.job or "-", row.state, "-" if row.cpu is None else f"{100 * row.cpu:.0f}%",
        size(row.memory_bytes), str(row.pids), size(row.disk_bytes), span(row.age_s),
    )  # fmt: skip
