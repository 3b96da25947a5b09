"""`dsecctl exec` and `dsecctl shell`: commands in a sandbox that is there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from typing import Any, Final

import click

from dsecctl import output, terminal
from dsecctl.app import App, command, pass_app
from dsecctl.attach import Attached, document, status_of
from dsecctl.values import DURATION, ENV, SANDBOX
from dsecd.client import Process, Sandbox
from dsecd.errors import DsecError

FAILED: Final = 125
JSON_CAP: Final = 2 << 20  # of each stream: two of them, and their JSON, fit one message and one terminal
SHELLS: Final = ("/bin/bash", "/bin/sh")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def command_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of whatever runs a command."""
    options: Iterable[Decorator] = (
        click.option("-i", "--interactive", is_flag=True, help="Connect stdin to the command."),
        click.option("-t", "--tty", is_flag=True, help="Give it a terminal; with -i, a raw one."),
        click.option("-e", "--env", type=ENV, multiple=True, help="Set a variable; KEY alone passes on ours."),
        click.option("-w", "--workdir", metavar="DIR", help="Working directory, inside."),
        click.option("-u", "--user", metavar="USER[:GROUP]", help="User, by name or number."),
        click.option("--timeout", type=DURATION, help="Kill the command after so long; exit status 124."),
    )
    for option in reversed([*options]):
        function = option(function)
    return function


def argv_of(words: tuple[str, ...]) -> list[str]:
    """The command line without the `--` that may stand before it."""
    return list(words[1:] if words[:1] == ("--",) else words)


