"""A frozen container's memory: out, while it is paused; and in again, just ahead of the thaw.

With cgroup v2 memory.reclaim takes it in steps. With v1 the processes' anonymous memory is paged out range by range
(process_madvise works on frozen processes), and then memory.force_empty takes the rest, page cache above all. Without
swap on the host only page cache can go. All of this is best effort: what counts of a pause is the freeze.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from dsecd._native import ffi, lib
from dsecd.cgroup.groups import SandboxCgroup
from dsecd.zram import swap

log = logging.getLogger("dsecd.container")

WILLNEED: Final = 3
PAGEOUT: Final = 21
STEP: Final = 2 << 20  # memory.reclaim's unit, and so how soon `stop` is obeyed: some milliseconds
BITE: Final = 4 << 20  # the same of process_madvise
DRY: Final = 3  # steps that give next to nothing, one after the other, are the end
LONGEST_S: Final = 60.0
# Ahead of the thaw: about what is swapped in within the time that a first command may wait for it.
AHEAD_S: Final = 0.015
AHEAD_BYTES: Final = 64 << 20
# What no inode of a file system has, or one that only processes have: their own memory.
_ANONYMOUS: Final = ("/memfd:", "/dev/zero", "/SYSV", "/anon_hugepage")


class Mapping(NamedTuple):
    """A range of addresses of a process; swapped: bytes of it that are out (only smaps says)."""

    start: int
    end: int
    swapped: int = 0


class Reclaim:
    """One container's, for one pause. `run` blocks, in a thread; `stop` may be called from any."""

    def __init__(self, cgroup: SandboxCgroup) -> None:
        self._cgroup = cgroup
        self._stop = threading.Event()

    def stop(self) -> None:
        """`run` ends after the step it is in. Nobody needs to wait for that: what is thawed faults its pages in."""
        self._stop.set()

    def run(self) -> int:
        """Bytes that became free. Raises nothing that a host or a kill can cause."""
        try:
            return self._run()
        except OSError as exc:  # the group went away, or the swap is full of errors
            log.info("reclaim ended early: %s", exc, extra={"sandbox_id": self._cgroup.sandbox_id})
            return 0

    def _run(self) -> int:
        deadline = time.monotonic() + LONGEST_S
        before = self._cgroup.memory()[0]
        if self._stop.is_set():
            return 0
        self._cgroup.allow_swap(True)
        if self._cgroup.in_steps:
            self._in_steps(deadline)
        else:
            if swap().free:
                self._page_out(deadline)
            if not self._stop.is_set():
                with contextlib.suppress(FileNotFoundError):  # v2 before memory.reclaim
                    self._cgroup.reclaim(before)
        if self._stop.is_set():  # `resume` has forbidden it already, perhaps before it was allowed here
            self._cgroup.allow_swap(False)
        return max(before - self._cgroup.memory()[0], 0)

    def _in_steps(self, deadline: float) -> None:
        dry = 0
        while dry < DRY and not self._stop.is_set() and time.monotonic() < deadline:
            dry = 0 if self._cgroup.reclaim(STEP) >= STEP // 8 else dry + 1

    def _page_out(self, deadline: float) -> None:
        for pid, fd in self._cgroup.open_members():
            for mapping in anonymous(pid):
                for start, length in bites(mapping):
                    if self._stop.is_set() or time.monotonic() > deadline:
                        return
                    advise(fd, PAGEOUT, start, length)


def fetch_ahead(cgroup: SandboxCgroup, first: int) -> int:
    """Swap in what fits into AHEAD_S and AHEAD_BYTES, the process `first` (the agent) before others; returns bytes."""
    deadline, left = time.monotonic() + AHEAD_S, AHEAD_BYTES
    if cgroup.memory()[1] == 0:
        return 0
    for pid, fd in _in_order(cgroup, first):
        for mapping in swapped(pid):
            for start, length in bites(mapping):
                if left <= 0 or time.monotonic() > deadline:
                    return AHEAD_BYTES - left
                advise(fd, WILLNEED, start, length)
            left -= mapping.swapped
        if time.monotonic() > deadline:
            break
    return AHEAD_BYTES - left


def _in_order(cgroup: SandboxCgroup, first: int) -> Iterator[tuple[int, int]]:
    """The first process, then the others. In two looks: all of them open at once would be too many descriptors."""
    for pid, fd in cgroup.open_members():
        if pid == first:
            yield pid, fd
    for pid, fd in cgroup.open_members():
        if pid != first:
            yield pid, fd


def advise(pidfd: int, advice: int, start: int, length: int) -> bool:
    """False where the kernel would not, for a reason that is the range's or the process's own."""
    done: int = lib.dsec_advise(pidfd, advice, ffi.new("uint64_t[2]", (start, length)), 1)
    if done in (-errno.ENOSYS, -errno.EPERM):
        raise OSError(-done, "process_madvise")
    return done >= 0


def bites(mapping: Mapping) -> Iterator[tuple[int, int]]:
    """Start and length of pieces that are done soon."""
    for start in range(mapping.start, mapping.end, BITE):
        yield start, min(BITE, mapping.end - start)


def anonymous(pid: int) -> Iterator[Mapping]:
    """What belongs to the process alone: its files' pages are others' too, or on disk already."""
    for line in _lines(pid, "maps"):
        words = line.split(maxsplit=5)
        if words[1] == "---p" or (words[4] != "0" and not words[5].startswith(_ANONYMOUS)):
            continue
        if len(words) > 5 and words[5].startswith(("[v", "[uprobes")):  # the kernel's: vdso, vvar, vsyscall
            continue
        yield _range(words[0])


def swapped(pid: int) -> Iterator[Mapping]:
    """Mappings of which something is swapped out, the smallest part first: stacks and small heaps are used first."""
    found: list[Mapping] = []
    at = Mapping(0, 0)
    for line in _lines(pid, "smaps"):
        if line[0] in "0123456789abcdef":
            at = _range(line.split(maxsplit=1)[0])
        elif line.startswith("Swap:") and (kib := int(line.split()[1])):
            found.append(at._replace(swapped=kib << 10))
    yield from sorted(found, key=lambda mapping: mapping.swapped)


def _range(text: str) -> Mapping:
    start, _, end = text.partition("-")
    return Mapping(int(start, 16), int(end, 16))


def _lines(pid: int, name: str) -> list[str]:
    """Of a file in /proc/<pid>; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
