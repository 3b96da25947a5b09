"""`dsecctl fleet`: the hosts behind a coordinator."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app
from dsecctl.drain import show_cordon
from dsecctl.table import span
from dsecctl.values import DURATION
from dsecd.client import DSecClient
from dsecd.wire import fleet as wire
from dsecd.wire import sandbox

HEAD: Final = ("HOST", "TAG", "STATE", "SANDBOXES", "CPU", "MEMORY", "LOAD", "REQS", "SEEN")

RECENT_S: Final = 3600.0  # a host that was away since is spoken of


@click.group("fleet", cls=Group)
def fleet() -> None:
    """Look at the hosts of a fleet, cordon and drain them."""


@command(
    "status",
    examples="""
    dsecctl -H unix:///run/dsecd/fleet.sock fleet status
    dsecctl fleet status --json | jq '.hosts[] | select(.problem)'
    """,
)
@pass_app
async def status(app: App) -> int:
    """List its hosts, and what each has promised.

    LOAD is the fullest of sandboxes, CPU and memory; REQS are requests that wait for the host. A host that cannot be
    used stands below the table with the reason, and one that was away in the last hour. Exit status 1 when there is one
    that cannot be used. `dsecctl doctor --fleet` asks the hosts themselves.
    """
    async with app.client() as client:
        found: wire.Status = await client.call("fleet.status", wire.StatusParams())
    if app.json:
        output.emit(found)
    else:
        output.table(HEAD, [_row(host) for host in found.hosts], shrink=(0, 1))
        for host in found.hosts:
            if host.problem:
                output.wrapped(f"{host.name}: ", host.problem)
            elif host.trouble_s is not None and host.trouble_s < RECENT_S:
                output.wrapped(f"{host.name}: ", f"was away {span(host.trouble_s)} ago: {host.trouble}")
        versions = sorted({host.version for host in found.hosts if host.version})
        if len(versions) > 1:
            output.wrapped("versions: ", f"hosts have different ones: {', '.join(versions)}")
    return 1 if any(host.problem for host in found.hosts) else 0


@command(
    "cordon",
    examples="""
    dsecctl fleet cordon node7
    dsecctl fleet cordon node7 -q && ssh node7 apt-get upgrade
    """,
)
@click.argument("name", metavar="HOST")
@pass_app
async def cordon(app: App, name: str) -> None:
    """Give a host no new sandboxes.

    What it has goes on. The host itself keeps that, over restarts of its daemon and of the coordinator.
    """
    await _cordon(app, name, on=True)


@command("uncordon", examples="dsecctl fleet uncordon node7\ndsecctl fleet uncordon node7 --json")
@click.argument("name", metavar="HOST")
@pass_app
async def uncordon(app: App, name: str) -> None:
    """Give a host new sandboxes again."""
    await _cordon(app, name, on=False)


async def _cordon(app: App, host: str, *, on: bool) -> None:
    async with app.client() as client:
        done: wire.Cordoned = await client.call("fleet.cordon", wire.Cordon(host=host, on=on))
    show_cordon(app, done, host, on)


@command(
    "drain",
    examples="""
    dsecctl fleet drain node7
    dsecctl fleet drain node7 --timeout 30m --stop
    """,
)
@click.option("--timeout", type=DURATION, default="1h", show_default=True, help="Wait so long for them to end.")
@click.option("--stop", is_flag=True, help="Stop what is left then.")
@click.argument("name", metavar="HOST")
@pass_app
async def drain(app: App, timeout: float, stop: bool, name: str) -> int:
    """Cordon a host and wait until its sandboxes are over.

    Exit status 1 when some are left.
    """
    async with app.client() as client:
        await client.call("fleet.cordon", wire.Cordon(host=name))
        deadline = time.monotonic() + timeout
        left = await _left(client, name)
        while left and time.monotonic() < deadline:
            if not app.quiet:
                output.note(f"{len(left)} sandboxes left on {name}")
            await asyncio.sleep(min(5.0, max(0.1, deadline - time.monotonic())))
            left = await _left(client, name)
        if left and stop:
            await asyncio.gather(*(client.call("sandbox.stop", sandbox.Stop(id=one)) for one in left))
            output.out(f"{name}: stopped {len(left)} sandboxes")
            return 0
    output.out(f"{name}: {len(left)} sandboxes left" if left else f"{name}: drained")
    return 1 if left else 0


async def _left(client: DSecClient, host: str) -> list[str]:
    status: wire.Status = await client.call("fleet.status", wire.StatusParams())
    tag = next((one.tag for one in status.hosts if one.name == host), "")
    found: sandbox.Sandboxes = await client.call("sandbox.list", sandbox.List())
    return [one.id for one in found.sandboxes if one.id.rpartition("-")[0] == tag]


def _row(host: wire.Host) -> tuple[str, ...]:
    state = "away" if host.problem else "cordoned" if host.cordoned else "busy" if host.pressure else "up"
    seen = "-" if host.age_s is None else f"{host.age_s:.0f}s"
    return (
        host.name, host.tag or "-", state, f"{host.sandboxes}/{host.sandboxes_max}", f"{host.cpu:.0f}",
        f"{host.memory_mb >> 10}G", f"{host.load:.2f}", str(host.in_flight), seen,
    )  # fmt: skip


for _one in (status, cordon, uncordon, drain):
    fleet.add_command(_one)
