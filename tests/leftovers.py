"""What a test may leave behind, seen from the host: a picture before, a picture after, and their difference.

Only what can be ours is looked at (below the given directories, in groups named after this process, in this process),
so that other work on the same machine never fails a test.
"""

from __future__ import annotations

import asyncio
import asyncio.runners
import contextlib
import functools
import gc
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
# What a running fixture of a wider scope may change by itself during a test (a daemon's image mounts).
tolerated: list[Callable[[str], bool]] = []


_pending: list[str] = []


def watch_tasks() -> None:
    """asyncio.run cancels what is left at its end without a word; write it down first."""
    inner = asyncio.runners._cancel_all_tasks

    def cancel_all(loop: asyncio.AbstractEventLoop) -> None:
        _pending.extend(f"task {task.get_coro()!r}" for task in asyncio.all_tasks(loop))
        inner(loop)

    asyncio.runners._cancel_all_tasks = cancel_all


def take_pending() -> list[str]:
    """Tasks that were not over when their `asyncio.run` was, since the last call."""
    found = _pending[:]
    _pending.clear()
    return found


def mounts_below(roots: Iterable[Path]) -> set[str]:
    """Mount points below `roots`, and mounts of network namespaces that are named after us."""
    tops = [str(root) for root in roots]
    found = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        point = words[4].encode().decode("unicode_escape")
        if any(point == top or point.startswith(top + "/") for top in tops):
            found.add(f"mount {point}")
        elif "nsfs" in words and str(os.getpid()) in point:
            found.add(f"netns {point}")
    return found


def loops_below(roots: Iterable[Path]) -> set[str]:
    """Loop devices whose backing file is (or was) below `roots`."""
    tops = tuple(f"{root}/" for root in roots)
    found = set()
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = file.read_text().strip()
        except OSError:  # detached meanwhile
            continue
        if backing.startswith(tops):
            found.add(f"loop device {file.parts[3]} on {backing}")
    return found


@functools.cache
def _hierarchies() -> list[Path]:
    """The root of every mounted hierarchy, once (some are symlinks to others)."""
    roots = {path.resolve() for path in [CGROUP_ROOT, *CGROUP_ROOT.iterdir()] if path.is_dir()}
    return sorted(root for root in roots if (root / "cgroup.procs").exists())


def cgroups_named(pid: int) -> set[str]:
    """Control groups with this pid in the name of their topmost directory, and all below them."""
    mine = re.compile(rf"(^|[^0-9]){pid}([^0-9]|$)")
    found = set()
    for root in _hierarchies():
        for name in os.listdir(root):
            if mine.search(name) and (root / name).is_dir():
                found |= {f"cgroup {directory}" for directory, _, _ in os.walk(root / name)}
    return found


def processes(pid: int, groups: Iterable[str] | None = None) -> set[str]:
    """Descendants of this process, and whoever sits in the control groups named after it.

    A zombie of a group counts only as our descendant: the host's init takes its time to reap.
    """
    parents, texts = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (words := _stat(entry)) is not None:
            name, state, parents[int(entry)] = words
            # Not whether it runs or sleeps: that changes from one look to the next.
            texts[int(entry)] = f"process {entry} ({name}{', Z' if state == 'Z' else ''})"
    found = set()
    for one in parents:
        above = parents[one]
        while above in parents and above != pid:
            above = parents[above]
        if above == pid:
            found.add(one)
    for group in cgroups_named(pid) if groups is None else groups:
        members = _lines(Path(group.removeprefix("cgroup ")) / "cgroup.procs")
        found |= {int(one) for one in members if not texts.get(int(one), "Z)").endswith("Z)")}
    return {texts[one] for one in found}


def command_lines() -> dict[int, bytes]:
    """Those of all processes, by their ids. (Not by a glob: it fails on a process that ends beneath it.)"""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/cmdline", "rb") as file:
                found[int(entry)] = file.read()
    return found


def _stat(pid: str) -> tuple[str, str, int] | None:
    """Name, state and parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(1024).decode(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    return name, state, int(parent)


def _lines(path: Path) -> list[str]:
    """What a control group lists; nothing when it is gone."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def links() -> set[str]:
    """Ways out of sandboxes' routers, and their tables in the host's packet filter go with them."""
    return {f"link {name}" for _, name in socket.if_nameindex() if re.fullmatch(r"(dsec|box)\d+", name)}


def descriptors(pid: int | str = "self") -> set[str]:
    """Open descriptors with what they are. Empty when the process is gone."""
    found = set()
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for number in numbers:
        if pid == "self" and int(number) < 3:  # pytest's own capture changes these
            continue
        try:
            found.add(f"fd {number} {os.readlink(f'/proc/{pid}/fd/{number}')}")
        except OSError:  # the listing's own
            continue
    return found


def threads() -> set[str]:
    return {f"thread {thread.name}" for thread in threading.enumerate() if thread.is_alive()}


def picture(roots: Iterable[Path]) -> set[str]:
    """Everything at this moment, one line for each thing."""
    roots = list(roots)
    groups = cgroups_named(os.getpid())
    return (
        mounts_below(roots)
        | loops_below(roots)
        | groups
        | processes(os.getpid(), groups)
        | descriptors()
        | threads()
        | links()
    )


def left(before: set[str], take: Callable[[], set[str]], *, patience: float = 3.0) -> list[str]:
    """What is there now and was not before, once it has had `patience` seconds to go by itself."""
    deadline = time.monotonic() + patience
    pause = 0.01
    while True:
        extra = take() - before
        if not extra or time.monotonic() > deadline:
            return sorted(extra)
        gc.collect()  # what only a cycle keeps open is closed here, with the ResourceWarning that fails the test
        time.sleep(pause)
        pause = min(pause * 2, 0.2)
