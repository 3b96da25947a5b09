"""A command inside a sandbox, seen from the host: start it, follow it, feed it, fetch what it wrote."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from dsecd.agent.frames import Field, Fields, FrameError, Tag, Type, parse_output
from dsecd.agent.link import AgentLink, Channel
from dsecd.errors import DsecError, Kind, kind_of_errno

FLAG_TTY: Final = 1
FLAG_STDIN: Final = 2
FLAG_CONTROL: Final = 4
FLAG_QUIET: Final = 8
KILL_ALL: Final = 1
KILL_REST: Final = 4
STDOUT, STDERR, CONTROL = 1, 2, 3
_STEP_KIND: Final[dict[int, Kind]] = {1: "pids", 3: "invalid", 5: "invalid"}
_STEP_TEXT: Final = {1: "cannot start a process", 2: "cannot execute", 3: "no such user", 4: "cannot enter directory"}

Listener = Callable[[int, int, memoryview], None]


class Kept(msgspec.Struct):
    """Output kept of one stream: `head`, then `dropped` bytes that nobody has, then `tail`."""

    head: bytes
    tail: bytes
    dropped: int


class Ended(msgspec.Struct, frozen=True):
    """How it ended. code: 0..255, 128+signal when a signal ended it. why: 0 by itself, 1 timeout, 2 by request."""

    code: int
    signal: int
    why: int
    ran_us: int
    cpu_us: int
    totals: dict[int, int]


def agent_error(payload: memoryview, what: str) -> DsecError:
    """The agent's ERROR frame as ours: the errno decides the kind, the text is data."""
    parsed = Fields(payload)
    number = parsed.integer(Tag.ERRNO)
    step = parsed.integer(Tag.STEP, 0)
    kind = _STEP_KIND.get(step) or kind_of_errno(number)
    where = _STEP_TEXT.get(step)
    text = parsed.text(Tag.TEXT)
    reason = os.strerror(number)
    said = [part for part in (what, where, text) if part and part != reason]
    return DsecError(kind, ": ".join([*said, reason]), detail={"errno": number, "step": step})


