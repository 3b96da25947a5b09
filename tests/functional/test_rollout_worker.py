"""A worker is hostile: what it cannot reach, and what becomes of its rollout when it dies, loops or lies."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rolloutkit as kit
from daemonkit import Daemon, asynchronous

from dsecd.client import DSecClient
from dsecd.rollout.channel import ON_AGENT, OWN
from dsecd.wire import rollouts as wire
from dsecd.wire.methods import METHODS

# What fake workers begin with. `call` gives the result or the error's kind.
HEAD = """
import asyncio, json, sys, os
from msgspec import Raw
from dsecd.client import DSecClient
from dsecd.errors import DsecError
from dsecd.wire import base, rollouts as wire, sandbox, execs, files

async def call(client, method, params):
    try:
        return await client.call(method, params)
    except DsecError as exc:
        return exc.kind

def ask(number, body):
    return wire.Ask(step=number, body=Raw(json.dumps(body).encode()))

async def deliver(client, found):
    await client.call("rollout.worker.result", wire.Deliver(outcome=wire.Outcome(output=json.dumps(found).encode())))

async def main():
    async with DSecClient("unix:///run/dsec/sock") as client:
        given = await client.call("rollout.worker.task", wire.GetTask())
        task = json.loads(bytes(given.task))
"""
TAIL = "\nasyncio.run(main())\n"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, watched: list[Path]) -> Iterator[Daemon]:
    """One with the images of rollouts."""
    with kit.daemon_of(tmp_path_factory.mktemp("workers"), watched) as one:
        yield one


def program(body: str) -> list[str]:
    """A worker whose main does this, given `client`, `given` and `task`."""
    return ["python3", "-c", HEAD + "".join(f"        {line}\n" for line in body.strip().splitlines()) + TAIL]


async def ends(client: DSecClient, body: str, task: Any = None, **more: Any) -> wire.Delivered:
    """The result of a rollout with that worker."""
    made = await kit.start(client, task=task, program=program(body), **more)
    result = await kit.result_of(client, made.id)
    await client.acknowledge([result.id])
    return result


async def finds(client: DSecClient, body: str, task: Any = None, **more: Any) -> Any:
    """What a worker found out and delivered."""
    result = await ends(client, body, task, **more)
    assert (result.state, result.reason) == ("done", "")
    assert result.outcome is not None
    return json.loads(result.outcome.output)


# -- what it can reach ------------------------------------------------------------------------------------------------
@asynchronous
async def test_every_other_method_is_denied(daemon: Daemon) -> None:
    """All methods that there are, asked for with no or with plausible params, but the closed list."""
    names = sorted(METHODS.keys() - ON_AGENT - OWN - {"daemon.hello"})
    body = """
reader, writer = await asyncio.open_unix_connection("/run/dsec/sock")
found = {}
for number, (name, params) in enumerate(task.items()):
    request = {"jsonrpc": "2.0", "id": number, "method": name, "params": params}
    writer.write(json.dumps(request).encode() + b"\\n")
    answer = json.loads(await reader.readline())
    found[name] = answer.get("error", {}).get("data", {}).get("kind", "allowed")
