"""`dsecctl principal …` and `dsecctl whoami`: who may act, and as what."""

from __future__ import annotations

from typing import Final

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app
from dsecd.wire import tenants as wire

HEAD: Final = ("PRINCIPAL", "PROJECT", "ROLE", "UID", "TOKENS")


@click.group("principal", cls=Group)
def principal() -> None:
    """Say who may act in a project: people and agents alike.

    A viewer reads, a user makes and uses sandboxes, an admin also makes projects and principals below its own. Once
    there is a principal, users of this host that are none (but root) may only log in with a token.
    """


@command(
    "add",
    examples="""
    dsecctl principal add alice --project root/team --role admin --uid 1000
    dsecctl principal add agent7 --project root/team/agent7
    """,
)
@click.argument("name")
@click.option("--project", required=True, help="The project it acts in, and below.")
@click.option("--role", type=click.Choice(("viewer", "user", "admin")), default="user", show_default=True)
@click.option("--uid", type=click.IntRange(1, (1 << 32) - 2), help="Whoever has this user id is it.")
@pass_app
async def add(app: App, name: str, project: str, role: wire.Granted, uid: int | None) -> None:
    """Add a principal, which comes with a user id of the host or with a token."""
    async with app.client() as client:
        made = await client.add_principal(name, project, role, uid=uid)
    if app.json:
        output.emit(made)


@command("list", examples="dsecctl principal list")
@pass_app
async def list_(app: App) -> None:
    """List the principals of one's project and below it.

    TOKENS are the ids that revoke them.
    """
    async with app.client() as client:
        found = await client.principals()
    if app.json:
        output.emit(found)
        return
    output.table(HEAD, [_row(one) for one in found], shrink=(0, 1, 4))


def _row(one: wire.Principal) -> tuple[str, ...]:
    tokens = ", ".join(token.id for token in one.tokens)
    return one.name, one.project, one.role, "" if one.uid is None else str(one.uid), tokens


@command("remove", examples="dsecctl principal remove agent7")
@click.argument("name")
@pass_app
async def remove(app: App, name: str) -> None:
    """Remove a principal and its tokens; its connections are cut, its sandboxes go on."""
    async with app.client() as client:
        await client.remove_principal(name)


@command("whoami", examples="dsecctl whoami --token-file ~/.dsec-token")
@pass_app
async def whoami(app: App) -> None:
    """Say whom the daemon takes one for."""
    async with app.client() as client:
        found = await client.whoami()
    if app.json:
        output.emit(found)
        return
    output.out(f"{found.principal}, {found.role} of {found.project}")


for _one in (add, list_, remove):
    principal.add_command(_one)
