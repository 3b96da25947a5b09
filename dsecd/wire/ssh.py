"""Reach a daemon on another host: the system's OpenSSH forwards its socket to one here.

The user's ssh configuration, agent, known_hosts and jump hosts apply; nothing is asked for (BatchMode).
$DSEC_SSH replaces the command, with options of its own if need be (`ssh -F my.config`). Where the user has a master
connection (ControlMaster), it is used: then ssh hands the forwarding over and ends, and it must be taken back there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dsecd.errors import DsecError
from dsecd.wire.stdio import bridged

DEFAULT_SOCKET: Final = "/run/dsecd/dsecd.sock"
CONNECT_S: Final = 20.0
CANCEL_S: Final = 5.0
TMPDIR_MAX: Final = 80
PREFIX: Final = "dsec-ssh-"
PROBE_S: Final = 2.0
OLD_S: Final = 60.0  # longer than a tunnel that is being made has no socket


@contextlib.asynccontextmanager
async def forwarded(url: str) -> AsyncIterator[str]:
    """`ssh://[user@]host[:port][/path/to/socket]` as a local socket path, for as long as the block lasts.

    With `?stdio` nothing is forwarded: each connection is an ssh of its own that runs `dsecctl stdio` there, or what
    the key's forced command is (dsecd.wire.stdio).
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        if not parts.hostname or parts.hostname.startswith("-"):
            raise ValueError
    except ValueError as exc:
        raise DsecError("invalid", f"{url!r} is not ssh://[user@]host[:port][/socket]") from exc
    ssh = shlex.split(os.environ.get("DSEC_SSH", "ssh"))
    if not ssh or shutil.which(ssh[0]) is None:
        raise DsecError("unsupported", "no ssh on this machine: apt-get install openssh-client")
    host = f"{parts.username}@{parts.hostname}" if parts.username else parts.hostname
    if parts.query not in ("", "stdio"):
        raise DsecError("invalid", f"{url!r}: what may stand behind ? is stdio")
    if parts.query:
        argv = [*ssh, "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
        argv += ["-p", str(port)] if port else []
        command = [*argv, "--", host, "dsecctl", "stdio"]
        async with bridged(command, lambda said: _refusal(said, host, port)) as path:
            yield path
        return
    # A socket's path is at most 107 bytes, and $TMPDIR may be longer.
    parent = "/tmp" if len(tempfile.gettempdir()) > TMPDIR_MAX else tempfile.gettempdir()
    await asyncio.to_thread(_sweep, Path(parent))
    directory = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    local = Path(directory, "sock")
    remote = parts.path if parts.path not in ("", "/") else DEFAULT_SOCKET
    options = ["-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15"]
    options += ["-p", str(port)] if port else []
    what = ["-L", f"{local}:{remote}", "--", host]
    process = await _spawn([*await asyncio.to_thread(_with_us), *ssh, "-nNT", *options, *what])
    try:
        await _until_there(process, local, host, port)
        yield str(local)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        if await asyncio.to_thread(_listens, local):  # a master has it
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await (await _spawn([*ssh, *options, "-O", "cancel", *what])).communicate()
        await asyncio.to_thread(shutil.rmtree, directory, True)


async def _spawn(argv: list[str]) -> asyncio.subprocess.Process:
    null = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*argv, stdin=null, stdout=null, stderr=asyncio.subprocess.PIPE)


@functools.cache
def _with_us() -> tuple[str, ...]:
    """What to put before a command that shall end when this process is killed; nothing where setpriv cannot do it."""
    words = ("setpriv", "--pdeathsig", "TERM")
    try:
        able = subprocess.run([*words, "true"], capture_output=True, timeout=PROBE_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        able = False
    return words if able else ()


def _sweep(parent: Path) -> None:
    """Directories of tunnels whose owners were killed. One that lives is not connected to, as far as can be seen."""
    with contextlib.suppress(OSError):
        alive = Path("/proc/net/unix").read_text()  # of this network namespace; nothing on other systems
        for old in parent.glob(f"{PREFIX}*"):
            info = old.lstat()
            ours = info.st_uid == os.getuid() and time.time() - info.st_mtime > OLD_S
            if ours and str(old) not in alive and not _listens(old / "sock"):
                shutil.rmtree(old, ignore_errors=True)


def _listens(local: Path) -> bool:
    """It is there a moment before ssh listens on it. Whoever is let in here is only looked at."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(local))
        except OSError:
            return False
    return True


async def _until_there(process: asyncio.subprocess.Process, local: Path, host: str, port: int | None) -> None:
    """ssh makes the socket once it is logged in; it says nothing, so look."""
    try:
        async with asyncio.timeout(CONNECT_S):
            while not await asyncio.to_thread(_listens, local):
                if process.returncode is not None and not _listens(local):
                    assert process.stderr is not None
                    said = (await process.stderr.read(4000)).decode("utf-8", "replace").strip()
                    raise _refusal(said, host, port)
                await asyncio.sleep(0.02)
    except TimeoutError as exc:
        raise DsecError("network", f"ssh to {host} did not connect within {CONNECT_S:g} s") from exc


def _refusal(said: str, host: str, port: int | None) -> DsecError:
    """What ssh said, as one sentence with what to do. Only what time may mend is `network`."""
    name = host.rpartition("@")[2]
    entry = name if port in (None, 22) else f"[{name}]:{port}"
    if "IDENTIFICATION HAS CHANGED" in said:
        file = re.search(r"^Offending \S+ key in (\S+):\d+", said, re.MULTILINE)
        where = f" -f {shlex.quote(file[1])}" if file else ""
        return DsecError(
            "denied", f"ssh to {host} refused: its host key is not the one that is known, so it may be another "
            f"machine; if the key was changed on purpose: ssh-keygen{where} -R {shlex.quote(entry)}",
        )  # fmt: skip
    if "Host key verification failed" in said:
        return DsecError(
            "denied", f"ssh to {host} refused: its host key is not known here; compare it once: ssh "
            f"{f'-p {port} ' if port else ''}{host}, or put it into known_hosts",
        )  # fmt: skip
    last = said.splitlines()[-1][:300] if said else "no reason"
    if "Permission denied" in last:
        return DsecError(
            "denied",
            f"ssh to {host} refused: {last}; add a key to the agent or name one in ssh_config (nothing is asked for)",
        )
    return DsecError("network", f"ssh to {host} failed: {last}")