await deliver(client, found)
"""
    params: dict[str, Any] = {
        "sandbox.create": {"spec": {"image": kit.IMAGE}},
        "sandbox.stop": {"id": "x"},
        "rollout.attach": {},
        "rollout.answer": {"id": "x", "step": 1, "body": 1},
    }
    async with daemon.client() as client:
        found = await finds(client, body, {name: params.get(name, {}) for name in names})
    assert set(found) == set(names)
    assert "allowed" not in found.values()
    # `invalid`: its params were not even right; what is decoded is denied.
    assert {name for name, kind in found.items() if kind not in ("denied", "invalid")} == set()
    assert {found[name] for name in (*params, "sandbox.list", "daemon.info", "image.list", "image.gc")} == {"denied"}


@asynchronous
async def test_no_other_sandbox_is_reached(daemon: Daemon) -> None:
    """By no method of the closed list, with a request_id or without; not even its own container."""
    requests: dict[str, Any] = {
        "sandbox.get": {}, "exec.run": {"argv": ["true"]}, "exec.start": {"argv": ["true"]},
        "exec.attach": {"exec_id": "x1"}, "exec.stdin": {"exec_id": "x1"}, "exec.signal": {"exec_id": "x1"},
        "exec.resize": {"exec_id": "x1", "rows": 1, "cols": 1}, "exec.wait": {"exec_id": "x1"}, "exec.list": {},
        "session.open": {}, "session.run": {"session_id": "s1", "shell": "true"}, "session.close": {"session_id": "s1"},
        "port.connect": {"port": 80}, "file.read": {"path": "/etc/passwd"}, "file.write": {"path": "/x", "data": ""},
        "file.list": {"path": "/"}, "file.stat": {"path": "/"}, "file.mkdir": {"path": "/y"},
        "file.remove": {"path": "/x"}, "file.rename": {"path": "/x", "to": "/y"}, "tree.upload": {"path": "/"},
        "tree.download": {"path": "/"},
    }  # fmt: skip
    assert requests.keys() == ON_AGENT
    body = """
reader, writer = await asyncio.open_unix_connection("/run/dsec/sock")
found, number = {}, 0
for name, params in task["requests"].items():
    for ident in [*task["idents"], ""]:
        for key in ({}, {"request_id": "same"}):
            number += 1
            request = {"jsonrpc": "2.0", "id": number, "method": name, "params": {"id": ident, **params, **key}}
            writer.write(json.dumps(request).encode() + b"\\n")
            answer = json.loads(await reader.readline())
            kind = answer.get("error", {}).get("data", {}).get("kind", "allowed")
            found.setdefault(name, []).append(kind)
await deliver(client, found)
"""
    async with daemon.client() as client:
        other = await client.run_container(kit.agent_args(name="other"))
        task = {"requests": requests, "idents": [other.id, "other"]}
        found = await finds(client, body, task)
        assert (await other.run_shell("ls /x /y")).exit_code != 0
        await other.stop()
    assert set(found) == set(requests)
    for name, kinds in found.items():
        assert set(kinds[:4]) == {"denied"}, name
        assert set(kinds[4:]) <= {"denied", "invalid"}, name


@asynchronous
async def test_its_own_agent_sandbox_is_reached(daemon: Daemon) -> None:
    """The same calls are allowed there; keys of two workers are two keys."""
    body = """
run = execs.Run(id=given.agent, shell="echo x >> /runs; cat /runs", request_id="same")
first = await client.call("exec.run", run)
again = await client.call("exec.run", run)
got = await client.call("sandbox.get", sandbox.ById(id=given.agent))
await deliver(client, [first.stdout.decode(), again.replayed, got.state, given.job])
"""
    async with daemon.client() as client:
        for _ in range(2):
            assert await finds(client, body) == ["x\n", True, "running", "test"]


@asynchronous
async def test_nobody_else_reaches_its_socket(daemon: Daemon) -> None:
    """Not the agent sandbox, which has no path to it; and whoever opens it on the host is cut off unheard."""
    async with daemon.client() as client:
        made = await kit.start(client)
        await kit.waiting(client, made.id)
        agent = await client.get(made.agent)
        look = "ls -la /run/dsec; find / -xdev -type s 2>/dev/null; cat /proc/net/unix | grep -c dsec"
        assert (await agent.run_shell(look)).stdout.strip() == "0"
        path = daemon.run_dir / "rollouts" / made.id / "sock"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_uid != 0
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(str(path))  # this test is root
            request = {"jsonrpc": "2.0", "id": 1, "method": "rollout.worker.task"}
            try:
                sock.sendall(json.dumps(request).encode() + b"\n")
                assert sock.recv(100) == b""
            except ConnectionError:
                pass
        # From the daemon's own socket a worker's calls are no calls.
        assert await kit.kind_of(client.call("rollout.worker.task", wire.GetTask())) == "denied"
        worker = await client.get(made.worker)
        denied = await worker.run_shell("touch /run/dsec/x; rm /run/dsec/sock; mount -o remount,rw /run/dsec")
        assert denied.exit_code != 0
        assert path.exists()
        await client.stop_rollout(made.id)
        assert not path.parent.exists()
        await client.acknowledge([one.id for one in await client.rollout_results("test")])


@asynchronous
async def test_quotas_of_a_worker(daemon: Daemon) -> None:
    """Connections, requests in flight, bytes in flight, length of a message: refused, and the daemon does not grow."""
    body = """
