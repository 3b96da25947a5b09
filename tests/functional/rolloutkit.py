"""What tests of rollouts share: images, a scaffold of twenty lines, a trainer whose model is a list of commands."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.server
import io
import json
import tarfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import daemonkit
import msgspec
from daemonkit import Daemon

import dsecd
from dsecd.client import DSecClient, DSecContainerRunArgs
from dsecd.client_rollout import Step
from dsecd.errors import DsecError
from dsecd.wire import images as image_wire
from dsecd.wire import rollouts as wire

IMAGE = "python:test"
TOOLKIT = "worker:test"
INSIDE = "opt/dsec"

# Asks its model for one shell line at a time, runs it, tells what it printed.
SCAFFOLD = """
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=3600) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    if said == "DONE":
        break
    ran = subprocess.run(said, shell=True, capture_output=True, text=True)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": ran.stdout + ran.stderr}]
"""


def python_tar() -> Path:
    """A Debian with a whole Python, made once and kept."""
    suite = daemonkit.host_suite()
    key = sha256(repr((suite, "python3", 1)).encode()).hexdigest()[:12]
    target = daemonkit.CACHE / f"test-python-{suite}-{key}.tar"
    daemonkit.CACHE.mkdir(parents=True, exist_ok=True)
    with open(daemonkit.CACHE / "test-python.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            daemonkit.bootstrap(suite, target, ("python3",))
    return target


def worker_tar() -> bytes:
    """The toolkit of a worker: our package and msgspec, for the Python that runs this (the suite's own)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for module in (dsecd, msgspec):
            assert module.__file__ is not None
            home = Path(module.__file__).parent
            for path in sorted(home.rglob("*")):
                if path.is_file() and path.suffix in (".py", ".so") and "_native" not in path.name:
                    tar.add(path, f"{INSIDE}/{home.name}/{path.relative_to(home)}")
    return out.getvalue()


async def make_images(daemon: Daemon, client: DSecClient) -> None:
    await daemon.import_tar(client, python_tar(), IMAGE)

    async def toolkit() -> AsyncIterator[bytes]:
        yield worker_tar()

    await client.import_image(image_wire.Import(name=TOOLKIT, kind="toolkit"), toolkit())


@contextlib.contextmanager
def daemon_of(directory: Path, watched: list[Path]) -> Iterator[Daemon]:
    """One with the images of rollouts."""
    with daemonkit.started(directory, watched) as one:

        async def fill() -> None:
            async with one.client() as client:
                await make_images(one, client)

        daemonkit.run(fill())
        yield one


def agent_args(**args: Any) -> DSecContainerRunArgs:
    values = {"container_image": IMAGE, "memory_limit_mb": 256, "disk_limit_mb": 256, **args}
    return DSecContainerRunArgs(**values)


def worker_args(**args: Any) -> DSecContainerRunArgs:
    values: dict[str, Any] = {"toolkits": [TOOLKIT], "env": {"PYTHONPATH": f"/{INSIDE}"}, **args}
    return agent_args(**values)


def task(name: str, **more: Any) -> dict[str, Any]:
    """The scaffold above, told its name; the diff is what its commands have written."""
    files = {"/scaffold.py": SCAFFOLD}
    return {"files": files, "scaffold": f"python3 /scaffold.py {name}", "diff": "cat /done", "grade": "test -s /done",
            **more}  # fmt: skip


async def start(client: DSecClient, name: str = "one", **more: Any) -> wire.Rollout:
    values: dict[str, Any] = {"task": task(name), "job": "test", **more}
    return await client.start_rollout(agent_args(), worker_args(), **values)


def said(content: str) -> dict[str, Any]:
    """An answer as OpenAI's endpoint gives it."""
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}}],
    }


def policy(commands: list[str]) -> Callable[[Any], dict[str, Any]]:
    """A model without state: what it says depends on how much was said."""

    def answer(body: Any) -> dict[str, Any]:
        turn = len(body["messages"]) // 2
        return said(commands[turn] if turn < len(commands) else "DONE")

    return answer


def counting(number: int, pause: float = 0.0) -> list[str]:
    """Commands that each leave one line; twice the same line is a command that ran twice."""
    return [f"echo step-{n} >> /done; sleep {pause}; echo said-{n}" for n in range(number)]


@contextlib.contextmanager
def endpoint(answer: Callable[[Any], Any]) -> Iterator[str]:
    """An OpenAI-compatible server of the trainer's."""

    class Model(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            found = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            found["choices"][0]["logprobs"] = {"content": [{"token": "x", "token_id": 7, "logprob": -0.5}]}
            text = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Nobody reads it."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


@contextlib.asynccontextmanager
async def trainer(
    daemon: Daemon, answer: Callable[[Any], Any], job: str = "test",
    on_step: Callable[[Step], Awaitable[None]] | None = None,
) -> AsyncIterator[asyncio.Task[None]]:  # fmt: skip
    """A trainer that answers until the block ends; its connection is then cut, as by SIGKILL."""
    client = await DSecClient(daemon.url).open()

    async def serve() -> None:
        async for step in client.attach(job):
            if on_step is not None:
                await on_step(step)
            await step.answer(answer(step.body))

    serving = asyncio.ensure_future(serve())
    try:
        yield serving
    finally:
        if client._link.peer.transport is not None:
            client._link.peer.transport.abort()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await client.close()


async def result_of(client: DSecClient, ident: str, timeout: float = 60) -> wire.Delivered:
    """Of that rollout; the rollout itself is over then, too."""
    async with asyncio.timeout(timeout):
        after = 0
        while True:
            for one in await client.rollout_results(after=after, wait_s=5):
                after = max(after, one.id)
                if one.rollout == ident:
                    await over(client, ident)
                    return one


async def over(client: DSecClient, ident: str) -> wire.Rollout:
    return await until(client, ident, lambda r: r.state in ("done", "failed", "stopped"))


async def until(
    client: DSecClient, ident: str, what: Callable[[wire.Rollout], bool], timeout: float = 30
) -> wire.Rollout:
    deadline = asyncio.get_running_loop().time() + timeout
    while not what(found := await client.rollout(ident)):
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"after {timeout:g} s it is still {json.dumps(msgspec.to_builtins(found))}")
        await asyncio.sleep(0.05)
    return found


async def waiting(client: DSecClient, ident: str) -> wire.Rollout:
    return await until(client, ident, lambda r: r.state == "waiting_model")


async def kind_of(work: Awaitable[Any]) -> str:
    """The kind of error it ends with; "" none."""
    try:
        await work
    except DsecError as exc:
        return exc.kind
    return ""
