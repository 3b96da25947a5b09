"""A coordinator over real daemons: everything works as on one host, wherever it is, whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import leftovers
import pytest
from daemonkit import Daemon, asynchronous, container_args, started
from fleetkit import Fleet
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from sshd_kit import Sshd
from terminalkit import Terminal

from dsecd import fleethosts
from dsecd.client import DSecClient, DsecError, Sandbox, SandboxFailed
from dsecd.wire import base
from dsecd.wire import daemon as daemon_wire
from dsecd.wire import fleet as fleet_wire
from dsecd.wire import sandbox as wire
from dsecd.wire import trace as trace_wire

GIVE = "give one of them another host_tag"
DSECCTL = str(Path(sys.executable).with_name("dsecctl"))


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """What hangs between so many processes fails, and says where."""

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(150)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon) -> Iterator[list[Daemon]]:
    """Three daemons with the base image, ids apart."""
    made: list[Daemon] = []

    def is_one(item: str) -> bool:
        return any(one.process is not None and item.startswith(f"process {one.pid} ") for one in made)

    leftovers.tolerated.append(is_one)  # tests start them again
    with contextlib.ExitStack() as stack:
        stack.callback(leftovers.tolerated.remove, is_one)
        for n in range(3):
            place, first = tmp_path_factory.mktemp(f"host{n}"), 3100 + 100 * n
            config = {"host_tag": f"h{n}", "id_first_slot": first, "id_last_slot": first + 99, "max_sandboxes": 40}
            made.append(stack.enter_context(started(place, watched, daemon.state / "images", **config)))
        yield made


@pytest.fixture
def fleet(tmp_path: Path, hosts: list[Daemon]) -> Iterator[Fleet]:
    one = Fleet(tmp_path, {f"host{n}": {"url": host.url} for n, host in enumerate(hosts)}).start()
    try:
        yield one
    finally:
        one.end()
        for host in hosts:
            if host.process is None:
                host.start()
            if alive := list(host.sandboxes()):
                host.ask("sandbox.stop_many", {"ids": alive})
            host.ask("daemon.cordon", {"on": False})


def tags(sandboxes: list[Sandbox | SandboxFailed]) -> Counter[str]:
    return Counter(one.id.partition("-")[0] for one in sandboxes if isinstance(one, Sandbox))


@asynchronous
async def test_everything_works_through_it(fleet: Fleet) -> None:
    """Commands, streams both ways, tunnels, trajectories, pauses: of sandboxes on several hosts at once."""
    await fleet.ready(3)
    async with DSecClient(fleet.url) as client:
        boxes = [await client.run_container(container_args(name=f"box{n}")) for n in range(6)]
        assert len(tags([*boxes])) == 3
        data = os.urandom(3_000_000)

        async def use(box: Sandbox) -> None:
            assert (await box.run_shell("echo here; exit 3")).exit_code == 3
            await box.write_file("/blob", data)
            assert await box.read_file("/blob") == data
            process = await box.start(["sh", "-c", "cat; echo end"], stdin=True, follow=True)
            await process.write(b"x" * 300_000, eof=True)
            got = b"".join([piece async for _, piece in process.output()])
            assert got == b"x" * 300_000 + b"end\n"
            big = await box.run_shell("head -c 6000000 /dev/zero; head -c 6000000 /dev/zero >&2")
            assert (len(big.stdout_bytes), len(big.stderr_bytes)) == (6_000_000, 6_000_000)
            await box.pause()
            assert (await box.run_shell("echo again")).stdout == "again\n"
            assert [e.seq for e in (await client.trajectory(box.id)).entries][:2] == [1, 2]

        await asyncio.gather(*map(use, boxes))
        assert (await client.get("box4")).id == boxes[4].id
        assert {one.id for one in await client.list()} == {one.id for one in boxes}
        info: daemon_wire.Info = await client.call("daemon.info", daemon_wire.InfoParams())
        assert (info.host, info.sandboxes, info.sandboxes_max) == ("fleet", 6, 120)
        with pytest.raises(DsecError, match="ask that one") as caught:
            await client.images()
        assert caught.value.kind == "unsupported"
        with pytest.raises(DsecError) as caught:
            await client.get("h9-01m8n19tbn992438ztw4wctybg")
        assert caught.value.kind == "not_found"
        with pytest.raises(DsecError, match="has no image no:such") as caught:
            await client.run_container(container_args(container_image="no:such"))
        assert caught.value.kind == "unsupported"


@asynchronous
async def test_many_are_spread_and_each_has_its_result(fleet: Fleet) -> None:
    await fleet.ready(3)
    async with DSecClient(fleet.url) as client:
        made = await client.run_containers(container_args(name="many"), 45)
        assert [one.info.name for one in made if isinstance(one, Sandbox)] == [f"many-{n}" for n in range(45)]
        assert max(tags(made).values()) - min(tags(made).values()) <= 6
        answers = await asyncio.gather(*(one.run_shell("hostname") for one in made if isinstance(one, Sandbox)))
        assert [one.stdout.strip() for one in answers] == [f"many-{n}" for n in range(45)]
        more = await client.run_containers(container_args(), 100)  # there is room for 75
        assert sum(isinstance(one, Sandbox) for one in more) == 75
        assert {one.kind for one in more if isinstance(one, SandboxFailed)} == {"capacity"}
        stopped: wire.StoppedMany = await client.call("sandbox.stop_many", wire.StopMany(mine=True))
        assert stopped.stopped == 120


@asynchronous
async def test_a_host_that_dies_takes_only_its_own(fleet: Fleet, hosts: list[Daemon]) -> None:
    """Its sandboxes are `sandbox_dead`, infra, for as long as it is away; lists say who is missing; then it is back."""
    await fleet.ready(3)
    async with DSecClient(fleet.url) as client:
        boxes = [one for one in await client.run_containers(container_args(), 9) if isinstance(one, Sandbox)]
        lost = [one for one in boxes if one.id.startswith("h1-")]
        hosts[1].kill()
        await fleet.ready(2)
        for one in boxes:
            if one in lost:
                with pytest.raises(DsecError) as caught:
                    await one.run_shell("true")
                assert (caught.value.kind, caught.value.infra) == ("sandbox_dead", True)
            else:
                assert (await one.run_shell("echo on")).stdout == "on\n"
        listed: wire.Sandboxes = await client.call("sandbox.list", wire.List())
        assert listed.missing == ["host1"]
        assert {one.id for one in listed.sandboxes} == {one.id for one in boxes if one not in lost}
        assert "h1" not in tags(await client.run_containers(container_args(), 6))
        hosts[1].start()
        await fleet.ready(3)
        for one in lost:
            assert (await one.run_shell("echo back")).stdout == "back\n"


@asynchronous
async def test_it_may_die_at_any_moment(fleet: Fleet, hosts: list[Daemon]) -> None:
    """Killed three times in the middle of creates with request_ids, which are asked for again: each made once."""
    await fleet.ready(3)

    async def ask(number: int) -> str:
        while True:
            with contextlib.suppress(DsecError):
                async with DSecClient(fleet.url) as client:
                    made = await client.run_container(
                        container_args(labels={"n": str(number)}), request_id=f"k{number}"
                    )
                    return made.id
            await asyncio.sleep(0.05)

    asking = asyncio.gather(*(ask(n) for n in range(60)))
    for _ in range(3):
        await asyncio.sleep(0.4)
        fleet.end(signal.SIGKILL)
        fleet.start()
        await fleet.ready(3)
    idents = await asyncio.wait_for(asking, 90)
    alive = [one for host in hosts for one in host.ask("sandbox.list")["result"]["sandboxes"]]
    assert Counter(one["labels"]["n"] for one in alive) == Counter(str(n) for n in range(60))
    assert sorted(one["id"] for one in alive) == sorted(idents)


@asynchronous
async def test_two_at_once(fleet: Fleet, tmp_path: Path, hosts: list[Daemon]) -> None:
    """Neither knows of the other; what one has made the other finds, and together they overfill nothing."""
    (tmp_path / "second").mkdir()
    second = Fleet(tmp_path / "second", {f"host{n}": {"url": host.url} for n, host in enumerate(hosts)}).start()
    try:
        await asyncio.gather(fleet.ready(3), second.ready(3))
        async with DSecClient(fleet.url) as one, DSecClient(second.url) as other:
            both = await asyncio.gather(*(c.run_containers(container_args(), 60) for c in (one, other)))
            made = [box for boxes in both for box in boxes]
            assert all(isinstance(box, Sandbox) for box in made), "what one host refuses another one takes"
            assert len(await other.list()) == 120
            await (await other.get(made[0].id)).stop()  # type: ignore[union-attr]
    finally:
        second.end()


@asynchronous
async def test_a_cordoned_host_keeps_what_it_has(fleet: Fleet, hosts: list[Daemon]) -> None:
    await fleet.ready(3)

    def ctl(*args: str) -> str:
        done = subprocess.run([DSECCTL, "-H", fleet.url, "fleet", *args], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async with DSecClient(fleet.url) as client:
        boxes = [one for one in await client.run_containers(container_args(), 9) if isinstance(one, Sandbox)]
        mine = tags([*boxes])["h2"]
        assert mine
        await asyncio.to_thread(ctl, "cordon", "host2")
        hosts[2].restart()  # the host itself keeps that
        await fleet.ready(3)
        assert "h2" not in tags(await client.run_containers(container_args(), 9))
        assert all(one.ok for one in await asyncio.gather(*(box.run_shell("true") for box in boxes)))
        shown = await asyncio.to_thread(ctl, "status")
        assert all(len(line) <= 80 for line in shown.splitlines())
        assert "cordoned" in shown
        drained = await asyncio.to_thread(ctl, "drain", "host2", "--stop", "--timeout", "1s")
        assert f"{mine}" in drained
        assert not hosts[2].sandboxes()
        await asyncio.to_thread(ctl, "uncordon", "host2")
        assert tags(await client.run_containers(container_args(), 12))["h2"]


@asynchronous
async def test_events_of_all_hosts_are_one_stream(fleet: Fleet) -> None:
    await fleet.ready(3)
    async with DSecClient(fleet.url) as client, DSecClient(fleet.url) as watcher:
        seen: list[wire.Event] = []

        async def watch() -> None:
            async for event in watcher.events({"watched": "yes"}):
                seen.append(event)

        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0.3)
        made = await client.run_containers(container_args(labels={"watched": "yes"}), 6)
        await asyncio.sleep(0.5)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert {one.sandbox_id for one in seen if one.event == "started"} == {one.id for one in made}  # type: ignore[union-attr]
        assert [one.seq for one in seen] == list(range(1, len(seen) + 1))


@asynchronous
async def test_events_go_on_when_a_host_is_back(fleet: Fleet, hosts: list[Daemon]) -> None:
    await fleet.ready(3)
    async with DSecClient(fleet.url) as client, DSecClient(fleet.url) as watcher:
        seen: set[str] = set()

        async def watch() -> None:
            async for event in watcher.events({"again": "yes"}):
                seen.add(event.sandbox_id)

        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0.3)
        hosts[1].kill()
        await fleet.ready(2)
        hosts[1].start()
        await fleet.ready(3)
        async with asyncio.timeout(30):
            while not any(ident.startswith("h1-") for ident in seen):
                made = await client.run_containers(container_args(labels={"again": "yes"}), 3)
                await client.stop_many([one for one in made if isinstance(one, Sandbox)])
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@asynchronous
async def test_over_ssh_with_the_tunnel_cut(
    tmp_path: Path, hosts: list[Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host behind a real sshd; every connection is killed while 300 commands are in flight: each runs once."""
    sshd = Sshd(tmp_path)
    monkeypatch.setenv("DSEC_SSH", sshd.command)
    (tmp_path / "f").mkdir()
    url = f"ssh://root@127.0.0.1:{sshd.port}{hosts[0].socket}"
    fleet = Fleet(tmp_path / "f", {"far": {"url": url, "tag": "h0"}}).start()
    try:
        await fleet.ready(1)
        async with DSecClient(fleet.url) as client:
            box = await client.run_container(container_args(pids_limit=2000, memory_limit_mb=1024))

        async def run(number: int) -> str:
            while True:
                with contextlib.suppress(DsecError):
                    async with DSecClient(fleet.url) as one:
                        here = await one.get(box.id)
                        done = await here.run_shell(f"echo {number} >> /runs; echo {number}", request_id=f"c{number}")
                        return done.stdout
                await asyncio.sleep(0.1)

        running = asyncio.gather(*(run(n) for n in range(300)))
        await asyncio.sleep(0.5)
        sshd.kill_connections()
        answers = await asyncio.wait_for(running, 120)
        assert answers == [f"{n}\n" for n in range(300)]
        async with DSecClient(url) as direct:  # the SDK's own tunnel is made again, too
            same = await direct.get(box.id)
            assert sorted(map(int, (await same.read_file("/runs")).split())) == list(range(300))
            # All of them are under way when it is cut: a stream would not be taken up again.
            calls = asyncio.gather(*(same.run_shell(f"echo {n} >> /again; sleep 2") for n in range(500)))
            await asyncio.sleep(1)
            sshd.kill_connections()
            assert all(one.ok for one in await asyncio.wait_for(calls, 120))
            assert sorted(map(int, (await same.read_file("/again")).split())) == list(range(500))
            await same.stop()
    finally:
        fleet.end()
        sshd.stop()


