"""One Firecracker process, watched: when and why it ended, and what it and its guest have written."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

CONSOLE_BYTES: Final = 65_536
_READ_EVERY_S: Final = 0.05  # with a pipe of 64 KiB: 1.3 MB/s at most, however much the guest writes

# Firecracker's src/vmm/src/lib.rs, enum FcExitCode.
_EXITS: Final = {
    0: "the guest shut down",
    1: "it failed (status 1)",
    2: "it failed unexpectedly (status 2)",
    148: "its seccomp filter met a forbidden system call (status 148)",
    149: "SIGBUS: a file behind the guest's memory or pmem is shorter than it was, or unreadable (status 149)",
    150: "SIGSEGV (status 150)",
    151: "SIGXFSZ: a file would exceed its size limit (status 151)",
    152: "its configuration is bad (status 152)",
    153: "its arguments are bad (status 153)",
    154: "SIGXCPU: it used up its CPU time (status 154)",
    155: "SIGPIPE (status 155)",
    156: "SIGHUP (status 156)",
    157: "SIGILL (status 157)",
}


def reason(status: int | None) -> str:
    """Why it ended, from its exit status (negative: the signal; None: not known)."""
    if status is None:
        return "it ended while nobody watched"
    if status < 0:
        return f"it was killed by signal {-status}"
    return _EXITS.get(status, f"it ended with status {status}")


class Watch:
    """`ended` becomes the reason when the process has ended. Of an earlier daemon's child the status is not known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._fd: int | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.ended.set_result(reason(None))
        else:
            loop.add_reader(self._fd, self._gone)

    def _gone(self) -> None:
        status: int | None = None
        with contextlib.suppress(ChildProcessError):  # not our child, or reaped by who waited for it, too
            found, raw = os.waitpid(self.pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(raw) if found else None
        self.close()
        if not self.ended.done():
            self.ended.set_result(reason(status))

    def close(self) -> None:
        """Watch no longer. Twice is fine."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


class Console:
    """What the VMM writes (its log, and the guest's serial console): a pipe with a name, and the last 64 KiB of it.

    A file would grow for as long as the guest likes. The pipe does not: Firecracker sets it non-blocking and drops what
    does not fit, so a flood is read in part, and one that nobody reads (between two daemons) stops at 64 KiB. Both
    ends are held open by whoever has it, so that nobody gets SIGPIPE.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = b""
        self._waiting: asyncio.TimerHandle | None = None
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        with contextlib.suppress(FileNotFoundError):
            self._text = self._kept.read_bytes()[-CONSOLE_BYTES:]
            self._kept.unlink()
        self._fd: int | None = self.open_end()
        self._listen()

    @property
    def _kept(self) -> Path:
        return self._path.with_suffix(".kept")

    def open_end(self) -> int:
        """A descriptor for the VMM's output; the caller closes it."""
        return os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _listen(self) -> None:
        self._waiting = None
        if self._fd is not None:
            asyncio.get_running_loop().add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        if self._fd is not None:
            loop.remove_reader(self._fd)
        self._read()
        self._waiting = loop.call_later(_READ_EVERY_S, self._listen)

    def _read(self) -> None:
        if self._fd is None:
            return
        with contextlib.suppress(BlockingIOError):
            self._text = (self._text + os.read(self._fd, CONSOLE_BYTES))[-CONSOLE_BYTES:]

    def text(self) -> bytes:
        """The last 64 KiB, up to now."""
        self._read()
        return self._text

    def last_line(self) -> str:
        """For an error's sentence, when no guest has run yet."""
        lines = self.text().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip()[-300:] if lines else "it said nothing"

    def keep(self) -> None:
        """Leave what was read for the next daemon."""
        self._kept.write_bytes(self.text())

    def close(self) -> None:
        """Twice is fine."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._fd is not None:
            self._read()
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
