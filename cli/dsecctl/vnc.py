"""`dsecctl vm vnc`: a full VM's screen for a VNC viewer that runs here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import click

from dsecctl import output
from dsecctl.app import App, command, pass_app
from dsecctl.values import LISTEN, SANDBOX
from dsecd.client import Sandbox, Tunnel
from dsecd.errors import DsecError

PIECE: Final = 64 << 10


@command(
    "vnc",
    examples="""
    dsecctl vm vnc box
    dsecctl vm vnc --listen 127.0.0.1:5901 box
    dsecctl vm vnc --listen "$XDG_RUNTIME_DIR/box.vnc" box
    """,
)
@click.option(
    "--listen", "where", type=LISTEN, default="127.0.0.1:5900", show_default=True,
    help="An address of the loopback with a port, or the path of a Unix socket.",
)  # fmt: skip
@click.argument("sandbox", type=SANDBOX)
@pass_app
async def vnc(app: App, where: str | tuple[str, int], sandbox: str) -> None:
    """Show a full VM's screen to VNC viewers, until Ctrl-C.

    Point a viewer at the address. Viewers are not asked for a password: on a machine that others use, too, listen on a
    Unix socket, which is yours alone. One connection of a viewer is one tunnel to the VM; the VM is not idle meanwhile.
    """
    async with app.sandbox(sandbox) as (_client, box):
        await _seen(box)
        async with _listening(app, box, where) as name:
            output.emit({"sandbox": box.id, "listening": name}) if app.json else app.note(f"the screen is at {name}")
            await asyncio.get_running_loop().create_future()


async def _seen(box: Sandbox) -> None:
    """Ask for it once: that there is no screen is to be said now, and not to a viewer."""
    tunnel = await box.connect_vnc()
    try:
        await tunnel.read()
    finally:
        await tunnel.close()


@contextlib.asynccontextmanager
async def _listening(app: App, box: Sandbox, where: str | tuple[str, int]) -> AsyncIterator[str]:
    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _relay(await box.connect_vnc(), reader, writer)
        except DsecError as exc:
            if server.is_serving():  # else it was us who ended it
                app.note(f"a viewer was turned away: {exc}")
        except OSError:
            pass  # the viewer is gone
        finally:
            writer.close()

    if isinstance(where, tuple):
        server = await asyncio.start_server(accepted, *where)
        host, port = server.sockets[0].getsockname()[:2]
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    else:
        umask = os.umask(0o177)
        try:
            server = await asyncio.start_unix_server(accepted, where)
        finally:
            os.umask(umask)
        name = where
    try:
        yield name
    finally:
        server.close()
        if isinstance(where, str):
            Path(where).unlink(missing_ok=True)


async def _relay(tunnel: Tunnel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the VM closes, which it does when the viewer has."""

    async def inward() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE):
                await tunnel.write(data)
        tunnel.write_eof()

    task = asyncio.ensure_future(inward())
    try:
        while data := await tunnel.read():
            writer.write(data)
            await writer.drain()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await tunnel.close()
