"""`dsecctl image …`: what sandboxes are made of."""

from __future__ import annotations

import asyncio
from typing import Literal

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app
from dsecctl.progress import ProgressLine
from dsecctl.sources import open_disk, open_source
from dsecctl.table import size
from dsecctl.values import DURATION, IMAGE, PAIR, SIZE
from dsecd.errors import DsecError
from dsecd.wire import images as wire


@click.group("image", cls=Group)
def image() -> None:
    """Import, list and remove images.

    An image is a base, or a layer above one: a workspace (the files to work on) or a toolkit (tools). It never
    changes, and sandboxes that use the same one share it.
    """


@command(
    "import",
    examples="""
    dsecctl image import ./rootfs debian:12
    dsecctl image import base.tar.zst debian:12
    dsecctl image import docker://docker.io/library/debian:12 debian:12
    dsecctl image import --kind workspace --prefix workspace ./project app:1
    docker save app | dsecctl image import --format docker - app:latest
    dsecctl image import --kind vm disk.qcow2 appliance
    dsecctl image import --kind vm --agent own-debian.qcow2 mine
    """,
)
@click.option("--kind", type=click.Choice(["base", "workspace", "toolkit", "vm"]), default="base", show_default=True,
              help="What it is for.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(["auto", "tar", "oci", "docker"]), default="auto",
              show_default=True, help="What SOURCE is.")  # fmt: skip
@click.option("--tag", metavar="REF", help="Which image of an archive that holds several.")
@click.option("--prefix", default="", metavar="DIR", help="Put a plain tree below this directory of the image.")
@click.option("-e", "--env", type=PAIR, multiple=True, help="Variable for commands in it; repeatable.")
@click.option("-w", "--workdir", metavar="DIR", help="Working directory of commands in it.")
@click.option("-u", "--user", metavar="USER", help="User of commands in it.")
@click.option("--store", metavar="STORE", help="Put its data on this store of the daemon's configuration.")
@click.option("--profile", type=click.Choice(["server", "desktop", "android"]), default="server",
              help="What a VM image is.")  # fmt: skip
@click.option("--agent", is_flag=True, help="dsec-agent is in the VM image, as a service.")
@click.argument("source")
@click.argument("name")
@pass_app
async def import_(
    app: App, kind: wire.ImageKind, form: str, tag: str | None, prefix: str, env: tuple[tuple[str, str], ...],
    workdir: str | None, user: str | None, store: str | None, profile: wire.Profile, agent: bool, source: str,
    name: str,
) -> int:  # fmt: skip
    """Make an image called NAME of SOURCE.

    SOURCE is a directory, a tar (plain or compressed with gzip, zstd, xz or bzip2), an OCI layout (a directory or a tar
    of one), an archive of `docker save`, docker://REGISTRY/NAME:TAG, or `-` for stdin. Files keep owners, modes, times,
    hard links and extended attributes, as far as you may read them; what you may not read is left out and reported,
    and the exit status is 1.

    With --kind vm it is a disk for a full virtual machine: raw or qcow2, plain or compressed.
    """
    async with app.client() as client:
        found = open_disk(source) if kind == "vm" else open_source(source, form)
        params = wire.Import(
            name=name, kind=kind, format=found.format, reference=found.reference or tag, prefix=prefix,
            env=dict(env), workdir=workdir, user=user, store=store, profile=profile,
            agent=agent,
        )  # fmt: skip
        with ProgressLine(quiet=app.quiet, total=found.total) as line:
            stream = line.counted(found.stream) if found.stream is not None else None
            made = await client.import_image(params, stream, line.update)
    for issue in found.issues:
        output.note(f"left out: {issue}")
    _made(app, made)
    return int(bool(found.issues))


@command(
    "bootstrap",
    examples="""
    dsecctl image bootstrap debian:12
    dsecctl image bootstrap --suite trixie --include git,python3-pip debian:13
    dsecctl image bootstrap --kind vm debian-vm
    """,
)
@click.option("--kind", type=click.Choice(["base", "vm"]), default="base", show_default=True,
              help="For containers and microVMs, or a disk with systemd.")  # fmt: skip
@click.option("--disk", type=SIZE, default=wire.Bootstrap(name="x").disk_mb, help="Of a VM's disk.  [default: 8g]")
@click.option("--suite", help="Debian suite, as bookworm.  [default: the host's own]")
@click.option("--include", multiple=True, metavar="PACKAGE[,...]", help="More packages; repeatable.")
@click.argument("name")
@pass_app
async def bootstrap(
    app: App, kind: Literal["base", "vm"], disk: int, suite: str | None, include: tuple[str, ...], name: str
) -> None:
    """Make a Debian called NAME with mmdebstrap.

    It is made on the daemon's host, from that host's own apt sources. One for VMs has systemd, dsec-agent and QEMU's
    guest agent, and needs a kernel with a disk driver built in: dsecctl kernel build.
    """
    packages = [package for words in include for package in words.split(",") if package]
    async with app.client() as client:
        with ProgressLine(quiet=app.quiet) as line:
            params = wire.Bootstrap(name=name, kind=kind, disk_mb=disk, suite=suite, include=packages)
            made = await client.bootstrap_image(params, line.update)
    _made(app, made)