# -- bad input --------------------------------------------------------------------------------------------------------
@asynchronous
async def test_hosts_that_are_not_what_they_should_be(tmp_path: Path, hosts: list[Daemon]) -> None:
    """Another tag than the inventory's, two with one tag, nobody there, garbage, silence: said of each, and no more."""
    garbage, silent = tmp_path / "g.sock", tmp_path / "s.sock"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        welcome = daemon_wire.Welcome(protocol=99, version="9", host="x", uid=0, pid=1)
        writer.write(base.encode(base.Success("2.0", 1, welcome)) + b"\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, garbage)
    mute = socket.socket(socket.AF_UNIX)  # takes connections, as the kernel does, and says nothing
    mute.bind(str(silent))
    mute.listen()
    fleet = Fleet(
        tmp_path,
        {
            "good": {"url": hosts[0].url}, "twin": {"url": hosts[0].url},
            "other": {"url": hosts[1].url, "tag": "zz"}, "absent": {"url": "unix:///nowhere/sock"},
            "newer": {"url": f"unix://{garbage}"}, "silent": {"url": f"unix://{silent}"},
            "ssh": {"url": "ssh://127.0.0.1:1/x"},
        },
    ).start()  # fmt: skip
    try:
        await asyncio.sleep(fleethosts.ANSWER_S + 2)
        async with DSecClient(fleet.url) as client:
            status: fleet_wire.Status = await client.call("fleet.status", fleet_wire.StatusParams())
            said = {host.name: host.problem for host in status.hosts}
            assert {said["good"], said["twin"]} <= {"", *(f"has the same tag as {n}: {GIVE}" for n in ("good", "twin"))}
            assert said["good"] != said["twin"], "one of them is used, and it stays that one"
            assert "says that it is 'h1', and the inventory 'zz'" in said["other"]
            assert "is dsecd running?" in said["absent"]
            assert "speaks protocol 99" in said["newer"]
            assert "did not answer within" in said["silent"]
            assert "ssh to 127.0.0.1 failed" in said["ssh"]
    finally:
        fleet.end()
        server.close()
        mute.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[hosts.a]\nurl = 7\n", "Expected `str`, got `int`"),
        ("[hosts.a]\nurl = 'http://x'\n", "matching regex"),
        ("[hosts.'a b']\nurl = 'ssh://x'\n", "matching regex"),
        ("[hosts.a]\nurl = 'ssh://x'\nweight = 3\n", "unknown field `weight`"),
        ("no toml", "is not one"),
        ("#!/bin/sh\nsleep 60\n", "did not end within 1 s"),
        ("#!/bin/sh\necho '{'\n", "is not one"),
        ("#!/bin/sh\nyes 123456789 | head -c 50000000\n", "prints more than 4 MiB"),
        ("#!/bin/sh\nexit 3\n", "ended with status 3"),
        ("#!/bin/sh\nsetsid sleep 3 &\n", "did not end within 1 s"),  # its output stays open
        ("#!/bin/sh\nhead -c 100000 /dev/zero | tr '\\0' '['\n", "is not one"),
        ("x = " + 5000 * "[", "is not one"),
        ("[hosts.a]\nurl='ssh://x'\ntag='t'\n[hosts.b]\nurl='ssh://y'\ntag='t'\n", "two hosts have the tag 't'"),
    ],
)
def test_inventories_that_are_none(tmp_path: Path, content: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleethosts, "INVENTORY_S", 1.0)
    path = tmp_path / "inventory"
    path.write_text(content)
    path.chmod(0o755 if content.startswith("#!") else 0o644)
    with pytest.raises(DsecError, match=said) as caught:
        asyncio.run(fleethosts.read(path))
    assert caught.value.kind == "invalid"


