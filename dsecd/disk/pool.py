"""The contract of a disk pool, and what every driver shares: names, half-made things, rubbish, the collector.

On disk, whatever the driver (commit by rename, so a kill at any instant leaves only names that start with a dot):

    <root>/<sandbox id>/upper   owned by the sandbox's root; the overlay's upperdir
    <root>/<sandbox id>/work    the overlay's workdir, same owner
    <root>/.new-<id>            being made; rubbish after a crash
    <root>/.trash-<id>.<n>      being deleted; rubbish at any time

One daemon owns a pool (the state directory's lock sees to that), so names need no lock of their own: the caller makes
and destroys one id from one thread at a time; different ids may go in parallel.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsecd.disk.prune import keep_only
from dsecd.disk.shift import prepare_copy
from dsecd.errors import DsecError

log = logging.getLogger(__name__)

NEW: Final = ".new-"
TRASH: Final = ".trash-"
LIMIT_MIN: Final = 1 << 20  # below this not even the empty directories' own metadata fits
LIMIT_MAX: Final = 1 << 50
OWNER_MAX: Final = (1 << 32) - (1 << 20)  # ids are 32 bits, and a sandbox has 2^20
COLLECT_DELAY_S: Final = 1.0
COLLECT_WAIT_MAX_S: Final = 60.0
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True)
class PoolConfig:
    """How to open a pool. `driver`: auto, btrfs, prjquota or loop-btrfs; the other fields are loop-btrfs's only."""

    driver: str = "auto"
    # The image's apparent size; 0: `share` of the free space of the state directory's file system at first start.
    size_bytes: int = 0
    share: float = 0.8
    # Kept free on the host's file system: a sparse image that cannot grow would turn the whole pool read-only.
    reserve_bytes: int = 1 << 30


@dataclass(frozen=True)
class Space:
    """One sandbox's writable space. `path` holds `upper/` and `work/`."""

    sandbox_id: str
    path: Path
    limit_bytes: int

    @property
    def upper(self) -> Path:
        return self.path / "upper"

    @property
    def work(self) -> Path:
        return self.path / "work"


