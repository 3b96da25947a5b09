"""`dsecctl completion`: scripts for shells."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from dsecctl import output
from dsecctl.app import command

VARIABLE = "_DSECCTL_COMPLETE"


@command(
    "completion",
    examples="""
    dsecctl completion bash > /etc/bash_completion.d/dsecctl
    source <(dsecctl completion zsh)
    dsecctl completion fish > ~/.config/fish/completions/dsecctl.fish
    """,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a completion script.

    With it SHELL completes commands and options, and asks the daemon for names of sandboxes and images.
    """
    cls = get_completion_class(shell)
    assert cls is not None
    script = cls(ctx.find_root().command, {}, "dsecctl", VARIABLE)
    output.out(script.source_template % script.source_vars())
