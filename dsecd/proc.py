"""Child processes: the one door to `posix_spawn`, waited for through pidfds.

posix_spawn shares memory until exec, so starting a child costs the same in a daemon of 20 MiB and of 200 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_ENV: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
_SIGNALS: Final = [signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXFSZ]


def spawn(argv: Sequence[str], fds: Mapping[int, int], env: Mapping[str, str] | None = None) -> int:
    """Start argv[0] (an absolute path) in a process group of its own; returns the pid.

    fds: child's number → ours. 0 is /dev/null unless given. All our other descriptors are O_CLOEXEC.
    """
    sources = set(fds.values())
    if sources & (set(fds.keys()) - {k for k, v in fds.items() if k == v}):
        raise ValueError("a descriptor would be overwritten before it is passed on")
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = []
    if 0 not in fds:
        actions.append((os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
    actions += [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in fds.items()]
    return os.posix_spawn(
        argv[0],
        list(argv),
        dict(_ENV if env is None else env),
        file_actions=actions,
        setpgroup=0,
        setsigmask=[],
        setsigdef=_SIGNALS,
    )


async def readable(fd: int) -> None:
    """Wait until `fd` is readable (a pidfd: until the process has ended)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _settle, future)
    try:
        await future
    finally:
        loop.remove_reader(fd)


async def wait(pid: int, timeout: float | None) -> int:
    """Wait for our child and reap it: its exit status, or minus the signal.

    At the deadline or when cancelled, its process group is killed, then reaped; the deadline raises TimeoutError.
    """
    pidfd = os.pidfd_open(pid)
    try:
        async with asyncio.timeout(timeout):
            await readable(pidfd)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        await asyncio.shield(readable(pidfd))
        _reap(pid)
        raise
    finally:
        os.close(pidfd)
    return _reap(pid)


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which `pid` started; None when there is no such process or it is a zombie.

    A pid read from a file is believed only together with this.
    """
    try:
        rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if rest[0] in (b"Z", b"X") else int(rest[19])


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
