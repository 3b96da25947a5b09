"""Figures of networks: how long other rules take, and an answer to a question for a name."""

from __future__ import annotations

import ast
import tempfile
from pathlib import Path
from typing import Final

from netkit import DNS4, SERVICES, World

from dsecd.client import Sandbox
from tests.bench.frame import BASE, Stage, clock, median, say, spread
from tests.own import OwnDaemon, own_daemon

CHANGES: Final = 300
QUESTIONS: Final = 300
FIRSTS: Final = 10
# Inside: questions for A, timed by who asks. The first word of each name is numbered, or always the same.
ASK: Final = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(5)
sock.connect(("100.88.63.254", 53))
took = []
for number in range(int(sys.argv[2])):
    labels = sys.argv[1].replace("N", str(number)).split(".")
    name = b"".join(bytes([len(one)]) + one.encode() for one in labels) + bytes(1)
    began = time.perf_counter()
    sock.send(number.to_bytes(2, "big") + bytes.fromhex("01000001000000000000") + name + bytes.fromhex("00010001"))
    reply = sock.recv(2000)
    took.append((time.perf_counter() - began) * 1e3)
    assert reply[:2] == number.to_bytes(2, "big") and reply[3] & 15 == 0 and reply[7] > 0, reply
    time.sleep(0.012)  # within what one sandbox may ask
print(took)
"""


async def figures(stage: Stage) -> dict[str, float]:
    """policy_ms: `set_network` of a sandbox that has a network, there and back; policy_first_ms: of one that has none.
    dns_p50_ms: an answer that is known, dns_new_p50_ms: one that must be fetched and opened first."""
    with tempfile.TemporaryDirectory(prefix="dsecd-net-", dir="/var/tmp") as directory:
        world = World(Path(directory))
        try:
            world.open()
            config = {"network": {"resolvers": [DNS4]}, "services": SERVICES, "netns": world.host}
            with own_daemon("net", BASE, OwnDaemon, **config) as daemon:
                return await _figures(daemon, stage)
        finally:
            world.close()


async def _figures(daemon: OwnDaemon, stage: Stage) -> dict[str, float]:
    changes: list[float] = []
    firsts: list[float] = []
    async with daemon.client() as client:
        await BASE.make(daemon, client)
        for _ in range(FIRSTS):
            sandbox = await client.run_container(stage.args())
            with clock(firsts):
                await sandbox.set_network({"pypi": True})
            await sandbox.stop()
        sandbox = await client.run_container(stage.args(network_rules={"pypi": True}))
        for number in range(CHANGES):
            with clock(changes):
                await sandbox.set_network({"npm": True} if number % 2 == 0 else {"pypi": True, "wide": True})
        await sandbox.set_network({"*.example.org": True})
        known = await _ask(sandbox, "good.example.org")
        new = await _ask(sandbox, "hN.pool.example.org")
        await sandbox.stop()
    say(f"other rules    {spread(changes)} ms")
    say(f"first rules    {spread(firsts)} ms")
    say(f"known name     {spread(known)} ms")
    say(f"new name       {spread(new)} ms")
    return {
        "policy_ms": median(changes), "policy_first_ms": median(firsts),
        "dns_p50_ms": median(known), "dns_new_p50_ms": median(new),
    }  # fmt: skip


async def _ask(sandbox: Sandbox, name: str) -> list[float]:
    done = await sandbox.exec(["python3", "-c", ASK, name, str(QUESTIONS)])
    assert done.ok, done.stderr
    found: list[float] = ast.literal_eval(done.stdout)
    return found
