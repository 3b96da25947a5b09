"""`dsecctl kernel …`: what virtual machines boot."""

from __future__ import annotations

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app
from dsecctl.progress import ProgressLine
from dsecctl.table import size
from dsecctl.values import KERNEL
from dsecd.wire import kernels as wire


@click.group("kernel", cls=Group)
def kernel() -> None:
    """Get, build, list and remove kernels of virtual machines.

    A kernel comes with an initramfs that holds the agent and the modules it needs. Machines boot the one that the
    daemon's configuration names, else the newest.
    """


@command(
    "list",
    examples="""
    dsecctl kernel list
    dsecctl kernel list --json | jq -r '.[] | select(.default).name'
    """,
)
@pass_app
async def list_(app: App) -> None:
    """List kernels, newest first.

    A star marks what machines boot by default. CAN names what a kernel offers beyond what every machine needs.
    """
    async with app.client() as client:
        found = await client.kernels()
    if app.json:
        output.emit(found)
        return
    shown = ("pmem", "dax", "vsock", "serial", "reporting", "damon", "screen")
    rows = [
        (
            one.name + ("*" if one.default else ""), one.kind, one.release, size(one.size), str(len(one.modules)),
            one.created[:10], " ".join(word for word in shown if one.features.get(word, "absent") != "absent"),
        )
        for one in found
    ]  # fmt: skip
    output.table(("NAME", "KIND", "RELEASE", "SIZE", "MODULES", "CREATED", "CAN"), rows, shrink=(6, 2))


@command(
    "import-deb",
    examples="""
    dsecctl kernel import-deb
    dsecctl kernel import-deb --package linux-image-amd64 generic
    """,
)
@click.option("--package", default=wire.ImportDeb().package, show_default=True, help="Of the host's apt sources.")
@click.argument("name", default=wire.ImportDeb().name)
@pass_app
async def import_deb(app: App, package: str, name: str) -> None:
    """Get the kernel of a Debian package and call it NAME (cloud).

    The package, or the image package it depends on, comes from the apt sources of the daemon's host, and from
    backports where the suite's own is too old. Nothing is installed there.
    """
    await _make(app, wire.ImportDeb(name=name, package=package))


@command(
    "build",
    examples="""
    dsecctl kernel build
    dsecctl kernel build --option CONFIG_BTRFS_FS=y with-btrfs
    """,
)
@click.option("--option", "options", multiple=True, metavar="CONFIG_X=y", help="Line to add; repeatable.")
@click.argument("name", default=wire.Build().name)
@pass_app
async def build(app: App, options: tuple[str, ...], name: str) -> None:
    """Build a lean kernel from Debian's source and call it NAME (lean).

    It boots faster than a distribution's, and takes ten minutes or more of all cores to build; the same one is not
    built twice.
    """
    await _make(app, wire.Build(name=name, options=list(options)))


@command("rm", examples="dsecctl kernel rm cloud")
@click.argument("name", type=KERNEL)
@pass_app
async def rm(app: App, name: str) -> None:
    """Remove a kernel.

    Machines that run do not need it any more.
    """
    async with app.client() as client:
        await client.call("kernel.remove", wire.KernelByName(name=name))
    if app.json:
        output.emit({"kernel": name, "removed": True})
    elif not app.quiet:
        output.out(name)


for _one in (list_, import_deb, build, rm):
    kernel.add_command(_one)


async def _make(app: App, params: wire.ImportDeb | wire.Build) -> None:
    async with app.client() as client:
        with ProgressLine(quiet=app.quiet) as line:
            made = await client.make_kernel(params, line.update)
    if app.json:
        output.emit(made)
    else:
        output.out(f"{made.name} {made.release}")