class Command(Channel):
    """One command. It lives on when nobody looks; `forget` drops its record in the agent."""

    __slots__ = (
        "_fetched", "_on_credit", "_on_more", "_on_output", "_output", "complete", "ended", "meta", "program",
        "started", "stdin_limit", "stdin_sent",
    )  # fmt: skip

    def __init__(self, link: AgentLink, meta: bytes = b"", number: int | None = None) -> None:
        if number is None:
            super().__init__(link)
        else:  # taken back from the agent's list
            self.link, self.number = link, number
        loop = asyncio.get_running_loop()
        self.meta = meta
        self.program = "command"  # what errors call it
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[Ended] = loop.create_future()
        self._output: dict[int, list[tuple[int, bytes]]] = {}
        self._on_output: Listener | None = None
        self._fetched: asyncio.Future[None] | None = None
        self._on_credit = asyncio.Event()
        self._on_more = asyncio.Event()
        self.complete = True  # all output of a command that is not quiet comes before its EXIT
        self.stdin_sent = 0
        self.stdin_limit = 0
        link.attach(self)

    def start(self, items: list[Field]) -> None:
        """Send EXEC with these fields (META is added)."""
        program = next((value for tag, value in items if tag is Tag.ARG and isinstance(value, bytes)), b"")
        self.program = program[:200].decode("utf-8", "replace")
        self.send(Type.EXEC, [*items, (Tag.META, self.meta)])

    # -- frames -------------------------------------------------------------------------------------------------------
    def frame(self, kind: Type, payload: memoryview) -> None:
        match kind:
            case Type.OUTPUT:
                stream, offset, data = parse_output(payload)
                if self._on_output is not None:
                    self._on_output(stream, offset, data)
                    self._on_more.set()
                else:
                    self._output.setdefault(stream, []).append((offset, bytes(data)))
            case Type.STARTED:
                if not self.started.done():
                    self.started.set_result(Fields(payload).integer(Tag.PID))
            case Type.EXIT:
                ended = _parse_exit(payload)
                if not self.started.done():
                    self.started.set_result(0)
                if not self.ended.done():
                    self.ended.set_result(ended)
                elif self._fetched is not None and not self._fetched.done():
                    self._fetched.set_result(None)
            case Type.CREDIT:
                self.stdin_limit = Fields(payload).integer(Tag.LIMIT)
                self._on_credit.set()
            case Type.ERROR:
                self._fail(agent_error(payload, self.program))
                self.link.detach(self)
            case _:
                raise FrameError(f"{kind.name} for a command")

    def lost(self, error: DsecError) -> None:
        self._fail(error)

    def _fail(self, error: DsecError) -> None:
        for future in (self.started, self.ended, self._fetched):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # not everybody waits for both
        self._on_credit.set()
        self._on_more.set()

    # -- what a holder does -------------------------------------------------------------------------------------------
    def listen(self, listener: Listener | None) -> None:
        """Give output to `listener` instead of keeping it here."""
        self._on_output = listener

    @property
    def listened(self) -> bool:
        return self._on_output is not None

    def follow(self, stream: int, offset: int, limit: int) -> None:
        self.send(Type.FOLLOW, [(Tag.STREAM, stream), (Tag.OFFSET, offset), (Tag.LIMIT, limit)])

    async def followed(self, at: Mapping[int, int], ended: Ended) -> None:
        """Wait until a listener has had all that followed streams will give. `at`: where it is, changing meanwhile."""
        while self.link.alive and any(at[s] < ended.totals.get(s, 0) for s in at):
            self._on_more.clear()
            await self._on_more.wait()

    def unfollow(self, stream: int) -> None:
        self.send(Type.UNFOLLOW, [(Tag.STREAM, stream)])

    async def feed(self, data: bytes) -> None:
        """Write to its stdin, waiting for its credit. After its end, bytes are dropped, as by a closed pipe."""
        view = memoryview(data)
        while len(view) and not self.ended.done():
            room = min(self.stdin_limit - self.stdin_sent, 256 << 10)
            if room <= 0:
                self._on_credit.clear()
                waiter = asyncio.ensure_future(self._on_credit.wait())
                await asyncio.wait((waiter, self.ended), return_when=asyncio.FIRST_COMPLETED)
                waiter.cancel()
                continue
            piece, view = view[:room], view[room:]
            self.send_raw(Type.STDIN, piece)
            self.stdin_sent += len(piece)
            await self.link.drained()

    def feed_eof(self) -> None:
        self.send(Type.STDIN_EOF)

    def kill(self, signal: int, *, everything: bool = False) -> None:
        self.send(Type.KILL, [(Tag.SIGNAL, signal), (Tag.FLAGS, KILL_ALL if everything else 0)])

    def kill_rest(self) -> None:
        """SIGKILL to every process of the command but its first: what a shell started, not the shell."""
        self.send(Type.KILL, [(Tag.SIGNAL, 9), (Tag.FLAGS, KILL_REST)])

    def resize(self, rows: int, cols: int) -> None:
        self.send(Type.RESIZE, [(Tag.ROWS, rows), (Tag.COLS, cols)])

    async def fetch(self) -> None:
        """Get everything kept of an ended command; then `kept` has it."""
        await asyncio.shield(self.ended)
        if self._fetched is None or self._fetched.done():
            self._output.clear()
            self._fetched = asyncio.get_running_loop().create_future()
            self.send(Type.FETCH)
            if not self.link.alive:
                self.lost(DsecError("sandbox_dead", "the sandbox died before its output was fetched"))
        await asyncio.shield(self._fetched)

    def forget(self) -> None:
        """Drop the agent's record of an ended command."""
        self.send(Type.FORGET)
        self.link.detach(self)

    def kept(self, stream: int, total: int) -> Kept:
        """What came of one stream, with the gap found by its offsets."""
        head: list[bytes] = []
        tail: list[bytes] = []
        at = 0
        gap = 0
        for offset, data in self._output.get(stream, []):
            if offset > at:
                gap += offset - at
            (tail if gap else head).append(data)
            at = offset + len(data)
        gap += max(0, total - at)
        return Kept(b"".join(head), b"".join(tail), gap)


def _parse_exit(payload: memoryview) -> Ended:
    parsed = Fields(payload)
    totals: dict[int, int] = {}
    stream = 0
    for tag, value in parsed.pairs():
        if tag is Tag.STREAM and isinstance(value, int):
            stream = value
        elif tag is Tag.TOTAL and isinstance(value, int):
            totals[stream] = value
    return Ended(
        code=parsed.integer(Tag.EXIT) & 0xFF,
        signal=parsed.integer(Tag.SIGNAL),
        why=parsed.integer(Tag.WHY),
        ran_us=parsed.integer(Tag.RAN_US),
        cpu_us=parsed.integer(Tag.CPU_US, 0),
        totals=totals,
    )
