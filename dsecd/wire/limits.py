"""What the clients of one server may make it hold."""

from __future__ import annotations

import sys
from typing import Final

import msgspec

from dsecd.errors import DsecError
from dsecd.wire.base import MAX_FRAME

MAX_CALLS: Final = 20_000
MAX_UNSENT: Final = 128 << 20
MAX_HELD: Final = 1 << 30


class Limits(msgspec.Struct, frozen=True):
    """calls: in flight on one connection; more are refused. unsent: bytes of replies that a client does not read; then
    it is cut off. connections: at once. frame: bytes of a message. held: bytes of all that one principal has asked and
    that is not answered, on all its connections.
    """

    calls: int = MAX_CALLS
    unsent: int = MAX_UNSENT
    connections: int = sys.maxsize
    frame: int = MAX_FRAME
    held: int = MAX_HELD


class Held:
    """Bytes that clients have sent and that are not done with, by whose they are (`Peer.uid`)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def take(self, uid: int, more: int) -> None:
        """`quota`. Until `drop`."""
        now = self._bytes.get(uid, 0) + more
        if now > self._most:
            raise DsecError(
                "quota", f"more than {self._most} bytes of requests in flight: wait for answers before asking for more",
                retryable=True,
            )  # fmt: skip
        self._bytes[uid] = now

    def drop(self, uid: int, less: int) -> None:
        left = self._bytes[uid] - less
        if left:
            self._bytes[uid] = left
        else:
            del self._bytes[uid]
