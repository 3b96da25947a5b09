"""The SDK's connection breaks: what begins afterwards, and what was under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from wirekit import House, asynchronous, house

from dsecd.client import DSecClient, DsecError, Sandbox
from dsecd.wire import files
from dsecd.wire import sandbox as wire

BIG = bytes(range(256)) * 16384  # more than goes in one message


def box(client: DSecClient) -> Sandbox:
    return Sandbox(client, wire.Sandbox(id="x", state="running", backend="container", image="i"))


async def cut(h: House, client: DSecClient) -> None:
    """All connections break, and the client has seen it."""
    for connection in list(h.server.connections):
        connection.transport.abort()
    async with asyncio.timeout(5):
        while client.alive:
            await asyncio.sleep(0.001)


@asynchronous
async def test_streams_begin_on_a_new_connection() -> None:
    async with house() as h, DSecClient(f"unix://{h.path}", again_s=5) as client:
        for _ in range(2):
            await cut(h, client)
            assert await box(client).write_file("/f", BIG) == len(BIG)
            assert h.toys.uploaded == BIG
            await cut(h, client)
            assert await box(client).read_file("/f", size=1 << 20) == b"x" * (1 << 20)
            await cut(h, client)
            async with contextlib.aclosing(client.events()) as events:
                assert (await anext(events)).event == "tick"


@asynchronous
async def test_a_file_is_read_and_written_from_the_start_again() -> None:
    async with house() as h, DSecClient(f"unix://{h.path}", again_s=5) as client:
        reading = asyncio.create_task(box(client).read_file("/wait", size=1 << 16))
        async with asyncio.timeout(5):
            while not h.toys.told:
                await asyncio.sleep(0.001)
        for connection in list(h.server.connections):
            connection.transport.abort()
        h.toys.gate.set()
        assert await reading == b"x" * (1 << 16)
        writing = asyncio.create_task(box(client).write_file("/f", BIG))
        async with asyncio.timeout(5):
            while not len(BIG) > len(h.toys.uploaded) > 1 << 16:
                await asyncio.sleep(0)
        for connection in list(h.server.connections):
            connection.transport.abort()
        assert await writing == len(BIG)
        assert h.toys.uploaded == BIG


@asynchronous
async def test_without_again_they_say_that_it_is_gone() -> None:
    async with house() as h, DSecClient(f"unix://{h.path}") as client:
        await cut(h, client)
        with pytest.raises(DsecError) as caught:
            await box(client).write_file("/f", BIG)
        assert caught.value.kind == "network"


@asynchronous
async def test_an_upload_of_a_broken_connection_ends_no_other() -> None:
    """Both have the same number, each on its connection; the first one's stream ends in the middle of the second."""
    async with house() as h, DSecClient(f"unix://{h.path}", again_s=5) as client:
        first_goes_on, second_goes_on = asyncio.Event(), asyncio.Event()

        async def pieces(go_on: asyncio.Event) -> AsyncIterator[bytes]:
            yield b"before"
            await go_on.wait()
            yield b"after"

        first = await client.begin("file.write", files.Write(id="x", path="/f", stream=True))
        pouring = asyncio.create_task(first.pour(pieces(first_goes_on)))
        await asyncio.sleep(0.01)
        await cut(h, client)
        second = await client.begin("file.write", files.Write(id="x", path="/f", stream=True))
        assert second.ident == first.ident
        also = asyncio.create_task(second.pour(pieces(second_goes_on)))
        async with asyncio.timeout(5):
            while h.toys.uploaded != b"before":
                await asyncio.sleep(0.001)
        first_goes_on.set()
        await pouring
        first.cancel()
        with pytest.raises(DsecError) as caught:
            await first.finish()
        assert caught.value.kind == "outcome_unknown"
        second_goes_on.set()
        await also
        assert (await second.finish()).size == len(b"beforeafter")
        assert h.toys.uploaded == b"beforeafter"
