"""One JSON object per line: cut a byte stream into lines, bound their length."""

from __future__ import annotations

from typing import Final

from dsecd.wire.base import MAX_FRAME

MAX_PARTS: Final = 512


class FrameTooLong(Exception):
    """A line over the cap. The rest of the stream cannot be trusted: close the connection."""


class Lines:
    """Bytes in, whole lines out (without the LF). Holds at most one unfinished line of `limit` bytes.

    A long line is copied once, when it is whole; until then only views of what was received are kept.
    """

    __slots__ = ("_limit", "_parts", "_size")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._parts: list[bytes | memoryview] = []
        self._size = 0

    @property
    def unfinished(self) -> int:
        """Bytes of the line whose end is still to come."""
        return self._size

    def feed(self, data: bytes) -> list[bytes]:
        """Lines completed by `data`; empty lines are dropped."""
        lines: list[bytes] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            if self._size + end - start > self._limit:
                raise FrameTooLong
            if self._parts:
                self._parts.append(memoryview(data)[start:end])
                lines.append(b"".join(self._parts))
                self._parts, self._size = [], 0
            elif end > start:
                lines.append(data[start:end])
            start = end + 1
        if start < len(data):
            self._size += len(data) - start
            if self._size > self._limit:
                raise FrameTooLong
            self._parts.append(memoryview(data)[start:] if start else data)
            if len(self._parts) > MAX_PARTS:  # somebody who sends byte by byte must not cost an object for each
                self._parts = [b"".join(self._parts)]
        return lines
