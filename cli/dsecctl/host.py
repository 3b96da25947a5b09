"""`dsecctl doctor`, `dsecctl info` and `dsecctl reload`: the host and its daemon."""

from __future__ import annotations

from typing import Final, Literal

import click

from dsecctl import fleetdoctor, output
from dsecctl.app import App, command, pass_app
from dsecctl.hints import hint_for
from dsecctl.table import moment, size, span
from dsecd.errors import DsecError
from dsecd.wire import daemon as wire

COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}


@command(
    "doctor",
    examples="""
    dsecctl doctor
    dsecctl -H ssh://node7 doctor --json | jq '.[] | select(.level == "fail")'
    sudo dsecctl doctor --fix zram
    dsecctl -H unix:///run/dsecd/fleet.sock doctor --fleet
    """,
)
@click.option("--fix", type=click.Choice(["zram"]), help="Change the host first; as root. zram: swap for the paused.")
@click.option("--fleet", "whole", is_flag=True, help="All hosts of a fleet (of its coordinator), merged.")
@pass_app
async def doctor(app: App, fix: Literal["zram"] | None, whole: bool) -> int:
    """Check what the host can do, and say what to install or change.

    Each check is ok, warn (it works without) or fail. Exit status 1 when one fails. The checks change nothing; --fix
    zram makes swap in compressed memory, where there is none, so that pausing gives back all of a sandbox's memory.

    With --fleet each host has one line, and below stands what is not good, once for all hosts that say the same. A
    host that cannot be asked counts as a failure, and does not keep the others from answering.
    """
    if whole and fix is not None:
        raise click.UsageError("--fix changes one host: ask that one, with -H ssh://HOST")
    if whole:
        return await fleetdoctor.examine(app)
    if fix is not None:
        async with app.client() as client:
            fixed: wire.Fixed = await client.call("daemon.fix", wire.Fix(what=fix))
        app.note(fixed.text)
    checks = await _checks(app)
    if app.json:
        output.emit(checks)
    else:
        for check in checks:
            level = click.style(f"{check.level:<4}", fg=COLOURS.get(check.level))
            output.wrapped(f"{level}  {check.name}: ", check.text)
            if check.fix and check.level != "ok":
                output.wrapped("      fix: ", check.fix)
    return int(any(check.level == "fail" for check in checks))


async def _checks(app: App) -> list[wire.Check]:
    """That the daemon answers is the first."""
    try:
        async with app.client() as client:
            found: wire.Doctor = await client.call("daemon.doctor", wire.DoctorParams())
            return [wire.Check("daemon", "ok", f"answers at {client.url}"), *found.checks]
    except DsecError as exc:
        return [wire.Check("daemon", "fail", str(exc), hint_for(exc))]


@command(
    "info",
    examples="""
    dsecctl info
    dsecctl info --json | jq .memory_free_mb
    """,
)
@pass_app
async def info(app: App) -> None:
    """Show what the host is and has left."""
    async with app.client() as client:
        host: wire.Info = await client.call("daemon.info", wire.InfoParams())
        now: wire.Counters = await client.call("daemon.stats", wire.StatsParams())
    if app.json:
        output.emit({**output.plain(host), "daemon": now})
        return
    states = ", ".join(f"{count} {state}" for state, count in now.sandboxes.items() if count)
    output.pairs([
        ("host", host.host), ("version", host.version),
        ("daemon", f"up {span(now.uptime_s)}, since {moment(host.started_at)}, {size(now.rss_bytes)}"),
        ("backends", ", ".join(host.backends)), ("runtime", host.runtime), ("cgroups", host.cgroups),
        ("cpu", f"{host.cpus} cores, {host.cpu_committed:g} promised"),
        ("memory", f"{host.memory_free_mb} of {host.memory_mb} MiB free, {host.memory_committed_mb} promised"),
        ("disk", f"{host.disk_free_mb} of {host.disk_total_mb} MiB free"),
        ("sandboxes", f"{host.sandboxes} of {host.sandboxes_max}" + (f": {states}" if states else "")),
        ("so far", f"{now.created} created, {now.failed} failed, {now.stopped} stopped, {now.commands} commands"),
    ])  # fmt: skip


@command("reload", examples="dsecctl reload\nsystemctl reload dsecd")
@pass_app
async def reload(app: App) -> None:
    """Let the daemon read its configuration again.

    What can change while it runs is in force then; what cannot is named. A file that is wrong changes nothing: it says
    what is wrong with it, and exits with status 1.
    """
    async with app.client() as client:
        done: wire.Reloaded = await client.call("daemon.reload", wire.Reload())
    if app.json:
        output.emit(done)
    elif not app.quiet:
        output.out(f"in force: {', '.join(done.changed)}" if done.changed else "nothing to change")
        if done.needs_restart:
            output.out(f"after a restart only: {', '.join(done.needs_restart)}")