@asynchronous
async def test_the_inventory_is_read_again(fleet: Fleet, hosts: list[Daemon]) -> None:
    """What is new is used, what is gone is not; a bad one changes nothing. A program may be it."""
    await fleet.ready(3)
    async with DSecClient(fleet.url) as client:
        box = next(one for one in await client.run_containers(container_args(), 9) if one.id.startswith("h2-"))  # type: ignore[union-attr]
        fleet.list({"host0": {"url": hosts[0].url}})
        assert fleet.process is not None
        fleet.process.send_signal(signal.SIGHUP)
        await fleet.ready(1)
        with pytest.raises(DsecError, match="no host of this fleet has a sandbox") as caught:
            await client.get(box.id)  # type: ignore[union-attr]
        assert caught.value.kind == "not_found"
        assert box.id in hosts[2].sandboxes(), "and it goes on there"  # type: ignore[union-attr]
    fleet.inventory.write_text("nonsense")
    fleet.process.send_signal(signal.SIGHUP)
    await asyncio.sleep(0.3)
    await fleet.ready(1)
    listing = {"hosts": {f"host{n}": {"url": host.url} for n, host in enumerate(hosts)}}
    fleet.inventory.write_text(f"#!/bin/sh\necho '{json.dumps(listing)}'\n")
    fleet.inventory.chmod(0o755)
    fleet.process.send_signal(signal.SIGHUP)
    await fleet.ready(3)