@command(
    "exec", failure=FAILED, context_settings={"allow_interspersed_args": False},
    examples="""
    dsecctl exec box -- python3 -m pytest -q
    tar c src | dsecctl exec -i box tar x -C /workspace
    dsecctl exec -e DEBUG=1 -w /srv --timeout 5m box make test
    dsecctl exec --json box uname -a | jq -r .stdout
    dsecctl exec --fresh --keep /workspace box make -C /workspace check
    """,
)  # fmt: skip
@command_options
@click.option("--fresh", is_flag=True, help="In a copy of its files that ends with the command.")
@click.option("--keep", multiple=True, metavar="PATH", help="With --fresh: only these files; repeatable.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@pass_app
async def exec_(
    app: App, sandbox: str, argv: tuple[str, ...], fresh: bool, keep: tuple[str, ...], **options: Any
) -> int:
    """Run a command in a running sandbox.

    Its stdout and stderr come out of ours, live and byte for byte, and its exit status is ours. Without -i its stdin is
    /dev/null. Ctrl-C goes to the command; a second one kills it with everything it started. With --json nothing is
    streamed: one document at the end has status, output and times. In a full VM without dsec-agent output comes
    at the end, too, and Ctrl-C ends dsecctl alone.

    With --fresh it runs in a copy of a container's files, where no process of the sandbox is; nothing that it does
    stays, and its output comes at the end. Programs that the sandbox replaced are replaced there, too; with --keep, all
    but what is below these paths is as the images have it.
    """
    words = argv_of(argv)
    if not words:
        raise click.UsageError("a command is missing")
    if keep and not fresh:
        raise click.UsageError("--keep needs --fresh")
    if fresh and options["tty"]:
        raise click.UsageError("--fresh and -t exclude each other")
    async with app.sandbox(sandbox) as (_client, box):
        if fresh:
            return await _whole(
                app, box, words, options["interactive"], timeout=options["timeout"], env=dict(options["env"]),
                cwd=options["workdir"], user=options["user"], fresh=True, keep=keep,
            )  # fmt: skip
        return await run_in(app, box, words, **options)


@command(
    "shell", failure=FAILED,
    examples="""
    dsecctl shell box
    dsecctl shell -u nobody -w /tmp box
    """,
)  # fmt: skip
@click.option("-e", "--env", type=ENV, multiple=True, help="Set a variable; KEY alone passes on ours.")
@click.option("-w", "--workdir", metavar="DIR", help="Working directory, inside.")
@click.option("-u", "--user", metavar="USER[:GROUP]", help="User, by name or number.")
@click.option("--shell", "program", metavar="PATH", help="This program instead of bash or sh.")
@click.argument("sandbox", type=SANDBOX)
@pass_app
async def shell(app: App, sandbox: str, program: str | None, **options: Any) -> int:
    """Open an interactive shell in a running sandbox.

    It is bash where the image has it, else /bin/sh, on a terminal of its own that follows the size of ours. Its exit
    status is ours.
    """
    async with app.sandbox(sandbox) as (_client, box):
        return await shell_in(app, box, [program] if program else SHELLS, **options)


async def run_in(
    app: App, box: Sandbox, argv: list[str], *, interactive: bool = False, tty: bool = False,
    env: tuple[tuple[str, str], ...] = (), workdir: str | None = None, user: str | None = None,
    timeout: float | None = None,
) -> int:  # fmt: skip
    """Run one command to its end, attached or as a JSON document. Returns the exit status."""
    if app.json and tty:
        raise click.UsageError("--json and -t exclude each other")
    try:
        process = await start(
            box, argv, interactive=interactive, tty=tty, env=env, workdir=workdir, user=user, timeout=timeout,
            cap_bytes=JSON_CAP if app.json else None, follow=not app.json,
        )  # fmt: skip
    except DsecError as exc:
        if exc.kind == "unsupported" and box.info.backend == "fullvm":  # QEMU's agent is there, or none
            if tty:
                raise click.UsageError("this full VM gives no terminal: see `dsecctl vm vnc` and `vm console`") from exc
            return await _whole(app, box, argv, interactive, timeout=timeout, env=dict(env), cwd=workdir, user=user)
        app.failure = _status_of_start(exc)
        raise
    attached = Attached(app, process, stdin=interactive, tty=tty)
    if not app.json:
        return status_of(app, await attached.follow())
    result = await attached.collect()
    output.emit(document(result, sandbox_id=box.id))
    return status_of(app, result)


async def _whole(app: App, box: Sandbox, argv: list[str], interactive: bool, **options: Any) -> int:
    """Without a stream (a full VM without dsec-agent, --fresh): stdin is read first, output comes at the end."""
    data = bytearray()
    source = terminal.Stdin()
    while interactive and (piece := await source.read()):
        data += piece
    result = await box.exec(argv, stdin=bytes(data) if interactive else None, **options)
    if app.json:
        output.emit(document(result, sandbox_id=box.id))
    else:
        await output.raw_later(result.stdout_bytes)
        output.raw(output.STDERR, result.stderr_bytes)
        if result.truncated:
            app.note("only a part of the output was kept")
    return status_of(app, result)


def _status_of_start(exc: DsecError) -> int:
    """127 for a program that is not there, 126 for one that does not execute, as shells have it; else it was us."""
    if "cannot execute" not in exc.message or "errno" not in exc.detail:
        return FAILED
    return 127 if exc.detail["errno"] == errno.ENOENT else 126


async def shell_in(app: App, box: Sandbox, programs: Iterable[str], **options: Any) -> int:
    """The first of `programs` that the image has, on a terminal."""
    if app.json:
        raise click.UsageError("a shell has no --json")
    missing: DsecError | None = None
    for program in programs:
        try:
            process = await start(box, [program], interactive=True, tty=True, follow=True, **options)
        except DsecError as exc:
            if exc.kind != "not_found":
                raise
            missing = exc
            continue
        return status_of(app, await Attached(app, process, stdin=True, tty=True).follow())
    raise missing or DsecError("invalid", "no shell was named")


async def start(
    box: Sandbox, argv: list[str], *, interactive: bool = False, tty: bool = False,
    env: tuple[tuple[str, str], ...] = (), workdir: str | None = None, user: str | None = None,
    timeout: float | None = None, cap_bytes: int | None = None, follow: bool = False,
) -> Process:  # fmt: skip
    """Start it as our options say."""
    variables = dict(env)
    if tty:
        variables = {"TERM": os.environ.get("TERM", "xterm"), **variables}
    rows, cols = terminal.size()
    more: dict[str, Any] = {} if cap_bytes is None else {"cap_bytes": cap_bytes}
    return await box.start(
        argv, stdin=interactive, tty=tty, rows=rows, cols=cols, follow=follow, timeout=timeout, env=variables,
        cwd=workdir, user=user, **more,
    )  # fmt: skip
