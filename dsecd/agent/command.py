"""A command inside a sandbox, seen from the host: start it, follow it, feed it, fetch what it wrote."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from dsecd import spans
from dsecd.agent.frames import Field, Fields, FrameError, Tag, Type, parse_output
from dsecd.agent.link import AgentLink, Channel
from dsecd.errors import DsecError, Kind, kind_of_errno

FLAG_TTY: Final = 1
FLAG_STDIN: Final = 2
FLAG_CONTROL: Final = 4
FLAG_QUIET: Final = 8
FLAG_FOLLOW: Final = 16
KILL_ALL: Final = 1
KILL_REST: Final = 4
SYNC_MS: Final = 30_000
MAX_ERRNO: Final = 4095  # as the kernel has it
# What the agent keeps of two streams at most, with what a piece costs us beside its bytes; one that sends more is not
# ours. To a listener, what it was granted, and what was under way for the one before it.
MAX_HELD: Final = 32 << 20
PIECE: Final = 64
UNDER_WAY: Final = 8 << 20
DIGEST_BYTES: Final = 32  # SHA-256
STDOUT, STDERR, CONTROL = 1, 2, 3
_STEP_KIND: Final[dict[int, Kind]] = {1: "pids", 3: "invalid", 5: "invalid"}
_STEP_TEXT: Final = {1: "cannot start a process", 2: "cannot execute", 3: "no such user", 4: "cannot enter directory"}

Listener = Callable[[int, int, memoryview], None]


class Kept(msgspec.Struct):
    """Output kept of one stream: `head`, `dropped` bytes that nobody has (`digest`: their SHA-256), `tail`."""

    head: bytes
    tail: bytes
    dropped: int
    digest: str = ""


class Ended(msgspec.Struct, frozen=True):
    """How it ended. code: 0..255, 128+signal when a signal ended it. why: 0 by itself, 1 timeout, 2 by request."""

    code: int
    signal: int
    why: int
    ran_us: int
    cpu_us: int
    totals: dict[int, int]
    digests: dict[int, str] = {}


def agent_error(payload: memoryview, what: str) -> DsecError:
    """The agent's ERROR frame as ours: the errno decides the kind, the text is data."""
    parsed = Fields(payload)
    number = min(parsed.integer(Tag.ERRNO), MAX_ERRNO)
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
        "_cut", "_doomed", "_fetched", "_given", "_granted", "_held", "_input", "_on_credit", "_on_more", "_on_output",
        "_output", "_silent", "_trace", "complete", "ended", "meta", "program", "reading", "sent", "started",
        "stdin_limit", "stdin_sent", "tied",
    )  # fmt: skip

    def __init__(self, link: AgentLink, meta: bytes = b"", number: int | None = None) -> None:
        if number is None:
            super().__init__(link)
        else:  # taken back from the agent's list
            self.link, self.number = link, number
        loop = asyncio.get_running_loop()
        self.meta = meta
        self.program = "command"  # what errors call it
        self.sent = 0.0
        self._trace: tuple[spans.Trace, int] | None = None  # of the request that started it, and the depth in it
        self._silent = True
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[Ended] = loop.create_future()
        self._output: dict[int, list[tuple[int, bytes]]] = {}
        self._held = 0  # of it
        self._given = 0  # bytes to this listener
        self._granted: dict[int, tuple[int, int]] = {}  # what it was granted of each stream: from, to
        self._on_output: Listener | None = None
        self._cut: asyncio.Future[None] | None = None  # what its listener listened on
        self._fetched: asyncio.Future[None] | None = None
        self._on_credit = asyncio.Event()
        self._on_more = asyncio.Event()
        self._doomed = False
        self.reading = asyncio.Lock()  # to follow it and to fetch all of it exclude each other
        self.tied = False  # to its connection: it does not outlive a pause that ends that
        self.complete = True  # all output of a command that is not quiet comes before its EXIT
        self.stdin_sent = 0
        self.stdin_limit = 0
        self._input = 0  # how many connections its stdin has had
        link.attach(self)

    def start(self, items: list[Field]) -> None:
        """Send EXEC with these fields (META is added)."""
        program = next((value for tag, value in items if tag is Tag.ARG and isinstance(value, bytes)), b"")
        self.program = program[:200].decode("utf-8", "replace")
        self.sent = time.monotonic()
        if (trace := spans.current.get()) is not None:
            self._trace = trace, spans.depth.get()
        self.send(Type.EXEC, [*items, (Tag.META, self.meta)])

    def _took(self, name: str, began: float) -> None:
        """Until now, as a span of the request."""
        if self._trace is not None:
            trace, depth = self._trace
            trace.add(name, "agent", began, time.monotonic(), depth)

    # -- frames -------------------------------------------------------------------------------------------------------
    def frame(self, kind: Type, payload: memoryview) -> None:
        match kind:
            case Type.OUTPUT:
                stream, offset, data = parse_output(payload)
                if self._silent:
                    self._silent = False
                    self._took("first output", self.sent)
                if self._on_output is not None:
                    self._given += len(data)
                    if self._given > UNDER_WAY + sum(limit - first for first, limit in self._granted.values()):
                        raise FrameError("more output than was granted")
                    self._on_output(stream, offset, data)
                    self._on_more.set()
                else:
                    if offset == 0:  # all that is kept comes again: after a pause what came then was not all
                        self._held -= sum(len(piece) + PIECE for _, piece in self._output.pop(stream, []))
                    self._held += len(data) + PIECE
                    if self._held > MAX_HELD:
                        raise FrameError("more output than is kept")
                    self._output.setdefault(stream, []).append((offset, bytes(data)))
            case Type.STARTED:
                if not self.started.done():
                    self.started.set_result(Fields(payload).integer(Tag.PID))
                    self._took("start the command", self.sent)
            case Type.EXIT:
                ended = _parse_exit(payload)
                if not self.started.done():
                    self.started.set_result(0)
                if not self.ended.done():
                    self.ended.set_result(ended)
                    self._took("run", time.monotonic() - ended.ran_us / 1e6)
                    self._trace = None
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

    def renewed(self) -> None:
        """It went on in the guest. Who follows it must attach again, who fetches ask again; who waits for its end still
        does, and asks for all of it."""
        if self.tied:
            self.kill(9)  # it alone: what it has started in the background goes on
            super().renewed()
            return
        error = DsecError("sandbox_dead", "the sandbox was paused meanwhile: ask again", retryable=True)
        for future in (self._cut, self._fetched):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()
        self.listen(None)
        self.stdin_sent = self.stdin_limit = 0  # the agent counts anew, and FETCH brings its grant
        self._input += 1
        self._on_credit.set()
        self._on_more.set()
        if not self.ended.done():
            self._output.clear()
            self._held = 0
            self.send(Type.FETCH)
            if self._doomed:
                self.kill(9, everything=True)

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
        self._cut = None if listener is None else asyncio.get_running_loop().create_future()
        self._given = 0
        self._granted = {}

    @property
    def listened(self) -> bool:
        return self._on_output is not None

    def follow(self, stream: int, offset: int, limit: int) -> None:
        self._granted[stream] = self._granted.get(stream, (offset, 0))[0], limit
        self.send(Type.FOLLOW, [(Tag.STREAM, stream), (Tag.OFFSET, offset), (Tag.LIMIT, limit)])

    async def followed(self, at: Mapping[int, int]) -> Ended:
        """Its end, when its listener has had all that followed streams will give. `at`: where it is, changing
        meanwhile. `sandbox_dead`, retryable: a pause ended the connection; it goes on."""
        cut = self._cut
        assert cut is not None
        await asyncio.wait((self.ended, cut), return_when=asyncio.FIRST_COMPLETED)
        while not cut.done():
            ended = self.ended.result()
            if not self.link.alive or all(at[s] >= ended.totals.get(s, 0) for s in at):
                return ended
            self._on_more.clear()
            await self._on_more.wait()
        cut.result()
        raise AssertionError("it is cut by an error")

    def unfollow(self, stream: int) -> None:
        self.send(Type.UNFOLLOW, [(Tag.STREAM, stream)])

    async def feed(self, data: bytes) -> None:
        """Write to its stdin, waiting for its credit. After its end, bytes are dropped, as by a closed pipe.
        `outcome_unknown`: a pause ended the connection in the midst of it."""
        view, connection = memoryview(data), self._input
        while len(view) and not self.ended.done():
            if self.link.suspended or self._input != connection:
                raise DsecError(
                    "outcome_unknown", "the sandbox was paused while input was on its way: some may be there"
                )
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
        self._doomed = self._doomed or everything  # the link may be suspended
        self.send(Type.KILL, [(Tag.SIGNAL, signal), (Tag.FLAGS, KILL_ALL if everything else 0)])

    def kill_rest(self) -> None:
        """SIGKILL to every process of the command but its first: what a shell started, not the shell."""
        self.send(Type.KILL, [(Tag.SIGNAL, 9), (Tag.FLAGS, KILL_REST)])

    def resize(self, rows: int, cols: int) -> None:
        self.send(Type.RESIZE, [(Tag.ROWS, rows), (Tag.COLS, cols)])

    async def fetch(self) -> None:
        """Get everything kept of an ended command; then `kept` has it."""
        await asyncio.shield(self.ended)
        async with self.reading:
            self.let_go()
            self._fetched = asyncio.get_running_loop().create_future()
            self.send(Type.FETCH)
            if not self.link.alive:
                self.lost(DsecError("sandbox_dead", "the sandbox died before its output was fetched"))
            await asyncio.shield(self._fetched)

    def let_go(self) -> None:
        """Of the output that is here; the agent has it."""
        self._output.clear()
        self._held = 0
        self.complete = False

    def forget(self) -> None:
        """Drop the agent's record of an ended command."""
        self.send(Type.FORGET)
        self.link.detach(self)

    def kept(self, stream: int, ended: Ended) -> Kept:
        """What came of one stream, with the gap found by its offsets."""
        total = ended.totals.get(stream, 0)
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
        return Kept(b"".join(head), b"".join(tail), gap, ended.digests.get(stream, "") if gap else "")


