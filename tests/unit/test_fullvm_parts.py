"""Parts of full VMs without one: keys, and the guest agent's client against agents that lie, stall and flood."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dsecd.cgroup.groups import Cgroups
from dsecd.errors import DsecError
from dsecd.vmm import qga
from dsecd.vmm.fullvm import FullVm
from dsecd.vmm.keymap import CHARACTERS, chord, keys_for
from dsecd.vmm.machine import MachineSpec
from dsecd.vmm.qga import GuestAgent

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


# -- keys --------------------------------------------------------------------------------------------------------------
def test_every_printable_ascii_character_has_keys_of_its_own() -> None:
    printable = [chr(number) for number in range(32, 127)]
    assert set(printable) <= set(CHARACTERS)
    chords = [keys_for(one) for one in printable]
    assert len(set(chords)) == len(printable)
    assert keys_for("a") == ("a",)
    assert keys_for("A") == ("shift", "a")
    assert keys_for("?") == ("shift", "slash")
    for bad in ("ä", "\x00", "", "ab"):
        with pytest.raises(DsecError):
            keys_for(bad)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("ctrl+alt+delete", ("ctrl", "alt", "delete")),
        ("F2", ("f2",)),
        ("Enter", ("ret",)),
        ("shift+a", ("shift", "a")),
        ("+", ("shift", "equal")),
        ("super+l", ("meta_l", "l")),
    ],
)
def test_chords(text: str, keys: tuple[str, ...]) -> None:
    assert chord(text) == keys


@pytest.mark.parametrize("text", ["", "ctrl+", "a b", "+".join("abcdefghi"), "key;drop", "x" * 40])
def test_bad_chords(text: str) -> None:
    with pytest.raises(DsecError) as caught:
        chord(text)
    assert caught.value.kind == "invalid"


# -- the guest agent ---------------------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def guest(directory: Path, talk: Talk) -> AsyncIterator[Path]:
    """A guest whose agent behaves as `talk` does."""
    done: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        done.append(task)
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    path = directory / "qga"
    server = await asyncio.start_unix_server(serve, path, limit=1 << 24)
    try:
        yield path
    finally:
        server.close()
        for task in done:
            task.cancel()
        await asyncio.gather(*done, return_exceptions=True)


def synced(line: bytes) -> bytes:
    """The right answer to a sync."""
    assert line.startswith(b"\xff")
    asked = json.loads(line[1:])
    assert asked["execute"] == "guest-sync-delimited"
    return b'\xff{"return": %d}\n' % asked["arguments"]["id"]


def scripted(*answers: bytes | None, before: bytes = b"") -> Talk:
    """Syncs when it is asked to (with `before` in front), and then gives these answers; None: none at all."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = list(answers)
        while line := await reader.readline():
            if b"guest-sync-delimited" in line:
                writer.write(before + synced(line))
            elif left and (answer := left.pop(0)) is not None:
                writer.write(answer)

    return talk


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(bounded())


async def opened(path: Path) -> GuestAgent:
    reader, writer = await asyncio.open_unix_connection(str(path), limit=qga.MAX_LINE)
    return GuestAgent(reader, writer)


def test_answers_of_an_earlier_life_are_skipped(tmp_path: Path) -> None:
    old = b'{"return": {"id": "old"}}\n\xff{"return": 1}\n{"return": 2}\n{"retu'

    async def work() -> None:
        async with guest(tmp_path, scripted(b'{"return": {"id": "debian"}}\n', before=old)) as path:
            agent = await opened(path)
            assert (await agent.os()).id == "debian"
            await agent.close()

    run(work)


def test_an_answer_that_comes_too_late_is_not_the_next_ones(tmp_path: Path) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        late = False
        while line := await reader.readline():
            if b"guest-sync-delimited" in line:
                if late:
                    writer.write(b'{"return": {"id": "late"}}\n')
                writer.write(synced(line))
            elif late:
                writer.write(b'{"return": {"id": "right"}}\n')
            else:
                late = True

    async def work() -> None:
        async with guest(tmp_path, talk) as path:
            agent = await opened(path)
            with pytest.raises(DsecError, match=r"did not answer guest-get-osinfo within 0\.2 s") as caught:
                await agent.ask("guest-get-osinfo", qga.OsInfo, timeout=0.2)
            assert caught.value.kind == "vmm"
            assert (await agent.os()).id == "right"
            await agent.close()

    run(work)


