"""api: `sandbox.get`, sent without waiting on one connection, against a line echo in the same Python."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Final

from dsecd.wire import sandbox as wire
from tests.bench.frame import Bench, Bound, Outcome, Stage, median, rounded, say, spread

CALLS: Final = 20_000
ROUNDS: Final = 7
ECHO: Final = """
import asyncio, sys
class Echo(asyncio.Protocol):
    def connection_made(self, transport): self.transport = transport
    def data_received(self, data): self.transport.write(data)
async def main():
    server = await asyncio.get_running_loop().create_unix_server(Echo, sys.argv[1])
    await server.serve_forever()
asyncio.run(main())
"""


def pipelined(path: Path, requests: bytes) -> float:
    """Calls per second: a thread sends them all, replies are counted as lines. Client and daemon each have a core."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sender = threading.Thread(target=sock.sendall, args=(requests,))
        started = time.perf_counter()
        sender.start()
        lines = 0
        last = b""
        while lines < CALLS:
            data = sock.recv(1 << 20)
            if not data:
                raise RuntimeError("the daemon closed the connection")
            lines += data.count(b"\n")
            last = data
        elapsed = time.perf_counter() - started
        sender.join()
    if b'"error"' in last:
        raise RuntimeError(f"the daemon refused: {last[-300:]!r}")
    return CALLS / elapsed


async def run(stage: Stage) -> Outcome:
    sandbox = await stage.client.run_container(stage.args())
    requests = b"".join(
        json.dumps({"jsonrpc": "2.0", "id": n, "method": "sandbox.get", "params": {"id": sandbox.id}}).encode() + b"\n"
        for n in range(CALLS)
    )
    ours: list[float] = []
    echo: list[float] = []
    sdk: list[float] = []
    echo_socket = stage.work / "echo"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ECHO, str(echo_socket))
    try:
        while not echo_socket.exists():
            await asyncio.sleep(0.01)
        for _ in range(ROUNDS):
            ours.append(await asyncio.to_thread(pipelined, stage.daemon.socket, requests))
            echo.append(await asyncio.to_thread(pipelined, echo_socket, requests))
            sdk.append(await with_sdk(stage, sandbox.id))
    finally:
        process.terminate()
        await process.wait()
    await sandbox.stop()
    say(f"dsecd, bare socket     {spread(ours)} per second")
    say(f"dsecd, through the SDK {spread(sdk)} per second")
    say(f"echo of the same lines {spread(echo)} per second")
    return Outcome(
        {"get_per_s": median(ours)},
        {"sdk_get_per_s": median(sdk), "echo_per_s": median(echo), "vs_echo": rounded(median(ours) / median(echo))},
    )


async def with_sdk(stage: Stage, ident: str) -> float:
    params = wire.ById(id=ident)
    started = time.perf_counter()
    await asyncio.gather(*(stage.client.call("sandbox.get", params) for _ in range(CALLS // 2)))
    return CALLS // 2 / (time.perf_counter() - started)


BENCH: Final = Bench("api", "many requests on one connection", (Bound("get_per_s", 20_000, most=False),), run)
