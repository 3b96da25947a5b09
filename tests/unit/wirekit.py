"""A server of the wire with toy handlers over a real Unix socket, and a client that says exactly what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from dsecd.errors import DsecError
from dsecd.wire import base, daemon, execs, files
from dsecd.wire import sandbox as wire
from dsecd.wire.call import Call, Interceptor
from dsecd.wire.limits import Limits
from dsecd.wire.peer import Peer
from dsecd.wire.server import Server


class Toys:
    """Handlers that do nothing, slowly if asked to."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.running = 0
        self.uploaded = b""
        self.gate = asyncio.Event()
        self.window = 1 << 16
        self.told = 0

    def hello(self, call: Call, params: daemon.Hello) -> daemon.Welcome:
        if params.client == "bug":
            raise ZeroDivisionError("secret of the daemon")
        if params.client == "refuse":
            raise DsecError("denied", "not you", detail={"why": 1}, sandbox_id="s1")
        return daemon.Welcome(protocol=1, version="0", host="t", uid=call.peer.uid, pid=call.peer.pid)

    async def wait(self, call: Call, params: wire.Wait) -> wire.Sandbox:
        self.running += 1
        try:
            if params.id == "bug":
                raise KeyError("secret of the daemon")
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(params.id)
            raise
        finally:
            self.running -= 1
        return wire.Sandbox(id=params.id, state="running", backend="container", image="i")

    async def run(self, call: Call, params: execs.Run) -> execs.Ran:
        return execs.Ran(exec_id="x1", exit_code=int(params.timeout_s or 0), stdout=params.stdin or b"")

    async def write(self, call: Call, params: files.Write) -> files.Written:
        self.uploaded = b""
        if params.path == "/wait":
            await self.gate.wait()
        if params.path == "/early":
            raise DsecError("disk_full", "no room")
        async for chunk in call.inflow(self.window):
            self.uploaded += chunk
            if params.path == "/slow":
                await asyncio.sleep(0.001)
        return files.Written(size=len(self.uploaded))

    async def read(self, call: Call, params: files.Read) -> files.FileRead:
        flow = call.outflow(params.window)
        for _ in range(params.size // 4096):
            await flow.write(b"x" * 4096)
            if params.path == "/wait":
                self.told += 1
                await self.gate.wait()
        return files.FileRead(size=flow.sent)

    async def events(self, call: Call, params: wire.Events) -> base.Empty:
        while True:
            self.told += 1
            event = wire.Event(call.id, self.told, 0.0, "s", "tick", text="x" * 1000)
            await call.notify_bounded("sandbox.event", event)
            await asyncio.sleep(0)

    def table(self) -> dict[str, Callable[..., Any]]:
        return {
            "daemon.hello": self.hello, "sandbox.wait": self.wait, "exec.run": self.run, "file.write": self.write,
            "file.read": self.read, "sandbox.events": self.events,
        }  # fmt: skip


class Talker:
    """A raw connection: `send` anything, `reply` is the next line as JSON."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, line: bytes) -> None:
        self.writer.write(line)

    def send(self, method: str, params: Any = None, ident: Any = None, **more: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params or {}, **more}
        if ident is not None:
            message["id"] = ident
        self.say(json.dumps(message).encode() + b"\n")

    async def reply(self) -> dict[str, Any]:
        async with asyncio.timeout(5):
            line = await self.reader.readline()
        assert line.endswith(b"\n"), f"the server closed the connection after {line[:100]!r}"
        message: dict[str, Any] = json.loads(line)
        return message

    async def error(self, ident: Any, kind: str, *words: str) -> dict[str, Any]:
        """The next reply is this error."""
        message = await self.reply()
        assert message.get("id") == ident, message
        assert message["error"]["data"]["kind"] == kind, message
        for word in words:
            assert word in message["error"]["message"], message
        error: dict[str, Any] = message["error"]
        return error

    async def alive(self) -> None:
        """The connection still serves."""
        self.send("daemon.hello", ident="alive?")
        message = await self.reply()
        assert message["id"] == "alive?", message
        assert message["result"]["host"] == "t"

    async def closed(self) -> bool:
        async with asyncio.timeout(5):
            return await self.reader.read() == b""


class House:
    """The server, its handlers and where it listens."""

    def __init__(self, server: Server, toys: Toys, path: str) -> None:
        self.server, self.toys, self.path = server, toys, path

    @contextlib.asynccontextmanager
    async def talker(self) -> AsyncIterator[Talker]:
        reader, writer = await asyncio.open_unix_connection(self.path, limit=1 << 25)
        try:
            yield Talker(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def peer(self) -> AsyncIterator[Peer]:
        peer = await Peer.connect_unix(self.path)
        try:
            yield peer
        finally:
            await peer.aclose()


@contextlib.asynccontextmanager
async def house(interceptor: Interceptor | None = None, limits: Limits | None = None) -> AsyncIterator[House]:
    """At the end no call runs, no connection is left, and nothing of them is held."""
    toys = Toys()
    server = Server(toys.table(), interceptor, limits)
    with tempfile.TemporaryDirectory(prefix="wire") as directory:
        path = str(Path(directory) / "sock")
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        sock.setblocking(False)
        await server.serve(sock)
        try:
            yield House(server, toys, path)
        finally:
            await server.close()
            async with asyncio.timeout(5):
                while server.connections or toys.running or server.held:
                    await asyncio.sleep(0.001)


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test written as a coroutine."""

    @functools.wraps(test)
    def plain(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return plain
