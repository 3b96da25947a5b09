"""`dsecctl audit`: management calls, and what came of them."""

from __future__ import annotations

import json
import time
from typing import Final

import click

from dsecctl import output
from dsecctl.app import App, command, pass_app
from dsecd.wire import tenants as wire

HEAD: Final = ("SEQ", "WHEN", "WHO", "WHAT", "OUTCOME")


@command(
    "audit",
    examples="""
    dsecctl audit
    dsecctl audit --after 120 --json | jq '.[] | select(.event == "refused")'
    """,
)
@click.option("--after", type=click.IntRange(0), default=0, help="Only entries behind this number.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most so many.")
@pass_app
async def audit(app: App, after: int, limit: int) -> None:
    """List management calls and what came of them.

    Those of one's project and below it, oldest first. Each has an entry before it is done (asked) and one behind it
    (done); one that was not begun is refused.
    """
    async with app.client() as client:
        found = await client.audit(after, limit)
    if app.json:
        output.emit(found)
        return
    output.table(HEAD, [_row(one) for one in found], shrink=(2, 3))


def _row(one: wire.AuditEntry) -> tuple[str, ...]:
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(one.at))
    what = one.method if one.params is None else f"{one.method} {json.dumps(one.params)}"
    outcome = f"{one.event} #{one.ref} {one.outcome}" if one.ref else f"{one.event} {one.outcome}"
    return str(one.seq), when, f"{one.principal} ({one.project})", what, outcome.strip()
