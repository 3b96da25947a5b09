"""Limits and figures of one call, from the control group of the sandbox that it runs in.

A sandbox of calls runs one at a time, so its group is the call's for as long as it lasts: what the agent (and a zygote)
holds is measured before, and every limit is that and the call's. No group is made per call and no process is moved:
on cgroup v1 each move takes a lock of the whole machine for milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

from msgspec import Struct

_STAT_MAX: Final = 8192


class MeterNames(Struct, frozen=True):
    """File names, and words of memory.stat, of one cgroup version."""

    limit: str
    outer: str  # memory and swap together; "": none
    usage: str
    peak: str
    ooms: str
    cache: tuple[bytes, ...]


V1: Final = MeterNames(
    "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes",
    "memory.oom_control", (b"total_inactive_file", b"total_active_file"),
)  # fmt: skip
V2: Final = MeterNames(
    "memory.max", "", "memory.current", "memory.peak", "memory.events", (b"inactive_file", b"active_file")
)


class CallFigures(Struct, frozen=True):
    """peak: bytes beyond what was there before."""

    peak: int
    oom: bool
    pids_limit: bool


class CallMeter:
    """Holds the files open: a call costs a few small reads and writes."""

    def __init__(self, memory: Path, pids: Path, names: MeterNames, idle_memory: int, idle_pids: int) -> None:
        self._names = names
        self._idle = (idle_memory, idle_pids)
        self._fds: dict[str, int] = {}
        try:
            for path, writes in (
                (names.limit, True),
                (names.usage, False),
                ("memory.stat", False),
                (names.ooms, False),
            ):
                self._open(memory / path, writes)
            for path, writes in (("pids.max", True), ("pids.current", False), ("pids.events", False)):
                self._open(pids / path, writes)
            for optional in (names.outer, names.peak):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                    self._open(memory / optional, True)
        except BaseException:
            self.close()
            raise
        self._base = self._ooms = self._hits = 0

    def _open(self, path: Path, writes: bool) -> None:
        self._fds[path.name] = os.open(path, (os.O_RDWR if writes else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def begin(self, memory: int, pids: int) -> None:
        """The call may use so many bytes and tasks beyond what is there."""
        stat = self._read("memory.stat")
        used, cache = self._number(self._names.usage), sum(_after(stat, word) for word in self._names.cache)
        # Cache of files does not count: it goes as soon as the call needs the room.
        self._base = max(used - cache, 0)
        self._ooms = _after(self._read(self._names.ooms), b"oom_kill")
        self._hits = _after(self._read("pids.events"), b"max")
        self._set_memory(self._base + memory)
        self._write("pids.max", self._number("pids.current") + pids)
        if self._names.peak in self._fds:
            with contextlib.suppress(OSError):  # before Linux 6.12 a v2 peak cannot be reset: then it is of all calls
                self._write(self._names.peak, 0)

    def end(self) -> CallFigures:
        """What it used. Its processes are gone; the limits are the sandbox's own again."""
        name = self._names.peak if self._names.peak in self._fds else self._names.usage
        figures = CallFigures(
            peak=max(self._number(name) - self._base, 0),
            oom=_after(self._read(self._names.ooms), b"oom_kill") > self._ooms,
            pids_limit=_after(self._read("pids.events"), b"max") > self._hits,
        )
        self._set_memory(self._idle[0])
        self._write("pids.max", self._idle[1])
        return figures

    def _set_memory(self, value: int) -> None:
        """On v1 memory may never be above memory and swap: raise the outer one first, lower it last."""
        names = [self._names.limit] + ([self._names.outer] if self._names.outer in self._fds else [])
        if value >= self._idle[0]:
            names.reverse()
        for name in names:
            try:
                self._write(name, value)
            except OSError as exc:  # v1: more is in use than that, and nothing of it can go
                if exc.errno != errno.EBUSY:
                    raise

    def _read(self, name: str) -> bytes:
        return os.pread(self._fds[name], _STAT_MAX, 0)

    def _number(self, name: str) -> int:
        return int(self._read(name))

    def _write(self, name: str, value: int) -> None:
        os.pwrite(self._fds[name], b"%d" % value, 0)


def _after(text: bytes, word: bytes) -> int:
    """The number behind `word` at the beginning of a line; 0 without one."""
    at = 0 if text.startswith(word + b" ") else text.find(b"\n" + word + b" ") + 1
    if at == 0 and not text.startswith(word + b" "):
        return 0
    return int(text[at + len(word) + 1 :].split(b"\n", 1)[0])
