"""QEMU's control socket against a QEMU that stalls, lies, floods and dies: bounded, typed, and over when it is over."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dsecd.errors import DsecError
from dsecd.vmm import qmp as module
from dsecd.vmm.machine import MachineSpec
from dsecd.vmm.qemu import QemuMachine
from dsecd.vmm.qemu_args import CONSOLE_BYTES
from dsecd.vmm.qmp import MAX_LINE, Qmp, QmpError

GREETING = {"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 2}}, "capabilities": []}}
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\r\n"


@contextlib.asynccontextmanager
async def served(path: Path, talk: Talk) -> AsyncIterator[None]:
    tasks: list[asyncio.Task[None]] = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            with contextlib.suppress(ConnectionError):
                await talk(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_unix_server(one, path)
    try:
        yield
    finally:
        server.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def connected(path: Path, answer: Talk) -> AsyncIterator[Qmp]:
    """A connection whose beginning goes well; `answer` is given every command that follows."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(line(GREETING))
        asked = json.loads(await reader.readline())
        writer.write(line({"return": {}, "id": asked["id"]}))
        await answer(reader, writer)
        await reader.read()

    async with served(path, talk):
        qmp = await Qmp.connect(path, 5)
        try:
            yield qmp
        finally:
            await qmp.close()


def test_it_greets_and_answers(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        assert asked["arguments"] == {"dashed-name": 1}
        writer.write(line({"event": "STOP"}) + line({"return": "of another", "id": 99}))
        writer.write(line({"return": 7, "id": asked["id"]}))
        asked = json.loads(await reader.readline())
        writer.write(line({"error": {"class": "CommandNotFound", "desc": "x" * 10_000}, "id": asked["id"]}))

    async def scenario() -> None:
        async with connected(tmp_path / "s", answer) as qmp:
            assert qmp.version == "10.0.2"
            assert await qmp.run("one", dashed_name=1) == 7
            assert list(qmp.events) == ["STOP"]
            with pytest.raises(QmpError, match="QEMU refused two") as caught:
                await qmp.run("two")
            assert (caught.value.kind, caught.value.word) == ("vmm", "CommandNotFound")
            assert len(caught.value.message) < 400

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "said",
    [b"", b"garbage\n", b"[]\n", b'{"QMP": {"version": 3}}\n', b"\xff\xfe\n", b"x" * (MAX_LINE + 2)],
    ids=["end", "no json", "a list", "of no version", "no text", "no end of line"],
)
def test_a_greeting_that_is_none(tmp_path: Path, said: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        if said:
            await reader.read()

    async def scenario() -> None:
        async with served(tmp_path / "s", talk):
            with pytest.raises(DsecError, match="control socket does not answer") as caught:
                await Qmp.connect(tmp_path / "s", 5)
            assert caught.value.kind == "vmm"
            assert len(caught.value.message) < 400

    asyncio.run(scenario())


def test_nobody_and_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMAND_S", 0.2)

    async def stall(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def scenario() -> None:
        with pytest.raises(DsecError, match="does not answer") as caught:
            await Qmp.connect(tmp_path / "nobody", 1)
        assert caught.value.kind == "vmm"
        async with served(tmp_path / "s", stall):
            with pytest.raises(DsecError, match="no greeting"):
                await Qmp.connect(tmp_path / "s", 0.2)
        async with connected(tmp_path / "t", stall) as qmp:
            with pytest.raises(DsecError, match=r"did not answer stop within 0\.2 s") as caught:
                await qmp.run("stop", 0.2)
            assert caught.value.kind == "vmm"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "said",
    [b"", b"not json\n", b"[1, 2]\n", b"y" * (MAX_LINE + 2), b'{"return": "' + b"z" * MAX_LINE + b'"}\n'],
    ids=["end", "no json", "no object", "no end of line", "a line too long"],
)
def test_what_cannot_be_believed_any_more_is_over(tmp_path: Path, said: bytes) -> None:
    """The command that waits and all later ones get `sandbox_dead`, at once."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(said)
        if not said:
            writer.close()

    async def scenario() -> None:
        async with connected(tmp_path / "s", answer) as qmp:
            began = time.monotonic()
            for _ in range(2):
                with pytest.raises(DsecError) as caught:
                    await qmp.run("query-status", 60)
                assert caught.value.kind == "sandbox_dead"
            assert time.monotonic() - began < 30

    asyncio.run(scenario())


def test_a_flood_of_events_is_not_kept(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        for _ in range(200):
            writer.write(line({"event": "E" * 1000, "data": {}}) * 100)
            await writer.drain()
        writer.write(line({"return": {}, "id": asked["id"]}))

    async def scenario() -> None:
        async with connected(tmp_path / "s", answer) as qmp:
            assert await qmp.run("query-status", 60) == {}
            assert len(qmp.events) == 64
            assert {len(name) for name in qmp.events} == {64}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (base64.b64encode(bytes(range(256)) * 1024).decode(), (bytes(range(256)) * 1024)[-CONSOLE_BYTES:]),
        ("a", b""),
        (12, b""),
        (None, b""),
    ],
    ids=["too much", "no base64", "a number", "nothing"],
)
def test_a_console_is_bounded_whatever_is_told(tmp_path: Path, told: Any, kept: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        writer.write(line({"return": told, "id": asked["id"]}))

    async def scenario() -> None:
        spec = MachineSpec(id="x", directory=tmp_path, vcpus=1, memory=1 << 28, kernel=None)
        async with connected(tmp_path / "s", answer) as qmp:
            assert await QemuMachine(spec, "tcg", "10", 1, 1, qmp, "", "boot").console() == kept

    asyncio.run(scenario())
