"""Byte sources for the tar reader: descriptors, regions of them, digests on the way, decompressors by magic number."""

from __future__ import annotations

import bz2
import hashlib
import lzma
import os
import select
import subprocess
import zlib
from collections.abc import Callable
from typing import Final, Protocol

from dsecd.erofs.tar import Source, bad
from dsecd.errors import DsecError

PIECE: Final = 1 << 18

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_XZ: Final = b"\xfd7zXZ\x00"
_BZIP2: Final = b"BZh"


class FdSource:
    """Reads a descriptor from where it stands (a pipe, a socket, a file). `seen` counts bytes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.seen = 0

    def read(self, n: int) -> bytes:
        while True:
            try:
                data = os.read(self._fd, n)
            except BlockingIOError:
                # A client's descriptor may be non-blocking, and that flag is the client's too: leave it.
                select.select([self._fd], [], [])
                continue
            except OSError as e:
                raise DsecError("invalid", f"the input cannot be read: {e.strerror}") from e
            self.seen += len(data)
            return data


class RegionSource:
    """Reads part of a seekable file by offset, so that several may share a descriptor."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._fd, self._at, self._end = fd, offset, offset + size

    def read(self, n: int) -> bytes:
        data = os.pread(self._fd, min(n, self._end - self._at), self._at)
        self._at += len(data)
        return data


class HashingSource:
    """Passes bytes on and keeps their sha256 and count."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self.seen = 0

    def read(self, n: int) -> bytes:
        data = self._source.read(n)
        self._hash.update(data)
        self.seen += len(data)
        return data

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()


class Peeked:
    """A source whose first bytes have been looked at."""

    def __init__(self, head: bytes, source: Source) -> None:
        self._head, self._source = head, source

    def read(self, n: int) -> bytes:
        if self._head:
            data, self._head = self._head[:n], self._head[n:]
            return data
        return self._source.read(n)


class BoundedSource:
    """Refuses to pass on more than `limit` bytes: what a compressed stream may unpack to."""

    def __init__(self, source: Source, limit: int) -> None:
        self._source, self._left, self._limit = source, limit, limit

    def read(self, n: int) -> bytes:
        data = self._source.read(n)
        self._left -= len(data)
        if self._left < 0:
            raise bad(f"the image unpacks to more than {self._limit} bytes")
        return data


def peek(source: Source, n: int) -> tuple[bytes, Peeked]:
    head = b""
    while len(head) < n and (data := source.read(n - len(head))):
        head += data
    return head, Peeked(head, source)


class _Decompressor(Protocol):
    """What zlib, bz2 and lzma objects have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


class _Unpacked:
    """gzip, bzip2 or xz in this process, members one after the other; each call's output is bounded."""

    def __init__(self, source: Source, make: Callable[[], _Decompressor], name: str) -> None:
        self._source, self._make, self._name = source, make, name
        self._stream: _Decompressor | None = make()
        self._pending = b""
        self._end = False

    def read(self, n: int) -> bytes:
        while (stream := self._stream) is not None:
            if not self._pending and not self._end and self._wants_input(stream):
                self._pending = self._source.read(PIECE)
                self._end = not self._pending
            try:
                data = stream.decompress(self._pending, n)
            except (zlib.error, lzma.LZMAError, OSError, EOFError) as e:
                raise bad(f"the {self._name} stream is altered or truncated ({e})") from e
            self._pending = getattr(stream, "unconsumed_tail", b"")
            if stream.eof:
                self._next_member(stream.unused_data)
            elif self._end and not data:
                raise bad(f"the {self._name} stream is truncated")
            if data:
                return data
        return b""

    @staticmethod
    def _wants_input(stream: _Decompressor) -> bool:
        return getattr(stream, "needs_input", True)

    def _next_member(self, rest: bytes) -> None:
        rest = rest or self._source.read(PIECE)
        rest = rest.lstrip(b"\0")  # padding after the last member is allowed, and common from tape tools
        self._pending = rest
        self._stream = self._make() if rest else None


class ZstdSource:
    """zstd through its own program, which Python 3.11 lacks a module for. `read` pumps bytes in and out by itself."""

    def __init__(self, source: Source) -> None:
        self._source = source
        try:
            self._process = subprocess.Popen(
                ["zstd", "-dcq", "--no-progress"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, bufsize=0,
            )  # fmt: skip
        except FileNotFoundError as e:
            raise bad("the stream is zstd and the program zstd is not installed") from e
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in: int | None = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._pending = memoryview(b"")

    def read(self, n: int) -> bytes:
        while True:
            writable: list[int] = []
            if self._in is not None:
                if not self._pending:
                    self._refill()
                writable = [self._in] if self._in is not None else []
            ready, can_write, _ = select.select([self._out], writable, [])
            if can_write:
                self._feed()
            if ready:
                data = os.read(self._out, n)
                if not data and self._process.wait() != 0:
                    raise bad("the zstd stream is altered or truncated")
                return data

    def _refill(self) -> None:
        data = self._source.read(PIECE)
        self._pending = memoryview(data)
        if not data:
            self._close_in()

    def _feed(self) -> None:
        assert self._in is not None
        try:
            self._pending = self._pending[os.write(self._in, self._pending) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._close_in()

    def _close_in(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._in = None


def decompressed(source: Source, limit: int) -> Source:
    """The plain bytes of a source, whatever it is compressed with, and never more than `limit` of them."""
    head, peeked = peek(source, 6)
    unpacked: Source = peeked
    if head.startswith(_GZIP):
        unpacked = _Unpacked(peeked, lambda: zlib.decompressobj(31), "gzip")
    elif head.startswith(_ZSTD):
        unpacked = ZstdSource(peeked)
    elif head.startswith(_XZ):
        unpacked = _Unpacked(peeked, lambda: lzma.LZMADecompressor(memlimit=256 << 20), "xz")
    elif head.startswith(_BZIP2):
        unpacked = _Unpacked(peeked, bz2.BZ2Decompressor, "bzip2")
    return BoundedSource(unpacked, limit)
