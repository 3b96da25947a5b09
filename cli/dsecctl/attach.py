"""A started command at this process's own stdin, stdout, stderr, signals and terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final

from dsecctl import output, terminal
from dsecctl.app import App
from dsecd.client import ExecResult, Process
from dsecd.errors import DsecError

TIMED_OUT: Final = 124
FORWARDED: Final = (signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
QUICK: Final = 4096  # so little is written without a thread: a pipe takes it at once, or its reader is in no hurry


class Attached:
    """Follows one command to its end.

    The first Ctrl-C goes to the command, the second kills it with all its descendants, the third ends dsecctl. When
    dsecctl cannot go on (its stdout is closed, its terminal is gone) the command is killed: nobody would be left to end
    it.
    """

    def __init__(self, app: App, process: Process, *, stdin: bool, tty: bool) -> None:
        self._app = app
        self._process = process
        self._stdin = stdin
        self._tty = tty
        self._interrupts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def follow(self) -> ExecResult:
        """Copy its output, live; returns how it ended, without output."""
        async with self._connected(), contextlib.aclosing(self._process.output()) as pieces:
            async for stream, data in pieces:
                await _write(stream, data)
        if self._process.missed:
            self._app.note(f"{self._process.missed} bytes came before dsecctl could follow, and are lost")
        assert self._process.ended is not None
        return self._process.ended

    async def collect(self) -> ExecResult:
        """The same without showing its output; returns what was kept of it."""
        async with self._connected():
            return await self._process.wait()

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            if self._tty and terminal.is_terminal():
                stack.enter_context(terminal.raw_mode())
            stack.enter_context(self._signals())
            if self._tty:
                self._resized()  # since its start, perhaps
            if self._stdin:
                self._spawn(self._feed())
            try:
                yield
            except BaseException:
                await self._kill()
                raise
            finally:
                await self._end_tasks()

    # -- to the command -----------------------------------------------------------------------------------------------
    async def _feed(self) -> None:
        """Our stdin to its stdin. The daemon answers when it has taken a piece, so a slow command holds us back."""
        source = terminal.Stdin()
        while data := await source.read():
            await self._process.write(data)
        await self._process.write(b"", eof=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers: dict[int, Callable[[], None]] = {signal.SIGINT: self._interrupted, signal.SIGHUP: self._hung_up}
        handlers |= {number: self._forwarder(number) for number in FORWARDED}
        if self._tty:
            handlers[signal.SIGWINCH] = self._resized
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _forwarder(self, number: int) -> Callable[[], None]:
        return lambda: self._spawn(self._process.signal(number))

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._spawn(self._process.signal(signal.SIGINT))
            return
        self._spawn(self._process.signal(signal.SIGKILL, everything=True))
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _resized(self) -> None:
        self._spawn(self._process.resize(*terminal.size()))

    def _hung_up(self) -> None:
        self._spawn(self._process.signal(signal.SIGKILL, everything=True))

    async def _kill(self) -> None:
        with contextlib.suppress(DsecError):
            await self._process.signal(signal.SIGKILL, everything=True)

    # -- tasks --------------------------------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Beside the output. It may come too late, when the command is over already."""

        async def quietly() -> None:
            with contextlib.suppress(DsecError):
                await work

        task = asyncio.get_running_loop().create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_tasks(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def status_of(app: App, result: ExecResult) -> int:
    """The exit status of run and exec; says on stderr what the number alone does not."""
    for happened, text in (
        (result.oom, "the sandbox ran out of memory"),
        (result.pids_limit, "the sandbox ran out of processes"),
        (result.disk_full, "the sandbox's disk was full"),
    ):
        if happened:
            app.note(text)
    if result.timed_out:
        app.note("the command ran into --timeout and was killed [timeout]")
        return TIMED_OUT
    return result.exit_code


def document(result: ExecResult, **more: object) -> dict[str, object]:
    """A result as JSON: text where it is UTF-8, else with the exact bytes beside it."""
    found: dict[str, object] = {**more, "exec_id": result.exec_id, "exit_code": result.exit_code}
    for name in ("stdout", "stderr"):
        text: str = getattr(result, name)
        data: bytes = getattr(result, f"{name}_bytes")
        found[name] = text
        if text.encode() != data:
            found[f"{name}_base64"] = data
    for name in (
        "timed_out", "oom", "pids_limit", "disk_full", "stdout_dropped", "stderr_dropped", "stdout_dropped_sha256",
        "stderr_dropped_sha256", "queued_ms", "ran_ms", "cpu_ms",
    ):  # fmt: skip
        found[name] = getattr(result, name)
    return found


async def _write(stream: int, data: bytes) -> None:
    """In a thread, for whoever reads us may be slow, and leases are renewed meanwhile."""
    fd = output.STDERR if stream == 2 else output.STDOUT
    if len(data) <= QUICK:
        output.raw(fd, data)
    else:
        await asyncio.to_thread(output.raw, fd, data)