@pytest.mark.parametrize(
    ("answer", "reason", "kind"),
    [
        (b"not json\n", "cannot be read", "vmm"),
        (b'{"return": {"id": 5}}\n', "cannot be read", "vmm"),
        (b'{"return": ' + b"[" * 5000 + b"\n", "cannot be read", "vmm"),
        (b"{}\n", "neither a result nor an error", "vmm"),
        (b"\xff\xfe\n", "cannot be read", "vmm"),
        (b'{"error": {"class": "CommandNotFound", "desc": "x"}}\n', "does not know guest-get-osinfo", "unsupported"),
        (b'{"error": {"class": "GenericError", "desc": "y"}}\n', "refused guest-get-osinfo", "invalid"),
        (b'{"error": "text"}\n', "cannot be read", "vmm"),
    ],
)
def test_bad_answers_are_one_clear_error(tmp_path: Path, answer: bytes, reason: str, kind: str) -> None:
    async def work() -> None:
        async with guest(tmp_path, scripted(answer, b'{"return": {"id": "after"}}\n')) as path:
            agent = await opened(path)
            with pytest.raises(DsecError, match=reason) as caught:
                await agent.os()
            assert caught.value.kind == kind
            assert (await agent.os()).id == "after"
            await agent.close()

    run(work)


def test_text_from_the_guest_is_cut(tmp_path: Path) -> None:
    answer = json.dumps({"error": {"class": "GenericError", "desc": "z" * 100_000}}).encode() + b"\n"

    async def work() -> None:
        async with guest(tmp_path, scripted(answer)) as path:
            agent = await opened(path)
            with pytest.raises(DsecError) as caught:
                await agent.os()
            assert caught.value.detail == {"said": "z" * 512}
            assert "z" not in caught.value.message
            await agent.close()

    run(work)


def test_a_guest_that_floods_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qga, "MAX_LINE", 1 << 16)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()

    async def work() -> None:
        async with guest(tmp_path, talk) as path:
            agent = await opened(path)
            assert agent.usable
            with pytest.raises(DsecError, match="MiB at once") as caught:
                await agent.os()
            assert caught.value.kind == "vmm"
            assert not agent.usable
            with pytest.raises(DsecError, match="the VMM ended"):
                await agent.os()
            await agent.close()

    run(work)


def test_a_guest_that_never_answers_or_dies(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()

    async def work() -> None:
        async with guest(tmp_path, silent) as path:
            with pytest.raises(DsecError, match=r"did not answer within 0\.3 s: does it run") as caught:
                await GuestAgent.connect(path, 0.3)
            assert caught.value.kind == "vmm"
        async with guest(tmp_path, dead) as path:
            with pytest.raises(DsecError, match="the VMM ended") as caught:
                await GuestAgent.connect(path, 5)
            assert caught.value.kind == "sandbox_dead"
        with pytest.raises(DsecError) as caught:
            await GuestAgent.connect(tmp_path / "nothing", 1)
        assert caught.value.kind == "sandbox_dead"

    run(work)


def test_a_vmm_that_dies_with_the_question_unread_is_noticed_at_once(tmp_path: Path) -> None:
    """Its peer sees a reset then, and not an end."""

    async def work() -> None:
        loop = asyncio.get_running_loop()

        async def die(listener: socket.socket) -> None:
            conn, _ = await loop.sock_accept(listener)
            with conn:
                while True:
                    with contextlib.suppress(BlockingIOError):
                        if conn.recv(1, socket.MSG_PEEK):
                            return
                    await asyncio.sleep(0.01)

        with socket.socket(socket.AF_UNIX) as listener:
            listener.setblocking(False)
            listener.bind(str(tmp_path / "qga"))
            listener.listen()
            dying = asyncio.ensure_future(die(listener))
            with pytest.raises(DsecError, match="the VMM ended") as caught:
                await GuestAgent.connect(tmp_path / "qga", 3)
            assert caught.value.kind == "sandbox_dead"
            await dying

    run(work)


def test_commands_are_waited_for(tmp_path: Path) -> None:
    def answer(**said: Any) -> bytes:
        return json.dumps({"return": said}).encode() + b"\n"

    out = base64.b64encode(b"hello").decode()
    answers = (
        answer(pid=7),
        answer(exited=False),
        answer(exited=False),
        answer(**{"exited": True, "exitcode": 3, "out-data": out, "out-truncated": True}),
        answer(pid=8),
        answer(**{"exited": True, "out-data": "no base64!"}),
    )

    async def work() -> None:
        async with guest(tmp_path, scripted(*answers)) as path:
            agent = await opened(path)
            ran = await agent.exec(["true"])
            assert (ran.exit_code, ran.signal, ran.stdout, ran.stderr, ran.truncated) == (3, 0, b"hello", b"", True)
            with pytest.raises(DsecError, match="cannot be read"):
                await agent.exec(["true"])
            await agent.close()

    run(work)


# -- the screen --------------------------------------------------------------------------------------------------------
def test_a_vm_without_a_screen_says_so(tmp_path: Path) -> None:
    """Before QEMU is asked, which would take a viewer's descriptor and say nothing."""
    spec = MachineSpec(id="x", directory=tmp_path, vcpus=1, memory=1 << 28, kernel=None, display=False)

    async def ask() -> None:
        cgroups = Mock(spec=Cgroups)
        with pytest.raises(DsecError, match="no screen") as caught:
            await FullVm(Mock(cgroups=cgroups), spec, None).viewer()
        assert caught.value.kind == "unsupported"

    asyncio.run(ask())
