"""The file of one trajectory: a line of JSON for each entry, behind a sum that covers it and all before it.

A line is `<sum> <body>\\n`; sum is the first 16 bytes of SHA-256 over the sum before it and the body, in hex; the first
covers the sandbox's id. So a line that was altered, moved, put in or taken out breaks the chain at that place. What a
crash may leave is a last line without its end: it was never acknowledged, and is cut off.
"""

from __future__ import annotations

import hashlib
import logging
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec
from msgspec import Struct

from dsecd.erofs import files

log = logging.getLogger("dsecd.trajectory")

SUFFIX: Final = ".log"
HEX: Final = 32
MAX_LINE: Final = 64 << 20  # an answer has at most 16 MiB of kept output, in base64


class Head(Struct):
    """What must be known of an entry without reading it whole."""

    seq: int
    event: str
    key: str = ""
    ref: int = 0
    exec_id: str = ""


class Bad(Struct):
    """A line that is not as it was written. seq: where it stands, as far as that is known."""

    seq: int
    offset: int


class Scan(Struct, kw_only=True):
    """What a file holds. offsets: of each entry, seq 1 first. size: without a torn tail of `torn` bytes.

    ends: reply of each request. commands: whose end is there. sum: what the next line builds on.
    """

    offsets: array[int]
    ends: dict[int, int]
    commands: set[str]
    bad: list[Bad]
    sum: bytes
    size: int = 0
    torn: int = 0


_head = msgspec.json.Decoder(Head).decode


def anchor(ident: str) -> bytes:
    """What stands for the sum before the first line."""
    return hashlib.sha256(ident.encode()).digest()[:16]


def sum_of(before: bytes, body: bytes) -> bytes:
    return hashlib.sha256(before + body).digest()[:16]


def seal(before: bytes, body: bytes) -> tuple[bytes, bytes]:
    """The line for `body`, and its sum."""
    made = sum_of(before, body)
    return b"%s %s\n" % (made.hex().encode(), body), made


def split(line: bytes) -> tuple[bytes, bytes] | None:
    """Sum and body of a line without its end; None: its sum is none as we write them."""
    try:
        said = bytes.fromhex(line[:HEX].decode("ascii"))
    except ValueError:
        return None
    return (said, line[HEX + 1 :]) if line[: HEX + 1] == said.hex().encode() + b" " else None


def scan(path: Path, ident: str) -> Scan:
    """Read all of it. A file that is not there is empty."""
    found = Scan(offsets=array("Q"), ends={}, commands=set(), bad=[], sum=anchor(ident))
    before: tuple[bytes, ...] = (found.sum,)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return found
    with file:
        for offset, line in _lines(file):
            if not line.endswith(b"\n"):
                found.torn = len(line)
                break
            before = _take(found, offset, line[:-1], before)
            found.size = offset + len(line)
    found.sum = before[0]
    return found


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while line := file.readline(MAX_LINE):
        yield offset, line
        offset += len(line)


def _take(found: Scan, offset: int, line: bytes, before: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """One line more; returns what the next one's chain may begin with.

    A bad line keeps its place, so that those behind it keep their numbers and stay good: if only its body was altered,
    its sum is still what they build on; if its sum was, what it should have been.
    """
    expected = len(found.offsets) + 1
    parts = split(line)
    head = _head_of(parts[1]) if parts is not None else None
    whole = parts is not None and any(sum_of(one, parts[1]) == parts[0] for one in before)
    if parts is None or head is None or not whole:
        found.offsets.append(offset)
        found.bad.append(Bad(expected, offset))
        built = tuple(sum_of(one, line[HEX + 1 :]) for one in before)
        return built if parts is None else (parts[0], *built)
    if head.seq != expected:  # an altered line end made one of two, or two of one
        found.bad.append(Bad(min(head.seq, expected), offset))
        del found.offsets[head.seq - 1 :]
        found.offsets.extend([offset] * (head.seq - 1 - len(found.offsets)))
    found.offsets.append(offset)
    if head.event == "reply":
        found.ends[head.ref] = head.seq
    elif head.event == "ended":
        found.commands.add(head.exec_id)
    return (parts[0],)


def _head_of(body: bytes) -> Head | None:
    try:
        return _head(body)
    except msgspec.MsgspecError:
        return None


def recover(path: Path, ident: str) -> Scan:
    """Scan it, and cut a torn tail off."""
    found = scan(path, ident)
    if found.torn:
        log.warning("trajectory: %d bytes of a last entry cut off", found.torn, extra={"sandbox_id": ident})
        os.truncate(path, found.size)
    for bad in found.bad:
        log.error("trajectory: entry %d was altered", bad.seq, extra={"sandbox_id": ident})
    return found


def write(path: Path, before: bytes, size: int, bodies: list[bytes]) -> tuple[bytes, int]:
    """Put lines behind the first `size` bytes, durable; the new last sum and size. All of them or, on error, none."""
    lines = []
    for body in bodies:
        line, before = seal(before, body)
        lines.append(line)
    data = memoryview(b"".join(lines))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], size + done)
        os.fdatasync(fd)
        if size == 0:
            files.fsync(path.parent)
    except OSError:
        os.ftruncate(fd, size)
        raise
    finally:
        os.close(fd)
    return before, size + len(data)


def read(path: Path, ident: str, before: int | None, start: int, end: int) -> tuple[list[bytes], str]:
    """Bodies of the lines from `start` to `end`, and the last one's sum. before: where the line begins that they build
    on; `start`: there is none; None: it was altered, and is not looked at. ValueError(n): the nth of them was altered.
    """
    first = start if before is None else before
    with path.open("rb") as file:
        data = os.pread(file.fileno(), end - first, first)
    chain = anchor(ident) if before == start else b""
    if first < start and (known := split(data[: start - first - 1])) is not None:
        chain = known[0]
    bodies: list[bytes] = []
    for number, line in enumerate(data[start - first :].split(b"\n")[:-1]):
        parts = split(line)
        if parts is None or (chain and sum_of(chain, parts[1]) != parts[0]):
            raise ValueError(number)
        chain = parts[0]
        bodies.append(parts[1])
    return bodies, chain.hex()


def trim(directory: Path, live: set[str], oldest: float | None, keep_bytes: int) -> list[str]:
    """Remove logs of what is not live: those last written before `oldest` (None: none for that), then the oldest ones
    while all together are over keep_bytes. Returns whose."""
    found: list[tuple[float, int, str]] = []
    total = 0
    for entry in os.scandir(directory):
        stat = entry.stat()
        total += stat.st_size
        ident = entry.name.removesuffix(SUFFIX)
        if ident not in live:
            found.append((stat.st_mtime, stat.st_size, ident))
    gone = []
    for mtime, size, ident in sorted(found):
        if total <= keep_bytes and (oldest is None or mtime > oldest):
            break
        (directory / f"{ident}{SUFFIX}").unlink(missing_ok=True)
        total -= size
        gone.append(ident)
    return gone
