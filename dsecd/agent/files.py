"""Files, trees and tunnels inside a sandbox, seen from the host.

Each call is one channel. Paths are bytes, absolute inside the sandbox; the agent resolves them there, so that no
symlink of the tenant ever names a host file.
"""

from __future__ import annotations

import asyncio
import stat
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from dsecd.agent.command import agent_error
from dsecd.agent.frames import MAX_DATA, Field, Fields, FrameError, Tag, Type, signed
from dsecd.agent.link import AgentLink, Channel
from dsecd.errors import DsecError

WINDOW: Final = 2 << 20
MAX_ENTRIES: Final = 100_000
MANY: Final = 256  # frames of one exchange that wait to be taken
SMALL: Final = 4096
_TYPES: Final = {8: "file", 4: "dir", 10: "symlink", 1: "fifo", 12: "socket", 2: "char", 6: "block"}
PARENTS: Final = 1
EXCLUSIVE: Final = 2
APPEND: Final = 4
OWNER: Final = 8
RECURSIVE: Final = 2
FOLLOW: Final = 16


class FileStat(msgspec.Struct, frozen=True):
    """One entry. name is b"" for a plain stat; target for symlinks."""

    name: bytes
    type: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: bytes | None


def parse_stat(payload: memoryview) -> FileStat:
    parsed = Fields(payload)
    target = parsed.raw(Tag.PATH2, b"")
    return FileStat(
        name=parsed.raw(Tag.NAME, b""),
        type=_TYPES.get(parsed.integer(Tag.TYPE, 0), "other"),
        mode=stat.S_IMODE(parsed.integer(Tag.MODE)),
        uid=parsed.integer(Tag.UID) & 0xFFFF_FFFF,
        gid=parsed.integer(Tag.GID) & 0xFFFF_FFFF,
        size=parsed.integer(Tag.SIZE),
        mtime_ns=signed(parsed.integer(Tag.MTIME_NS)),
        target=target or None,
    )


class Exchange(Channel):
    """A request whose answer is a few frames or a byte stream. `recv` gives frames in order.

    What the agent may send ahead is bounded by the LIMIT it was given; more is a protocol error.
    """

    __slots__ = ("_closed", "_error", "_frames", "_limit", "_once", "_received", "_wake", "_what", "peer_limit", "sent")

    def __init__(self, link: AgentLink, what: str) -> None:
        super().__init__(link)
        self._frames: deque[tuple[Type, memoryview]] = deque()
        self._once: set[Type] = set()
        self._wake = asyncio.Event()
        self._what = what
        self._error: DsecError | None = None
        self._received = 0
        self._limit = 0
        self._closed = False
        self.sent = 0
        self.peer_limit = 0
        link.attach(self)

    def request(self, kind: Type, items: list[Field], window: int = 0) -> None:
        """Send the request; with a window, the agent may send that many bytes ahead."""
        self._limit = window
        self.send(kind, [*items, (Tag.LIMIT, window)] if window else items)

    def frame(self, kind: Type, payload: memoryview) -> None:
        if kind is Type.CREDIT:
            self.peer_limit = Fields(payload).integer(Tag.LIMIT)
        elif kind is Type.ERROR:
            self._error = agent_error(payload, self._what)
            self._closed = True
            self.link.detach(self)
        elif kind in (Type.DATA, Type.ENTRY):
            self._received += len(payload)
            if not payload or self._received > self._limit + MAX_DATA:
                raise FrameError("the agent sent beyond its limit")
            self._queue(kind, payload)
        elif kind in (Type.EOF, Type.DONE, Type.STAT, Type.CONNECTED):
            if kind in self._once:
                raise FrameError(f"{kind.name} again")
            self._once.add(kind)
            self._frames.append((kind, payload))
            if kind is Type.DONE:
                self._closed = True
                self.link.detach(self)
        else:
            raise FrameError(f"{kind.name} for a file call")
        self._wake.set()

    def _queue(self, kind: Type, payload: memoryview) -> None:
        """Small pieces that nobody takes become larger ones: a byte of a limit must not cost an object."""
        if kind is Type.DATA and len(self._frames) >= MANY and self._frames[-1][0] is Type.DATA:
            last = self._frames[-1][1]
            if len(last) + len(payload) <= SMALL:
                self._frames[-1] = kind, memoryview(bytes(last) + payload)
                return
        self._frames.append((kind, payload))

    def lost(self, error: DsecError) -> None:
        self._error = error
        self._closed = True
        self._wake.set()

    async def recv(self) -> tuple[Type, memoryview]:
        """The next frame; raises what the agent reported."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        return self._frames.popleft()

    def took(self, size: int, window: int) -> None:
        """`size` more bytes were handed on: let the agent send as many again."""
        self._limit += size
        if self._limit - self._received <= window:
            self.send(Type.CREDIT, [(Tag.STREAM, 0), (Tag.LIMIT, self._limit)])

    async def put(self, data: bytes | memoryview) -> None:
        """Send bytes, waiting for the agent's credit. Raises what the agent reported meanwhile."""
        view = memoryview(data)
        while len(view):
            if self._error is not None:
                raise self._error
            room = min(self.peer_limit - self.sent, MAX_DATA)
            if room <= 0:
                if self._closed:
                    raise DsecError("invalid", f"{self._what}: the agent took no more")
                self._wake.clear()
                await self._wake.wait()
                continue
            piece, view = view[:room], view[room:]
            self.send_raw(Type.DATA, piece)
            self.sent += len(piece)
            await self.link.drained()

    def put_eof(self) -> None:
        self.send(Type.EOF)

    def abandon(self) -> None:
        """Give up early; harmless after the end."""
        if not self._closed:
            self._closed = True
            self.send(Type.CLOSE)
            self.link.detach(self)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.abandon()