async def cut(path="/run/dsec/sock"):
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        async with asyncio.timeout(0.5):
            return await reader.read(1) == b"", reader, writer
    except TimeoutError:
        return False, reader, writer
    except ConnectionError:
        return True, reader, writer
more = [await cut() for _ in range(6)]
found = {"cut": [one[0] for one in more]}
for _, _, writer in more:
    writer.close()
await asyncio.sleep(0.2)
run = execs.Run(id=given.agent, shell="sleep 2", stdin=b"x")
flood = [asyncio.ensure_future(call(client, "exec.run", run)) for _ in range(80)]
kinds = [one if isinstance(one, str) else "ran" for one in await asyncio.gather(*flood)]
found["calls"] = {kind: kinds.count(kind) for kind in set(kinds)}
big = execs.Run(id=given.agent, shell="sleep 1", stdin=b"x" * (5 << 20))
kinds = await asyncio.gather(*[call(client, "exec.run", big) for _ in range(4)])
found["bytes"] = sorted(one if isinstance(one, str) else "ran" for one in kinds)
reader, writer = await asyncio.open_unix_connection("/run/dsec/sock")
try:
    for _ in range(9):
        writer.write(b"x" * (1 << 20))
        await writer.drain()
    found["line"] = (await reader.readline()).decode()
except ConnectionError:
    found["line"] = "message is longer"
await deliver(client, found)
"""
    async with daemon.client() as client:
        found = await finds(client, body)
    assert found["cut"] == [False, False, False, True, True, True]  # the worker's own is the fourth
    assert found["calls"] == {"ran": 64, "capacity": 16}
    assert found["bytes"] == ["quota", "quota", "ran", "ran"]
    assert "message is longer" in found["line"]


@asynchronous
async def test_a_worker_that_is_cut_off_while_it_asks(daemon: Daemon) -> None:
    """At any moment of it: asked again, the step reaches the trainer that was there all the time, and is one step."""
    body = """
for number in range(1, 31):
    _, writer = await asyncio.open_unix_connection("/run/dsec/sock")
    params = {"step": number, "body": number}
    request = {"jsonrpc": "2.0", "id": 1, "method": "rollout.worker.ask", "params": params}
    writer.write(json.dumps(request).encode() + b"\\n")
    await writer.drain()
    await asyncio.sleep(0.0005 * (number % 8))
    writer.close()
    await asyncio.sleep(0.03)
    async with asyncio.timeout(5):
        await client.call("rollout.worker.ask", ask(number, number))
