"""The coordinator between clients that do not read and hosts that lie. Hosts are toys, sockets are real."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from wirekit import asynchronous

from dsecd import fleet_front, fleethosts
from dsecd.client import DSecClient, DsecError
from dsecd.fleet import Fleet
from dsecd.fleet_front import Front
from dsecd.fleethosts import Inventory
from dsecd.wire import base, daemon, devices, images, sandbox
from dsecd.wire import peer as peer_module
from dsecd.wire.peer import Peer

ULID = "01m8n19tbn992438ztw4wctybg"
Said = Callable[[dict[str, Any]], list[object]]


class Toy:
    """A host that says what a test wants: a list of messages for each request that `said` takes."""

    def __init__(self, path: Path, tag: str, said: Said = lambda _request: []) -> None:
        self.path, self.tag, self.said = path, tag, said
        self.asked: list[str] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> Toy:
        self.server = await asyncio.start_unix_server(self._serve, self.path, limit=base.MAX_FRAME)
        return self

    def stop(self) -> None:
        self.server.close()
        for writer in self.writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                request = json.loads(line)
                self.asked.append(request["method"])
                for message in self.said(request) or self._usual(request):
                    writer.write(base.encode(message) + b"\n")

    def _usual(self, request: dict[str, Any]) -> list[object]:
        info = daemon.Info(version="1", host=self.tag, started_at=0.0, backends=["container"], sandboxes_max=9,
                           cpu_max=9.0, memory_max_mb=9999)  # fmt: skip
        welcome = daemon.Welcome(protocol=base.PROTOCOL, version="1", host=self.tag, uid=0, pid=1)
        results: dict[str, object] = {
            "daemon.hello": welcome, "daemon.info": info, "image.list": images.Images(images=[]),
            "device.list": devices.DevicePools(pools=[]),
        }  # fmt: skip
        result = results.get(request["method"])
        return [] if result is None else [base.Success("2.0", request["id"], result)]


@contextlib.asynccontextmanager
async def fleet_of(tmp_path: Path, **said: Said) -> AsyncIterator[tuple[str, dict[str, Toy], Fleet]]:
    """A coordinator in this process over toys with these names, which are their tags, too."""
    toys = {tag: await Toy(tmp_path / f"{tag}.sock", tag, one).start() for tag, one in said.items()}
    listing = {"hosts": {tag: {"url": f"unix://{toy.path}"} for tag, toy in toys.items()}}
    source = tmp_path / "inventory"
    source.write_text(f"#!/bin/sh\necho '{json.dumps(listing)}'\n")
    source.chmod(0o755)
    fleet = Fleet(Inventory(source))
    await fleet.inventory.refresh()
    await fleet.inventory.known()
    server = await asyncio.get_running_loop().create_unix_server(lambda: Front(fleet), str(tmp_path / "fleet"))
    try:
        yield f"unix://{tmp_path}/fleet", toys, fleet
    finally:
        server.close()
        for front in list(fleet.fronts):
            front.drop()
        await fleet.inventory.close()
        for toy in toys.values():
            toy.stop()
        await asyncio.sleep(0.05)


def quiet(_request: dict[str, Any]) -> list[object]:
    return []


@asynchronous
async def test_a_host_answers_for_nobody_else(tmp_path: Path) -> None:
    """What it says of a request that another host has, or nobody asked, the client does not hear."""

    def liar(request: dict[str, Any]) -> list[object]:
        if request["method"] != "sandbox.stop":
            return []
        forged: list[object] = [base.Success("2.0", n, {"forged": n}) for n in range(1, 9) if n != request["id"]]
        forged.append(base.Notification("2.0", "stream.data", base.StreamSent(1, 0, memoryview(b"forged"))))
        forged.append(base.Notification("2.0", "sandbox.event", {"sub": 1}))
        return [*forged, base.Success("2.0", request["id"], {"mine": True})]

    async with fleet_of(tmp_path, good=quiet, bad=liar) as (_, toys, _fleet):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "fleet"))
        for ident, method, tag in ((1, "exec.run", "good"), (2, "sandbox.stop", "bad")):
            params = {"id": f"{tag}-{ULID}"} | ({"argv": ["x"]} if ident == 1 else {})
            writer.write(base.encode({"jsonrpc": "2.0", "id": ident, "method": method, "params": params}) + b"\n")
            while method not in toys[tag].asked:
                await asyncio.sleep(0.01)
        answer = json.loads(await asyncio.wait_for(reader.readline(), 10))
        assert (answer["id"], answer["result"]) == (2, {"mine": True})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readline(), 0.3)
        writer.close()


@asynchronous
async def test_a_client_that_does_not_read_is_not_read_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage without end, whose errors nobody fetches: the coordinator holds little of it."""
    async with fleet_of(tmp_path, one=quiet) as (_, _toys, fleet):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "fleet"), limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                while True:
                    writer.write(b"{\n" * 10_000)
                    await writer.drain()
        (front,) = fleet.fronts
        assert front.transport is not None
        assert front.transport.get_write_buffer_size() < 32 << 20
        writer.transport.abort()
        assert reader is not None


