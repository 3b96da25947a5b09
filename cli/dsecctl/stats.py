"""`dsecctl stats`: what sandboxes use."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import click

from dsecctl import output
from dsecctl.app import App, command, find, pass_app
from dsecctl.table import size
from dsecctl.values import DURATION, SANDBOX
from dsecd.client import DSecClient, Sandbox
from dsecd.errors import DsecError
from dsecd.wire import sandbox as wire

HEAD: Final = ("ID", "CPU TIME", "MEMORY", "PEAK", "PIDS", "DISK")
WATCHED: Final = ("ID", "CPU", "CPU TIME", "MEMORY", "PIDS", "DISK")
LONG_ID: Final = 28  # a longer one would not fit 80 columns: shown without its host tag
Sample = dict[str, tuple[float, int]]  # by sandbox: when, and CPU microseconds until then


@command(
    "stats",
    examples="""
    dsecctl stats
    dsecctl stats --watch --interval 5s box
    dsecctl stats --json | jq '[.[].memory_bytes] | add'
    """,
)
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="Time between two looks.")
@click.argument("sandboxes", nargs=-1, type=SANDBOX, metavar="[SANDBOX]...")
@pass_app
async def stats(app: App, watch: bool, interval: float, sandboxes: tuple[str, ...]) -> None:
    """Show what sandboxes use of CPU, memory, processes and disk.

    Without names: all that run. With --watch, CPU is in per cent of one core since the last look; with --json too,
    each look is one line.
    """
    before: Sample = {}
    async with app.client() as client:
        boxes = [await find(client, text) for text in sandboxes]
        while True:
            found = await _look(client, boxes)
            now = time.monotonic()
            if app.json:
                output.emit(found)
            else:
                _show(found, before, now, watch)
            if not watch:
                return
            before = {one.id: (now, one.cpu_usec) for one in found}
            await asyncio.sleep(interval)


async def _look(client: DSecClient, named: list[Sandbox]) -> list[wire.Stats]:
    """Of those named, or of all that run. One that ends meanwhile is left out, unless it was named."""
    if named:
        return [*await asyncio.gather(*(box.stats() for box in named))]

    async def one(box: Sandbox) -> wire.Stats | None:
        try:
            return await box.stats()
        except DsecError as exc:
            if exc.kind in ("not_found", "conflict", "sandbox_dead"):
                return None
            raise

    found = await asyncio.gather(*(one(box) for box in await client.list()))
    return [item for item in found if item is not None]


def _show(found: list[wire.Stats], before: Sample, now: float, watch: bool) -> None:
    rows = []
    for one in found:
        ident = one.id if len(one.id) <= LONG_ID else one.id.rpartition("-")[2]
        cpu, used = f"{one.cpu_usec / 1e6:.1f}s", size(one.memory_bytes)
        middle = (_load(one, before, now), cpu, used) if watch else (cpu, used, size(one.memory_peak_bytes))
        rows.append((ident, *middle, str(one.pids), size(one.disk_bytes)))
    if watch:
        output.clear()
    output.table(WATCHED if watch else HEAD, rows, shrink=(0,))
    for one in found:
        if not watch and (one.reclaimed_bytes or one.swapped_bytes):
            back, out = size(one.reclaimed_bytes), size(one.swapped_bytes)
            output.wrapped(f"{one.id}: ", f"its last pause gave back {back}, {out} are in swap")


def _load(one: wire.Stats, before: Sample, now: float) -> str:
    at, used = before.get(one.id, (now, 0))
    return f"{(one.cpu_usec - used) / (now - at) / 1e4:.0f}%" if now > at else "-"
