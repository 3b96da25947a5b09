"""`dsecctl ps`, `inspect`, `stop`, `pause`, `resume`, `extend`: what there is, and its life."""

from __future__ import annotations

import asyncio
from typing import Any, Final, get_args

import click

from dsecctl import output
from dsecctl.app import App, command, find, pass_app
from dsecctl.table import moment, since, until
from dsecctl.values import DURATION, PAIR, SANDBOX
from dsecd.client import DSecClient, Sandbox
from dsecd.errors import DsecError
from dsecd.wire import sandbox as wire

HEAD: Final = ("ID", "STATE", "AGE", "IDLE", "LEFT", "IMAGE", "NAME")
STATES: Final[tuple[wire.State, ...]] = get_args(wire.State)


@command(
    "ps",
    examples="""
    dsecctl ps
    dsecctl ps -a --label job=42
    dsecctl stop $(dsecctl ps -q --label job=42)
    dsecctl ps --json | jq -r '.[] | select(.state == "paused").id'
    """,
)
@click.option("-a", "--all", "everything", is_flag=True, help="Those that have ended, too.")
@click.option("-l", "--label", "labels", type=PAIR, multiple=True, help="Only with this label; repeatable.")
@click.option("--job", help="Only of this job.")
@click.option("--mine", is_flag=True, help="Only those that my user started.")
@click.option("-q", "ids", is_flag=True, help="Only ids, one a line.")
@click.option("--no-trunc", is_flag=True, help="As wide as it needs; else the terminal's width, or 80.")
@pass_app
async def ps(
    app: App, everything: bool, labels: tuple[tuple[str, str], ...], job: str | None, mine: bool, ids: bool,
    no_trunc: bool,
) -> None:  # fmt: skip
    """List sandboxes, oldest first.

    AGE is since its creation, IDLE the time it has left without a running command, LEFT its whole time left.
    """
    async with app.client() as client:
        found = await client.list(dict(labels), mine=mine, states=STATES if everything else (), job=job)
    infos = sorted((one.info for one in found), key=lambda info: info.created_at)
    if app.json:
        output.emit([info.id for info in infos] if ids else infos)
    elif ids:
        output.lines([info.id for info in infos])
    else:
        output.table(HEAD, [_row(info) for info in infos], shrink=(5, 6), cut=not no_trunc)


def _row(info: wire.Sandbox) -> tuple[str, ...]:
    over = info.state in ("stopped", "failed")
    times = ("-", "-") if over else (until(info.idle_deadline), until(info.total_deadline))
    return info.id, info.state, since(info.created_at), *times, info.image, info.name or "-"


@command(
    "inspect",
    examples="""
    dsecctl inspect box
    dsecctl inspect --json box | jq -r .reason
    """,
)
@click.argument("sandbox", type=SANDBOX)
@pass_app
async def inspect(app: App, sandbox: str) -> None:
    """Show all that is known of one sandbox, also why it ended."""
    async with app.sandbox(sandbox) as (_client, box):
        show(app, box.info)


@command(
    "stop",
    examples="""
    dsecctl stop box
    dsecctl stop --label job=42
    dsecctl stop --all-mine
    """,
)
@click.option("-l", "--label", "labels", type=PAIR, multiple=True, help="All with this label; repeatable.")
@click.option("--all-mine", is_flag=True, help="All that my user started.")
@click.argument("sandboxes", nargs=-1, type=SANDBOX, metavar="[SANDBOX]...")
@pass_app
async def stop(app: App, labels: tuple[tuple[str, str], ...], all_mine: bool, sandboxes: tuple[str, ...]) -> int:
    """Kill everything in sandboxes and remove them.

    Prints the id of each as it is gone. One that cannot be stopped does not keep the others: exit status 1 says that
    there was one. Stopping a stopped one is no error.
    """
    if bool(sandboxes) == bool(labels or all_mine):
        raise click.UsageError("name sandboxes, or give --label or --all-mine")
    async with app.client() as client:
        if not sandboxes:
            sandboxes = tuple(one.id for one in await client.list(dict(labels), mine=all_mine))
        return await _each(app, client, sandboxes, Sandbox.stop)


