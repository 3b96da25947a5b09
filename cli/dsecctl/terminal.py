"""This process's own standard input and terminal: read without blocking the loop, raw mode, size."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import termios
import tty
from collections.abc import Iterator
from typing import Final

STDIN: Final = 0
PIECE: Final = 1 << 20


class Stdin:
    """Standard input, piece by piece.

    Not asyncio's pipe transport: that one makes the descriptor non-blocking, which a terminal shares with stdout and
    with the shell that started us. A descriptor that is readable now does not block for one read.
    """

    def __init__(self, fd: int = STDIN) -> None:
        self._fd = fd
        with contextlib.suppress(OSError):  # not a pipe, or too much for this user: smaller pieces do as well
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIECE)

    async def read(self) -> bytes:
        """What there is; b"" at the end. Nothing is read ahead."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._fd, ready.set)
        except PermissionError:  # a regular file or /dev/null: epoll does not take them, and they never block
            await asyncio.sleep(0)
            return os.read(self._fd, PIECE)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._fd)
        try:
            return os.read(self._fd, PIECE)
        except OSError:  # a terminal that has hung up
            return b""


def is_terminal(fd: int = STDIN) -> bool:
    return os.isatty(fd)


def size() -> tuple[int, int]:
    """Rows and columns of the first of our descriptors that is a terminal."""
    for fd in (STDIN, 1, 2):
        with contextlib.suppress(OSError):
            found = os.get_terminal_size(fd)
            if found.lines and found.columns:
                return found.lines, found.columns
    return 24, 80


@contextlib.contextmanager
def raw_mode(fd: int = STDIN) -> Iterator[None]:
    """Every key goes to the other end as it is, Ctrl-C too. The old settings come back at the end."""
    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
