"""Messages of `fncall.*`: one program, one verdict."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dsecd.wire.base import Params, Result
from dsecd.wire.sandbox import Devices

Verdict = Literal[
    "ok", "wrong_answer", "compile_error", "runtime_error", "time_limit", "wall_limit", "memory_limit", "output_limit",
    "process_limit", "denied", "infra",
]  # fmt: skip
Match = Literal["lines", "exact"]

FileName = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^/\x00]+$")]
Data = Annotated[bytes, Meta(max_length=8 << 20)]
Text = Annotated[str, Meta(max_length=8 << 20)]
Arg = Annotated[str, Meta(max_length=65_536, pattern=r"^[^\x00]*$")]
Argv = Annotated[list[Arg], Meta(max_length=1024)]
Env = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^=\x00]+$")], Arg], Meta(max_length=256)
]


class Limits(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one call may use. wall_s None: twice the CPU time and two seconds more.

    output_kb: of stdout and of stderr each; disk_mb: of all files it writes, in memory; processes: and threads.
    """

    cpu_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    wall_s: Annotated[float, Meta(gt=0, le=7200)] | None = None
    memory_mb: Annotated[int, Meta(ge=8, le=1 << 20)] = 256
    output_kb: Annotated[int, Meta(ge=1, le=4096)] = 1024
    processes: Annotated[int, Meta(ge=1, le=4096)] = 64
    open_files: Annotated[int, Meta(ge=4, le=4096)] = 256
    file_mb: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    disk_mb: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    stack_mb: Annotated[int, Meta(ge=1, le=1 << 16)] = 64


class Program(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Either a language and its code, or an argv. files lie beside it in its directory, executable."""

    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    code: Text | None = None
    argv: Argv = []
    files: Annotated[dict[FileName, Data], Meta(max_length=256)] = {}
    env: Env = {}


class Checker(Program, frozen=True, kw_only=True):
    """A program that judges instead of a comparison: it is called with the arguments `input output expected`, names of
    files in its directory, and says `ok` by exit status 0 and `wrong_answer` by 1; what it prints is the detail."""

    limits: Limits = Limits()


class Case(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One test. expected None: only how it ends counts."""

    stdin: Data | None = None
    args: Argv = []
    expected: Data | None = None


class Call(Params):
    """What `fncall.run` and `fncall.batch` share. image None: the configuration's.

    devices: of the host's pools, as of a container; the program has them, its compiler and checker do not.
    """

    program: Program
    image: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    limits: Limits = Limits()
    match: Match = "lines"
    devices: Devices = []


class Run(Call):
    """`fncall.run`. want: names of files it makes that come back with the result."""

    case: Case = Case()
    want: Annotated[list[FileName], Meta(max_length=64)] = []


class Batch(Call, kw_only=True):
    """`fncall.batch`: compiled once; each result comes as a `fncall.case` notification when it is there."""

    cases: Annotated[list[Case], Meta(min_length=1, max_length=10_000)]
    stop_at_first: bool = False
    checker: Checker | None = None


class Judged(Result):
    """One verdict. detail: a sentence for people. memory_kb: the most beyond what was there before.

    queued_ms counts until the program was let go (compiling is in compile_ms); wall_ms and cpu_ms are the
    program's alone. warm: a zygote's copy ran it.
    """

    verdict: Verdict
    detail: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int = 0
    signal: int = 0
    truncated: bool = False
    cpu_ms: float = 0.0
    wall_ms: float = 0.0
    memory_kb: int = 0
    queued_ms: float = 0.0
    ran_ms: float = 0.0
    compile_ms: float = 0.0
    compiler: str = ""
    files: dict[str, bytes] = {}
    warm: bool = False


class CaseJudged(Struct):
    """`fncall.case`: the result of case number `index`."""

    sub: int | str
    index: int
    result: Judged


class BatchJudged(Result):
    """verdict: `ok`, or that of the first case (by number) that is not. done: cases that were run."""

    verdict: Verdict
    detail: str = ""
    done: int = 0
    passed: int = 0
    compile_ms: float = 0.0
    compiler: str = ""