class DiskPool(ABC):
    """Blocking calls for a worker thread, each of them short. `driver` names what is underneath."""

    driver: str = ""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()

    # What a driver fills in ---------------------------------------------------------------------------------------

    @abstractmethod
    def _make(self, path: Path, limit_bytes: int, source: Path | None) -> None:
        """Make `path` with its limit set, empty or as a copy of `source`; no other id's space may be touched."""

    @abstractmethod
    def _limit(self, path: Path, limit_bytes: int) -> None: ...

    @abstractmethod
    def _usage(self, path: Path) -> tuple[int, int]: ...

    @abstractmethod
    def _discard(self, path: Path) -> None:
        """Take a name away at once; what takes long is left to `_sweep`."""

    @abstractmethod
    def _sweep(self) -> bool:
        """Work off what `_discard` left; true when nothing is left."""

    @abstractmethod
    def free(self) -> tuple[int, int]:
        """(free, total) bytes that spaces can really fill, whatever their limits promise."""

    def why_no_copies(self) -> str:
        """Why a clone takes as long as its bytes; "" it takes milliseconds, whatever the source holds."""
        return ""

    # What callers use ---------------------------------------------------------------------------------------------

    def create(self, sandbox_id: str, limit_bytes: int, owner_uid: int) -> Space:
        """An empty space; `upper/` and `work/` belong to owner_uid:owner_uid, mode 0755."""
        return self._commit(sandbox_id, limit_bytes, owner_uid, None)

    def clone(self, src_id: str, dst_id: str, limit_bytes: int, owner_uid: int) -> Space:
        """A copy of a space as it is now; the caller has frozen the source. What the source used counts here too.

        Milliseconds when the owner is the same; with another one every inode is visited (`shift.py`).
        """
        return self._commit(dst_id, limit_bytes, owner_uid, self._existing(src_id))

    def keep_only(self, sandbox_id: str, paths: Sequence[str]) -> None:
        """Of a copy that nobody uses yet: all that is not below these paths inside goes (`prune.py`)."""
        try:
            keep_only(self._existing(sandbox_id), paths)
        except OSError as error:
            raise _failed(f"take files out of {sandbox_id}", error) from error

    def settle(self, sandbox_id: str) -> None:
        """Before the source of a clone is frozen: write out what would hold the clone up, which may take seconds.

        For drivers whose clones wait for writes.
        """
        self._existing(sandbox_id)

    def open(self, sandbox_id: str) -> Space:
        path = self._existing(sandbox_id)
        return Space(sandbox_id, path, self._usage(path)[1])

    def usage(self, sandbox_id: str) -> tuple[int, int]:
        """(used, limit) in bytes, data and metadata together."""
        return self._usage(self._existing(sandbox_id))

    def set_limit(self, sandbox_id: str, limit_bytes: int) -> None:
        """Below what is used already is allowed: then the sandbox can only delete."""
        self._limit(self._existing(sandbox_id), check_limit(limit_bytes))

    def destroy(self, sandbox_id: str) -> None:
        """The name is gone when this returns, the bytes follow. An id that is not there is no error."""
        path = self.root / check_id(sandbox_id)
        if path.exists():
            self._discard(path)
            self._start_collector()

    def list(self) -> list[str]:
        return sorted(name for name in os.listdir(self.root) if _ID.fullmatch(name))

    def collect(self) -> bool:
        """One pass over rubbish, by hand; true when nothing is left."""
        return self._sweep()

    def close(self) -> None:
        """Stop the collector. Spaces stay mounted and usable: sandboxes outlive the daemon."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    # ----------------------------------------------------------------------------------------------------------------

    def _commit(self, sandbox_id: str, limit_bytes: int, owner_uid: int, source: Path | None) -> Space:
        path, new = self.root / check_id(sandbox_id), self.root / (NEW + sandbox_id)
        check_limit(limit_bytes)
        if not 0 <= owner_uid <= OWNER_MAX:
            raise DsecError("invalid", f"no room for a sandbox's ids at {owner_uid}")
        if path.exists():
            raise DsecError("conflict", f"disk space {sandbox_id} exists already")
        if new.exists():  # an earlier try of this id failed before its rename
            self._discard(new)
        try:
            self._make(new, limit_bytes, source)
            if source is not None:
                prepare_copy(new, owner_uid)
            for name in ("upper", "work"):
                with contextlib.suppress(FileExistsError):
                    (new / name).mkdir(0o755)
                os.chown(new / name, owner_uid, owner_uid)
            new.rename(path)
        except OSError as error:
            if new.exists():
                self._discard(new)
                self._start_collector()
            raise _failed(f"make disk space {sandbox_id}", error) from error
        return Space(sandbox_id, path, limit_bytes)

    def _existing(self, sandbox_id: str) -> Path:
        path = self.root / check_id(sandbox_id)
        if not path.is_dir():
            raise DsecError("not_found", f"no disk space for sandbox {sandbox_id}")
        return path

    def _recover(self) -> None:
        """Called by drivers at open: what an earlier life left half-made or half-deleted."""
        for name in os.listdir(self.root):
            if name.startswith((NEW, TRASH)):
                self._discard(self.root / name)
        self._start_collector()

    def _start_collector(self) -> None:
        with self._thread_lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._collector, name="dsecd-disk-collector", daemon=True)
                self._thread.start()
        self._wake.set()

    def _collector(self) -> None:
        """Asleep while there is nothing to do; else a sweep after a moment, then ever more seldom."""
        wait: float | None = None
        while not self._closing.is_set():
            if self._wake.wait(wait):
                self._wake.clear()
                wait = 0.0
            if self._closing.wait(COLLECT_DELAY_S):  # many destroys come together; sweep once for all of them
                return
            try:
                done = self._sweep()
            except OSError as error:
                log.warning("disk: sweeping %s failed: %s, ignoring until the next sweep", self.root, error)
                done = False
            wait = None if done else min((wait or 1.0) * 2, COLLECT_WAIT_MAX_S)


def check_id(sandbox_id: str) -> str:
    if not _ID.fullmatch(sandbox_id):
        raise DsecError("invalid", f"not a sandbox id: {sandbox_id[:80]!r}")
    return sandbox_id


def check_limit(limit_bytes: int) -> int:
    if not LIMIT_MIN <= limit_bytes <= LIMIT_MAX:
        raise DsecError("invalid", f"a disk limit lies between {LIMIT_MIN} and {LIMIT_MAX} bytes, not {limit_bytes}")
    return limit_bytes


def _failed(what: str, error: OSError) -> DsecError:
    """Our own bookkeeping failed: a full pool is the host's shortage, anything else a fault of ours."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DsecError("capacity", f"{what}: the disk pool is full ({error.strerror})")
    return DsecError("internal", f"{what}: {error}")
