"""Who needs which data on a directory that several hosts share, and when data there may go.

        <directory>/
            <64 hex>.data             data of an image
            <64 hex>.by-<owner>       that host has the image; its mtime is when the host last said so
            tmp-<random>.data         data that is not committed yet
            gone-<owner>-<64 hex>.data   data that is being removed

No lock works on every shared file system, so the order of renames does it. Who commits claims first and renames its
data into place then. Who removes gives up its claim, sees no other, renames the data away, *looks again*, and puts it
back if a claim has come. A claim that the second look missed was made after the data went away, and so its data comes
after too. Ages are told by the store's own clock, which stamps what is touched there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

DAY_S: Final = 86_400.0
LEASE_S: Final = 30 * DAY_S  # a host that has not said a word for so long is gone for good
_NAME: Final = re.compile(r"([0-9a-f]{64})\.(?:data|by-(.+))|tmp-([0-9a-f]+)\.data|gone-.+-([0-9a-f]{64})\.data")


class Gone(NamedTuple):
    """A file that was removed, and the bytes of disk that it took."""

    name: str
    size: int


def host_owner(tag: str) -> str:
    """Who this host is on shared stores: two hosts of one tag must not be one owner."""
    try:
        machine = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    return f"{tag}-{hashlib.sha256(b'dsecd' + machine.encode()).hexdigest()[:12]}"


class Claims:
    """One shared directory as one host (`owner`) sees it."""

    def __init__(self, root: Path, owner: str, *, lease_s: float = LEASE_S) -> None:
        self._root = root
        self._owner = owner
        self._lease_s = lease_s

    def claim(self, hexa: str) -> None:
        """Before the data comes; and again from time to time, to say that we are alive."""
        self._claim(hexa).touch()

    def release(self, hexa: str) -> Gone | None:
        """Give up an image; its data goes when no other host claims it."""
        try:
            self._claim(hexa).unlink()
        except FileNotFoundError:
            return None
        return self._drop(hexa)

    def sweep(
        self, ours: Collection[str], here: Collection[str], making: Callable[[str], bool | None]
    ) -> Iterator[Gone]:
        """What nobody needs, removed as it comes: data without claims, claims of hosts that are gone.

        ours: images of this host with data here; they are claimed anew. here: those whose claims stay. making: whether
        an import of ours (by its random word) is under way; None: it is not one of ours.
        """
        for hexa in ours:
            self.claim(hexa)
        now = self._now()
        found = [match for path in sorted(self._root.iterdir()) if (match := _NAME.fullmatch(path.name))]
        doubtful: set[str] = set()
        for match in found:
            hexa, owner, temporary, gone = match.groups()
            path = self._root / match[0]
            if owner == self._owner and hexa not in here:
                if (data := self.release(hexa)) is not None:
                    yield data
            elif owner is not None and now - _age_base(path, now) > self._lease_s:
                doubtful.add(hexa)
                yield _remove(path)
            elif temporary is not None:
                alive = making(temporary)
                if alive is False or (alive is None and now - _age_base(path, now) > DAY_S):
                    yield _remove(path)
            elif gone is not None and now - _age_base(path, now) > DAY_S:
                if (data := self._settle(path, gone)) is not None:  # its remover died between two steps
                    yield data
            elif hexa is not None and owner is None and now - _age_base(path, now) > DAY_S:
                doubtful.add(hexa)  # data that nobody may claim: somebody died after giving up the claim
        for hexa in sorted(doubtful):
            if (data := self._drop(hexa)) is not None:
                yield data

    def _claim(self, hexa: str) -> Path:
        return self._root / f"{hexa}.by-{self._owner}"

    def _is_claimed(self, hexa: str) -> bool:
        return bool(list(self._root.glob(f"{hexa}.by-*")))

    def _drop(self, hexa: str) -> Gone | None:
        gone = self._root / f"gone-{self._owner}-{hexa}.data"
        if self._is_claimed(hexa):
            return None
        try:
            (self._root / f"{hexa}.data").rename(gone)
        except FileNotFoundError:
            return None
        return self._settle(gone, hexa)

    def _settle(self, gone: Path, hexa: str) -> Gone | None:
        """Remove data that was renamed away, or put it back where somebody claims it now and brought none."""
        claimed = self._is_claimed(hexa)
        data = self._root / f"{hexa}.data"
        if claimed and not data.exists():
            try:
                os.link(gone, data)
            except FileExistsError:
                pass  # they were quicker
            except OSError:
                gone.rename(data)  # no hard links there; at worst it replaces the same bytes
                return None
        size = _remove(gone).size
        return None if claimed else Gone(data.name, size)

    def _now(self) -> float:
        """The store's clock."""
        probe = self._root / f"tmp-{secrets.token_hex(8)}.data"
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            with contextlib.suppress(FileNotFoundError):
                probe.unlink()


def _remove(path: Path) -> Gone:
    try:
        size = path.stat().st_blocks * 512
        path.unlink()
    except FileNotFoundError:
        return Gone(path.name, 0)
    return Gone(path.name, size)


def _age_base(path: Path, now: float) -> float:
    """When it was last written, claimed or renamed; what is gone meanwhile is young."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return now
    return max(found.st_mtime, found.st_ctime)
