"""What a sandbox of the SDK gives out that lives on: a started command, an open shell, a tunnel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from dsecd.client_types import ExecResult, result_of
from dsecd.errors import DsecError
from dsecd.wire import base, execs
from dsecd.wire.peer import Pending
from dsecd.wire.stream import CHUNK

if TYPE_CHECKING:
    from dsecd.client import DSecClient


class Process:
    """A command that was started. `output` follows it; `wait` gives what was kept."""

    def __init__(self, client: DSecClient, sandbox: str, ident: str) -> None:
        self._client = client
        self._ref: dict[str, Any] = {"id": sandbox, "exec_id": ident}
        self.id = ident
        self.ended: ExecResult | None = None  # how it ended, once `output` has come to its end; without output
        self.missed = 0  # bytes written before `output` began that were over the cap

    async def wait(self, *, timeout: float | None = None) -> ExecResult:
        """Its result. timeout: of this call, not of the command."""
        return await self._client.ran("exec.wait", execs.Wait(timeout_s=timeout, **self._ref))

    async def write(self, data: bytes, *, eof: bool = False) -> None:
        """Feed its stdin; waits while the command does not read."""
        for start in range(0, len(data), CHUNK):
            await self._client.call("exec.stdin", execs.Stdin(data=data[start : start + CHUNK], **self._ref))
        if eof:
            await self._client.call("exec.stdin", execs.Stdin(eof=True, **self._ref))

    async def signal(self, number: int = 15, *, everything: bool = False) -> None:
        await self._client.call("exec.signal", execs.Signal(signal=number, all=everything, **self._ref))

    async def resize(self, rows: int, cols: int) -> None:
        await self._client.call("exec.resize", execs.Resize(rows=rows, cols=cols, **self._ref))

    async def output(self, *, stdout_from: int = 0, stderr_from: int = 0) -> AsyncGenerator[tuple[int, bytes], None]:
        """(1, data) of stdout and (2, data) of stderr as they come, to the end. Not reading makes the command wait."""
        queue: asyncio.Queue[base.ExecOutput | None] = asyncio.Queue()

        def notified(method: str, raw: msgspec.Raw) -> None:
            if method == "exec.output":
                queue.put_nowait(msgspec.json.decode(raw, type=base.ExecOutput))

        params = execs.Attach(stdout_from=stdout_from, stderr_from=stderr_from, **self._ref)
        at = {1: stdout_from, 2: stderr_from}
        pending = await self._client.begin("exec.attach", params, notified=notified)
        pending.future.add_done_callback(lambda _f: queue.put_nowait(None))
        try:
            while (item := await queue.get()) is not None:
                self.missed += item.offset - at[item.stream]
                at[item.stream] = item.offset + len(item.data)
                yield item.stream, item.data
                limit = at[item.stream] + params.window
                pending.grant(limit, item.stream)
            self.ended = result_of(await pending.finish())
        finally:
            pending.cancel()


class Session:
    """An open shell."""

    def __init__(self, client: DSecClient, sandbox: str, ident: str) -> None:
        self._client = client
        self._ref: dict[str, Any] = {"id": sandbox, "session_id": ident}
        self.id = ident

    async def run(
        self, line: str, *, timeout: float | None = None, cap_bytes: int = 8 << 20, request_id: str | None = None
    ) -> ExecResult:
        """Run one line (or several) in it."""
        params = execs.SessionRun(
            shell=line, timeout_s=timeout, cap_bytes=cap_bytes, request_id=request_id, **self._ref
        )
        return await self._client.ran("session.run", params)

    async def close(self) -> None:
        await self._client.call("session.close", execs.SessionRef(**self._ref))

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


class Tunnel:
    """Bytes to and from a port inside."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    async def read(self) -> bytes:
        """The next bytes; b"" at the end."""
        assert self._pending.inflow is not None
        return await self._pending.inflow.take()

    async def write(self, data: bytes) -> None:
        assert self._pending.outflow is not None
        await self._pending.outflow.write(data)

    def write_eof(self) -> None:
        self._pending.end_upload()

    async def close(self) -> None:
        self._pending.cancel()
        with contextlib.suppress(DsecError):
            await self._pending.finish()