await deliver(client, "all")
"""
    async with daemon.client() as client, kit.trainer(daemon, lambda body: kit.said(str(body))):
        result = await ends(client, body)
        assert (result.state, result.steps) == ("done", 30)
        steps = await client.rollout_steps(result.rollout, bodies=True)
        assert [bytes(step.body) for step in steps] == [str(n).encode() for n in range(1, 31)]


# -- how it fails -----------------------------------------------------------------------------------------------------
LIES = {
    "another body": ('await call(client, "rollout.worker.partial", wire.Partial(number=1, data=Raw(b"1")))\n'
                     'asyncio.ensure_future(call(client, "rollout.worker.ask", ask(1, "a")))\n'
                     'await call(client, "rollout.worker.ask", ask(1, "b"))', "step 1 again, with another body"),
    "an unknown step": ('await call(client, "rollout.worker.ask", ask(6, "a"))', "step 6, of at most 5"),
    "a body that is too long": ('await call(client, "rollout.worker.ask", ask(1, "a" * 5000))', "more than 4 KiB"),
    "too many at once": ('await asyncio.gather(*[call(client, "rollout.worker.ask", ask(n, n)) for n in (1, 2, 3)])',
                         "more than 2 steps open at once"),
    "another partial result": ('for text in (b"1", b"2"):\n'
                               '    params = wire.Partial(number=1, data=Raw(text))\n'
                               '    await call(client, "rollout.worker.partial", params)', "again, with other content"),
    "it dies": ('sys.exit("out of ideas")', "ended with status 1 and no result: out of ideas"),
    "it is killed": ("os.kill(os.getpid(), 9)", "ended with status 137 and no result: it said nothing"),
    "it leaves": ("return", "ended with status 0 and no result"),
}  # fmt: skip


@pytest.mark.parametrize("how", LIES)
@asynchronous
async def test_a_worker_that_breaks_the_rules(daemon: Daemon, how: str) -> None:
    """Its rollout has failed, says why, and its sandboxes are gone."""
    body, reason = LIES[how]
    limits = wire.Limits(steps=5, open_steps=2, body_kb=4)
    stays = "" if how in ("it dies", "it is killed", "it leaves") else "\nawait asyncio.sleep(60)"
    async with daemon.client() as client:
        result = await ends(client, body + stays, limits=limits)
        assert result.state == "failed"
        assert reason in result.reason
        assert daemon.sandboxes() == {}
        found = await client.rollout(result.rollout)
        assert (found.state, found.reason) == ("failed", result.reason)


@asynchronous
async def test_a_worker_that_loops(daemon: Daemon) -> None:
    """It asks for ever: the limit ends it. What it sent in all is bounded, too."""
    body = """
for number in range(1, 10**6):
    await client.call("rollout.worker.ask", ask(number, "x" * task))
"""
    async with daemon.client() as client, kit.trainer(daemon, lambda body: kit.said("on")):
        result = await ends(client, body, 10, limits=wire.Limits(steps=20))
        assert (result.state, result.steps) == ("failed", 20)
        assert "step 21, of at most 20" in result.reason
        result = await ends(client, body, 400_000, limits=wire.Limits(total_mb=1))
        assert (result.state, result.steps) == ("failed", 2)
        assert "more than 1 MiB in all" in result.reason


@asynchronous
async def test_results_twice(daemon: Daemon) -> None:
    """The first one is durable and counts; it cannot be taken back by a second."""
    body = """
outcomes = [wire.Deliver(outcome=wire.Outcome(reward=reward)) for reward in (1.0, 1.0, 2.0)]
kinds = await asyncio.gather(*[call(client, "rollout.worker.result", one) for one in outcomes])
"""
    async with daemon.client() as client:
        result = await ends(client, body)
        assert result.state == "done"
        assert result.outcome is not None
        assert result.outcome.reward == 1.0
        assert await client.rollout_results("test") == []


@asynchronous
async def test_the_agent_sandbox_dies(daemon: Daemon) -> None:
    """Then there is nothing to go on with."""
    async with daemon.client() as client:
        made = await kit.start(client)
        await kit.waiting(client, made.id)
        await (await client.get(made.agent)).stop()
        result = await kit.result_of(client, made.id)
        assert result.state == "failed"
        assert "its agent sandbox" in result.reason
        assert daemon.sandboxes() == {}
        await client.acknowledge([result.id])


@asynchronous
async def test_the_agent_kills_the_relay(daemon: Daemon) -> None:
    """The scaffold has no model then, and fails as a program does; the rollout ends with its status."""
    commands = [
        "echo first > /done; for p in /proc/[0-9]*; do grep -qa dsec-relay $p/cmdline && kill -9 ${p#/proc/}; done"
    ]
    async with daemon.client() as client, kit.trainer(daemon, kit.policy(commands)):
        made = await kit.start(client)
        result = await kit.result_of(client, made.id)
        assert result.outcome is not None
        assert result.state == "done"
        assert result.outcome.exit_code != 0
        assert result.outcome.diff == b"first\n"
        await client.acknowledge([result.id])


@asynchronous
async def test_keep_agent(daemon: Daemon) -> None:
    """By policy the agent sandbox stays, for whoever wants to look; the worker never does."""
    async with daemon.client() as client:
        result = await ends(client, "return", keep_agent=True)
        found = await client.rollout(result.rollout)
        assert daemon.sandboxes() == {found.agent: "running"}
        await (await client.get(found.agent)).stop()
