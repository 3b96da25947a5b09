"""`dsecctl choose`: which backend a task gets, and why. The options of a task's needs, for `dsecctl run` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from dsecctl import output
from dsecctl.app import App, command, pass_app
from dsecctl.values import DURATION, IMAGE
from dsecd.client import DSecNeeds
from dsecd.wire import sandbox as wire

NEEDS: Final = ("stateless", "kernel", "system", "gui")


def needs_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a task declares: `need`, `trust`, `os` and `life` of the callback."""
    for option in (
        click.option("--life", type=DURATION, help="How long it will live."),
        click.option("--os", type=click.Choice(["linux", "other"]), help="What it runs on.  [default: linux]"),
        click.option(
            "--trust", type=click.Choice(["normal", "hostile"]),
            help="Hostile code never shares the host's kernel.  [default: normal]",
        ),
        click.option(
            "--need", type=click.Choice(NEEDS), multiple=True,
            help="Stateless: one call that keeps nothing. Kernel: one of its own. System: as root, with init, mounts, "
            "Docker inside. Gui: a screen. Repeatable.",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


def needs_of(options: dict[str, Any]) -> DSecNeeds | None:
    """None when nothing is declared."""
    given: dict[str, Any] = dict.fromkeys(options["need"], True)
    for key, name in (("trust", "trust"), ("os", "os"), ("life_s", "life")):
        if options[name]:
            given[key] = options[name]
    return DSecNeeds(**given) if given else None


@command(
    "choose",
    examples="""
    dsecctl choose --trust hostile
    dsecctl choose --need stateless --life 5s --image debian:12
    dsecctl choose --need gui --json | jq -r .backend
    """,
)
@needs_options
@click.option("--image", type=IMAGE, help="What it starts from.  [default: any kind]")
@click.option("--device", "devices", multiple=True, metavar="POOL[:N]", help="Devices it needs; repeatable.")
@pass_app
async def choose(app: App, image: str | None, devices: tuple[str, ...], **options: Any) -> int:
    """Show which backend a task gets with --backend auto, and why.

    Starts nothing. Also shows what is against each backend, the lightest first, and what would change the choice. Exit
    status 1 when none fits.
    """
    async with app.client() as client:
        chosen = await client.choose(needs_of(options), image=image, devices=devices)
    if app.json:
        output.emit(chosen)
    else:
        _show(chosen)
    return int(not chosen.backend)


def _show(chosen: wire.Chosen) -> None:
    output.wrapped("", chosen.reason)
    for one in chosen.considered:
        verdict = one.why or ("chosen" if one.backend == chosen.backend else "fits")
        output.wrapped(f"  {one.backend:<9}  ", verdict)
    for change in chosen.changes:
        output.wrapped(f"{change.backend or 'nothing'}: ", f"if {change.what}")
