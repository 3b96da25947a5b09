"""Files of images: written so that a crash leaves all of one or none, read with a sentence that says what is wrong."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from dsecd.erofs import blob
from dsecd.erofs.model import BLOCK, SUM
from dsecd.erofs.tar import bad

log: Final = logging.getLogger(__name__)

PIECE: Final = 1 << 20
SYNC_EVERY: Final = 64 << 20

Alive = Callable[[], None]  # called now and then by what takes long, to say that it gets on


def still() -> None:
    """For what is done where nobody waits for a sign of life."""


# -- reading -----------------------------------------------------------------------------------------------------------
def read_head(path: Path, size: int, what: str) -> bytes:
    """The first block of a file of that size. DsecError `image`: it is not there, or of another size."""
    try:
        with path.open("rb") as f:
            found = os.fstat(f.fileno()).st_size
            if found != size:
                raise bad(f"{what} is truncated or altered: {found} bytes, and {size} in the manifest")
            return f.read(BLOCK)
    except FileNotFoundError as e:
        raise bad(f"{what} is not there any more ({path})") from e
    except OSError as e:
        raise bad(f"{what} cannot be read: {e.strerror}") from e


def sha256_of(path: Path) -> str:
    with path.open("rb") as f:
        return "sha256:" + hashlib.file_digest(f, "sha256").hexdigest()


def altered_at(
    path: Path, size: int, sums: bytes, alive: Alive = still, pieces: Iterable[int] | None = None
) -> int | None:
    """Where the first altered piece of a data file of `size` bytes begins. pieces: by number, only these."""
    with path.open("rb", buffering=0) as f:
        for number in range(len(sums) // 32) if pieces is None else pieces:
            at = number * SUM
            length = min(SUM, size - at)
            if (found := blob.altered_at(os.pread(f.fileno(), length, at), at, length, sums)) is not None:
                return found
            alive()
    return None


def size_below(path: Path) -> int:
    """Bytes of disk, of a file or of all files below a directory. What goes meanwhile (another gc's) counts nothing."""
    found = [path] if path.is_file() else [Path(top, name) for top, _, names in os.walk(path) for name in names]
    return sum(map(_blocks, found))


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def mtime(path: Path) -> float:
    """Of what is gone meanwhile: now."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def is_locked(path: Path) -> bool:
    """Whether a living process holds a flock on it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


# -- changing ----------------------------------------------------------------------------------------------------------
def write_durably(path: Path, data: bytes) -> None:
    """All of it or what was there before, even if the power goes."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def copy_durably(source: Path, target: Path, alive: Alive = still) -> None:
    """A new file. What could not be written in full is taken away again."""
    try:
        with source.open("rb", buffering=0) as a, target.open("xb", buffering=0) as b:
            unsynced = 0
            while piece := a.read(PIECE):
                view = memoryview(piece)
                while view:
                    view = view[b.write(view) or 0 :]
                unsynced += len(piece)
                if unsynced >= SYNC_EVERY:  # one sync of it all could take longer than anybody waits for a sign
                    os.fsync(b.fileno())
                    unsynced = 0
                alive()
            os.fsync(b.fileno())
            alive()
    except OSError:
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
        raise


def fsync(directory: Path) -> None:
    """Its entries are on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_all(path: Path) -> None:
    """Also while what was just killed is still dying, and writes a last file. What stays after that is gc's."""
    for _ in range(100):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.05)
    log.warning("cannot remove %s now, ignoring", path)


def empty(trash: Path) -> None:
    shutil.rmtree(trash, ignore_errors=True)
