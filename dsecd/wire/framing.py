"""One JSON object per line: cut a byte stream into lines, bound their length."""

from __future__ import annotations

from dsecd.wire.base import MAX_FRAME


class FrameTooLong(Exception):
    """A line over the cap. The rest of the stream cannot be trusted: close the connection."""


class Lines:
    """Bytes in, whole lines out (without the LF). Holds at most one unfinished line of `limit` bytes."""

    __slots__ = ("_limit", "_parts", "_size")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Lines completed by `data`; empty lines are dropped."""
        pieces = data.split(b"\n")
        if len(pieces) == 1:
            self._keep(data)
            return []
        first, last = pieces[0], pieces.pop()
        if self._parts:
            self._keep(first)
            pieces[0] = b"".join(self._parts)
        self._parts = []
        self._size = 0
        for piece in pieces:
            if len(piece) > self._limit:
                raise FrameTooLong
        if last:
            self._keep(last)
        return [piece for piece in pieces if piece]

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            raise FrameTooLong
        self._parts.append(data)
