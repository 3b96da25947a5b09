"""`dsecctl events`: what happens to sandboxes, as it happens."""

from __future__ import annotations

import contextlib

import click

from dsecctl import output
from dsecctl.app import App, command, pass_app
from dsecctl.table import moment, printable
from dsecctl.values import PAIR


@command(
    "events",
    examples="""
    dsecctl events
    dsecctl events --since 0 --label job=42
    dsecctl events --json | jq -c 'select(.state == "failed")'
    """,
)
@click.option("--since", type=int, metavar="SEQ", help="Those after this number, too; 0: all that are remembered.")
@click.option("-l", "--label", "labels", type=PAIR, multiple=True, help="Only with this label; repeatable.")
@pass_app
async def events(app: App, since: int | None, labels: tuple[tuple[str, str], ...]) -> None:
    """Follow what happens to sandboxes, until Ctrl-C.

    One line for each: its number, time, sandbox, event, and state with a reason. Numbers rise by one and begin again
    when the daemon is restarted; it remembers the last 10,000. With --json each is one line of JSON.
    """
    async with app.client() as client, contextlib.aclosing(client.events(dict(labels), since=since)) as found:
        async for event in found:
            if app.json:
                output.emit({name: getattr(event, name) for name in event.__struct_fields__ if name != "sub"})
            else:
                words = (str(event.seq), moment(event.at), event.sandbox_id, event.event, event.state, event.text)
                output.out(printable("  ".join(word for word in words if word)))
            output.flush()