@command(
    "collapse",
    examples="""
    dsecctl image collapse --into tools:1 linters:3 editors:2
    dsecctl image collapse --into app:flat tools:1 app:1 debian:12
    """,
)
@click.option("--into", "name", required=True, metavar="NAME", help="What the new image is called.")
@click.option("--max-mb", type=click.IntRange(1), default=3072, show_default=True,
              help="Refuse layers that hold more together.")  # fmt: skip
@click.option("--store", metavar="STORE", help="Put its data on this store of the daemon's configuration.")
@click.argument("layers", nargs=-1, required=True, type=IMAGE, metavar="TOP... BOTTOM")
@pass_app
async def collapse(app: App, name: str, max_mb: int, store: str | None, layers: tuple[str, ...]) -> None:
    """Merge layers into one image, which looks like the stack of them.

    Name the topmost first. With a base as the bottom the result is a base; what lies above one keeps what it hides of
    the layers below. The layers stay.
    """
    params = wire.Collapse(name=name, layers=list(layers), max_mb=max_mb, store=store)
    async with app.client() as client:
        with ProgressLine(quiet=app.quiet) as line:
            made = await client.collapse_images(params, line.update)
    _made(app, made)


@command("push", examples="dsecctl image push debian:12 docker://registry.example:5000/team/debian:12")
@click.argument("ref", type=IMAGE, metavar="IMAGE")
@click.argument("reference", metavar="docker://HOST[:PORT]/NAME[:TAG]")
@pass_app
async def push(app: App, ref: str, reference: str) -> None:
    """Bring an image to an OCI registry.

    It is an artifact for `image pull`, and no container image. What the registry has already is not sent again.
    """
    async with app.client() as client:
        with ProgressLine(quiet=app.quiet) as line:
            done = await client.push_image(wire.Push(ref=ref, reference=reference), line.update)
    if app.json:
        output.emit(done)
    else:
        output.out(done.digest)


@command(
    "pull",
    examples="""
    dsecctl image pull docker://registry.example:5000/team/debian:12
    dsecctl image pull --lazy docker://registry.example:5000/team/debian:12
    """,
)
@click.option("--lazy", is_flag=True, help="Leave its data there, and fetch what is read when it is read.")
@click.option("--name", metavar="NAME", help="What it is called here.  [default: as it was pushed]")
@click.option("--store", metavar="STORE", help="Put its data on this store of the daemon's configuration.")
@click.argument("reference", metavar="docker://HOST[:PORT]/NAME[:TAG]")
@pass_app
async def pull(app: App, lazy: bool, name: str | None, store: str | None, reference: str) -> None:
    """Get an image that `image push` made.

    With --lazy the daemon's configuration must name the repository as a store: [stores.NAME], kind registry. Without
    it, the data of an image that is here lazily comes here, too.
    """
    async with app.client() as client:
        with ProgressLine(quiet=app.quiet) as line:
            params = wire.Pull(reference=reference, name=name, lazy=lazy, store=store)
            made = await client.pull_image(params, line.update)
    _made(app, made)


@command(
    "list",
    examples="""
    dsecctl image list
    dsecctl image list --json | jq -r '.[] | select(.used_by == 0).name'
    """,
)
@click.option("--kind", type=click.Choice(["base", "workspace", "toolkit", "environment", "vm"]),
              help="Only of this kind.")  # fmt: skip
@click.option("--no-trunc", is_flag=True, help="As wide as it needs; else the terminal's width, or 80.")
@pass_app
async def list_(app: App, kind: str | None, no_trunc: bool) -> None:
    """List images, newest first.

    USED is the number of sandboxes that have it mounted.
    """
    async with app.client() as client:
        found = [one for one in await client.images() if kind in (None, one.kind)]
    if app.json:
        output.emit(found)
        return
    rows = [
        (
            one.name or "-", one.kind, size(one.data_size + one.meta_size), str(one.files), one.created[:10],
            str(one.used_by), one.digest if no_trunc else one.digest.removeprefix("sha256:")[:12],
        )
        for one in found
    ]  # fmt: skip
    head = ("NAME", "KIND", "SIZE", "FILES", "CREATED", "USED", "DIGEST")
    output.table(head, rows, shrink=(0,), cut=not no_trunc)


