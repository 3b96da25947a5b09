"""`dsecctl cordon`, `uncordon` and `drain`: one host. `dsecctl fleet` has the same for hosts of a fleet, by name."""

from __future__ import annotations

import click

from dsecctl import output
from dsecctl.app import App, command, pass_app
from dsecctl.values import DURATION
from dsecd.wire import daemon as wire
from dsecd.wire.fleet import Cordoned


@command("cordon", examples="dsecctl cordon\ndsecctl -H ssh://node7 cordon -q")
@pass_app
async def cordon(app: App) -> None:
    """Take no new sandboxes on this host.

    What is there goes on. It stays so over restarts, until `dsecctl uncordon`.
    """
    await _cordon(app, on=True)


@command("uncordon", examples="dsecctl uncordon\ndsecctl -H ssh://node7 uncordon --json")
@pass_app
async def uncordon(app: App) -> None:
    """Take new sandboxes on this host again."""
    await _cordon(app, on=False)


async def _cordon(app: App, *, on: bool) -> None:
    async with app.client() as client:
        info: wire.Info = await client.call("daemon.cordon", wire.Cordon(on=on))
    show_cordon(app, info, info.host, info.cordoned)


def show_cordon(app: App, done: wire.Info | Cordoned, host: str, cordoned: bool) -> None:
    """What a cordon, or its end, has made of a host; of one in a fleet, too."""
    if app.json:
        output.emit(done)
    elif not app.quiet:
        output.out(f"{host}: {'cordoned' if cordoned else 'takes new sandboxes'}, {done.sandboxes} sandboxes")


@command(
    "drain",
    examples="""
    dsecctl drain --deadline 30m
    dsecctl uncordon
    """,
)
@click.option("--deadline", type=DURATION, default="60s", show_default=True, help="How long commands may run on.")
@click.option("--shutdown", is_flag=True, help="The next daemon takes new sandboxes again.")
@pass_app
async def drain(app: App, deadline: float, shutdown: bool) -> None:
    """Empty this host and take no new sandboxes.

    Those without a running command end at once, the others when their commands do, and all at the deadline; what ran
    on until then is `sandbox_dead` for whoever waits for it.
    """
    async with app.client() as client:
        done: wire.Drained = await client.call("daemon.drain", wire.Drain(deadline_s=deadline, cordon=not shutdown))
    if app.json:
        output.emit(done)
    elif not app.quiet:
        cut = f", {done.cut} of them in the middle of a command" if done.cut else ""
        output.out(f"{done.stopped} sandboxes ended{cut}")
