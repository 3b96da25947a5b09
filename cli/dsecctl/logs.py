"""`dsecctl logs`: what commands of a sandbox wrote."""

from __future__ import annotations

import contextlib

import click

from dsecctl import output
from dsecctl.app import App, command, pass_app
from dsecctl.attach import document
from dsecctl.table import since
from dsecctl.values import SANDBOX
from dsecd.client import ExecResult, Process, Sandbox
from dsecd.errors import DsecError
from dsecd.wire import execs


@command(
    "logs",
    examples="""
    dsecctl logs box
    dsecctl logs box x3
    dsecctl logs -f box x3
    """,
)
@click.option("-f", "--follow", is_flag=True, help="Of a running command: go on until it ends.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("exec_id", metavar="[EXEC]", required=False)
@pass_app
async def logs(app: App, follow: bool, sandbox: str, exec_id: str | None) -> None:
    """List the commands of a sandbox, or show the output of one.

    The daemon keeps the beginning and the end of what a command writes, and counts what is missing between
    (`cap_bytes` in the SDK); it keeps the last 64 commands that ended, as long as the sandbox runs. stdout and stderr
    come out of ours. While a command is followed it writes no faster than we print; only one may follow at a time.
    """
    async with app.sandbox(sandbox) as (client, box):
        found: execs.Execs = await client.call("exec.list", execs.ListExecs(id=box.id))
        if exec_id is None:
            _listing(app, found.execs)
            return
        await _one(app, box, _known(found.execs, exec_id), follow)


def _listing(app: App, found: list[execs.ExecInfo]) -> None:
    if app.json:
        output.emit(found)
        return
    rows = [(one.exec_id, "running" if one.running else "ended", since(one.started_at), one.command) for one in found]
    output.table(("EXEC", "STATE", "AGE", "COMMAND"), rows, shrink=(3,))


def _known(found: list[execs.ExecInfo], exec_id: str) -> execs.ExecInfo:
    for one in found:
        if one.exec_id == exec_id:
            return one
    raise DsecError("not_found", f"this sandbox has no command {exec_id!r}: `dsecctl logs SANDBOX` lists them")


async def _one(app: App, box: Sandbox, info: execs.ExecInfo, follow: bool) -> None:
    process = box.process(info.exec_id)
    if info.running and not follow:
        raise DsecError("conflict", f"command {info.exec_id} is running: -f follows it")
    if info.running and not app.json:
        await _follow(process)
        return
    result = await process.wait()
    if app.json:
        output.emit(document(result, sandbox_id=box.id))
    else:
        _show(app, result)


async def _follow(process: Process) -> None:
    async with contextlib.aclosing(process.output()) as pieces:
        async for stream, data in pieces:
            output.raw(stream, data)


def _show(app: App, result: ExecResult) -> None:
    for stream, data, dropped, head in (
        (output.STDOUT, result.stdout_bytes, result.stdout_dropped, result.stdout_head),
        (output.STDERR, result.stderr_bytes, result.stderr_dropped, result.stderr_head),
    ):
        if dropped:
            output.raw(stream, data[:head])
            name = "stdout" if stream == output.STDOUT else "stderr"
            app.note(f"{dropped} bytes of {name} are missing here: over the cap")
            output.raw(stream, data[head:])
        else:
            output.raw(stream, data)
