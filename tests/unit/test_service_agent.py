"""The link to an agent that its machine outlives: it ends, another one comes, the machine sleeps, the VMM ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dsecd.agent.address import AgentAddress
from dsecd.agent.command import Command
from dsecd.agent.frames import VERSION, Decoder, Tag, Type, fields, frame
from dsecd.agent.serial import Serial
from dsecd.errors import DsecError
from dsecd.vmm import debian_vm, service
from dsecd.vmm.service import ServiceAgent

SOON_S = 20.0
OVER = b"\xfe\x00" + b"0" * 16


class Vmm:
    """QEMU as far as a ServiceAgent asks it, and the guest's end of the port."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notices: dict[str, asyncio.Event] = {}
        self.open = self.gone = False
        self.pid = 100
        self.asked: list[Type] = []  # of agents, by all connections
        self.dials = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def run(self, command: str) -> Any:
        if self.gone:
            raise DsecError("sandbox_dead", "the VMM ended")
        assert command == "query-chardev"
        return [{"label": "qmp", "frontend-open": True}, {"label": "agent", "frontend-open": self.open}]

    def port(self, *, opened: bool) -> None:
        self.open = opened
        if "VSERPORT_CHANGE" in self.notices:
            self.notices["VSERPORT_CHANGE"].set()

    def say(self, data: bytes) -> None:
        for writer in self._writers:
            writer.write(data)

    def end(self) -> None:
        self.gone = True
        self.port(opened=False)
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.dials += 1
        self._writers.add(writer)
        decoder, data = Decoder(), b""
        try:
            while not (sync := re.search(rb"\xfe\x00[0-9a-f]{16}", data)):
                data += await reader.read(64)
            writer.write(sync[0])
            data = data[sync.end() :]
            while True:
                for kind, number, _ in decoder.feed(data.replace(sync[0], b"").replace(b"\xfe\xff", b"\xfe")):
                    self._answer(writer, kind, number)
                if not (data := await reader.read(4096)):
                    break
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, kind: Type, number: int) -> None:
        self.asked.append(kind)
        if kind is Type.HELLO:
            ready = fields([(Tag.VERSION, VERSION), (Tag.NEXT, 1), (Tag.PID, self.pid)])
            writer.write(Serial.encode(frame(Type.READY, 0, ready)))
        elif kind is Type.WAKE:
            writer.write(Serial.encode(frame(Type.DONE, number, b"")))


@contextlib.asynccontextmanager
async def guest(path: Path) -> AsyncIterator[tuple[Vmm, ServiceAgent]]:
    vmm = Vmm(path / "agent.sock")
    server = await asyncio.start_unix_server(vmm.serve, vmm.path)
    agent = ServiceAgent("x", AgentAddress(vmm.path, serial=True))
    try:
        yield vmm, agent
    finally:
        await agent.release()
        vmm.end()
        server.close()
        await asyncio.sleep(0)


def begin(vmm: Vmm, agent: ServiceAgent, **how: bool) -> None:
    agent.begin(vmm, **how)  # type: ignore[arg-type]


def command_of(agent: ServiceAgent) -> Command:
    command = Command(agent.link, b"")
    command.start([(Tag.ARG, b"sleep")])
    return command


async def kind_of(waiting: Awaitable[object]) -> str:
    with pytest.raises(DsecError) as caught:
        async with asyncio.timeout(SOON_S):
            await waiting
    return caught.value.kind


