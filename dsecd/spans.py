"""What a request did, and when: spans, nested, kept in memory for the last so many requests.

Whoever does something that takes time says so with `span(...)`; where no request is being followed that costs next to
nothing. A request's trace is found through a context variable, as its id for the log is (dsecd.logs), so tasks and
threads that work for it have it, too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Final, TypeVar

from msgspec import Struct

T = TypeVar("T")

MAX_SPANS: Final = 64  # of one request: a create_many of thousands must not fill memory


class Span(Struct):
    """Monotonic seconds. place: who did it (daemon, launcher, agent, fleet). depth: 1 is right below the request."""

    name: str
    place: str
    began: float
    ended: float | None = None
    depth: int = 1
    host: str = ""


class Trace(Struct):
    """One request. key: its request_id, or a number of ours. owner: whose, as its program tells them apart.

    at: UNIX time of `began`. outcome: "" while it runs.
    """

    key: str
    method: str
    sandbox: str
    owner: str
    at: float
    began: float
    ended: float | None = None
    outcome: str = ""
    spans: list[Span] = []
    left_out: int = 0  # spans beyond MAX_SPANS

    def add(
        self, name: str, place: str, began: float, ended: float | None, depth: int, *, host: str = ""
    ) -> Span | None:
        """One that is over, or that somebody else ends. None: there are too many."""
        if len(self.spans) >= MAX_SPANS:
            self.left_out += 1
            return None
        one = Span(name, place, began, ended, depth, host)
        self.spans.append(one)
        return one


current: ContextVar[Trace | None] = ContextVar("trace", default=None)
depth: ContextVar[int] = ContextVar("depth", default=1)  # of the next span: each task of a request has its own


class span:
    """`with span("disk"):` what takes time inside belongs to it. place: who does it."""

    __slots__ = ("_host", "_name", "_one", "_place", "_token")

    def __init__(self, name: str, place: str = "daemon", host: str = "") -> None:
        self._name, self._place, self._host = name, place, host
        self._one: Span | None = None
        self._token: Token[int] | None = None

    def __enter__(self) -> None:
        trace = current.get()
        if trace is not None and trace.ended is None:  # what a request left behind is not its any more
            level = depth.get()
            self._one = trace.add(self._name, self._place, time.monotonic(), None, level, host=self._host)
            self._token = depth.set(level + 1)

    def __exit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _tb: TracebackType | None
    ) -> None:
        if self._token is not None:
            depth.reset(self._token)
        if self._one is not None:
            self._one.ended = time.monotonic()


async def spent(name: str, place: str, work: Awaitable[T]) -> T:
    """`span` around what is awaited."""
    with span(name, place):
        return await work


class Ring:
    """The last `keep` requests; 0: none are followed. tag: of the host, for the keys of those that bring none."""

    def __init__(self, keep: int, tag: str = "") -> None:
        self._kept: deque[Trace] = deque(maxlen=keep)
        self._keep = keep
        self._tag = tag
        self._numbers = 0

    def begin(self, key: str | None, method: str, sandbox: str, owner: str, began: float) -> Trace | None:
        """Follow a request; without a key it gets a number."""
        if not self._keep:
            return None
        if key is None:
            self._numbers += 1
            key = f"{self._tag}#{self._numbers}"
        at = time.time() - (time.monotonic() - began)
        trace = Trace(key, method, sandbox, owner, at, began)
        self._kept.append(trace)
        return trace

    def find(self, key: str, seen: Callable[[str], bool]) -> list[Trace]:
        """Of that key, oldest first: a request that was asked for again has several. seen: whether an owner's is."""
        return [one for one in self._kept if one.key == key and seen(one.owner)]

    def last(self, count: int, seen: Callable[[str], bool]) -> list[Trace]:
        """The newest, newest first."""
        found: list[Trace] = []
        for one in reversed(self._kept):
            if len(found) == count:
                break
            if seen(one.owner):
                found.append(one)
        return found
