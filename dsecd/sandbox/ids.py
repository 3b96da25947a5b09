"""Sandbox ids (`<host tag>-<ULID>`) and slots of 2^20 user ids."""

from __future__ import annotations

import heapq
import re
import secrets
import time
from typing import Final

from dsecd.container.bundle import ID_COUNT
from dsecd.errors import DsecError

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
TAG: Final = re.compile(r"[a-z0-9]{1,16}")
ID: Final = re.compile(r"([a-z0-9]{1,16})-([0-9a-hjkmnp-tv-z]{26})")


def new_id(tag: str) -> str:
    """A fresh id: 48 bits of milliseconds, 80 random bits, base 32; sorts by time, is a valid cgroup and file name."""
    number = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return f"{tag}-" + "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


class Slots:
    """User id ranges: slot n is ids n*2^20 .. (n+1)*2^20-1, from `first` to `last`. Lowest free first.

    Ranges below 2^20 are the host's. A slot is taken by one sandbox at a time, so that no two sandboxes share a uid.
    """

    def __init__(self, first: int = 1, last: int = 4094) -> None:
        self._free = list(range(first, last + 1))
        self._taken: set[int] = set()

    def take(self) -> int:
        while self._free:
            slot = heapq.heappop(self._free)
            if slot not in self._taken:
                self._taken.add(slot)
                return slot
        raise DsecError("capacity", "no user id range is free: every slot of 2^20 ids has a sandbox")

    def claim(self, slot: int) -> None:
        """Take a given slot (after a restart)."""
        if slot in self._taken:
            raise DsecError("internal", f"user id slot {slot} has two owners")
        self._taken.add(slot)

    def free(self, slot: int) -> None:
        if slot in self._taken:
            self._taken.discard(slot)
            heapq.heappush(self._free, slot)

    @staticmethod
    def base(slot: int) -> int:
        return slot * ID_COUNT