@asynchronous
async def test_what_is_said_before_its_host_is_found_is_not_lost(fleet: Fleet) -> None:
    """An empty upload to a sandbox by name, its end right behind it; and a cancel right behind a long command."""
    await fleet.ready(3)
    async with DSecClient(fleet.url) as client:
        box = await client.run_container(container_args(name="early"))
        reader, writer = await asyncio.open_unix_connection(fleet.socket)
        ask = {"id": "early", "path": "/empty", "stream": True}
        writer.write(base.encode({"jsonrpc": "2.0", "id": 1, "method": "file.write", "params": ask}) + b"\n")
        writer.write(base.encode(base.Notification("2.0", "stream.eof", base.StreamEof(1))) + b"\n")
        ask = {"id": "early", "argv": ["sleep", "100"]}
        writer.write(base.encode({"jsonrpc": "2.0", "id": 2, "method": "exec.run", "params": ask}) + b"\n")
        writer.write(base.encode(base.Notification("2.0", "$/cancelRequest", base.Cancel(2))) + b"\n")
        said: dict[int, Any] = {}
        while len(said) < 2:
            answer = json.loads(await asyncio.wait_for(reader.readline(), 20))
            if "method" not in answer:
                said[answer["id"]] = answer
        assert said[1]["result"]["size"] == 0
        assert said[2]["error"]["data"]["detail"] == {"cancelled": True}
        writer.close()
        assert await box.read_file("/empty") == b""


