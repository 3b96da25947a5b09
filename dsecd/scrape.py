"""Metrics over HTTP: one GET a connection, bounded in time, bytes and number, so that no scraper can be in the way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from dsecd import __version__
from dsecd.errors import DsecError
from dsecd.metrics import CONTENT_TYPE, Gauge, Registry

log = logging.getLogger("dsecd.metrics")

READ_S: Final = 5.0  # for a request
WRITE_S: Final = 10.0  # for its answer
COLLECT_S: Final = 10.0
FRESH_S: Final = 0.5  # an answer is good for so long: many scrapers cost what one does
MAX_REQUEST: Final = 8192
MAX_CONNECTIONS: Final = 16
LAG_S: Final = 1.0


class Scrapes:
    """Listens for scrapers. collect: brings gauges up to date, before each answer."""

    def __init__(self, registry: Registry, collect: Callable[[], Awaitable[None]]) -> None:
        self._registry = registry
        self._collect = collect
        self._servers: list[asyncio.Server] = []
        self._open: set[asyncio.Task[None]] = set()
        self._text = b""
        self._at = -1.0
        self._turn = asyncio.Lock()

    async def serve(self, sock: socket.socket) -> None:
        """On a bound stream socket, which is ours from now on."""
        # Of AF_UNIX, too: why not by start_unix_server, wire/server.py says.
        self._servers.append(
            await asyncio.start_server(self._accepted, sock=sock, limit=MAX_REQUEST, backlog=MAX_CONNECTIONS)
        )

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._open.add(task)
        try:
            async with asyncio.timeout(READ_S):
                head = await reader.readuntil(b"\r\n\r\n")
            answer = await self._answer(head.partition(b"\r\n")[0].split(b" "))
            writer.write(answer)
            async with asyncio.timeout(WRITE_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # a scraper that left, is slow, or is none
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _answer(self, asked: list[bytes]) -> bytes:
        if len(asked) != 3 or not asked[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", b"this is HTTP/1.1\n")
        if asked[0] != b"GET":
            return _response("405 Method Not Allowed", b"only GET\n", "Allow: GET\r\n")
        if asked[1].partition(b"?")[0] not in (b"/metrics", b"/"):
            return _response("404 Not Found", b"metrics are at /metrics\n")
        try:
            return _response("200 OK", await self.text(), kind=CONTENT_TYPE)
        except (DsecError, OSError, TimeoutError) as exc:
            log.warning("metrics could not be collected: %s", exc)
            return _response("503 Service Unavailable", b"metrics could not be collected; the log says why\n")

    async def text(self) -> bytes:
        """The exposition. Whoever comes while it is made, or soon after, gets the same."""
        async with self._turn:
            if time.monotonic() - self._at > FRESH_S:
                async with asyncio.timeout(COLLECT_S):
                    await self._collect()
                self._text, self._at = self._registry.text().encode(), time.monotonic()
        return self._text


def _response(status: str, body: bytes, more: str = "", kind: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + body


def loopback(host: str, port: int) -> socket.socket:
    """A bound socket; the caller's to close. `invalid`: why not."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise DsecError("invalid", f"cannot listen on {host} port {port} for metrics: {exc.strerror}") from exc
    return sock


class Process:
    """What any program of ours says of itself; `prefix` is its name."""

    def __init__(self, registry: Registry, prefix: str) -> None:
        registry.info(f"{prefix}_build", "What runs here.", ("version", "python")).set(
            1, __version__, ".".join(map(str, sys.version_info[:3]))
        )
        self._started: Gauge = registry.gauge(
            f"{prefix}_start_time_seconds", "When it started, in UNIX time.", unit="seconds"
        )
        self._started.set(round(time.time(), 3))
        self._fds = registry.gauge(f"{prefix}_open_fds", "File descriptors it has open.")
        self._fds_max = registry.gauge(f"{prefix}_max_fds", "File descriptors it may have open.")
        self._rss = registry.gauge(f"{prefix}_resident_memory_bytes", "Its memory.", unit="bytes")
        self._cpu = registry.counter(f"{prefix}_cpu_seconds", "CPU time it used, its children's not.", unit="seconds")
        self._lag = registry.histogram(
            f"{prefix}_loop_lag_seconds", "How late its event loop is, looked at once a second."
        )

    def look(self) -> None:
        self._fds.set(len(os.listdir("/proc/self/fd")))
        self._fds_max.set(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._rss.set(pages * resource.getpagesize())
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._cpu.set(round(used.ru_utime + used.ru_stime, 6))

    async def watch_lag(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_S
            await asyncio.sleep(LAG_S)
            self._lag.observe(max(0.0, loop.time() - due))


def pressure(directory: Path = Path("/proc/pressure")) -> dict[tuple[str, str], tuple[float, float]]:
    """By resource (cpu, memory, io) and share (some, full): per cent of the last ten seconds, and seconds since boot in
    which some process, or all of them, waited for it. Empty where the kernel does not tell."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for name in ("cpu", "memory", "io"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            for line in (directory / name).read_text().splitlines():
                share, *pairs = line.split()
                values = dict(pair.split("=", 1) for pair in pairs)
                found[name, share] = float(values["avg10"]), int(values["total"]) / 1e6
    return found
