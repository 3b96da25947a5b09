"""The host end of an agent that runs calls: one channel, one call at a time (docs/agent-protocol.md, "Calls")."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from dsecd.agent.frames import Field, Fields, FrameError, Tag, Type, parse_output
from dsecd.agent.link import AgentLink, Channel
from dsecd.errors import DsecError

PIECE: Final = 1 << 20  # of a file, in one frame
ARGUMENTS_MAX: Final = 90 << 10  # argv and environment together, as the cell takes them
OUTPUT_MAX: Final = 8 << 20
PRODUCED_MAX: Final = 32 << 20
MODE: Final = 0o755

ITSELF, WALL, STOPPED, CPU, OUTPUT = range(5)  # why a call ended


class CallLimits(Struct, frozen=True):
    """Times in milliseconds, sizes in bytes. output: of each stream; space: of all files; produced: read back."""

    cpu_ms: int
    wall_ms: int
    output: int
    open_files: int
    file: int
    space: int
    stack: int
    produced: int


class CallPlan(Struct, frozen=True):
    """One program to run in an empty directory with these files; without stdin it gets an empty one."""

    argv: tuple[str, ...]
    limits: CallLimits
    env: Mapping[str, str] = {}
    files: Mapping[str, bytes] = {}
    stdin: bytes | None = None
    want: tuple[str, ...] = ()
    cpus: bytes = b""


class CallEnd(Struct):
    """How it ended. code: 128+signal when a signal ended it; not_started: errno of execve, 0 if it started."""

    code: int
    signal: int
    why: int
    ran_us: int
    cpu_us: int
    space_full: bool
    not_started: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    files: dict[str, bytes]
    refused: dict[str, int]  # produced files that were not read: errno


class CallChannel(Channel):
    """Made once for each agent of calls. `ready` before each `run`; once `broken`, the sandbox is of no more use."""

    __slots__ = ("_ended", "_files", "_limits", "_output", "_ready", "_refused", "broken")

    def __init__(self, link: AgentLink) -> None:
        super().__init__(link)
        self._ready = asyncio.Event()
        self._ended: asyncio.Future[CallEnd] | None = None
        self.broken: DsecError | None = None
        self._forget()
        link.attach(self)

    def _forget(self) -> None:
        self._output: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        self._files: dict[str, bytearray] = {}
        self._refused: dict[str, int] = {}
        self._limits: CallLimits | None = None

    # -- frames -------------------------------------------------------------------------------------------------------
    def frame(self, kind: Type, payload: memoryview) -> None:
        match kind:
            case Type.CELL:
                self._ready.set()
            case Type.OUTPUT:
                stream, offset, data = parse_output(payload)
                kept = self._output.get(stream)
                if kept is None or self._limits is None or offset != len(kept) or offset + len(data) > OUTPUT_MAX:
                    raise FrameError("output of a call out of place")
                kept += data
            case Type.PRODUCED:
                self._produced(Fields(payload))
            case Type.ENDED:
                self._end(Fields(payload))
            case Type.ERROR:
                parsed = Fields(payload)
                never = parsed.integer(Tag.ERRNO) == errno.ENOEXEC
                text = f"the place of a call broke: {parsed.text(Tag.TEXT)}"
                self.lost(DsecError("unsupported" if never else "sandbox_dead", text))
            case _:
                raise FrameError(f"{kind.name} for a call")

    def _produced(self, parsed: Fields) -> None:
        name = parsed.raw(Tag.NAME).decode("utf-8", "surrogateescape")
        if (number := parsed.integer(Tag.ERRNO, 0)) != 0:
            self._refused[name] = number
            return
        kept = self._files.setdefault(name, bytearray())
        kept += parsed.raw(Tag.DATA)
        if self._limits is None or sum(map(len, self._files.values())) > PRODUCED_MAX:
            raise FrameError("more files of a call than were asked for")

    def _end(self, parsed: Fields) -> None:
        totals = [int(value) for value in parsed.all(Tag.TOTAL)]
        if self._ended is None or self._ended.done() or len(totals) != 2:
            raise FrameError("the end of no call")
        end = CallEnd(
            code=parsed.integer(Tag.EXIT) & 0xFF,
            signal=parsed.integer(Tag.SIGNAL),
            why=parsed.integer(Tag.WHY),
            ran_us=parsed.integer(Tag.RAN_US),
            cpu_us=parsed.integer(Tag.CPU_US),
            space_full=bool(parsed.integer(Tag.FLAGS) & 1),
            not_started=parsed.integer(Tag.ERRNO),
            stdout=bytes(self._output[1]),
            stderr=bytes(self._output[2]),
            truncated=totals[0] > len(self._output[1]) or totals[1] > len(self._output[2]),
            files={name: bytes(data) for name, data in self._files.items()},
            refused=self._refused,
        )
        self._forget()
        self._ended.set_result(end)

    def lost(self, error: DsecError) -> None:
        self.broken = self.broken or error
        self._ready.set()
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # whoever waited may have been cancelled

    # -- what the owner does ------------------------------------------------------------------------------------------
    def open(self, zygote: tuple[str, ...] = ()) -> None:
        """Begin: with a zygote (its command line), or with cells that execute programs."""
        self.send(Type.CALLS, [(Tag.ARG, one.encode()) for one in zygote])

    async def ready(self) -> None:
        """Wait until a cell is there. `sandbox_dead`, or `unsupported` when the zygote says that it cannot be."""
        await self._ready.wait()
        if self.broken is not None:
            raise self.broken

    async def run(self, plan: CallPlan) -> CallEnd:
        """Run one call in the cell that is ready. When cancelled, it is killed; then wait for `ready` as always.

        Cancelled before all its files are there, it takes the place with it.
        """
        self._ready.clear()
        self._limits = plan.limits
        self._ended = asyncio.get_running_loop().create_future()
        try:
            for name, data in plan.files.items():
                await self._file(data, [(Tag.NAME, name.encode("utf-8", "surrogateescape")), (Tag.MODE, MODE)])
            if plan.stdin is not None:
                await self._file(plan.stdin, [])
        except BaseException:
            # No call runs that could be stopped: its cell would wait for the rest, and none comes after it.
            self.lost(DsecError("sandbox_dead", "a call was given up while its files were on the way"))
            raise
        self.send(Type.CALL, _fields_of(plan))
        if not self.link.alive or self.broken is not None:
            self.lost(DsecError("sandbox_dead", "the place of a call is gone"))
        try:
            return await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.send(Type.CALL_STOP)
            raise

    async def _file(self, data: bytes, head: list[Field]) -> None:
        view = memoryview(data)
        for at in range(0, max(len(view), 1), PIECE):
            self.send(Type.CALL_FILE, [*head, (Tag.DATA, bytes(view[at : at + PIECE]))])
            await self.link.drained()


def _fields_of(plan: CallPlan) -> list[Field]:
    limits = plan.limits
    items: list[Field] = [(Tag.ARG, one.encode("utf-8", "surrogateescape")) for one in plan.argv]
    items += [(Tag.ENV, f"{k}={v}".encode("utf-8", "surrogateescape")) for k, v in plan.env.items()]
    items += [(Tag.NAME, name.encode("utf-8", "surrogateescape")) for name in plan.want]
    if plan.cpus:
        items.append((Tag.CPUS, plan.cpus))
    return [
        *items,
        (Tag.TIMEOUT_MS, limits.wall_ms), (Tag.CPU_MS, limits.cpu_ms), (Tag.CAP, limits.output),
        (Tag.NOFILE, limits.open_files), (Tag.FILE_MAX, limits.file), (Tag.SPACE, limits.space),
        (Tag.STACK, limits.stack), (Tag.LIMIT, limits.produced),
    ]  # fmt: skip
