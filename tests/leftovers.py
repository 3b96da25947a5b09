"""What a test may leave behind, seen from the host: a picture before, a picture after, and their difference.

Only what can be ours is looked at (below the given directories, in groups named after this process, in this process),
so that other work on the same machine never fails a test.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
# What a running fixture of a wider scope may change by itself during a test (a daemon's image mounts).
tolerated: list[Callable[[str], bool]] = []


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


def cgroups_named(pid: int) -> set[str]:
    """Control groups with this pid in the name of their topmost directory, and all below them."""
    mine = re.compile(rf"(^|[^0-9]){pid}([^0-9]|$)")
    found = set()
    for root in {path.resolve() for path in [CGROUP_ROOT, *CGROUP_ROOT.iterdir()] if path.is_dir()}:
        if not (root / "cgroup.procs").exists():
            continue
        for top in root.iterdir():
            if mine.search(top.name) and top.is_dir():
                found |= {f"cgroup {directory}" for directory, _, _ in os.walk(top)}
    return found


def processes(pid: int) -> set[str]:
    """Descendants of this process, and whoever sits in a control group named after it.

    A zombie of a group counts only as our descendant: the host's init takes its time to reap.
    """
    mine = re.compile(rf"/[^/]*(^|[^0-9]){pid}([^0-9]|$)")
    stats = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
                groups = Path(f"/proc/{entry}/cgroup").read_text()
            except OSError:
                continue
            name, _, rest = text.partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            stats[int(entry)] = (
                int(parent),
                f"process {entry} ({name}, {state})",
                state != "Z" and bool(mine.search(groups)),
            )
    found = {text for _, text, ours in stats.values() if ours}
    for one, (parent, text, _) in stats.items():
        while parent in stats and parent != pid:
            parent = stats[parent][0]
        if parent == pid and one != pid:
            found.add(text)
    return found


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
    pid = os.getpid()
    return mounts_below(roots) | loops_below(roots) | cgroups_named(pid) | processes(pid) | descriptors() | threads()


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
