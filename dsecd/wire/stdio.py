"""A socket here whose every connection is a program's standard input and output: ssh with a forced command."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

from dsecd.errors import DsecError

PROBE_S: Final = 20.0
MOST: Final = 64  # connections at once


@contextlib.asynccontextmanager
async def bridged(argv: Sequence[str], refusal: Callable[[str], DsecError]) -> AsyncIterator[str]:
    """Its path, for as long as the block lasts. refusal: the error of what the program said on stderr as it failed."""
    await _probe(argv, refusal)
    directory = tempfile.mkdtemp(prefix="dsec-ssh-")
    path = Path(directory, "sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    running: set[asyncio.subprocess.Process] = set()
    tasks: set[asyncio.Task[None]] = set()
    try:
        listener.bind(str(path))
        listener.listen(MOST)
        accepting = asyncio.ensure_future(_accept(argv, listener, running, tasks))
        try:
            yield str(path)
        finally:
            accepting.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(accepting, *tasks, return_exceptions=True)
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            await asyncio.gather(*(process.wait() for process in running))
    finally:
        listener.close()
        await asyncio.to_thread(shutil.rmtree, directory, True)


async def _probe(argv: Sequence[str], refusal: Callable[[str], DsecError]) -> None:
    """Once with nothing to say: whether it gets there, and why not."""
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=null, stdout=null, stderr=pipe)
    try:
        async with asyncio.timeout(PROBE_S):
            _, said = await process.communicate()
    except TimeoutError as exc:
        raise DsecError("network", f"{argv[0]} did not come back within {PROBE_S:g} s") from exc
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        raise refusal(said.decode("utf-8", "replace").strip()[-4000:])


async def _accept(
    argv: Sequence[str],
    listener: socket.socket,
    running: set[asyncio.subprocess.Process],
    tasks: set[asyncio.Task[None]],
) -> None:
    while True:
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        with sock:
            if len(running) >= MOST:
                continue
            null = asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=sock.fileno(), stdout=sock.fileno(), stderr=null
            )
        running.add(process)
        task = asyncio.ensure_future(_waited(process, running))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _waited(process: asyncio.subprocess.Process, running: set[asyncio.subprocess.Process]) -> None:
    await process.wait()
    running.discard(process)
