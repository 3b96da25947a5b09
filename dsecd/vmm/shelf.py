"""Directories by name that appear whole or not at all, and what a crash at any instant leaves of them: base of stores.

<root>/
    lock                  held (flock) while anything below changes its name
    <name>/               one entry
    tmp-<random>/         being made; its maker and the maker's child hold a flock on the directory
    trash-<random>/       being removed
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from dsecd.erofs import files
from dsecd.erofs.store import Work
from dsecd.errors import DsecError

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._+:-]{0,127}")
_OURS: Final = ("tmp-", "trash-")


class Shelf:
    """Methods block: call them from a thread where that matters. All are safe to call from several.

    A name that is used again is replaced by two renames; a crash in between costs the old one.
    """

    def __init__(self, root: Path, what: str, reserved: Collection[str] = ()) -> None:
        """what: one of its entries is called that in errors. reserved: names of other files below the root."""
        self.root = root
        self.what = what
        self._reserved = frozenset(reserved) | {"lock"}
        self._mutex = threading.RLock()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def check_name(self, name: str) -> None:
        if not NAME.fullmatch(name) or name.startswith(_OURS) or name in self._reserved:
            raise DsecError(
                "invalid", f"{self.what} name {name[:160]!r} is not [a-z0-9][a-z0-9._+:-]* of at most 128, or reserved"
            )

    def names(self) -> list[str]:
        return sorted(
            path.name for path in self.root.iterdir()
            if path.is_dir() and not path.name.startswith(_OURS) and path.name not in self._reserved
        )  # fmt: skip

    def not_found(self, name: str) -> DsecError:
        return DsecError("not_found", f"there is no {self.what} {name[:160]!r}")

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Work]:
        """A locked `tmp-` directory for one entry; gone at the end, committed or not."""
        path = self.root / f"tmp-{secrets.token_hex(8)}"
        with self._locked():  # `collect` must not see the directory before its lock
            path.mkdir(mode=0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield Work(path, fd)
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)

    def put(self, ready: Path, name: str) -> None:
        """Make a directory of a workspace the entry of that name."""
        self.check_name(name)
        _sync(ready)
        with self._locked():
            old = self._to_trash(name)
            ready.rename(self.root / name)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def remove(self, name: str, in_use: Collection[str] = ()) -> None:
        """`conflict` when it is one of `in_use`, names that somebody needs."""
        self.check_name(name)
        if name in in_use:
            raise DsecError("conflict", f"the {self.what} {name!r} is in use")
        with self._locked():
            trash = self._to_trash(name)
        if trash is None:
            raise self.not_found(name)
        shutil.rmtree(trash, ignore_errors=True)

    def collect(self) -> None:
        """Remove what a daemon that was killed left behind. At the start."""
        with self._locked():
            for path in [*self.root.glob("trash-*"), *self.root.glob("tmp-*")]:
                if path.name.startswith("trash-") or not files.is_locked(path):
                    shutil.rmtree(path, ignore_errors=True)

    def _to_trash(self, name: str) -> Path | None:
        trash = self.root / f"trash-{secrets.token_hex(8)}"
        try:
            (self.root / name).rename(trash)
        except FileNotFoundError:
            return None
        return trash

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex, (self.root / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _sync(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
