"""How a VMM process begins: in its cgroup, in network and IPC namespaces of its own, as a user with no rights.

Done by small programs of util-linux, each of which becomes the next, so that the pid is the VMM's in the end and
nothing of it runs before it is in its cgroup.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dsecd import proc
from dsecd.vmm.machine import Limits

_JOIN: Final = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 >"$1/cgroup.procs"; shift; n=$((n-1)); done; exec "$@"'
_HIGH: Final = 512  # our own descriptors are moved up here, so that the child's numbers below are free


def wrapped(argv: Sequence[str], limits: Limits) -> list[str]:
    """argv behind all that. limits.uid 0: stays root (tests)."""
    network = ["nsenter", f"--net={limits.netns}", "--"] if limits.netns else ["unshare", "--net", "--ipc", "--"]
    groups = [str(len(limits.groups)), *map(str, limits.groups)]
    user: list[str] = []
    if limits.uid:
        user = ["setpriv", f"--reuid={limits.uid}", f"--regid={limits.gid}", "--clear-groups", "--inh-caps=-all",
                "--bounding-set=-all", "--no-new-privs", "--"]  # fmt: skip
    return ["/bin/sh", "-ec", _JOIN, "dsec-vmm", *groups, *network, *user, *argv]


class Descriptors:
    """Files that the VMM gets as numbers, because it may not open (or even see) their paths."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._last = 2
        self.passed: dict[int, int] = {}  # child's number -> ours

    def _high(self, fd: int) -> int:
        copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        self._stack.callback(os.close, copy)
        return copy

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def give(self, fd: int) -> int:
        """The child's number for a descriptor of ours, which stays the caller's."""
        self._last += 1
        self.passed[self._last] = self._high(fd)
        return self._last

    def open(self, path: Path, flags: int = os.O_RDONLY) -> int:
        """The child's number for a file. Never follows a symlink in the last place."""
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return self.give(fd)
        finally:
            os.close(fd)

    def open_direct(self, path: Path) -> tuple[int, bool]:
        """The child's number for a file to read and write, and whether it bypasses the page cache: not all can."""
        try:
            return self.open(path, os.O_RDWR | os.O_DIRECT), True
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return self.open(path, os.O_RDWR), False

    def log(self, path: Path) -> None:
        """The VMM's own few words go to this file: a pipe that nobody reads could block it."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.passed[1] = self.passed[2] = self._high(fd)
        finally:
            os.close(fd)

    def listen(self, path: Path) -> int:
        """The child's number for a new listening socket, root's alone."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            path.unlink(missing_ok=True)
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen(4)
            return self.give(sock.fileno())


def last_words(path: Path, limit: int = 400) -> str:
    """The last line or two of a VMM's log, for an error's sentence."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    said = "; ".join(line.strip() for line in lines[-2:])
    return said if len(said) <= limit else "…" + said[-limit:]  # what went wrong stands last


def kill(pid: int, started: int) -> None:
    """SIGKILL to a process that is really the one we started, and to its group."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if proc.start_time(pid) == started:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


async def gone(pid: int, timeout: float) -> bool:
    """Wait for a process to end, and reap it if it is our child: from then on its number may be another's."""
    if not await ended(pid, timeout):
        return False
    reap(pid)
    return True


async def ended(pid: int, timeout: float) -> bool:
    """Wait for a process to end, and leave it as it is."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        async with asyncio.timeout(timeout):
            await proc.readable(fd)
    except TimeoutError:
        return False
    finally:
        os.close(fd)
    return True


def reap(pid: int) -> None:
    """A daemon that was restarted is not the parent; then init does it."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except OSError as exc:
        if exc.errno != errno.ECHILD:
            raise
