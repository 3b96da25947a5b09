"""Reach a daemon on another host: the system's OpenSSH forwards its socket to one here.

The user's ssh configuration, agent, known_hosts and jump hosts apply; nothing is asked for (BatchMode).
$DSEC_SSH replaces the command, with options of its own if need be (`ssh -F my.config`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dsecd.errors import DsecError

DEFAULT_SOCKET: Final = "/run/dsecd/dsecd.sock"
CONNECT_S: Final = 20.0


@contextlib.asynccontextmanager
async def forwarded(url: str) -> AsyncIterator[str]:
    """`ssh://[user@]host[:port][/path/to/socket]` as a local socket path, for as long as the block lasts."""
    parts = urlsplit(url)
    if not parts.hostname or parts.hostname.startswith("-"):
        raise DsecError("invalid", f"{url!r} is not ssh://[user@]host[:port][/socket]")
    ssh = shlex.split(os.environ.get("DSEC_SSH", "ssh"))
    if not ssh or shutil.which(ssh[0]) is None:
        raise DsecError("unsupported", "no ssh on this machine: apt-get install openssh-client")
    host = f"{parts.username}@{parts.hostname}" if parts.username else parts.hostname
    directory = tempfile.mkdtemp(prefix="dsec-ssh-")
    local = Path(directory, "sock")
    remote = parts.path if parts.path not in ("", "/") else DEFAULT_SOCKET
    argv = [*ssh, "-nNT", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15"]
    argv += ["-p", str(parts.port)] if parts.port else []
    argv += ["-L", f"{local}:{remote}", "--", host]
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        await _until_there(process, local, host)
        yield str(local)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await asyncio.to_thread(shutil.rmtree, directory, True)


async def _until_there(process: asyncio.subprocess.Process, local: Path, host: str) -> None:
    """ssh makes the socket once it is logged in; it says nothing, so look."""
    try:
        async with asyncio.timeout(CONNECT_S):
            while not local.exists():
                if process.returncode is not None:
                    assert process.stderr is not None
                    said = (await process.stderr.read(2000)).decode("utf-8", "replace").strip()
                    raise DsecError(
                        "network", f"ssh to {host} failed: {said.splitlines()[-1] if said else 'no reason'}"
                    )
                await asyncio.sleep(0.02)
    except TimeoutError as exc:
        raise DsecError("network", f"ssh to {host} did not connect within {CONNECT_S:g} s") from exc