def scenario(path: Path, work: Callable[[Vmm, ServiceAgent], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(2 * SOON_S), guest(path) as (vmm, agent):
            await work(vmm, agent)

    asyncio.run(run())


def test_nobody_dials_before_the_port_is_open(tmp_path: Path) -> None:
    async def work(vmm: Vmm, agent: ServiceAgent) -> None:
        begin(vmm, agent)
        assert await kind_of(agent.answering(0.2)) == "vmm"
        assert vmm.dials == 0
        assert await kind_of(agent.link.list_commands()) == "vmm"
        vmm.port(opened=True)
        await agent.answering(SOON_S)
        assert (vmm.dials, vmm.asked) == (1, [Type.HELLO])

    scenario(tmp_path, work)


@pytest.mark.parametrize("how", ["says so", "closes the port"])
def test_an_agent_ends_and_another_comes(tmp_path: Path, how: str) -> None:
    async def work(vmm: Vmm, agent: ServiceAgent) -> None:
        vmm.port(opened=True)
        begin(vmm, agent)
        await agent.answering(SOON_S)
        link, command = agent.link, command_of(agent)
        if how == "says so":
            vmm.say(OVER)
        else:
            vmm.port(opened=False)
        assert await kind_of(command.ended) == "outcome_unknown"
        if how != "says so":
            with pytest.raises(DsecError, match="does it run") as caught:
                await agent.answering(0.1)
            assert (caught.value.kind, caught.value.retryable, caught.value.infra) == ("vmm", True, True)
        vmm.pid += 1
        vmm.port(opened=True)
        while vmm.dials < 2:
            await asyncio.sleep(0.01)
        await agent.answering(SOON_S)
        assert agent.link is link
        assert link.alive
        command_of(agent)
        while vmm.asked.count(Type.EXEC) < 2:
            await asyncio.sleep(0.01)

    scenario(tmp_path, work)


@pytest.mark.parametrize("same", [True, False])
def test_commands_go_on_after_a_sleep_unless_their_agent_is_gone(tmp_path: Path, same: bool) -> None:
    async def work(vmm: Vmm, agent: ServiceAgent) -> None:
        vmm.port(opened=True)
        begin(vmm, agent)
        await agent.answering(SOON_S)
        command = command_of(agent)
        await agent.suspend()
        assert not command.ended.done()
        vmm.asked.clear()
        vmm.pid += not same
        begin(vmm, agent, slept=True)
        await agent.answering(SOON_S)
        assert Type.WAKE in vmm.asked
        if same:
            assert vmm.asked.index(Type.FETCH) < vmm.asked.index(Type.WAKE)
            assert not command.ended.done()
        else:
            assert Type.FETCH not in vmm.asked
            assert await kind_of(command.ended) == "outcome_unknown"

    scenario(tmp_path, work)


def test_a_sleep_ends_what_hangs_on_the_connection_and_no_command(tmp_path: Path) -> None:
    """Its follower, who may attach again, and input on its way. What waits for its end still waits; a session's shell
    is killed, as nobody can follow that any more."""

    async def work(vmm: Vmm, agent: ServiceAgent) -> None:
        vmm.port(opened=True)
        begin(vmm, agent)
        await agent.answering(SOON_S)
        command, shell = command_of(agent), command_of(agent)
        shell.tied = True
        for one in (command, shell):
            one.listen(lambda *_: None)
        command.frame(Type.CREDIT, memoryview(fields([(Tag.STREAM, 0), (Tag.LIMIT, 4)])))
        await command.feed(b"1234")
        following = asyncio.create_task(command.followed({1: 0}))
        feeding = asyncio.create_task(command.feed(b"5"))
        await asyncio.sleep(0)
        await agent.suspend()
        assert await kind_of(command.feed(b"6")) == "outcome_unknown"
        vmm.asked.clear()
        begin(vmm, agent, slept=True)
        await agent.answering(SOON_S)
        async with asyncio.timeout(5):
            with pytest.raises(DsecError, match="ask again") as caught:
                await following
            assert (caught.value.kind, caught.value.retryable) == ("sandbox_dead", True)
            assert await kind_of(feeding) == "outcome_unknown"
            assert not command.ended.done() and not command.listened
            assert await kind_of(shell.ended) == "sandbox_dead"
            assert vmm.asked.count(Type.FETCH) == vmm.asked.count(Type.KILL) == 1
            command.frame(Type.CREDIT, memoryview(fields([(Tag.STREAM, 0), (Tag.LIMIT, 4)])))
            await command.feed(b"789")  # the agent counts anew

    scenario(tmp_path, work)


def test_an_agent_that_never_lasts_is_not_dialled_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PAUSE_S", (0.05, 30.0))

    async def work(vmm: Vmm, agent: ServiceAgent) -> None:
        vmm.port(opened=True)
        begin(vmm, agent)
        for _ in range(100):
            vmm.say(OVER)
            await asyncio.sleep(0.02)
        assert 1 < vmm.dials < 8

    scenario(tmp_path, work)


def test_the_vmm_ends(tmp_path: Path) -> None:
    async def work(vmm: Vmm, agent: ServiceAgent) -> None:
        vmm.port(opened=True)
        begin(vmm, agent)
        await agent.answering(SOON_S)
        command = command_of(agent)
        vmm.end()
        assert await kind_of(command.ended) == "sandbox_dead"
        while await kind_of(agent.answering(0.05)) != "sandbox_dead":
            pass

    scenario(tmp_path, work)


def test_the_unit_in_the_documents_is_the_one_that_is_installed() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/agent-protocol.md").read_text()
    assert f"```ini\n{debian_vm.AGENT_SERVICE}```" in text