@command("show", examples="dsecctl image show debian:12")
@click.argument("ref", type=IMAGE, metavar="IMAGE")
@pass_app
async def show(app: App, ref: str) -> None:
    """Show all that is known of one image, by name or digest.

    Of an image that is filled on demand: how much of it runs have touched, and how often that was in the cache.
    """
    async with app.client() as client:
        one: wire.Image = await client.call("image.get", wire.ByRef(ref=ref))
    if app.json:
        output.emit(one)
        return
    output.pairs([
        ("name", one.name or "-"), ("kind", one.kind), ("digest", one.digest), ("source", one.source or "-"),
        ("created", one.created), ("files", str(one.files)), ("metadata", size(one.meta_size)),
        ("data", size(one.data_size)), ("env", " ".join(f"{key}={value}" for key, value in one.env.items()) or "-"),
        ("workdir", one.workdir or "-"), ("user", one.user or "-"), ("store", one.store),
        ("used by", f"{one.used_by} sandboxes"), *_reads(one), *_vm(one),
    ])  # fmt: skip


def _vm(one: wire.Image) -> list[tuple[str, str]]:
    if one.kind != "vm":
        return []
    return [("disk", f"{one.disk_mb} MiB"), ("profile", one.profile), ("agent", "yes" if one.agent else "no")]


def _reads(one: wire.Image) -> list[tuple[str, str]]:
    """What its runs read; nothing for an image that was never filled on demand."""
    reads = one.reads
    if reads is None:
        return []
    hits = "-" if reads.hit_rate is None else f"{100 * reads.hit_rate:.1f} % of reads found their data in the cache"
    rows = [
        ("runs", f"{reads.runs} recorded"),
        ("touched", f"{size(reads.touched_bytes)}, {reads.touched_percent:.1f} % of the data"),
        ("hit rate", hits),
    ]
    if reads.cached_bytes is not None:
        rows.append(("in cache", size(reads.cached_bytes)))
    if reads.denied:
        rows.append(("failed", f"{reads.denied} reads: {reads.why}"))
    return rows


@command("verify", examples="dsecctl image verify debian:12")
@click.argument("ref", type=IMAGE, metavar="IMAGE")
@pass_app
async def verify(app: App, ref: str) -> None:
    """Read all of an image and compare it with its sums.

    Worth it for an image on a store that is mounted straight (`direct`), which is compared by samples only when it is
    mounted. Of an image on a server only what is here is read: its data is compared whenever it is fetched.
    """
    async with app.client() as client:
        done: wire.Verified = await client.call("image.verify", wire.ByRef(ref=ref))
    if app.json:
        output.emit(done)
    elif not app.quiet:
        output.out(f"{done.digest} is sound; {size(done.data_bytes)} of data read")


@command("rm", examples="dsecctl image rm debian:12 app:1")
@click.argument("refs", nargs=-1, required=True, type=IMAGE, metavar="IMAGE...")
@pass_app
async def rm(app: App, refs: tuple[str, ...]) -> int:
    """Remove images that no sandbox uses.

    Of an image with several names, only the name goes. Exit status 1 says that one could not be removed.
    """
    return await removed(app, refs)


async def removed(app: App, refs: tuple[str, ...]) -> int:
    """Remove them side by side, and say of each what became of it."""
    async with app.client() as client:
        work = (client.call("image.remove", wire.ByRef(ref=ref)) for ref in refs)
        results = await asyncio.gather(*work, return_exceptions=True)
    documents: list[object] = []
    for ref, result in zip(refs, results, strict=True):
        if isinstance(result, DsecError):
            output.note(f"{ref}: {result}")
            documents.append({"image": ref, "error": {"kind": result.kind, "message": result.message}})
        elif isinstance(result, BaseException):
            raise result
        else:
            documents.append({"image": ref, "removed": True})
            if not app.json and not app.quiet:
                output.out(ref)
    if app.json:
        output.emit(documents)
    return int(any(isinstance(result, DsecError) for result in results))


@command(
    "gc",
    examples="""
    dsecctl image gc
    dsecctl image gc --min-age 1h
    """,
)
@click.option("--min-age", type=DURATION, default=0.0, help="Spare what is younger.")
@pass_app
async def gc(app: App, min_age: float) -> None:
    """Remove images that have no name and no user.

    What imports that crashed left behind goes with them.
    """
    async with app.client() as client:
        done: wire.Collected = await client.call("image.gc", wire.Gc(min_age_s=min_age))
    if app.json:
        output.emit(done)
    elif not app.quiet:
        output.lines(done.removed)
        output.out(f"{len(done.removed)} removed, {size(done.freed_bytes)} freed")


for _one in (import_, bootstrap, collapse, push, pull, list_, show, verify, rm, gc):
    image.add_command(_one)


def _made(app: App, made: wire.Image) -> None:
    if app.json:
        output.emit(made)
    else:
        output.out(made.digest)
