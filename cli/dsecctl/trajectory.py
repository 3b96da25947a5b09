"""`dsecctl trajectory`: what was done to a sandbox, step by step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app
from dsecctl.table import moment, printable
from dsecd.wire import trajectory as wire

HEAD: Final = ("SEQ", "TIME", "WHO", "EVENT", "WHAT", "MS")


@click.group("trajectory", cls=Group)
def trajectory() -> None:
    """Read, export and verify the log of all that changed a sandbox."""


@command(
    "show",
    examples="""
    dsecctl trajectory show web
    dsecctl trajectory show web --after 120
    dsecctl trajectory show web --json | jq '.entries[].params.shell // empty'
    """,
)
@click.option("--after", type=click.IntRange(0), default=0, metavar="SEQ", help="Only entries behind this one.")
@click.argument("sandbox")
@pass_app
async def show(app: App, after: int, sandbox: str) -> None:
    """Show its entries, oldest first; with --json whole, with what commands wrote.

    Works for a sandbox that is over, too, by id, as long as its log is kept (`trajectory_keep_days`).
    """
    async with app.client() as client:
        found = await client.trajectory(sandbox, after=after)
    if app.json:
        output.emit(found)
        return
    methods = {entry.seq: entry.method for entry in found.entries}
    output.table(HEAD, [_row(entry, methods) for entry in found.entries], shrink=(4,))


@command(
    "export",
    examples="""
    dsecctl trajectory export web -o web.log
    dsecctl trajectory export web | cut -c34- | jq -c '{seq, event}'
    """,
)
@click.option("-o", "--output", "target", type=click.Path(dir_okay=False, path_type=Path), help="Into this file.")
@click.argument("sandbox")
@pass_app
async def export(app: App, target: Path | None, sandbox: str) -> None:
    """Write its log to stdout or a file.

    Each line is a sum of 32 characters, a space, and the entry as JSON. The sum is the first half of SHA-256 over the
    sum before it (binary) and the entry, so nothing can be altered, moved or left out in the middle.
    """
    async with app.client() as client:
        pieces = client.export_trajectory(sandbox)
        if target is None:
            async for piece in pieces:
                await output.raw_later(piece)
            return
        with target.open("wb") as file:
            async for piece in pieces:
                await asyncio.to_thread(file.write, piece)


@command(
    "verify",
    examples="""
    dsecctl trajectory verify web
    dsecctl trajectory verify web --json | jq .altered
    """,
)
@click.argument("sandbox")
@pass_app
async def verify(app: App, sandbox: str) -> int:
    """Read all of its log and follow the chain of sums.

    Exit status 1 when an entry was altered.
    """
    async with app.client() as client:
        found = await client.verify_trajectory(sandbox)
    if app.json:
        output.emit(found)
    else:
        for bad in found.altered:
            output.out(f"entry {bad.seq} was altered (its line begins at byte {bad.offset})")
        if not app.quiet:
            state = f"{len(found.altered)} altered" if found.altered else "intact"
            output.out(f"{found.entries} entries, {state}, sum {found.sum}")
    return 1 if found.altered else 0


def _row(entry: wire.Entry, methods: dict[int, str]) -> tuple[str, ...]:
    who = "-" if entry.who is None else str(entry.who.uid)
    took = f"{entry.took_ms:.1f}" if entry.took_ms else "-"
    return str(entry.seq), moment(entry.at), who, entry.event, printable(_what(entry, methods)), took


def _what(entry: wire.Entry, methods: dict[int, str]) -> str:
    """The entry in a few words."""
    if entry.event == "request":
        return f"{entry.method} {_asked(entry.params or {})}".rstrip()
    if entry.event in ("reply", "ended"):
        to = f"{entry.ref} {methods.get(entry.ref, '')}".rstrip() if entry.ref else entry.exec_id
        return f"{to}: {_answer(entry)}"
    data = entry.data if isinstance(entry.data, dict) else {}
    return " ".join(str(data[name]) for name in ("state", "text") if data.get(name))


def _asked(params: dict[str, Any]) -> str:
    for name in ("shell", "argv", "path", "reason"):
        if value := params.get(name):
            return " ".join(value) if isinstance(value, list) else str(value)
    rest = {name: value for name, value in params.items() if name not in ("id", "request_id")}
    return json.dumps(rest) if rest else ""


def _answer(entry: wire.Entry) -> str:
    if entry.error:
        return f"{entry.error['data']['kind']}: {entry.error['message']}"
    result = entry.result if isinstance(entry.result, dict) else {}
    return f"exit {result['exit_code']}" if "exit_code" in result else "done"


for _one in (show, export, verify):
    trajectory.add_command(_one)
