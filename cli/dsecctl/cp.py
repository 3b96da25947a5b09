"""`dsecctl cp`: files and trees in and out."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import click

from dsecctl import output, terminal
from dsecctl.app import App, command, pass_app
from dsecctl.values import SandboxRef
from dsecd.client import Sandbox
from dsecd.errors import DsecError
from dsecd.trees import TreeReport
from dsecd.wire import files


class Place(NamedTuple):
    """One end of a copy. sandbox: None for this host. contents: `DIR/.`, what is in it and not itself."""

    sandbox: str | None
    path: str

    @property
    def contents(self) -> bool:
        return self.path.endswith("/.") or self.path in (".", "/")

    @property
    def wants_directory(self) -> bool:
        return self.path.endswith("/")


class _PlaceType(SandboxRef):
    name = "place"

    def convert(self, value: str | Place, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        if isinstance(value, Place):
            return value
        head, colon, path = value.partition(":")
        if not colon or not head or "/" in head or head.startswith("."):
            return Place(None, value)
        return Place(head, path if path.startswith("/") else f"/{path}")


@command(
    "cp",
    examples="""
    dsecctl cp fix.patch box:/workspace/
    dsecctl cp box:/workspace/dist ./dist
    dsecctl cp ./src/. box:/workspace
    dsecctl cp box:/etc - | tar t
    """,
)
@click.option("-a", "--archive", is_flag=True, help="Into a sandbox: keep owners; else all is root's.")
@click.option("--chown", metavar="UID[:GID]", help="Into a sandbox: give all to this owner.")
@click.argument("source", type=_PlaceType(), metavar="SOURCE")
@click.argument("target", type=_PlaceType(), metavar="TARGET")
@pass_app
async def cp(app: App, archive: bool, chown: str | None, source: Place, target: Place) -> int:
    """Copy a file or a directory between this host and a sandbox.

    One of SOURCE and TARGET is SANDBOX:PATH, the other a local path, or `-` for a tar on stdin or stdout. As with
    cp -r, a directory that is there gets the copy inside it, under its own name; `DIR/.` copies what is in DIR.
    Directories above TARGET in the sandbox are made. A local file whose name has a colon is ./NAME.

    Out of a sandbox nothing is written outside TARGET: links that lead out of it, and devices, are left out and
    reported. Exit status 1 says that something was left out.
    """
    if (source.sandbox is None) == (target.sandbox is None):
        raise click.UsageError("one of SOURCE and TARGET must be SANDBOX:PATH")
    uid, gid = _owner(chown, archive)
    if source.sandbox is None:
        assert target.sandbox is not None
        async with app.sandbox(target.sandbox) as (_client, box):
            report = await _in(box, source.path, target, uid, gid)
    else:
        async with app.sandbox(source.sandbox) as (_client, box):
            report = await _out(box, source, target.path)
    for issue in report.issues:
        output.note(f"left out: {issue}")
    if app.json:
        output.emit({"entries": report.entries, "issues": report.issues}, to_stderr=target.path == "-")
    return int(bool(report.issues))


def _owner(chown: str | None, archive: bool) -> tuple[int | None, int | None]:
    if chown is None:
        return (None, None) if archive else (0, 0)
    if archive:
        raise click.UsageError("--archive and --chown exclude each other")
    user, _, group = chown.partition(":")
    if not user.isdecimal() or not (group or user).isdecimal():
        raise click.UsageError(f"--chown {chown!r} is not UID or UID:GID in numbers")
    return int(user), int(group or user)


# -- into a sandbox ---------------------------------------------------------------------------------------------------
async def _in(box: Sandbox, local: str, target: Place, uid: int | None, gid: int | None) -> TreeReport:
    path = os.path.normpath(target.path)
    if local == "-":
        return await box.upload_tar(_stdin(), os.fsencode(path), uid=uid, gid=gid)
    real = Path(local).resolve(strict=True)  # strict: a clear error when it is not there
    there = await _stat(box, path)
    if there is not None and there.type != "dir" and (real.is_dir() or target.wants_directory):
        raise DsecError("conflict", f"{path} is there and is no directory", sandbox_id=box.id)
    inside = there is not None and there.type == "dir"
    if real.is_dir() and Place(None, local).contents:
        name = None
    elif inside or (target.wants_directory and not real.is_dir()):
        name = Path(local).name or real.name
    else:
        path, name = os.path.split(path)
    return await box.upload(real, os.fsencode(path), name=name, uid=uid, gid=gid)


async def _stat(box: Sandbox, path: str) -> files.Stat | None:
    try:
        return await box.stat(os.fsencode(path))
    except DsecError as exc:
        if exc.kind == "not_found" and exc.detail.get("errno"):
            return None
        raise


async def _stdin() -> AsyncIterator[bytes]:
    source = terminal.Stdin()
    while data := await source.read():
        yield data


# -- out of a sandbox -------------------------------------------------------------------------------------------------
async def _out(box: Sandbox, source: Place, local: str) -> TreeReport:
    path = os.path.normpath(source.path)
    if local == "-":
        if terminal.is_terminal(output.STDOUT):
            raise click.UsageError("a tar does not belong on a terminal: write it to a file or a pipe")
        return await box.download_tar(os.fsencode(path), output.raw_later)
    found = await box.stat(os.fsencode(path))
    target = Path(local)
    if target.is_dir() and not (found.type == "dir" and source.contents):
        target /= os.path.basename(path)  # noqa: PTH119 - a path of the sandbox and not of this host
    if found.type == "dir":
        if target.exists() and not target.is_dir():
            raise DsecError("conflict", f"{target} is there and is no directory")
        return await box.download(os.fsencode(path), target)
    return await _file_out(box, path, target)


async def _file_out(box: Sandbox, path: str, target: Path) -> TreeReport:
    """One file: beside its target first, then renamed, so that nobody sees half of it."""
    if not target.parent.is_dir():
        raise DsecError("not_found", f"{target.parent}: no such directory")
    work = tempfile.mkdtemp(prefix=".dsecctl-", dir=target.parent)
    try:
        report = await box.download(os.fsencode(path), work)
        for made in Path(work).iterdir():
            made.replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return report