@asynchronous
async def test_one_host_that_does_not_answer_holds_up_no_answer_about_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleethosts, "QUESTION_S", 0.3)

    def lists(request: dict[str, Any]) -> list[object]:
        found = sandbox.Sandboxes(sandboxes=[])
        return [base.Success("2.0", request["id"], found)] if request["method"] == "sandbox.list" else []

    async with fleet_of(tmp_path, good=lists, slow=quiet) as (url, _, _fleet), DSecClient(url) as client:
        async with asyncio.timeout(20):
            listed: sandbox.Sandboxes = await client.call("sandbox.list", sandbox.List())
        assert listed.missing == ["slow"]


@asynchronous
async def test_an_id_of_a_host_that_was_never_reached_is_not_an_id_from_nowhere(tmp_path: Path) -> None:
    """A coordinator that began while a host was away does not say that its sandboxes never were."""

    def knows_none(request: dict[str, Any]) -> list[object]:
        failure = base.Failure.of(request["id"], DsecError("not_found", "no such sandbox"))
        return [failure] if request["method"] == "sandbox.get" else []

    def renews(request: dict[str, Any]) -> list[object]:
        return [base.Success("2.0", request["id"], sandbox.Renewed())] if request["method"] == "lease.renew" else (
            knows_none(request)
        )  # fmt: skip

    def away(request: dict[str, Any]) -> list[object]:
        return [base.Failure.of(request["id"], DsecError("internal", "ill"))]

    async with fleet_of(tmp_path, good=renews, ill=away) as (url, toys, fleet), DSecClient(url) as client:
        ids = {f"ill-{ULID}": "sandbox_dead", f"good-{ULID}": "not_found", "a-name": "sandbox_dead"}
        for ident, kind in ids.items():
            with pytest.raises(DsecError) as caught:
                await client.get(ident)
            assert caught.value.kind == kind, ident
        renewed: sandbox.Renewed = await client.call("lease.renew", sandbox.Renew(ids=list(ids)[:2]))
        assert renewed.gone == []
        toys["ill"].said = knows_none
        async with asyncio.timeout(20):
            while fleet.hosts["ill"].problem:
                await asyncio.sleep(0.05)
        with pytest.raises(DsecError) as caught:
            await client.get(f"nowhere-{ULID}")
        assert caught.value.kind == "not_found"


@asynchronous
async def test_a_cancel_right_behind_its_request_is_an_answer(tmp_path: Path) -> None:
    """Of what the coordinator answers itself, too; and the id is free again."""
    async with fleet_of(tmp_path, one=quiet) as (_, _toys, _fleet):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "fleet"))
        for _ in range(2):
            ask = base.encode({"jsonrpc": "2.0", "id": 7, "method": "sandbox.list", "params": {}})
            writer.write(ask + b"\n" + base.encode(base.Notification("2.0", "$/cancelRequest", base.Cancel(7))) + b"\n")
            answer = json.loads(await asyncio.wait_for(reader.readline(), 10))
            assert (answer["id"], answer["error"]["data"]["kind"]) == (7, "timeout")
        writer.close()


@asynchronous
async def test_a_connection_that_nobody_reads_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes wait in it: the other end has them for a moment, and then it is cut."""
    monkeypatch.setattr(peer_module, "CLOSE_S", 0.2)
    over = asyncio.Event()

    async def mute(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await over.wait()
        writer.transport.abort()

    server = await asyncio.start_unix_server(mute, tmp_path / "mute")
    peer = await Peer.connect_unix(str(tmp_path / "mute"))
    pending = peer.start("sandbox.get", sandbox.ById(id="x" * 64, request_id=None))
    for _ in range(40):
        peer.notify("stream.data", base.StreamSent(1, 0, memoryview(bytes(200_000))))
    async with asyncio.timeout(10):
        await peer.aclose()
    with pytest.raises(DsecError):
        await pending.finish()
    over.set()
    server.close()


@pytest.mark.parametrize("ident", [5, "a", "a,b", 'a"},{'])
@asynchronous
async def test_streams_come_whatever_the_id(tmp_path: Path, ident: int | str) -> None:
    """The lines of a stream are looked at by their beginning: it is what the wire writes."""
    data = base.Notification("2.0", "stream.data", base.StreamSent(ident, 0, memoryview(b"x")))
    assert base.encode(data).startswith(fleet_front._STREAM)

    def streams(request: dict[str, Any]) -> list[object]:
        return [data, base.Success("2.0", ident, {})] if request["method"] == "file.read" else []

    async with fleet_of(tmp_path, one=streams):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "fleet"))
        ask = {"jsonrpc": "2.0", "id": ident, "method": "file.read", "params": {"id": f"one-{ULID}", "path": "/x"}}
        writer.write(base.encode(ask) + b"\n")
        assert await asyncio.wait_for(reader.readline(), 10) == base.encode(data) + b"\n"
        assert json.loads(await asyncio.wait_for(reader.readline(), 10))["id"] == ident
        writer.close()
