"""`dsecctl fn`: stateless programs, one call or a whole problem."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from dsecctl import output, terminal
from dsecctl.app import App, Group, command, pass_app
from dsecctl.values import DURATION
from dsecd.client import DSecFnCallArgs
from dsecd.errors import DsecError
from dsecd.wire import fncall as wire

SUFFIXES: Final = {
    ".py": "python", ".c": "c", ".cpp": "cpp", ".cc": "cpp", ".cxx": "cpp", ".sh": "sh", ".bash": "bash", ".go": "go",
    ".rs": "rust", ".java": "java", ".js": "node",
}  # fmt: skip
ANSWERS: Final = (".out", ".ans", ".expected")
FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group("fn", cls=Group)
def fn() -> None:
    """Run stateless programs: no sandbox to make, to keep or to stop."""


def call_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What both commands take."""
    options = (
        click.option("-l", "--language", metavar="NAME", help="Language; otherwise by the file's suffix."),
        click.option("--image", metavar="IMAGE", help="Image to run in.  [default: the daemon's own for calls]"),
        click.option("--cpu", type=DURATION, default="10s", show_default=True, help="Limit of processor time."),
        click.option("--wall", type=DURATION, help="Limit of time.  [default: twice --cpu and 2s]"),
        click.option("--memory", type=click.IntRange(8), default=256, show_default=True, help="Limit of memory, MiB."),
        click.option("--device", "devices", multiple=True, metavar="POOL[:N]", help="Devices of a pool; repeatable."),
        click.option("--exact", is_flag=True, help="White space at ends of lines counts, too."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def args_of(source: Path, options: dict[str, Any]) -> DSecFnCallArgs:
    """The program and its limits."""
    language = options["language"] or SUFFIXES.get(source.suffix)
    if language is None:
        raise click.UsageError(f"{source.name}: give --language, its suffix names none")
    return DSecFnCallArgs(
        language=language, code=source.read_text(encoding="utf-8", errors="surrogateescape"),
        container_image=options["image"], cpu_s=options["cpu"], wall_s=options["wall"],
        memory_limit_mb=options["memory"], devices=list(options["devices"]),
        match="exact" if options["exact"] else "lines",
    )  # fmt: skip


@command(
    "run",
    examples="""
    dsecctl fn run solution.cpp -i in.txt
    dsecctl fn run --cpu 1s --memory 64 -e out.txt solve.py < in.txt
    dsecctl fn run tool.py -- --verbose x
    """,
)
@call_options
@click.option("-i", "--input", "stdin", type=FILE, help="Standard input.  [default: ours, unless it is a terminal]")
@click.option("-e", "--expect", type=FILE, help="What it should print.")
@click.argument("source", type=FILE)
@click.argument("args", nargs=-1)
@pass_app
async def run(
    app: App, stdin: Path | None, expect: Path | None, source: Path, args: tuple[str, ...], **options: Any
) -> int:
    """Run one program, and print its verdict on stderr.

    Exit status 0 if that is `ok`, else 1.
    """
    call = args_of(source, options)
    call.args = list(args)
    if stdin is not None:
        call.stdin = stdin.read_bytes()
    elif not sys.stdin.isatty():
        call.stdin = sys.stdin.buffer.read()
    call.expected = expect.read_bytes() if expect else None
    async with app.client() as client:
        result = await client.fncall(call)
    if app.json:
        output.emit(result)
    else:
        output.raw(output.STDOUT, result.stdout)
        output.raw(output.STDERR, result.compiler.encode(errors="replace") + result.stderr)
        if not app.quiet:
            said = f": {result.detail}" if result.detail else ""
            output.note(f"{result.verdict}{said} ({_figures(result)})")
    return 0 if result.verdict == "ok" else 1


def _figures(result: wire.Judged) -> str:
    text = f"{result.cpu_ms:.0f} ms CPU, {result.wall_ms:.0f} ms, {result.memory_kb / 1024:.1f} MiB"
    return text + (f", compiled in {result.compile_ms:.0f} ms" if result.compile_ms else "")


def problem(directory: Path) -> tuple[list[str], list[wire.Case], Path | None]:
    """Names and cases of a problem (NAME.in with NAME.out, here or in tests/), and its checker.* if there is one."""
    inputs = sorted([*directory.glob("*.in"), *directory.glob("tests/*.in")])
    if not inputs:
        raise DsecError("invalid", f"{directory}: no NAME.in, there or in tests/")
    cases = []
    for path in inputs:
        answer = next((path.with_suffix(s) for s in ANSWERS if path.with_suffix(s).exists()), None)
        cases.append(wire.Case(stdin=path.read_bytes(), expected=answer.read_bytes() if answer else None))
    checkers = [path for path in sorted(directory.glob("checker.*")) if path.suffix in SUFFIXES]
    return [path.stem for path in inputs], cases, checkers[0] if checkers else None


@command(
    "judge",
    examples="""
    dsecctl fn judge problems/sum
    dsecctl fn judge problems/sum --solution mine.py --stop-at-first
    """,
)
@call_options
@click.option("--solution", type=FILE, help="The program.  [default: solution.* of the directory]")
@click.option("--stop-at-first", is_flag=True, help="End with the first case that is not ok.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@pass_app
async def judge(app: App, solution: Path | None, stop_at_first: bool, directory: Path, **options: Any) -> int:
    """Judge a program on all cases of a problem.

    Cases are NAME.in with NAME.out, in the directory or its tests/; checker.* judges instead, if there is one.
    """
    names, cases, checker = problem(directory)
    source = solution or next((path for path in sorted(directory.glob("solution.*")) if path.suffix in SUFFIXES), None)
    if source is None:
        raise click.UsageError(f"{directory} has no solution.*: give --solution")
    asked = None
    if checker is not None:
        asked = wire.Checker(language=SUFFIXES[checker.suffix], code=checker.read_text())
    results: dict[int, wire.Judged] = {}
    follow = terminal.is_terminal(output.STDERR) and not app.quiet
    async with app.client() as client:
        batch = client.fncall_batch(args_of(source, options), cases, stop_at_first=stop_at_first, checker=asked)
        async for index, result in batch:
            results[index] = result
            if follow:
                passed = sum(one.verdict == "ok" for one in results.values())
                output.status(f"{len(results)} of {len(cases)} cases, {passed} ok")
    if follow:
        output.status("")
    assert batch.total is not None
    if app.json:
        output.emit({"total": batch.total, "cases": {names[n]: results[n] for n in sorted(results)}})
    else:
        _show(names, results, batch.total)
    return 0 if batch.total.verdict == "ok" else 1


def _show(names: list[str], results: dict[int, wire.Judged], total: wire.BatchJudged) -> None:
    if total.compiler:
        output.raw(output.STDERR, total.compiler.encode(errors="replace"))
    rows = [
        [names[n], one.verdict, f"{one.cpu_ms:.0f}", f"{one.wall_ms:.0f}", f"{one.memory_kb / 1024:.1f}", one.detail]
        for n, one in sorted(results.items())
    ]
    if rows:
        output.table(["CASE", "VERDICT", "CPU MS", "MS", "MIB", "DETAIL"], rows, [5])
    detail = f": {total.detail}" if total.detail else ""
    output.out(f"{total.verdict}{detail} ({total.passed} of {len(names)} ok)")


for _one in (run, judge):
    fn.add_command(_one)