async def _simple(link: AgentLink, kind: Type, items: list[Field], what: str) -> Fields:
    with Exchange(link, what) as exchange:
        exchange.request(kind, items)
        got, payload = await exchange.recv()
        if got is not Type.DONE:
            raise DsecError("internal", f"{what}: the agent answered {got.name}")
        return Fields(payload)


def _shown(path: bytes) -> str:
    return path[:200].decode("utf-8", "replace")


async def file_stat(link: AgentLink, path: bytes, *, follow: bool) -> FileStat:
    with Exchange(link, _shown(path)) as exchange:
        exchange.request(Type.STATPATH, [(Tag.PATH, path), (Tag.FLAGS, FOLLOW if follow else 0)])
        kind, payload = await exchange.recv()
        if kind is not Type.STAT:
            raise DsecError("internal", f"the agent answered {kind.name} to a stat")
        return parse_stat(payload)


class Reader:
    """An open file: its stat, then its bytes."""

    def __init__(self, exchange: Exchange, info: FileStat) -> None:
        self._exchange = exchange
        self.info = info

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        while True:
            kind, payload = await self._exchange.recv()
            if kind is Type.DONE:
                return
            yield payload
            self._exchange.took(len(payload), WINDOW)


async def read_open(exchange: Exchange, path: bytes, offset: int, size: int) -> Reader:
    """Open for reading on a fresh exchange (the caller's `with` closes it). size 0: to the end."""
    exchange.request(Type.READ, [(Tag.PATH, path), (Tag.OFFSET, offset), (Tag.SIZE, size)], WINDOW)
    kind, payload = await exchange.recv()
    if kind is not Type.STAT:
        raise DsecError("internal", f"the agent answered {kind.name} to a read")
    return Reader(exchange, parse_stat(payload))


def write_request(
    path: bytes, mode: int, uid: int | None, gid: int | None, *, parents: bool, exclusive: bool, append: bool
) -> list[Field]:
    """The fields of a WRITE."""
    flags = (PARENTS if parents else 0) | (EXCLUSIVE if exclusive else 0) | (APPEND if append else 0)
    items: list[Field] = [(Tag.PATH, path), (Tag.MODE, mode)]
    if uid is not None or gid is not None:
        flags |= OWNER
        items += [(Tag.UID, uid or 0), (Tag.GID, gid if gid is not None else uid or 0)]
    return [*items, (Tag.FLAGS, flags)]


