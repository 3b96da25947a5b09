"""`dsecctl trace`: what one request did, and when."""

from __future__ import annotations

from typing import Final

import click

from dsecctl import output
from dsecctl.app import App, command, pass_app
from dsecctl.table import moment
from dsecd.errors import DsecError
from dsecd.wire import trace as wire

LAST: Final = ("TRACE", "METHOD", "SANDBOX", "AT", "TOOK", "OUTCOME")
SPANS: Final = ("WHAT", "WHERE", "START", "TOOK")


@command(
    "trace",
    examples="""
    dsecctl trace step-17
    dsecctl trace
    dsecctl trace --json step-17 | jq '.traces[].spans[] | select(.took_ms > 100)'
    """,
)
@click.option("-n", "limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="List so many.")
@click.argument("key", metavar="[ID]", required=False)
@pass_app
async def trace(app: App, limit: int, key: str | None) -> int:
    """Show what a request did, and when.

    In milliseconds since it began.

    ID is its request_id; a request that brought none has a number, which the list shows that comes without ID.
    The last 2000 requests of a daemon are kept, in memory, without those that only look. Of a fleet: what each host did
    stands below the line that says when it was asked.
    """
    async with app.client() as client:
        found: wire.Traces = await client.call(
            "trace.list" if key is None else "trace.get",
            wire.ListTraces(limit=limit) if key is None else wire.Get(trace=key),
        )
    if key is not None and not found.traces:
        raise DsecError("not_found", f"no request {key[:80]!r} of yours is kept: `dsecctl trace` lists those that are")
    if app.json:
        output.emit(found)
    elif key is None:
        rows = [
            (one.key, one.method, one.sandbox or "-", moment(one.at)[11:], _ms(one.took_ms), one.outcome or "runs")
            for one in found.traces
        ]
        output.table(LAST, rows, shrink=(0, 2))
    else:
        for one in found.traces:
            _show(one)
    return 0


def _show(one: wire.Trace) -> None:
    rows = [(one.method, one.host, "0.0", _ms(one.took_ms))]
    for span in one.spans:
        where = span.host if span.place in ("daemon", "fleet") else f"{span.host} {span.place}"
        rows.append(("  " * span.depth + span.name, where, f"{span.start_ms:.1f}", _ms(span.took_ms)))
    about = f" on {one.sandbox}" if one.sandbox else ""
    output.out(f"{moment(one.at)}  {one.method}{about}: {one.outcome or 'runs'}")
    output.table(SPANS, rows, shrink=(0, 1))
    if one.left_out:
        output.out(f"{one.left_out} more are not kept")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
