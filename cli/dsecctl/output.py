"""The one place that prints. Results go to stdout; progress, notes and errors to stderr."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final

import click
import msgspec

from dsecctl.table import layout, printable
from dsecd.errors import DsecError

STDOUT: Final = 1
STDERR: Final = 2


def plain(value: object) -> Any:
    """Structs as objects with all their fields, also those at their defaults; bytes as base64."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes) and not isinstance(value, msgspec.Raw):
        return base64.b64encode(value).decode()
    return value


def emit(value: object, *, to_stderr: bool = False) -> None:
    """One JSON document; on a terminal indented. to_stderr: stdout is taken by something else."""
    encoded = msgspec.json.encode(plain(value))
    if (sys.stderr if to_stderr else sys.stdout).isatty():
        encoded = msgspec.json.format(encoded, indent=2)
    click.echo(encoded.decode(), err=to_stderr)


def out(text: str) -> None:
    """One line of result."""
    click.echo(text)


def lines(texts: Sequence[str]) -> None:
    for text in texts:
        click.echo(text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], shrink: Sequence[int] = (), *, cut: bool = True) -> None:
    """Columns under a head. Those in `shrink` are cut, longest first, until a line fits the terminal (80 if none)."""
    lines(layout(head, rows, shrink, columns() if cut else 0))


def pairs(rows: Sequence[tuple[str, str]]) -> None:
    """`name  value` lines."""
    width = max((len(name) for name, _ in rows), default=0)
    lines([f"{name:<{width}}  {printable(value)}".rstrip() for name, value in rows])


def close_stdout() -> None:
    """Nobody reads it any more; what is still buffered must not make Python complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)


def wrapped(lead: str, text: str) -> None:
    """`lead` and then `text`, wrapped, with what follows indented under the beginning."""
    click.echo(click.wrap_text(lead + printable(text), columns(), subsequent_indent=" " * 6))


def flush() -> None:
    """For output that somebody follows through a pipe."""
    sys.stdout.flush()


def columns() -> int:
    return max(80, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else 80


def clear() -> None:
    """Start again at the top of the terminal."""
    if sys.stdout.isatty():
        click.echo("\x1b[H\x1b[J", nl=False)


def screen(texts: Sequence[str]) -> None:
    """A terminal's whole content, written over what is there: nothing flickers, and nothing has to be put back."""
    click.echo("\x1b[H" + "".join(f"{text}\x1b[K\n" for text in texts) + "\x1b[J", nl=False)


def raw(fd: int, data: bytes) -> None:
    """All of `data`, as it is. BrokenPipeError when nobody reads it."""
    (sys.stdout if fd == STDOUT else sys.stderr).flush()
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def raw_later(data: bytes) -> None:
    """To stdout, in a thread: whoever reads us may be slow, and the loop has leases to renew."""
    await asyncio.to_thread(raw, STDOUT, data)


def note(text: str) -> None:
    click.echo(f"dsecctl: {printable(text)}", err=True)


def help_text(text: str) -> None:
    """Help that nobody asked for."""
    click.echo(text, err=True)


def status(text: str) -> None:
    """The one line on stderr that is written over again and again; "" takes it away."""
    click.echo(f"\r\x1b[K{text}", err=True, nl=False)


def error(exc: DsecError, hint: str, *, json: bool) -> None:
    """What went wrong, and what to do next."""
    click.echo(f"dsecctl: {printable(exc.message)} [{exc.kind}]", err=True)
    if hint:
        click.echo(f"         {hint}", err=True)
    if json:
        emit({
            "error": {
                "kind": exc.kind, "message": exc.message, "infra": exc.infra, "retryable": exc.retryable,
                "sandbox_id": exc.sandbox_id, "detail": exc.detail, "hint": hint or None,
            }
        })  # fmt: skip
