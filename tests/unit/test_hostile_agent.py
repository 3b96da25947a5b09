"""What a guest's root can say in its agent's place: all of it is bounded, and an error of the link at worst."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dsecd.agent import command as commands
from dsecd.agent import files as ops
from dsecd.agent import link as links
from dsecd.agent.address import AgentAddress
from dsecd.agent.command import MAX_HELD, PIECE, STDOUT, UNDER_WAY, Command
from dsecd.agent.files import MANY, WINDOW, Exchange
from dsecd.agent.frames import MAX_DATA, Field, FrameError, Tag, Type, fields
from dsecd.agent.link import AgentLink, Channel
from dsecd.errors import DsecError

MIB = 1 << 20


class Loose(AgentLink):
    """A link whose other end is the test."""

    def attach(self, channel: Channel) -> None:
        pass

    @property
    def alive(self) -> bool:
        return True


def loose(work: Callable[[AgentLink], Awaitable[None]]) -> None:
    async def run() -> None:
        await work(Loose(AgentAddress(Path("none")), []))

    asyncio.run(run())


def output(offset: int, size: int) -> memoryview:
    return memoryview(bytes([STDOUT]) + offset.to_bytes(8, "little") + bytes(size))


def test_output_that_nobody_asked_to_be_kept_is_refused() -> None:
    async def work(link: AgentLink) -> None:
        command = Command(link)
        kept = 0
        with pytest.raises(FrameError, match="than is kept"):
            while True:
                command.frame(Type.OUTPUT, output(1 + kept, MIB))
                kept += MIB
                assert kept < 2 * MAX_HELD
        command = Command(link)
        for _ in range(100):  # all of it again, as after a pause
            command.frame(Type.OUTPUT, output(0, 8 * MIB))
        command = Command(link)
        pieces = 0
        with pytest.raises(FrameError, match="than is kept"):
            while True:
                command.frame(Type.OUTPUT, output(5, 0))
                pieces += 1
                assert pieces <= MAX_HELD // PIECE

    loose(work)


def test_a_digest_is_one_or_nothing() -> None:
    async def work(link: AgentLink) -> None:
        end: list[Field] = [(Tag.EXIT, 0), (Tag.SIGNAL, 0), (Tag.WHY, 0), (Tag.RAN_US, 1), (Tag.STREAM, 1)]
        for wrong in (b"", bytes(31), b"x" * 1000):
            with pytest.raises(FrameError, match="digest"):
                Command(link).frame(Type.EXIT, memoryview(fields([*end, (Tag.TOTAL, 5), (Tag.DIGEST, wrong)])))
        command = Command(link)
        command.frame(Type.EXIT, memoryview(fields([*end, (Tag.TOTAL, 5), (Tag.DIGEST, b"x" * 32)])))
        assert command.kept(STDOUT, command.ended.result()).digest == "78" * 32
        command.frame(Type.OUTPUT, output(0, 5))  # nothing is missing, whatever the agent says
        assert command.kept(STDOUT, command.ended.result()).digest == ""

    loose(work)


def test_a_listener_gets_what_it_granted() -> None:
    async def work(link: AgentLink) -> None:
        command, given = Command(link), [0]

        def listener(stream: int, offset: int, data: memoryview) -> None:
            given[0] += len(data)

        command.listen(listener)
        command.follow(STDOUT, 5 << 30, (5 << 30) + MIB)
        with pytest.raises(FrameError, match="than was granted"):
            while True:
                command.frame(Type.OUTPUT, output(5 << 30, 1000))
        assert MIB <= given[0] <= MIB + UNDER_WAY
        command.listen(listener)  # another one: a new account
        for at in range(0, 100 * MIB, MIB):
            command.follow(STDOUT, at, at + MIB)
            command.frame(Type.OUTPUT, output(at, MIB))

    loose(work)


def test_an_exchange_holds_what_it_allowed() -> None:
    async def work(link: AgentLink) -> None:
        exchange = Exchange(link, "x")
        exchange.request(Type.WRITE, [])
        with pytest.raises(FrameError, match="beyond its limit"):
            for _ in range(3):
                exchange.frame(Type.DATA, memoryview(bytes(MAX_DATA)))
        exchange = Exchange(link, "x")
        exchange.request(Type.READ, [], WINDOW)
        exchange.frame(Type.STAT, memoryview(b""))
        for again in (Type.STAT, Type.DATA):
            with pytest.raises(FrameError):
                exchange.frame(again, memoryview(b""))

    loose(work)


def test_bytes_that_come_one_by_one_are_put_together() -> None:
    async def work(link: AgentLink) -> None:
        exchange = Exchange(link, "x")
        exchange.request(Type.CONNECT, [], WINDOW)
        sent = bytes(range(256)) * 200
        for byte in sent:
            exchange.frame(Type.DATA, memoryview(bytes([byte])))
        assert len(exchange._frames) <= MANY + len(sent) // ops.SMALL + 1
        exchange.frame(Type.EOF, memoryview(b""))
        got = b""
        while (item := await exchange.recv())[0] is Type.DATA:
            got += item[1]
        assert got == sent

    loose(work)


@pytest.mark.parametrize("number", [0, 1 << 31, (1 << 64) - 1])
def test_channel_numbers_have_room(number: int) -> None:
    with pytest.raises(FrameError, match="out of its bounds"):
        links._bounded(number)


def test_an_errno_is_one() -> None:
    items: list[Field] = [(Tag.ERRNO, (1 << 64) - 1), (Tag.STEP, (1 << 64) - 1), (Tag.TEXT, b"\xff" * 100_000)]
    error = commands.agent_error(memoryview(fields(items)), "x")
    assert isinstance(error, DsecError)
    assert error.kind == "internal"
    assert len(error.message) < 1000


def test_records_are_short() -> None:
    async def work(link: AgentLink) -> None:
        link._listing = []
        link._frame(Type.RECORD, 1, memoryview(fields([(Tag.META, bytes(4096))])))
        with pytest.raises(FrameError, match="RECORD"):
            link._frame(Type.RECORD, 2, memoryview(fields([(Tag.META, bytes(10_000))])))

    loose(work)