@asynchronous
async def test_garbage_from_a_client(fleet: Fleet, hosts: list[Daemon]) -> None:
    await fleet.ready(3)
    reader, writer = await asyncio.open_unix_connection(fleet.socket)
    for line, kind in (
        (b"{", "invalid"), (b'{"jsonrpc": "2.0", "id": 1, "method": "no.such"}', "invalid"),
        (b'{"jsonrpc": "2.0", "id": 2, "method": "sandbox.create", "params": {"spec": {}}}', "invalid"),
        (b'{"jsonrpc": "2.0", "id": 3, "method": "exec.run", "params": {"id": "h0-nope", "bad": 1}}', "invalid"),
    ):  # fmt: skip
        writer.write(line + b"\n")
        assert json.loads(await asyncio.wait_for(reader.readline(), 10))["error"]["data"]["kind"] == kind
    writer.write(b"x" * (base.MAX_FRAME + 10))
    with contextlib.suppress(ConnectionError):
        assert json.loads(await asyncio.wait_for(reader.readline(), 20))["error"]["data"]["kind"] == "invalid"
    writer.close()
    async with DSecClient(fleet.url) as client:
        await client.run_container(container_args())


# -- what operators see -----------------------------------------------------------------------------------------------
def told(fleet: Fleet, *argv: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([DSECCTL, "-H", fleet.url, *argv], capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@asynchronous
async def test_a_request_is_traced_through_it(fleet: Fleet) -> None:
    """Its own spans, and below each the host's, down to the runtime and the agent."""
    await fleet.ready(3)
    async with DSecClient(fleet.url) as client:
        box = await client.run_container(container_args(), request_id="through-create")
        await box.run_shell("sleep 0.2", request_id="through-exec")
        await box.run_shell("true")
        (made,) = (await client.call("trace.get", trace_wire.Get(trace="through-create"))).traces
        (ran,) = (await client.call("trace.get", trace_wire.Get(trace="through-exec"))).traces
        listed: trace_wire.Traces = await client.call("trace.list", trace_wire.ListTraces(limit=50))
    tag = box.id.partition("-")[0]
    for trace, method, inner in ((made, "sandbox.create", "start the container"), (ran, "exec.run", "run")):
        assert (trace.host, trace.method, trace.outcome) == ("fleet", method, "ok")
        spans = {one.name: one for one in trace.spans}
        asked, there, deep = spans[f"{method} at host{tag[1:]}"], spans[method], spans[inner]
        assert (asked.host, there.host, deep.host) == ("fleet", tag, tag)
        assert asked.depth + 1 == there.depth < deep.depth
        assert asked.start_ms <= there.start_ms <= deep.start_ms
        assert (deep.took_ms or 0) <= (there.took_ms or 0)  # its host's end is a moment after its answer
        assert 0 < (asked.took_ms or 0) <= (trace.took_ms or 0)
    assert (ran.spans[-1].took_ms or 0) > 0 and (ran.took_ms or 0) >= 200
    assert "look for its key" in {one.name for one in made.spans}
    keys = [(one.key, one.method) for one in listed.traces]
    assert keys.count(("through-create", "sandbox.create")) == 1
    assert any(key.startswith(f"{tag}#") for key, method in keys if method == "exec.run"), "its host numbered it"
    done = await asyncio.to_thread(told, fleet, "trace", "through-create")
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 80, done.stdout


@asynchronous
async def test_operators_see_who_is_away(fleet: Fleet, hosts: list[Daemon]) -> None:
    """Metrics, status, doctor and top: a host that dies is a line or a number, and in nobody's way."""
    await fleet.ready(3)

    def seen() -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(str(fleet.directory / "fleet-metrics.sock"))
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            text = answer.read().decode()
        return {one.name: one for one in text_string_to_metric_families(text)}

    def value(found: dict[str, Any], name: str, **labels: str) -> float:
        samples = [one for one in found[name].samples if labels.items() <= one.labels.items()]
        return sum(one.value for one in samples if not one.name.endswith("_created"))

    async with DSecClient(fleet.url) as client:
        made = await client.run_containers(container_args(name="seen"), 6)
        waiting = asyncio.ensure_future(made[0].run_shell("sleep 4"))  # type: ignore[union-attr]
        with pytest.raises(DsecError, match="has no image"):
            await client.run_container(container_args(container_image="no:such"))
        await asyncio.sleep(0.5)
        now = seen()
        assert value(now, "dsec_fleet_host_up") == 3 and value(now, "dsec_fleet_host_placed") == 6
        assert value(now, "dsec_fleet_host_requests_in_flight") == 1 and value(now, "dsec_fleet_refused") == 1
        assert value(now, "dsec_fleet_requests", method="exec.run") == 1 and value(now, "dsec_fleet_clients") == 1
        status: fleet_wire.Status = await client.call("fleet.status", fleet_wire.StatusParams())
        assert sum(one.in_flight for one in status.hosts) == 1
        await waiting
        text = (Path(__file__).parents[2] / "docs/metrics.md").read_text().partition("## The coordinator")[2]
        rows = [line.split("|")[1:5] for line in text.splitlines() if line.startswith("| `")]
        said = {name.strip(" `"): (kind.strip(), about.strip()) for name, kind, _, about in rows}
        assert said == {name: (one.type, one.documentation) for name, one in now.items()}

        whole = await asyncio.to_thread(told, fleet, "doctor", "--fleet", "--json")
        checks = {one["name"]: one["checks"] for one in json.loads(whole.stdout)["hosts"]}
        assert checks.keys() == {"host0", "host1", "host2"} and all(checks.values())
        failing = any(check["level"] == "fail" for some in checks.values() for check in some)
        assert whole.returncode == int(failing)
        hosts[1].kill()
        await fleet.ready(2)
        await asyncio.sleep(0.6)  # an answer of metrics is good for half a second
        now = seen()
        assert value(now, "dsec_fleet_host_up", host="host1") == 0 and value(now, "dsec_fleet_host_up") == 2
        assert value(now, "dsec_fleet_host_lost", host="host1") == 1
        shown = await asyncio.to_thread(told, fleet, "doctor", "--fleet")
        assert shown.returncode == 1
        lines = {line.split()[0]: line.split() for line in shown.stdout.splitlines() if line.startswith("host")}
        assert lines["host1"][2] == "away" and {lines["host0"][2], lines["host2"][2]} <= {"ok", "warn", "fail"}
        assert "fail  host1: cannot be asked" in shown.stdout and "systemctl status dsecd" in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) <= 80, shown.stdout
        top = await asyncio.to_thread(told, fleet, "top", "--once")
        left = sum(one.id.partition("-")[0] != "h1" for one in made if isinstance(one, Sandbox))
        assert top.returncode == 0 and "hosts that do not answer: host1" in top.stdout
        assert sum(line.startswith("seen-") for line in top.stdout.splitlines()) == left
        hosts[1].start()
        await fleet.ready(3)
        back = await asyncio.to_thread(told, fleet, "fleet", "status")
        assert back.returncode == 0 and "host1: was away " in back.stdout
        assert max(map(len, back.stdout.splitlines())) <= 80, back.stdout


@asynchronous
async def test_top_goes_on_when_the_coordinator_is_back(fleet: Fleet) -> None:
    """Meanwhile it shows the last that was known, and says so."""
    await fleet.ready(3)
    async with DSecClient(fleet.url) as client:
        await client.run_container(container_args(name="watched"))
    shown = Terminal(fleet, "top", "--interval", "1s")
    try:
        await asyncio.to_thread(shown.expect, b"watched", 60)
        fleet.end(signal.SIGKILL)
        await asyncio.to_thread(shown.expect, b"no news: ", 60)
        await asyncio.to_thread(shown.expect, b"watched", 60)
        fleet.start()
        await fleet.ready(3)
        page = b"no news"
        while b"no news" in page or b"watched" not in page:
            await asyncio.to_thread(shown.expect, b"\x1b[H", 60)
            page = await asyncio.to_thread(shown.expect, b"\x1b[J", 60)
        shown.type(b"\x03")
        assert await asyncio.to_thread(shown.end, 60) == 130
    finally:
        shown.close()
