"""A directory of the config that hosts share, as the image store uses it: never for longer than we have patience.

A shared file system may hang for as long as its server is away, and a thread in it cannot be woken. So whatever
touches one runs in a thread of its own; who waits for it does so until that thread has shown no sign of life for
`patience_s`, and holds nothing that others need. Changes take turns by a lock of *this host* (a file beside the
images), which a hanging thread keeps until it is through: the next ones are told so, and images elsewhere never ask.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Generic, TypeVar

from dsecd.erofs import files
from dsecd.erofs.claims import LEASE_S, Claims
from dsecd.erofs.files import Alive
from dsecd.erofs.stores import unreadable
from dsecd.errors import DsecError

T = TypeVar("T")

PATIENCE_S: Final = 30.0
HANGING_MAX: Final = 8
_TICK_S: Final = 0.2


class Shared:
    """One such directory. lock: this host's, for it."""

    def __init__(
        self, name: str, path: Path, owner: str, lock: Path, *, lease_s: float = LEASE_S, patience_s: float = PATIENCE_S
    ) -> None:
        self.name = name
        self.path = path
        self.claims = Claims(path, owner, lease_s=lease_s)
        self._lock = lock
        self._patience_s = patience_s
        self._mutex = threading.Lock()
        self._hanging: set[threading.Thread] = set()

    def data(self, hexa: str) -> Path:
        return self.path / f"{hexa}.data"

    def coming(self, word: str) -> Path:
        """Data that is not committed yet."""
        return self.path / f"tmp-{word}.data"

    @property
    def hangs(self) -> bool:
        """A call that nobody waits for any more has not ended."""
        with self._mutex:
            return any(thread.is_alive() for thread in self._hanging)

    def do(self, what: Callable[[Alive], T], lock_fd: int | None = None) -> T:
        """What it comes to. It calls what it is given now and then, if it takes long.

        DsecError `image`: the store does not answer. The thread then goes on by itself, with the lock, up to its next
        sign of life: that raises OSError ECANCELED.
        """
        with self._mutex:
            self._hanging = {thread for thread in self._hanging if thread.is_alive()}
            if len(self._hanging) >= HANGING_MAX:
                raise self._away(f"{HANGING_MAX} threads hang in it already")
        task = _Task(self.name, what, None if lock_fd is None else os.dup(lock_fd))
        while not task.ended.wait(_TICK_S):
            if time.monotonic() - task.alive_at > self._patience_s:
                task.abandoned = True
                with self._mutex:
                    self._hanging.add(task)
                raise self._away(f"no answer within {self._patience_s:g} s")
        task.join()
        return task.result()

    @contextlib.contextmanager
    def turn(self) -> Iterator[Turn]:
        """Nobody else on this host changes anything in it meanwhile. DsecError `image`: not now; at once, where a call
        of ours hangs in it already."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + self._patience_s
            while self.hangs or not _locked(fd):
                if self.hangs or time.monotonic() > deadline:
                    raise self._away("what was begun before does not end")
                time.sleep(0.01)
            yield Turn(self, fd)
        finally:
            os.close(fd)

    def put(self, data: Path, word: str) -> None:
        """Copy a data file there, under a name that says it is not committed. DsecError `disk_full`, `image`."""
        try:
            self.do(lambda alive: files.copy_durably(data, self.coming(word), alive))
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DsecError("disk_full", f"no space left for the image on store {self.name}") from e
            raise self._away(e.strerror or str(e)) from e

    def publish(self, hexa: str, word: str) -> None:
        """Claim an image and put its data in place, in that order (see `claims`)."""
        self.claims.claim(hexa)
        self.coming(word).rename(self.data(hexa))
        files.fsync(self.path)

    def _away(self, why: str) -> DsecError:
        return unreadable(self.name, str(self.path), why)


class Turn:
    """The right to change things in a shared directory, until the block that it was given to ends."""

    def __init__(self, shared: Shared, lock_fd: int) -> None:
        self.shared = shared
        self._lock_fd = lock_fd

    def do(self, what: Callable[[Alive], T]) -> T:
        return self.shared.do(what, self._lock_fd)


class _Task(threading.Thread, Generic[T]):
    """One call in a thread that nobody has to wait for; it closes its copy of the lock when it is through."""

    def __init__(self, name: str, what: Callable[[Alive], T], lock_fd: int | None) -> None:
        super().__init__(name=f"shared-{name}", daemon=True)
        self._what, self._lock_fd = what, lock_fd
        self._result: T
        self._failed: BaseException | None = None
        self.ended = threading.Event()
        self.abandoned = False
        self.alive_at = time.monotonic()
        self.start()

    def run(self) -> None:
        try:
            self._result = self._what(self._alive)
        except BaseException as exc:  # noqa: BLE001 - it is raised where somebody waits for it
            self._failed = exc
        finally:
            if self._lock_fd is not None:
                os.close(self._lock_fd)
            self.ended.set()

    def _alive(self) -> None:
        if self.abandoned:
            raise OSError(errno.ECANCELED, "nobody waits for it any more")
        self.alive_at = time.monotonic()

    def result(self) -> T:
        if self._failed is not None:
            raise self._failed
        return self._result


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