@command("pause", examples="dsecctl pause box")
@click.argument("sandboxes", nargs=-1, required=True, type=SANDBOX, metavar="SANDBOX...")
@pass_app
async def pause(app: App, sandboxes: tuple[str, ...]) -> int:
    """Freeze sandboxes: they keep all they have and use no CPU.

    What memory they can do without, they give back to the host: `dsecctl stats` says how much.

    The next command or file call in one lets it go on, as `dsecctl resume` does.
    """
    async with app.client() as client:
        return await _each(app, client, sandboxes, Sandbox.pause)


@command("resume", examples="dsecctl resume box")
@click.argument("sandboxes", nargs=-1, required=True, type=SANDBOX, metavar="SANDBOX...")
@pass_app
async def resume(app: App, sandboxes: tuple[str, ...]) -> int:
    """Let paused sandboxes go on where they were."""
    async with app.client() as client:
        return await _each(app, client, sandboxes, Sandbox.resume)


@command(
    "extend",
    examples="""
    dsecctl extend --ttl 2h box
    dsecctl extend --idle 10m box
    """,
)
@click.option("--ttl", type=DURATION, help="Stop it this long from now, whatever it does.")
@click.option("--idle", type=DURATION, help="Stop it after so long without a running command.")
@click.argument("sandbox", type=SANDBOX)
@pass_app
async def extend(app: App, ttl: float | None, idle: float | None, sandbox: str) -> None:
    """Give a sandbox new times, counted from now."""
    if ttl is None and idle is None:
        raise click.UsageError("give --ttl, --idle or both")
    async with app.sandbox(sandbox) as (_client, box):
        await box.extend(ttl_running_stop=idle, ttl_total=ttl)
    if app.json:
        output.emit(box.info)
    elif not app.quiet:
        left = f"left {until(box.info.total_deadline)}, idle {until(box.info.idle_deadline)}"
        output.out(f"{box.id}: {left}")


def show(app: App, info: wire.Sandbox) -> None:
    """One sandbox, for people or programs."""
    if app.json:
        output.emit(info)
        return
    owner = info.owner
    rows = [
        ("id", info.id), ("name", info.name or "-"), ("state", info.state), ("reason", info.reason or "-"),
        ("backend", info.choice.reason if info.choice else info.backend),
        ("job", info.job or "-"), ("paused", moment(info.paused_at)),
        ("image", info.image), ("layers", ", ".join(info.layers) or "-"),
        ("labels", ", ".join(f"{key}={value}" for key, value in info.labels.items()) or "-"),
        ("owner", f"uid {owner.uid}, pid {owner.pid} {owner.label}".strip() if owner else "-"),
        ("limits", f"{info.cpu:g} cores, {info.memory_mb} MiB memory, {info.disk_mb} MiB disk, {info.pids} processes"),
        ("devices", ", ".join(name for names in info.devices.values() for name in names) or "-"),
        ("created", moment(info.created_at)), ("running", moment(info.running_at)), ("ended", moment(info.ended_at)),
        ("idle until", moment(info.idle_deadline)), ("lives until", moment(info.total_deadline)),
        ("leased until", moment(info.lease_deadline)), ("commands", str(info.commands)),
    ]  # fmt: skip
    output.pairs(rows)


async def _each(app: App, client: DSecClient, texts: tuple[str, ...], act: Any) -> int:
    """Side by side; says for each how it went, and returns 1 when one failed."""

    async def one(text: str) -> Sandbox | DsecError:
        try:
            box = await find(client, text)
            await act(box)
        except DsecError as exc:
            return exc
        return box

    results = await asyncio.gather(*(one(text) for text in texts))
    failed = False
    documents: list[object] = []
    for text, result in zip(texts, results, strict=True):
        if isinstance(result, Sandbox):
            documents.append(result.info)
            if not app.json and not app.quiet:
                output.out(result.id)
        else:
            failed = True
            documents.append({"sandbox": text, "error": {"kind": result.kind, "message": result.message}})
            output.note(f"{text}: {result}")
    if app.json:
        output.emit(documents)
    return int(failed)