async def finish_put(exchange: Exchange) -> Fields:
    """EOF, then wait for DONE."""
    exchange.put_eof()
    kind, payload = await exchange.recv()
    if kind is not Type.DONE:
        raise DsecError("internal", f"the agent answered {kind.name} at the end of a stream")
    return Fields(payload)


async def list_dir(link: AgentLink, path: bytes) -> list[FileStat]:
    """Entries of a directory. More than 100,000: `invalid`."""
    entries: list[FileStat] = []
    with Exchange(link, _shown(path)) as exchange:
        exchange.request(Type.LISTDIR, [(Tag.PATH, path)], WINDOW)
        while True:
            kind, payload = await exchange.recv()
            if kind is Type.DONE:
                return entries
            if kind is not Type.ENTRY:
                raise DsecError("internal", f"the agent answered {kind.name} to a list")
            if len(entries) >= MAX_ENTRIES:
                raise DsecError("invalid", f"{_shown(path)} has more than {MAX_ENTRIES} entries; download the tree")
            entries.append(parse_stat(payload))
            exchange.took(len(payload), WINDOW)


async def make_dir(link: AgentLink, path: bytes, mode: int, *, parents: bool) -> None:
    items: list[Field] = [(Tag.PATH, path), (Tag.MODE, mode), (Tag.FLAGS, PARENTS if parents else 0)]
    await _simple(link, Type.MKDIR, items, _shown(path))


async def remove(link: AgentLink, path: bytes, *, recursive: bool) -> None:
    await _simple(link, Type.REMOVE, [(Tag.PATH, path), (Tag.FLAGS, RECURSIVE if recursive else 0)], _shown(path))


async def rename(link: AgentLink, path: bytes, to: bytes) -> None:
    await _simple(link, Type.RENAME, [(Tag.PATH, path), (Tag.PATH2, to)], _shown(path))


async def guest_stats(link: AgentLink) -> Fields:
    """What the guest's kernel counts for the sandbox (VMs only): the fields of STATS's answer."""
    return await _simple(link, Type.STATS, [], "stats")


def disk_of(stats: Fields) -> tuple[int, int]:
    """Of the answer of `guest_stats`: bytes used of the guest's writable file system, and its size."""
    return stats.integer(Tag.DISK_USED, 0), stats.integer(Tag.DISK_LIMIT, 0)


async def wake(link: AgentLink, realtime_ns: int, seed: bytes, hostname: str = "", net: str = "") -> None:
    """After a VM was resumed or cloned: set its clock, stir `seed` into its entropy, rename it, and give its card other
    addresses, in the words of its command line (VMs only)."""
    items: list[Field] = [(Tag.REALTIME_NS, realtime_ns), (Tag.SEED, seed)]
    if hostname:
        items.append((Tag.HOSTNAME, hostname.encode()))
    if net:
        items.append((Tag.NET, net.encode()))
    await _simple(link, Type.WAKE, items, "wake")


async def knobs(link: AgentLink, writes: list[tuple[str, str]]) -> None:
    """Write files of the guest's sysfs, in order (VMs only; the agent has a list of what may be written)."""
    items: list[Field] = []
    for path, value in writes:
        items += [(Tag.PATH, path.encode()), (Tag.DATA, value.encode())]
    await _simple(link, Type.KNOBS, items, "knobs")


async def knobs_read(link: AgentLink, paths: list[str]) -> list[bytes]:
    """Their contents, at most 4 KiB each. Data of a guest: not to be trusted."""
    done = await _simple(link, Type.KNOB_READ, [(Tag.PATH, path.encode()) for path in paths], "knobs")
    return [value for value in done.all(Tag.DATA) if isinstance(value, bytes)]


def tree_issues(done: Fields) -> list[str]:
    """ISSUE lines of a DONE, as bounded text."""
    lines = [value for value in done.all(Tag.ISSUE) if isinstance(value, bytes)]
    return [line[:512].decode("utf-8", "replace") for line in lines[:1000]]
