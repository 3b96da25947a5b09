"""`dsecctl vm`: what only virtual machines have. `dsecctl fork`: copies of a sandbox."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app
from dsecctl.values import SANDBOX
from dsecctl.vnc import vnc
from dsecd.client import SandboxFailed
from dsecd.wire import vms as wire

# What a terminal would obey. A guest's console is a stranger's text.
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]|\x1b.")


@click.group("vm", cls=Group)
def vm() -> None:
    """Look at virtual machines from outside, and work their screens."""


@command("console", examples="dsecctl vm console box")
@click.option("--raw", is_flag=True, help="As the guest wrote it, with its escape sequences.")
@click.argument("sandbox", type=SANDBOX)
@pass_app
async def console(app: App, raw: bool, sandbox: str) -> None:
    """Show the last 64 KiB of a guest's serial console."""
    async with app.sandbox(sandbox) as (_client, box):
        data = await box.console()
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    if app.json:
        output.emit({"sandbox": box.id, "console": text})
    elif raw:
        sys.stdout.buffer.write(data)
    else:
        output.out(_CONTROL.sub("", text).rstrip("\n"))


@command(
    "screen",
    examples="""
    dsecctl vm screen -o now.png box
    dsecctl vm screen box > now.png
    """,
)
@click.option("-o", "--output", "target", type=click.Path(dir_okay=False, writable=True), help="File to write.")
@click.argument("sandbox", type=SANDBOX)
@pass_app
async def screen(app: App, target: str | None, sandbox: str) -> None:
    """Take a picture (PNG) of a full VM's screen."""
    if target is None and sys.stdout.isatty():
        raise click.UsageError("give --output: a picture makes no sense on a terminal")
    async with app.sandbox(sandbox) as (_client, box):
        picture = await box.screen()
    if target is None:
        sys.stdout.buffer.write(picture.png)
        return
    Path(target).write_bytes(picture.png)
    if app.json:
        output.emit({"sandbox": box.id, "file": target, "width": picture.width, "height": picture.height})
    elif not app.quiet:
        output.out(f"{target}: {picture.width} by {picture.height}")


@command("type", examples="dsecctl vm type box 'hello'")
@click.option("--enter", is_flag=True, help="Press Enter behind it.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("text")
@pass_app
async def type_(app: App, enter: bool, sandbox: str, text: str) -> None:
    """Type text on a full VM's keyboard."""
    async with app.sandbox(sandbox) as (_client, box):
        await box.screen_input(text=text, keys=["enter"] if enter else [])


@command("key", examples="dsecctl vm key box ctrl+alt+delete")
@click.argument("sandbox", type=SANDBOX)
@click.argument("keys", nargs=-1, required=True)
@pass_app
async def key(app: App, sandbox: str, keys: tuple[str, ...]) -> None:
    """Press keys or chords on a full VM's keyboard, one after the other."""
    async with app.sandbox(sandbox) as (_client, box):
        await box.screen_input(keys=list(keys))


@command(
    "click",
    examples="""
    dsecctl vm click box 640 400
    dsecctl vm click --button right box 10 10
    """,
)
@click.option("--button", type=click.Choice(["left", "middle", "right"]), default="left", show_default=True)
@click.option("--clicks", type=click.IntRange(1, 3), default=1, show_default=True, help="How often.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("x", type=int)
@click.argument("y", type=int)
@pass_app
async def click_(app: App, button: str, clicks: int, sandbox: str, x: int, y: int) -> None:
    """Move a full VM's pointer to a pixel of its screen, and click."""
    async with app.sandbox(sandbox) as (_client, box):
        await box.screen_input(x=x, y=y, button=button, clicks=clicks)


@command(
    "snapshot",
    examples="""
    dsecctl vm snapshot box clean
    dsecctl vm snapshot --revert box clean
    dsecctl vm snapshot box
    """,
)
@click.option("--revert", "act", flag_value="vm.revert", help="Boot it anew from this one.")
@click.option("--drop", "act", flag_value="vm.drop", help="Forget this one.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("name", required=False)
@pass_app
async def snapshot(app: App, act: str | None, sandbox: str, name: str | None) -> None:
    """Keep a full VM's disk as it is under a name; without one, list what is kept.

    The guest runs on meanwhile. Reverting boots it anew, since its memory would not fit its disk.
    """
    if name is None and act is not None:
        raise click.UsageError("name the snapshot")
    async with app.sandbox(sandbox) as (client, box):
        if name is not None:
            await client.call(act or "vm.snapshot", wire.SnapshotParams(id=box.id, name=name))
        names = await box.disk_snapshots()
    if app.json:
        output.emit(names)
    elif not app.quiet:
        output.lines(names)


@command(
    "fork",
    examples="""
    dsecctl fork box
    dsecctl fork -n 8 box
    """,
)
@click.option("-n", "--count", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many copies.")
@click.argument("sandbox", type=SANDBOX)
@pass_app
async def fork(app: App, count: int, sandbox: str) -> int:
    """Copy a sandbox as it is now, copy-on-write.

    Of a container its files are copied, as they are at one instant, and no process: a command that runs in it does not
    run in the copies. Of a microVM memory and processes are copied, too. Each copy has its own id and entropy.
    Prints the id of each; one that could not be made does not keep the others, and exit status 1 says so.
    """
    async with app.sandbox(sandbox) as (_client, box):
        made = await box.fork(count)
    failed = [one for one in made if isinstance(one, SandboxFailed)]
    if app.json:
        output.emit(
            [{"error": {"kind": one.kind, "message": one.message}} if isinstance(one, SandboxFailed) else one.info
             for one in made]
        )  # fmt: skip
    else:
        output.lines([one.id for one in made if not isinstance(one, SandboxFailed)])
        for one in failed:
            output.note(f"a copy could not be made: {one}")
    return int(bool(failed))


for _one in (console, screen, type_, key, click_, vnc, snapshot):
    vm.add_command(_one)
