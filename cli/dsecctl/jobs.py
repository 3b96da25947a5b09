"""`dsecctl job …`: all sandboxes of one job at once."""

from __future__ import annotations

from typing import Final

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app
from dsecctl.table import since, size
from dsecd.wire import jobs as wire

HEAD: Final = ("JOB", "UID", "SANDBOXES", "MEMORY", "SWAPPED", "USED")


@click.group("job", cls=Group)
def job() -> None:
    """List, pause, resume and stop whole jobs.

    A job is all sandboxes that were started with the same --job, by my own user; for root, by anybody.
    """


@command(
    "list",
    examples="""
    dsecctl job list
    dsecctl job list --json | jq -r '.[] | select(.states.paused).job'
    """,
)
@pass_app
async def list_(app: App) -> None:
    """List jobs that have a sandbox which is not over.

    MEMORY is what they use of the host, SWAPPED what of theirs is in swap, USED how long ago a command ended or a call
    came.
    """
    async with app.client() as client:
        found = await client.jobs()
    if app.json:
        output.emit(found)
        return
    output.table(HEAD, [_row(one) for one in found], shrink=(0, 2))


def _row(one: wire.Job) -> tuple[str, ...]:
    states = ", ".join(f"{count} {state}" for state, count in sorted(one.states.items()))
    return one.job, str(one.uid), states, size(one.memory_bytes), size(one.swapped_bytes), since(one.used_at)


@command("pause", examples="dsecctl job pause train-7")
@click.argument("name", metavar="JOB")
@pass_app
async def pause(app: App, name: str) -> int:
    """Freeze all sandboxes of a job and give their memory back to the host.

    The next command or file call in one of them lets that one go on. Prints the id of each that is paused; one that
    cannot be keeps no other: exit status 1 says that there was one.
    """
    async with app.client() as client:
        return _show(app, await client.pause_job(name))


@command("resume", examples="dsecctl job resume train-7")
@click.argument("name", metavar="JOB")
@pass_app
async def resume(app: App, name: str) -> int:
    """Let all paused sandboxes of a job go on where they were."""
    async with app.client() as client:
        return _show(app, await client.resume_job(name))


@command("stop", examples="dsecctl job stop train-7")
@click.argument("name", metavar="JOB")
@pass_app
async def stop(app: App, name: str) -> int:
    """Kill everything in all sandboxes of a job and remove them."""
    async with app.client() as client:
        return _show(app, await client.stop_job(name))


def _show(app: App, outcomes: list[wire.Outcome]) -> int:
    failed = [(one.id, one.error) for one in outcomes if one.error is not None]
    if app.json:
        output.emit(outcomes)
    elif not app.quiet:
        output.lines([one.id for one in outcomes if one.error is None])
    for ident, error in failed:
        output.note(f"{ident}: {error.message} [{error.kind}]")
    return int(bool(failed))


for _one in (list_, pause, resume, stop):
    job.add_command(_one)
