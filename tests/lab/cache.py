"""The lab's cache under ~/.cache/dsecd: what is slow to make and the same every time.

A product is a directory `<kind>-<key>`, made under a lock in a temporary directory beside it and committed by rename,
so that a half-made one is never seen:

    ~/.cache/dsecd/
        <kind>-<key>/        immutable once it is there
        <kind>.lock          held by whoever makes a product of that kind
        .making-<kind>-*     work in progress; swept by the next holder of the lock

Never decides what belongs into a key: that is the maker's job.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.append(
    str(Path(__file__).resolve().parents[2])
)  # run.py runs before there is a venv; in the lab VM it is behind

from dsecd.errors import DsecError

KEEP = 2  # products of a kind: this one, and the last one, so that going back a commit is cheap


class LabError(DsecError):
    """The lab cannot go on; the message is one sentence for the person who started it."""

    def __init__(self, message: str) -> None:
        super().__init__("unsupported", message)


def cache_dir() -> Path:
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsecd"
    path.mkdir(parents=True, exist_ok=True)
    return path


def key_of(parts: Iterable[str | bytes]) -> str:
    """Digest of the parts, with their borders, short enough for a file name."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def product(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The directory `<kind>-<key>`, made by `make(temporary directory)` if it is not there yet."""
    final = cache_dir() / f"{kind}-{key}"
    if final.is_dir():
        os.utime(final)  # the last use, for pruning
        return final
    with (cache_dir() / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():  # somebody else made it while we waited
            return final
        sweep(kind)
        work = Path(tempfile.mkdtemp(prefix=f".making-{kind}-", dir=cache_dir()))
        try:
            make(work)
            work.chmod(0o755)
            work.rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        prune(kind)
    return final


def sweep(kind: str) -> None:
    """Remove what a maker that was killed left behind; only for the holder of the lock."""
    for stale in cache_dir().glob(f".making-{kind}-*"):
        shutil.rmtree(stale, ignore_errors=True)


def prune(kind: str) -> None:
    products = sorted(cache_dir().glob(f"{kind}-*/"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in products[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