def _parse_exit(payload: memoryview) -> Ended:
    parsed = Fields(payload)
    totals: dict[int, int] = {}
    digests: dict[int, str] = {}
    stream = 0
    for tag, value in parsed.pairs():
        if tag is Tag.STREAM and isinstance(value, int):
            stream = value
        elif tag is Tag.TOTAL and isinstance(value, int):
            totals[stream] = value
        elif tag is Tag.DIGEST and isinstance(value, bytes):
            if len(value) != DIGEST_BYTES:
                raise FrameError(f"a digest of {len(value)} bytes")
            digests[stream] = value.hex()
    return Ended(
        code=parsed.integer(Tag.EXIT) & 0xFF,
        signal=parsed.integer(Tag.SIGNAL),
        why=parsed.integer(Tag.WHY),
        ran_us=parsed.integer(Tag.RAN_US),
        cpu_us=parsed.integer(Tag.CPU_US, 0),
        totals=totals,
        digests=digests,
    )


async def sync(link: AgentLink) -> None:
    """Have file systems flushed, by the program for that. Errors as those of any command."""
    command = Command(link)
    try:
        command.start([(Tag.ARG, b"sync"), (Tag.FLAGS, 0), (Tag.TIMEOUT_MS, SYNC_MS), (Tag.CAP, 4096)])
        await command.ended
    finally:
        command.forget()
