"""A store that is an HTTP(S) server: ranged GETs over kept-alive connections.

The server is believed in nothing: status, Content-Range and length must be exactly what was asked for.
"""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections.abc import Mapping
from queue import Empty, LifoQueue
from typing import Final
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from dsecd.erofs.stores import StoreConfig, unreadable
from dsecd.errors import DsecError

IDLE_MAX: Final = 16
REDIRECTS_MAX: Final = 4
PIECE: Final = 1 << 18  # read1 allocates what it is asked for
RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Connections:
    """Kept-alive connections to any number of origins; used by one thread at a time each."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], LifoQueue[http.client.HTTPConnection]] = {}
        self._tls = ssl.create_default_context()

    def take(self, url: SplitResult, timeout_s: float) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before (then it may have been closed meanwhile)."""
        try:
            connection = self._idle[url.scheme, url.netloc].get_nowait()
        except (KeyError, Empty):
            return self.fresh(url, timeout_s), False
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        return connection, True

    def fresh(self, url: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
        if url.scheme == "https":
            return http.client.HTTPSConnection(url.netloc, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(url.netloc, timeout=timeout_s)

    def give_back(self, url: SplitResult, connection: http.client.HTTPConnection) -> None:
        queue = self._idle.setdefault((url.scheme, url.netloc), LifoQueue())
        if queue.qsize() < IDLE_MAX:
            queue.put(connection)
        else:
            connection.close()

    def close(self) -> None:
        for queue in self._idle.values():
            while not queue.empty():
                queue.get_nowait().close()


class Ranges:
    """GETs of byte ranges with all that can go wrong with them, for the HTTP and the registry store."""

    def __init__(self, store: str, config: StoreConfig) -> None:
        self._store = store
        self._config = config
        self._connections = Connections()
        self.close = self._connections.close

    def get(
        self, url: str, blob: str, offset: int, size: int, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The bytes. A refusal that only new credentials can lift raises PermissionError with the challenge."""
        deadline = time.monotonic() + timeout_s
        sent = dict(headers or {})
        for _ in range(REDIRECTS_MAX):
            answer = self._once(url, blob, offset, size, deadline, sent)
            if isinstance(answer, bytes):
                return answer
            url, sent = self._redirected(url, answer, blob, sent)
        raise unreadable(self._store, blob, f"more than {REDIRECTS_MAX} redirects")

    def _once(
        self, url: str, blob: str, offset: int, size: int, deadline: float, headers: Mapping[str, str]
    ) -> bytes | str:
        """The body, or where it says to go."""
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        sent = {"Range": f"bytes={offset}-{offset + size - 1}", "Accept-Encoding": "identity", **headers}
        reused = True
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise unreadable(self._store, blob, "no answer in time")
            connection, reused = self._connections.take(parts, left)
            try:
                connection.request("GET", target, headers=sent)
                return self._answer(connection, parts, blob, offset, size, deadline)
            except (OSError, http.client.HTTPException) as exc:
                connection.close()
                if isinstance(exc, PermissionError):
                    raise
                if not reused:  # a kept-alive connection may be dead; a fresh one that fails is news
                    raise unreadable(self._store, blob, str(exc) or type(exc).__name__) from exc
            except BaseException:
                connection.close()
                raise

    def _answer(
        self, connection: http.client.HTTPConnection, parts: SplitResult, blob: str, offset: int, size: int,
        deadline: float,
    ) -> bytes | str:  # fmt: skip
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            response.read(65_536)
            connection.close()
            return response.getheader("Location") or ""
        if response.status == 401:
            raise PermissionError(response.getheader("WWW-Authenticate") or "")
        if response.status != 206:
            raise unreadable(self._store, blob, f"status {response.status} to a range", status=response.status)
        found = RANGE.fullmatch(response.getheader("Content-Range") or "")
        if found is None or (int(found[1]), int(found[2])) != (offset, offset + size - 1):
            raise unreadable(
                self._store, blob, f"Content-Range {response.getheader('Content-Range')!r} was not asked for"
            )
        if response.length not in (None, size):
            raise unreadable(self._store, blob, f"its length is {response.length}, {size} bytes were asked for")
        body = self._body(connection, response, blob, size, deadline)
        if response.isclosed() and not response.will_close:
            self._connections.give_back(parts, connection)
        else:
            connection.close()
        return body

    def _body(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, blob: str, size: int,
        deadline: float,
    ) -> bytes:  # fmt: skip
        """At most `size` bytes, with the deadline for the whole and not for each piece: a slow drip is no answer."""
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise unreadable(self._store, blob, f"only {len(data)} of {size} bytes in time")
            if connection.sock is not None:
                connection.sock.settimeout(left)
            piece = response.read1(min(size - len(data), PIECE))
            if not piece:
                raise unreadable(self._store, blob, f"{len(data)} bytes instead of {size}")
            data += piece
        if response.read(1):
            raise unreadable(self._store, blob, f"more than the {size} bytes asked for")
        return bytes(data)

    def _redirected(self, url: str, where: str, blob: str, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        """A redirect within the origin keeps its headers; to a host that the configuration names it loses them."""
        old, new = urlsplit(url), urlsplit(urljoin(url, where))
        if (new.scheme, new.netloc) == (old.scheme, old.netloc):
            return new.geturl(), headers
        if new.scheme not in ("http", "https") or new.netloc not in self._config.redirects:
            raise unreadable(self._store, blob, f"redirected to {new.netloc!r}, which `redirects` does not name")
        return new.geturl(), {}


class HttpStore:
    """Blobs are `<url>/<blob>`."""

    def __init__(self, name: str, config: StoreConfig) -> None:
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise DsecError("invalid", f"store {name}: url {config.url!r} is not http(s)://host/…")
        self.name = name
        self._prefix = config.url.rstrip("/")
        self._ranges = Ranges(name, config)
        self.close = self._ranges.close

    def read(self, blob: str, offset: int, size: int, timeout_s: float) -> bytes:
        if not size:
            return b""
        try:
            return self._ranges.get(f"{self._prefix}/{quote(blob, safe='')}", blob, offset, size, timeout_s)
        except PermissionError as exc:
            raise unreadable(self.name, blob, "the server wants a login") from exc
