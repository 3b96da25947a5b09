"""Messages of `exec.*`, `session.*` and `port.*`: commands in a sandbox."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dsecd.wire.base import Count, Id, Params, Path, Result
from dsecd.wire.sandbox import Env

Cap = Annotated[int, Meta(ge=1024, le=8 << 20)]
Arg = Annotated[str, Meta(max_length=1 << 20)]


class Command(Params):
    """What to run: argv, or a shell line for the image's /bin/sh. timeout_s kills it with all its descendants.

    cap_bytes: bytes kept of each of stdout and stderr; first and last half, the middle is dropped and counted.
    """

    id: Id
    argv: Annotated[list[Arg], Meta(max_length=65_536)] = []
    shell: Arg | None = None
    env: Env = {}
    cwd: Path | None = None
    user: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    cap_bytes: Cap = 8 << 20


class Run(Command):
    """`exec.run`: run to the end. stdin is given whole (None: /dev/null).

    fresh: in a copy of the container that is made for this command and ends with it (`sandbox.fork`): no process of the
    sandbox is there, and nothing that the command does stays. Its files are the sandbox's own. keep: of what the
    sandbox wrote, only what is below these paths is there; all else is as the images have it.
    """

    stdin: bytes | None = None
    fresh: bool = False
    keep: Annotated[list[Path], Meta(max_length=64)] = []


class Start(Command):
    """`exec.start`: start and answer at once; then attach, stdin, signal, resize, wait.

    follow: exec.attach comes next; until then the command waits rather than that a byte over the cap is lost. When
    nobody has attached after 30 s it goes on without a follower.
    """

    stdin: bool = False
    follow: bool = False
    tty: bool = False
    rows: Annotated[int, Meta(ge=1, le=10_000)] = 24
    cols: Annotated[int, Meta(ge=1, le=10_000)] = 80


class Ran(Result):
    """How a command ended. exit_code: 128+signal when a signal ended it.

    Kept output is head plus tail; `*_dropped` bytes are missing between `*_head` bytes and the rest; `*_dropped_sha256`
    is their digest (hex; empty: nothing is missing, or nobody has summed it, as in a full VM without our agent).
    oom, pids_limit, disk_full: the sandbox hit that limit while the command ran. sent_ahead: the kept output was over
    8 MiB and came as `exec.output` notifications before this reply; offsets count in what was kept.
    """

    exec_id: str
    exit_code: int
    signal: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    stdout_dropped_sha256: str = ""
    stderr_dropped_sha256: str = ""
    stdout_head: int = 0
    stderr_head: int = 0
    timed_out: bool = False
    killed: bool = False
    oom: bool = False
    pids_limit: bool = False
    disk_full: bool = False
    queued_ms: float = 0.0
    ran_ms: float = 0.0
    cpu_ms: float = 0.0
    sent_ahead: bool = False


class Started(Result):
    exec_id: str
    pid: int


class ExecRef(Params):
    """A command of a sandbox."""

    id: Id
    exec_id: Id


class Attach(ExecRef):
    """`exec.attach`: follow output from these offsets as `exec.output` notifications within the credit.

    The reply is `Ran` without output when it has ended. window: first credit for each stream in bytes.
    """

    stdout_from: Count = 0
    stderr_from: Count = 0
    window: Annotated[int, Meta(ge=4096, le=8 << 20)] = 1 << 20


class Stdin(ExecRef):
    """`exec.stdin`: the reply comes when the command's pipe has taken or queued it within its credit."""

    data: Annotated[bytes, Meta(max_length=8 << 20)] = b""
    eof: bool = False


class Signal(ExecRef):
    """`exec.signal`: to the command's process, or with `all` SIGKILL to every descendant."""

    signal: Annotated[int, Meta(ge=1, le=64)] = 15
    all: bool = False


class Resize(ExecRef):
    rows: Annotated[int, Meta(ge=1, le=10_000)]
    cols: Annotated[int, Meta(ge=1, le=10_000)]


class Wait(ExecRef):
    """`exec.wait`: the reply is `Ran` with the kept output."""


class ExecInfo(Struct, kw_only=True, omit_defaults=True):
    exec_id: str
    running: bool
    pid: int
    command: str
    started_at: float = 0.0


class ListExecs(Params):
    id: Id


class Execs(Result):
    execs: list[ExecInfo]


class SessionOpen(Params):
    """`session.open`: a shell that keeps its directory and variables. shell: a program of the image."""

    id: Id
    shell: Path = "/bin/sh"
    env: Env = {}
    cwd: Path | None = None
    user: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class Session(Result):
    session_id: str


class SessionRun(Params):
    """`session.run`: timeout_s kills what the line started; the shell itself survives where it can."""

    id: Id
    session_id: Id
    shell: Arg
    cap_bytes: Cap = 8 << 20


class SessionRef(Params):
    id: Id
    session_id: Id


class PortConnect(Params):
    """`port.connect`: a byte tunnel to 127.0.0.1:port inside; streams both ways under this request's id.

    `vnc`: to the screen of a full VM, as RFC 6143 has it.
    """

    id: Id
    port: Annotated[int, Meta(ge=1, le=65_535)] | Literal["vnc"]
    window: Annotated[int, Meta(ge=4096, le=8 << 20)] = 1 << 20


class PortClosed(Result):
    sent: int = 0
    received: int = 0
