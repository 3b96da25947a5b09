"""Commands of one sandbox: run, start, attach, feed, wait; and taking them back after a daemon restart.

The agent keeps a command's output and status until it is told to forget, so the daemon holds no output of its own and
loses none when it is killed. A command's id is its channel number in the agent's life: `x17`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from msgspec import Struct

from dsecd.agent.command import (
    FLAG_CONTROL,
    FLAG_FOLLOW,
    FLAG_QUIET,
    FLAG_STDIN,
    FLAG_TTY,
    STDERR,
    STDOUT,
    Command,
    Ended,
)
from dsecd.agent.frames import Field, Tag, Type
from dsecd.agent.link import AgentLink
from dsecd.errors import DsecError
from dsecd.metrics import DAEMON
from dsecd.sandbox.cpus import CpuChooser
from dsecd.sandbox.record import Record, as_unix, now
from dsecd.wire import execs as wire

OVERHEAD_S: Final = DAEMON.histogram(
    "dsecd_exec_overhead_seconds", "Of exec.run: from its request to its result, without the time that the command ran."
)
ARG_MAX_ONE: Final = 131_071  # Linux MAX_ARG_STRLEN less the NUL: one argument or NAME=value (execve(2))
ARG_MAX_ALL: Final = 2_000_000  # a quarter of the default 8 MiB stack, less some room (execve(2))
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KILLED: Final = 9
ATTACH_S: Final = 30.0  # so long a command waits for the follower it was started for
KEEP_ENDED: Final = 64  # ended commands of one sandbox that nobody has waited for


class Meta(Struct, omit_defaults=True):
    """What the agent keeps for us with each command: enough to know it again after a restart."""

    text: str
    at: float
    uid: int = -1
    request: str = ""
    quiet: bool = False
    session: str = ""


class Asked(Struct):
    """A command, ready to be sent: made by `plan`, which refuses what execve would refuse."""

    items: list[Field]
    text: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Meta).decode


def plan(record: Record, asked: wire.Command | wire.SessionOpen, argv: list[str], flags: int) -> Asked:
    """The EXEC fields for `argv` with the sandbox's and the caller's environment. `invalid` names what is too long."""
    env = {"PATH": PATH, **record.spec.env, **asked.env}
    strings = [*argv, *(f"{name}={value}" for name, value in env.items())]
    raw = [text.encode() for text in strings]
    for text in raw:
        if len(text) > ARG_MAX_ONE:
            raise DsecError(
                "invalid",
                f"one argument or variable is {len(text)} bytes; Linux takes at most {ARG_MAX_ONE}: "
                "write it to a file and run that",
                detail={"limit": ARG_MAX_ONE},
            )
        if b"\0" in text:
            raise DsecError("invalid", "an argument or variable has a NUL byte")
    if sum(len(text) + 9 for text in raw) > ARG_MAX_ALL:
        raise DsecError("invalid", f"arguments and environment are over {ARG_MAX_ALL} bytes together")
    items: list[Field] = [(Tag.ARG, text) for text in raw[: len(argv)]]
    items += [(Tag.ENV, text) for text in raw[len(argv) :]]
    cwd = asked.cwd or record.spec.workdir
    if cwd:
        if not cwd.startswith("/") or "\0" in cwd:
            raise DsecError("invalid", f"cwd {cwd[:100]!r} is not an absolute path")
        items.append((Tag.CWD, cwd.encode()))
    user = asked.user or record.spec.user
    if user:
        items.append((Tag.USER, user.encode()))
    items.append((Tag.FLAGS, flags))
    cap = asked.cap_bytes if isinstance(asked, wire.Command) else 64 << 10
    items += [(Tag.TIMEOUT_MS, int((asked.timeout_s or 0) * 1000)), (Tag.CAP, cap)]
    return Asked(items, " ".join(argv)[:200])


def argv_of(asked: wire.Command) -> list[str]:
    """argv, or the shell line as an argv; exactly one must be given."""
    if (asked.shell is None) == (not asked.argv):
        raise DsecError("invalid", "give either argv or shell")
    return ["/bin/sh", "-c", asked.shell] if asked.shell is not None else asked.argv


class Entry(Struct):
    """A command we know. followers: attaches under way."""

    command: Command
    meta: Meta
    done: bool = False


class Commands:
    """All commands of one running sandbox."""

    def __init__(
        self, record: Record, link: AgentLink, cpus: CpuChooser | None, on_end: Callable[[str], Awaitable[None]]
    ) -> None:
        self.record = record
        self.link = link
        self._cpus = cpus
        self._on_end = on_end  # of a command that was started and not waited for
        self._ends: set[asyncio.Future[None]] = set()
        self._entries: dict[str, Entry] = {}
        self.busy = 0
        self.detached = False  # the daemon is stopping: commands are let go of, not killed

    def _enter(self, asked: Asked, uid: int, key: str, quiet: bool, session: str = "") -> tuple[str, Entry]:
        if len(self._entries) > 2 * KEEP_ENDED:
            self._trim()
        meta = Meta(asked.text, now(), uid, key, quiet, session)
        command = Command(self.link, _encode(meta))
        entry = Entry(command, meta)
        ident = f"x{command.number}"
        self._entries[ident] = entry
        self.record.commands += 1
        self._watch(ident, entry)
        mask = self._cpus.choose(self.record.spec.cpu, command.ended) if self._cpus is not None else b""
        command.start([*asked.items, (Tag.CPUS, mask)] if mask else asked.items)
        return ident, entry

    def _watch(self, ident: str, entry: Entry) -> None:
        """A running command keeps the sandbox from being idle; one that failed to start is not kept."""
        counts = not entry.meta.session  # an idle shell is no running command
        self.busy += counts

        def ended(future: asyncio.Future[Ended]) -> None:
            self.busy -= counts
            self.record.idle_since = now()
            entry.done = True
            if future.cancelled() or future.exception() is not None:
                self._entries.pop(ident, None)
            elif entry.meta.quiet and not entry.meta.session:
                telling = asyncio.ensure_future(self._on_end(ident))
                self._ends.add(telling)
                telling.add_done_callback(self._ends.discard)

        entry.command.ended.add_done_callback(ended)

    # -- run ----------------------------------------------------------------------------------------------------------
    async def run(self, asked: wire.Run, uid: int, received: float) -> wire.Ran:
        """exec.run: to the end. Cancelled (the client left): the command and its descendants are killed."""
        flags = FLAG_STDIN if asked.stdin else 0
        ident, entry = self._enter(plan(self.record, asked, argv_of(asked), flags), uid, asked.request_id or "", False)
        queued = time.monotonic() - received
        command = entry.command
        feeder: asyncio.Task[None] | None = None
        if asked.stdin:
            feeder = asyncio.get_running_loop().create_task(_feed_all(command, asked.stdin))
            feeder.add_done_callback(lambda task: _kill_unfed(command, task))
        try:
            ended = await command.ended
        except asyncio.CancelledError:
            if not self.detached:
                command.kill(KILLED, everything=True)
                self.forget(ident)
            raise
        finally:
            if feeder is not None:
                feeder.cancel()
                with contextlib.suppress(asyncio.CancelledError, DsecError):
                    await feeder
        if feeder is not None and not feeder.cancelled() and (fault := feeder.exception()) is not None:
            self.forget(ident)
            raise fault  # it was killed for that
        result = self._result(ident, command, ended, queued)
        command.let_go()
        OVERHEAD_S.observe(max(0.0, time.monotonic() - received - ended.ran_us / 1e6))
        if asked.request_id is None:  # after the reply: the agent's waking up must not delay it
            asyncio.get_running_loop().call_soon(self.forget, ident)
        return result

    async def again(self, ident: str) -> wire.Ran:
        """The result of a command that may have ended in an earlier daemon's life."""
        entry = self.get(ident)
        ended = await asyncio.shield(entry.command.ended)
        if not entry.meta.quiet and entry.command.complete:
            return self._result(ident, entry.command, ended, 0.0)  # `run` has still to give it to its caller
        await entry.command.fetch()
        result = self._result(ident, entry.command, ended, 0.0)
        entry.command.let_go()
        return result

    async def wait(self, ident: str) -> wire.Ran:
        """exec.wait."""
        return await self.again(ident)

    # -- start, attach ------------------------------------------------------------------------------------------------
    async def start(self, asked: wire.Start, uid: int) -> wire.Started:
        flags = FLAG_QUIET | (FLAG_TTY if asked.tty else 0) | (FLAG_STDIN if asked.stdin or asked.tty else 0)
        flags |= FLAG_FOLLOW if asked.follow else 0
        planned = plan(self.record, asked, argv_of(asked), flags)
        if asked.tty:
            planned.items += [(Tag.ROWS, asked.rows), (Tag.COLS, asked.cols)]
        self._trim()
        ident, entry = self._enter(planned, uid, asked.request_id or "", True)
        if asked.follow:
            asyncio.get_running_loop().call_later(ATTACH_S, _let_go, entry.command)
        return wire.Started(exec_id=ident, pid=await entry.command.started)

    async def start_shell(self, asked: wire.SessionOpen, uid: int, session: str) -> tuple[str, Command]:
        """The long-lived shell of a session."""
        planned = plan(self.record, asked, [asked.shell], FLAG_QUIET | FLAG_STDIN | FLAG_CONTROL)
        ident, entry = self._enter(planned, uid, asked.request_id or "", True, session)
        await entry.command.started
        return ident, entry.command

    def get(self, ident: str) -> Entry:
        entry = self._entries.get(ident)
        if entry is None:
            raise DsecError("not_found", f"no command {ident[:40]!r} in this sandbox", sandbox_id=self.record.id)
        return entry

    def forget(self, ident: str) -> None:
        entry = self._entries.pop(ident, None)
        if entry is not None:
            entry.command.forget()

    def find_request(self, uid: int, key: str) -> str | None:
        """The command that was started for an idempotency key."""
        for ident, entry in self._entries.items():
            if entry.meta.uid == uid and entry.meta.request == key:
                return ident
        return None

    def listing(self) -> list[wire.ExecInfo]:
        out = []
        for ident, entry in self._entries.items():
            started = entry.command.started
            pid = started.result() if started.done() and not started.exception() else 0
            at = as_unix(entry.meta.at) or 0.0
            out.append(
                wire.ExecInfo(exec_id=ident, running=not entry.done, pid=pid, command=entry.meta.text, started_at=at)
            )
        return out

    def _trim(self) -> None:
        """Answers to a request_id are in the registry by then; what nobody has fetched of the oldest is let go of."""
        ended = [ident for ident, entry in self._entries.items() if entry.done]
        for ident in ended[: max(0, len(ended) - KEEP_ENDED)]:
            self.forget(ident)

    # -- after a restart ----------------------------------------------------------------------------------------------
    async def take_back(self) -> None:
        """Learn from the agent what runs and what ended while no daemon was there."""
        for number, fields in await self.link.list_commands():
            try:
                meta = _decode(fields.raw(Tag.META))
            except msgspec.MsgspecError:
                meta = Meta("?", now())
            command = Command(self.link, fields.raw(Tag.META), number)
            command.complete = False
            entry = Entry(command, meta)
            self._entries[f"x{number}"] = entry
            if not command.started.done():
                command.started.set_result(fields.integer(Tag.PID, 0))
            self._watch(f"x{number}", entry)
            if fields.integer(Tag.STATE):
                command.send(Type.FETCH)
                await asyncio.shield(command.ended)
                command.let_go()
            elif meta.session:
                command.kill(KILLED, everything=True)  # its state machine went with the daemon that ran it

    # -- results ------------------------------------------------------------------------------------------------------
    def _result(self, ident: str, command: Command, ended: Ended, queued: float) -> wire.Ran:
        out = command.kept(STDOUT, ended)
        err = command.kept(STDERR, ended)
        return wire.Ran(
            exec_id=ident,
            stdout=out.head + out.tail,
            stderr=err.head + err.tail,
            stdout_dropped=out.dropped,
            stderr_dropped=err.dropped,
            stdout_dropped_sha256=out.digest,
            stderr_dropped_sha256=err.digest,
            stdout_head=len(out.head) if out.dropped else 0,
            stderr_head=len(err.head) if err.dropped else 0,
            queued_ms=round(queued * 1000, 3),
            **how(ended),
        )


def _let_go(command: Command) -> None:
    """Its follower never came. Its output is kept up to the cap, as that of any other."""
    if not command.listened:
        for stream in (STDOUT, STDERR):
            command.unfollow(stream)


def how(ended: Ended) -> dict[str, Any]:
    """The part of a result that the agent alone knows."""
    return {
        "exit_code": ended.code,
        "signal": ended.signal,
        "timed_out": ended.why == 1,
        "killed": ended.why == 2,
        "ran_ms": ended.ran_us / 1000,
        "cpu_ms": ended.cpu_us / 1000,
    }


def _kill_unfed(command: Command, feeder: asyncio.Task[None]) -> None:
    """It would wait for its input for ever."""
    if not feeder.cancelled() and feeder.exception() is not None:
        command.kill(KILLED, everything=True)


async def _feed_all(command: Command, data: bytes) -> None:
    await command.feed(data)
    command.feed_eof()
