"""Where a long request stands: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Final

from dsecctl import output, terminal
from dsecctl.table import cut, size
from dsecd.wire.base import Progress

REDRAW_S: Final = 0.1
LINE_S: Final = 5.0


class ProgressLine:
    """Give it what was sent and what the daemon says. total: bytes to send, if known."""

    def __init__(self, *, quiet: bool, total: int | None = None) -> None:
        self._quiet = quiet
        self._terminal = terminal.is_terminal(output.STDERR)
        self._total = total
        self._sent = 0
        self._now = Progress(0, "send")
        self._phase_began = self._next = time.monotonic()
        self._quiet_until = self._next + (0 if self._terminal else 1)  # what is quick needs no lines in a log

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._terminal and not self._quiet:
            output.status("")

    async def counted(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same stream, and its progress."""
        async for data in stream:
            yield data
            self._sent += len(data)
            if self._now.phase == "send":
                self._now.done = self._sent
            self._show()

    def update(self, now: Progress) -> None:
        """What the daemon says; it comes in phases."""
        changed = now.phase != self._now.phase
        if changed:
            self._phase_began = time.monotonic()
        self._now = now
        self._show(at_once=changed)

    def _show(self, *, at_once: bool = False) -> None:
        clock = time.monotonic()
        if self._quiet or clock < self._quiet_until or (clock < self._next and not at_once):
            return
        self._next = clock + (REDRAW_S if self._terminal else LINE_S)
        if self._terminal:
            output.status(cut(self.text(clock), output.columns() - 1))
        else:
            output.note(self.text(clock))

    def text(self, clock: float) -> str:
        """`unpack: 120.0 MiB of 190.0 MiB (63%), 85.0 MiB/s, 70% sent`."""
        now = self._now
        if now.phase == "build":
            return f"build: {now.done} steps" + (f", {now.text}" if now.text else "")
        words = f"{now.phase}: {size(now.done)}"
        if now.total:
            words += f" of {size(now.total)} ({100 * now.done // now.total}%)"
        if (took := clock - self._phase_began) > 0.2 and now.done:
            words += f", {size(now.done / took)}/s"
        if self._total and self._sent < self._total:
            words += f", {100 * self._sent // self._total}% sent"
        return words + (f", {now.text}" if now.text else "")
