"""`dsecctl project …`: who may hold how much of a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app
from dsecctl.values import SIZE
from dsecd.wire import tenants as wire

HEAD: Final = ("PROJECT", "SANDBOXES", "CPU", "MEMORY MB", "DISK MB", "CREATES/S")
NAMES: Final = wire.Quotas.__struct_fields__


@click.group("project", cls=Group)
def project() -> None:
    """Make, list and change projects, which share out a host.

    A project is a path (root/team/agent7). What its sandboxes hold counts in it and in all above it. Nobody hands on
    more than his own project has. Quotas are of each host.
    """


def _quotas(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of quotas; one that is not given stays as it is."""
    for option in (
        click.option("--creates-per-s", type=click.FloatRange(0.001, 1e6), help="Sandboxes begun in a second."),
        click.option("--disk", "disk_mb", type=SIZE, help="Writable space of all together: 100g."),
        click.option("--memory", "memory_mb", type=SIZE, help="Memory of all together: 64g."),
        click.option("--cpu", type=click.FloatRange(0, 1e9), help="Cores of all together."),
        click.option("--sandboxes", type=click.IntRange(0, 1 << 40), help="Sandboxes at once, paused ones too."),
    ):
        function = option(function)
    return function


@command("create", examples="dsecctl project create root/team --sandboxes 100 --memory 64g")
@click.argument("path")
@_quotas
@pass_app
async def create(app: App, path: str, **quotas: Any) -> None:
    """Make a project below one's own; a quota that is not given is the parent's."""
    async with app.client() as client:
        _show(app, await client.create_project(path, wire.Quotas(**quotas)))


@command(
    "list",
    examples="""
    dsecctl project list
    dsecctl project list --json | jq -r '.[] | select(.used.sandboxes > 90).path'
    """,
)
@pass_app
async def list_(app: App) -> None:
    """List one's project and those below it: what each uses, and of how much."""
    async with app.client() as client:
        found = await client.projects()
    if app.json:
        output.emit(found)
        return
    output.table(HEAD, [_row(one) for one in found], shrink=(0,))


@command("show", examples="dsecctl project show root/team")
@click.argument("path")
@pass_app
async def show(app: App, path: str) -> None:
    """Show one project: what it uses, and of how much."""
    async with app.client() as client:
        _show(app, await client.project(path))


@command(
    "set",
    examples="""
    dsecctl project set root/team --sandboxes 200
    dsecctl project set root/team --unset cpu
    """,
)
@click.argument("path")
@_quotas
@click.option("--unset", multiple=True, type=click.Choice(NAMES), help="Let this one be the parent's again.")
@pass_app
async def set_(app: App, path: str, unset: tuple[wire.QuotaName, ...], **quotas: Any) -> None:
    """Change quotas of a project below one's own.

    What is over them already stays.
    """
    async with app.client() as client:
        _show(app, await client.set_project(path, wire.Quotas(**quotas), unset))


@command("remove", examples="dsecctl project remove root/team/agent7")
@click.argument("path")
@pass_app
async def remove(app: App, path: str) -> None:
    """Remove a project without sandboxes, principals, or projects below it."""
    async with app.client() as client:
        await client.remove_project(path)


def _show(app: App, one: wire.Project) -> None:
    if app.json:
        output.emit(one)
    elif not app.quiet:
        output.table(HEAD, [_row(one)], shrink=(0,))


def _row(one: wire.Project) -> tuple[str, ...]:
    cells = [one.path]
    for name in NAMES:
        limit = getattr(one.limits, name)
        most = "-" if limit is None else f"{limit:g}"
        cells.append(most if name == "creates_per_s" else f"{getattr(one.used, name):g}/{most}")
    return tuple(cells)


for _one in (create, list_, show, set_, remove):
    project.add_command(_one)
