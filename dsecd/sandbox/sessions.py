"""Sessions: one shell of the image that keeps its directory and variables between lines.

The shell reads its lines from a pipe. After each line it reports the status on a control pipe (fd 9) that the line
itself does not have, and prints the same nonce on stdout and stderr, so that output is attributed exactly. A line can
at most confuse its own session: nothing it prints is trusted beyond that.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shlex
import time
from typing import Final

from dsecd.agent.command import CONTROL, STDERR, STDOUT, Command
from dsecd.agent.frames import FrameError
from dsecd.errors import DsecError
from dsecd.sandbox.commands import KILLED, Commands
from dsecd.sandbox.record import Record
from dsecd.wire import execs as wire

WINDOW: Final = 1 << 20
GRACE_S: Final = 2.0
PAUSED_LOOK_S: Final = 0.5  # how often a line that waits for its deadline looks whether its sandbox goes on
MARK_S: Final = 1.0  # a line may have sent the shell's own stdout elsewhere; then its mark never comes
_PROLOGUE: Final = b'__dsec_end() { echo "$2" ; echo "$2" >&2 ; echo "$2 $1" >&9 ; return "$1" ; }\n'


class _Capture:
    """Head and tail of one stream of one line, and the mark that ends it."""

    def __init__(self, cap: int, mark: bytes) -> None:
        self._head_max = (cap + 1) // 2
        self._tail_max = cap - self._head_max
        self._mark = mark
        self.head = bytearray()
        self.tail = bytearray()
        self.dropped = 0
        self._digest = hashlib.sha256()
        self.ended = asyncio.Event()

    def add(self, data: memoryview) -> None:
        if self.ended.is_set():
            return
        room = self._head_max - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        # The mark is the last thing written: it can only be at the end. Look before anything is dropped.
        whole = self.tail if len(self.tail) >= len(self._mark) else self.head + self.tail
        if whole.endswith(self._mark):
            self._cut()
        else:
            self._drop(self._tail_max + len(self._mark))

    def _cut(self) -> None:
        left = len(self._mark)
        from_tail = min(left, len(self.tail))
        del self.tail[len(self.tail) - from_tail :]
        if left > from_tail:
            del self.head[len(self.head) - (left - from_tail) :]
        self._drop(self._tail_max)
        self.ended.set()

    def _drop(self, keep: int) -> None:
        """All of the tail but its last `keep` bytes."""
        extra = len(self.tail) - keep
        if extra > 0:
            self._digest.update(self.tail[:extra])
            del self.tail[:extra]
            self.dropped += extra

    def finish(self) -> bytes:
        self._drop(self._tail_max)
        return bytes(self.head + self.tail)

    @property
    def digest(self) -> str:
        """Of what was dropped."""
        return self._digest.hexdigest() if self.dropped else ""


class Session:
    """One open shell. One line at a time."""

    def __init__(self, ident: str, command: Command, record: Record) -> None:
        self.id = ident
        self._record = record
        self._command = command
        self._lock = asyncio.Lock()
        self._captures: dict[int, _Capture] = {}
        self._taken = {STDOUT: 0, STDERR: 0, CONTROL: 0}
        command.tied = True
        command.listen(self._output)
        for stream in self._taken:
            command.follow(stream, 0, WINDOW)

    async def begin(self) -> None:
        await self._command.feed(_PROLOGUE)

    @property
    def open(self) -> bool:
        return not self._command.ended.done()

    def _output(self, stream: int, offset: int, data: memoryview) -> None:
        if stream not in self._taken:
            raise FrameError(f"stream {stream} of a session")
        self._taken[stream] = offset + len(data)
        capture = self._captures.get(stream)
        if capture is not None:
            capture.add(data)
        self._command.follow(stream, self._taken[stream], self._taken[stream] + WINDOW)

    async def run(self, asked: wire.SessionRun, received: float) -> wire.Ran:
        """Run one line; `timed_out` when it was killed at its deadline."""
        async with self._lock:
            if not self.open:
                raise DsecError("not_found", f"session {self.id} has ended; open a new one")
            mark = secrets.token_hex(16)
            end = mark.encode() + b"\n"
            self._captures = {s: _Capture(asked.cap_bytes, end) for s in (STDOUT, STDERR)}
            control = self._captures[CONTROL] = _Capture(4096, b"\n")
            queued, started = time.monotonic() - received, self._record.awake
            line = f"command eval {shlex.quote(asked.shell or '')} </dev/null 9>&-\n__dsec_end $? {mark}\n"
            timed_out = False
            feeder = asyncio.ensure_future(self._command.feed(line.encode()))
            try:
                timed_out = not await self._until(control.ended, asked.timeout_s)
                if timed_out:
                    await self._interrupt(control.ended)
                if control.ended.is_set():
                    await self._marks()
            except asyncio.CancelledError:
                self.close()
                raise
            finally:
                feeder.cancel()
            ran = self._record.awake - started
            return self._result(mark, control, queued, ran, timed_out)

    async def _until(self, event: asyncio.Event, timeout: float | None) -> bool:
        """Wait for the event or the shell's end; False at the deadline, whose time stands still in a pause."""
        waiter = asyncio.ensure_future(event.wait())
        deadline = None if timeout is None else self._record.awake + timeout
        try:
            while True:
                left = None if deadline is None else deadline - self._record.awake
                if left is not None and left <= 0:
                    return False
                if left is not None and self._record.paused_at is not None:
                    left = max(left, PAUSED_LOOK_S)
                futures = (waiter, self._command.ended)
                done, _ = await asyncio.wait(futures, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return True
        finally:
            waiter.cancel()

    async def _interrupt(self, ended: asyncio.Event) -> None:
        """Kill what the line started; when the shell itself does not come back, kill it too."""
        self._command.kill_rest()
        if not await self._until(ended, GRACE_S):
            self.close()
            await self._until(ended, GRACE_S)

    async def _marks(self) -> None:
        await asyncio.gather(*(self._until(self._captures[s].ended, MARK_S) for s in (STDOUT, STDERR)))

    def _result(self, mark: str, control: _Capture, queued: float, ran: float, timed_out: bool) -> wire.Ran:
        """queued, ran: seconds."""
        code = 128 + KILLED
        words = bytes(control.head + control.tail).split()
        if len(words) == 2 and words[0] == mark.encode() and words[1].isdigit() and len(words[1]) <= 3:
            code = int(words[1]) & 0xFF
        elif self._command.ended.done() and not timed_out:
            code = self._command.ended.result().code  # the line ended the shell: `exit 3`
        out, err = self._captures[STDOUT], self._captures[STDERR]
        stdout, stderr = out.finish(), err.finish()
        self._captures = {}
        return wire.Ran(
            exec_id=self.id,
            exit_code=code,
            stdout=stdout,
            stderr=stderr,
            stdout_dropped=out.dropped,
            stderr_dropped=err.dropped,
            stdout_dropped_sha256=out.digest,
            stderr_dropped_sha256=err.digest,
            stdout_head=len(out.head) if out.dropped else 0,
            stderr_head=len(err.head) if err.dropped else 0,
            timed_out=timed_out,
            queued_ms=round(queued * 1000, 3),
            ran_ms=round(ran * 1000, 3),
        )

    def close(self) -> None:
        self._command.kill(KILLED, everything=True)


class Sessions:
    """The open sessions of one sandbox."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._open: dict[str, Session] = {}

    async def open(self, asked: wire.SessionOpen, uid: int) -> wire.Session:
        ident = "s" + secrets.token_hex(6)
        _, command = await self._commands.start_shell(asked, uid, ident)
        session = self._open[ident] = Session(ident, command, self._commands.record)
        command.ended.add_done_callback(lambda _f: self._open.pop(ident, None))
        await session.begin()
        return wire.Session(session_id=ident)

    def get(self, ident: str) -> Session:
        session = self._open.get(ident)
        if session is None:
            raise DsecError("not_found", f"no session {ident[:40]!r}: it ended, or the daemon was restarted since")
        return session

    def close(self, ident: str) -> None:
        """End a session; one that has ended is no error."""
        session = self._open.pop(ident, None)
        if session is not None:
            session.close()
