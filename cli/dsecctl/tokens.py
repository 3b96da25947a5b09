"""`dsecctl token …`: secrets by which a principal is known."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app


@click.group("token", cls=Group)
def token() -> None:
    """Make and revoke tokens.

    The daemon gets their SHA-256 alone; the secret is only in the file.
    """


@command(
    "create",
    examples="""
    dsecctl token create agent7 -o agent7.token
    dsecctl --token-file agent7.token run debian:12 -- id
    """,
)
@click.argument("principal")
@click.option("-o", "--output", "file", required=True, type=click.Path(path_type=Path), help="A new file for it.")
@click.option("--label", default="", help="What it is for.")
@pass_app
async def create(app: App, principal: str, file: Path, label: str) -> None:
    """Make a token, and put it into a new file.

    Only its owner can read that. Prints the id that revokes it.
    """
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as out:
            async with app.client() as client:
                secret, ident = await client.create_token(principal, label)
            out.write(secret + "\n")
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    if app.json:
        output.emit({"id": ident, "file": str(file)})
    elif not app.quiet:
        output.out(ident)


@command("revoke", examples="dsecctl token revoke 0123456789ab")
@click.argument("ident", metavar="ID")
@pass_app
async def revoke(app: App, ident: str) -> None:
    """Let a token be nobody's; connections that came with it are cut."""
    async with app.client() as client:
        await client.revoke_token(ident)


for _one in (create, revoke):
    token.add_command(_one)
