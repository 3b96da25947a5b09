"""`dsecctl pack` and `dsecctl env …`: sandboxes that become images."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import click

from dsecctl import output, terminal
from dsecctl.app import App, Group, command, pass_app
from dsecctl.images import removed
from dsecctl.progress import ProgressLine
from dsecctl.sources import open_source
from dsecctl.table import size
from dsecctl.values import IMAGE, SANDBOX
from dsecd.wire import environments as wire
from dsecd.wire import images as image_wire


@command(
    "pack",
    examples="""
    dsecctl pack box env:ready
    dsecctl pack --leave-out '/task/answers/**' --label builder-3 box env:task-17
    dsecctl run env:task-17 -- ls /task
    """,
)
@click.option("--leave-out", multiple=True, metavar="GLOB", help="Hide this path, in lower layers, too; repeatable.")
@click.option("--label", default="", help="Of whoever built it: free text that is kept with it.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("name")
@pass_app
async def pack(app: App, leave_out: tuple[str, ...], label: str, sandbox: str, name: str) -> None:
    """Make an environment called NAME of what a sandbox wrote.

    An environment is an image: run sandboxes from it, pack those again. It is a layer above the sandbox's own layers,
    which stay. It stands still for a few milliseconds (a microVM: while its memory is saved) and is not changed. What
    builders leave behind (caches, histories, logs, temporary files) is not packed; forbidden files and secrets keep it
    from being made: `dsecctl env rules`.
    """
    async with app.sandbox(sandbox) as (client, box):
        with ProgressLine(quiet=app.quiet) as line:
            made = await client.pack_diff(box.id, name, leave_out=leave_out, label=label, progress=line.update)
    if app.json:
        output.emit(made)
        return
    output.out(made.image.digest)
    if made.left_out and not app.quiet:
        output.note(f"{made.left_out} entries were left out (caches, histories, temporary files, --leave-out)")


@click.group("env", cls=Group)
def env() -> None:
    """List, move and remove environments: packed sandboxes.

    `dsecctl pack` makes one. It is an image, so `run`, `image rm` and `image push` take it, too.
    """


@command("list", examples="dsecctl env list")
@click.option("--no-trunc", is_flag=True, help="As wide as it needs; else the terminal's width, or 80.")
@pass_app
async def list_(app: App, no_trunc: bool) -> None:
    """List environments, newest first.

    SIZE is of its own layer, without those below. BUILDER is the user id of whoever packed it.
    """
    async with app.client() as client:
        found = [one for one in await client.images() if one.kind == "environment"]
    if app.json:
        output.emit(found)
        return
    rows = [
        (
            one.name or "-", size(one.data_size + one.meta_size), str(len(one.below) + 1), _builder(one),
            one.created[:10], str(one.used_by), one.digest if no_trunc else one.digest.removeprefix("sha256:")[:12],
        )
        for one in found
    ]  # fmt: skip
    head = ("NAME", "SIZE", "LAYERS", "BUILDER", "CREATED", "USED", "DIGEST")
    output.table(head, rows, shrink=(0, 3), cut=not no_trunc)


def _builder(one: image_wire.Image) -> str:
    if one.builder is None:
        return "-"
    return f"{one.builder.uid} {one.builder.label}".rstrip()


@command("show", examples="dsecctl env show env:task-17")
@click.argument("ref", type=IMAGE, metavar="ENVIRONMENT")
@pass_app
async def show(app: App, ref: str) -> None:
    """Show one environment and the layers below it."""
    async with app.client() as client:
        one: image_wire.Image = await client.call("image.get", image_wire.ByRef(ref=ref))
    if app.json:
        output.emit(one)
        return
    output.pairs([
        ("name", one.name or "-"), ("kind", one.kind), ("digest", one.digest), ("source", one.source or "-"),
        ("builder", _builder(one)), ("created", one.created), ("files", str(one.files)),
        ("data", size(one.data_size)), ("used by", f"{one.used_by} sandboxes"),
        *((f"layer {number}", digest) for number, digest in enumerate(one.below, 1)),
    ])  # fmt: skip


@command(
    "export",
    examples="""
    dsecctl env export env:task-17 -o task-17.tar
    dsecctl env export env:task-17 | ssh far dsecctl env import -
    """,
)
@click.option("-o", "--output", "target", type=click.Path(dir_okay=False, writable=True), help="File to write.")
@click.argument("ref", type=IMAGE, metavar="ENVIRONMENT")
@pass_app
async def export(app: App, target: str | None, ref: str) -> None:
    """Write an environment with all layers below it into one file.

    The file is a tar of an OCI layout, for `dsecctl env import`. Any other image can be exported, too.
    """
    if target is None and terminal.is_terminal(output.STDOUT):
        raise click.UsageError("give --output: a tar makes no sense on a terminal")
    # What breaks off leaves no file that looks whole.
    part = None if target is None else Path(f"{target}.part")
    file = sys.stdout.buffer if part is None else part.open("wb")
    try:
        async with app.client() as client:
            with ProgressLine(quiet=app.quiet) as line:
                done = await client.export_environment(
                    ref, lambda data: asyncio.to_thread(file.write, data), progress=line.update
                )
        file.flush()
        if part is not None and target is not None:
            os.fsync(file.fileno())
            part.rename(target)
    finally:
        if part is not None:
            file.close()
            part.unlink(missing_ok=True)
    if target is None:
        return
    if app.json:
        output.emit(done)
    elif not app.quiet:
        output.out(f"{target}: {size(done.size)}")


@command("import", examples="dsecctl env import task-17.tar")
@click.option("--name", metavar="NAME", help="What it is called here.  [default: as it was exported]")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, allow_dash=True), metavar="FILE")
@pass_app
async def import_(app: App, name: str | None, source: str) -> None:
    """Get an environment that `env export` wrote; `-` reads stdin.

    Layers that are here already are not made again.
    """
    async with app.client() as client:
        found = open_source(source, "oci")
        assert found.stream is not None
        with ProgressLine(quiet=app.quiet, total=found.total) as line:
            made = await client.import_environment(line.counted(found.stream), name=name, progress=line.update)
    if app.json:
        output.emit(made)
    else:
        output.out(made.digest)


@command("rm", examples="dsecctl env rm env:task-17")
@click.argument("refs", nargs=-1, required=True, type=IMAGE, metavar="ENVIRONMENT...")
@pass_app
async def rm(app: App, refs: tuple[str, ...]) -> int:
    """Remove environments that no sandbox uses and no other one needs.

    The layers below stay. Exit status 1 says that one could not be removed.
    """
    return await removed(app, refs)


@command("rules", examples="dsecctl env rules")
@pass_app
async def rules(app: App) -> None:
    """List what packs are held against, and what is left out of them.

    They are [environments] of the daemon's configuration. In globs, `*` and `?` stay within a name and `**` goes
    through directories; what matches, matches with all that is below it.
    """
    async with app.client() as client:
        found: list[wire.Rule] = await client.environment_rules()
    if app.json:
        output.emit(found)
        return
    output.table(("RULE", "VALUE", "WHAT"), [(one.rule, one.value, one.what) for one in found], shrink=(1, 2))


for _one in (list_, show, export, import_, rm, rules):
    env.add_command(_one)
