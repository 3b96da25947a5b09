"""The agent link over Firecracker's vsock: nobody listens yet, a connection is reset before READY, the VMM is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from dsecd.agent.address import AgentAddress
from dsecd.agent.files import Exchange
from dsecd.agent.frames import VERSION, Tag, Type, fields, frame
from dsecd.agent.link import AgentLink
from dsecd.errors import DsecError

READY = frame(Type.READY, 0, fields([(Tag.VERSION, VERSION), (Tag.NEXT, 7)]))
Answer = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def vsock(path: Path, answer: Answer) -> AsyncIterator[None]:
    """A socket as Firecracker makes it; `answer` is called with the number of the connection."""
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            with contextlib.suppress(ConnectionError):
                assert await reader.readline() == b"CONNECT 1024\n"
                await answer(len(tasks), reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        await asyncio.sleep(0)  # aborted transports close their sockets in the loop's next turn


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ready: bytes = READY) -> None:
    writer.write(b"OK 1073741824\n")
    await reader.read(1)  # HELLO has begun
    writer.write(ready)
    await writer.drain()
    await reader.read()
    writer.close()


async def connect(path: Path, timeout: float = 5) -> AgentLink:
    return await AgentLink.connect(AgentAddress(path, vsock_port=1024), [], timeout)


def test_it_dials_until_the_guest_listens_and_has_reset_its_vsock(tmp_path: Path) -> None:
    async def answer(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if number == 1:  # nobody listens
            writer.close()
        elif number < 4:  # accepted, then reset
            writer.write(b"OK 1073741824\n")
            await reader.read(1)
            writer.transport.abort()
        else:
            await greet(reader, writer)

    async def scenario() -> None:
        async with vsock(tmp_path / "s", answer):
            link = await connect(tmp_path / "s")
            assert link.alive and link.take_number() == 7 and not link.closed.done()
            await link.suspend()
            await link.connect_again(5)
            assert link.alive
            await link.close()
            assert link.closed.done()

    asyncio.run(scenario())


def test_a_link_that_is_lost_after_ready_is_lost(tmp_path: Path) -> None:
    async def answer(_number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"OK 1073741824\n")
        await reader.read(1)
        writer.write(READY)
        await writer.drain()
        writer.transport.abort()

    async def scenario() -> None:
        async with vsock(tmp_path / "s", answer), asyncio.timeout(5):
            link = await connect(tmp_path / "s")
            await link.closed
            assert not link.alive

    asyncio.run(scenario())


def test_a_vmm_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    async def nothing(_number: int, _reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None: ...

    async def scenario() -> None:
        async with vsock(tmp_path / "s", nothing):
            pass
        began = time.monotonic()
        with pytest.raises(DsecError) as caught:  # the socket is still there, nobody is behind it
            await connect(tmp_path / "s", 30)
        assert caught.value.kind == "sandbox_dead" and time.monotonic() - began < 5

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "ready", [frame(Type.READY, 0, fields([(Tag.VERSION, VERSION + 1), (Tag.NEXT, 1)])), b"\xff" * 64]
)
def test_an_agent_that_breaks_the_protocol_is_not_dialled_again(tmp_path: Path, ready: bytes) -> None:
    async def answer(_number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer, ready)

    async def scenario() -> None:
        async with vsock(tmp_path / "s", answer):
            began = time.monotonic()
            with pytest.raises(DsecError) as caught:
                await connect(tmp_path / "s", 30)
            assert caught.value.kind == "sandbox_dead" and time.monotonic() - began < 5

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "said",
    [b"\xff" * 4096, READY, frame(Type.HELLO, 0, b""), frame(Type.RECORD, 5, b""), frame(Type.DONE, 0, b"")],
    ids=["noise", "READY again", "what hosts say", "an answer to nothing", "an end of nothing"],
)
def test_garbage_on_a_link_that_works_is_the_end_of_it(tmp_path: Path, said: bytes) -> None:
    """Whoever waits for something is told; nothing is read on."""

    async def answer(_number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"OK 1073741824\n")
        await reader.read(1)
        writer.write(READY)
        await reader.readuntil(b"\x2a" * 8)
        writer.write(said)
        await reader.read()

    async def scenario() -> None:
        async with vsock(tmp_path / "s", answer), asyncio.timeout(5):
            link = await connect(tmp_path / "s")
            waiting = Exchange(link, "x")
            waiting.send_raw(Type.DATA, b"\x2a" * 8)
            with pytest.raises(DsecError) as caught:
                await waiting.recv()
            assert caught.value.kind == "sandbox_dead"
            await link.closed
            assert "the agent broke the protocol" in link.reason

    asyncio.run(scenario())
