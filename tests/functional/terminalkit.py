"""dsecctl on a terminal of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path
from typing import Protocol

DSECCTL = str(Path(sys.executable).with_name("dsecctl"))


class Reachable(Protocol):
    """A daemon, or a coordinator."""

    @property
    def url(self) -> str: ...


def environment(daemon: Reachable) -> dict[str, str]:
    return {**os.environ, "DSEC_URL": daemon.url, "LC_ALL": "C.UTF-8", "TERM": "xterm"}


class Terminal:
    """dsecctl on a terminal of its own."""

    def __init__(self, daemon: Reachable, *argv: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(DSECCTL, [DSECCTL, *argv], environment(daemon))
        self.seen = b""

    def type(self, data: bytes) -> None:
        os.write(self.fd, data)

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def expect(self, what: bytes, timeout: float = 20.0) -> bytes:
        """Read until it has been shown; what came before it."""
        deadline = time.monotonic() + timeout
        while what not in self.seen:
            assert self._read(deadline), f"{what!r} is not in {self.seen!r}"
        before, _, self.seen = self.seen.partition(what)
        return before

    def _read(self, deadline: float) -> bool:
        if not select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # the other end is closed
            return False
        self.seen += data
        return bool(data)

    def end(self, timeout: float = 20.0) -> int:
        """Read to the end; the exit status."""
        deadline = time.monotonic() + timeout
        while self._read(deadline):
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """It is gone then, whether it had ended or not."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)
