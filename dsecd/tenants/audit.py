"""The audit log: management calls, who asked from where for what, and what came of it.

Files of chained lines (dsecd.sandbox.logfile), synced before the caller is answered; `audit-<n>.log` has the entries
from number n + 1 on. When one is full the next begins, and the oldest goes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from dsecd.errors import DsecError
from dsecd.sandbox import logfile
from dsecd.wire.access import within
from dsecd.wire.base import Params
from dsecd.wire.call import Peer
from dsecd.wire.tenants import AuditEntry

FILE_MAX: Final = 8 << 20
FILES: Final = 4
PARAMS_MAX: Final = 8 << 10
REFUSALS: Final = 30  # of one principal that are kept in a minute: a flood of them must not wash out the rest

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AuditEntry).decode


class AuditLog:
    """One per daemon, in a directory of its own."""

    def __init__(self, directory: Path, file_max: int = FILE_MAX) -> None:
        self._directory = directory
        self._max = file_max
        self._lock = asyncio.Lock()
        self._base = self._count = self._size = 0
        self._sum = b""
        self._minute = 0
        self._refusals: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[int]] = set()

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        bases = self._bases()
        self._base = bases[-1] if bases else 0
        found = logfile.recover(self._path(self._base), _ident(self._base))
        self._count, self._size, self._sum = len(found.offsets), found.size, found.sum

    def _bases(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("audit-")) for path in self._directory.glob("audit-*.log"))

    def _path(self, base: int) -> Path:
        return self._directory / f"audit-{base:012d}.log"

    async def around(self, method: str, params: Params, peer: Peer, invoke: Callable[[], Awaitable[Any]]) -> Any:
        """Do it, with an entry before and one behind. What cannot be written down is not done."""
        asked = await self.put(entry("asked", method, peer, _content(params)))
        done = entry("done", method, peer, ref=asked)
        try:
            result = await invoke()
        except BaseException as exc:
            known = exc if isinstance(exc, DsecError) else DsecError("internal", type(exc).__name__)
            done.outcome, done.message = known.kind, known.message[:500]
            await asyncio.shield(self.put(done))
            raise
        done.outcome = "ok"
        await asyncio.shield(self.put(done))
        return result

    def refused(self, method: str, params: Params, peer: Peer, exc: DsecError) -> None:
        """One that was not even begun; written in the background."""
        minute = int(time.monotonic() / 60)
        if minute != self._minute:
            self._minute, self._refusals = minute, Counter()
        self._refusals[peer.principal] += 1
        if peer.role == "nobody" or self._refusals[peer.principal] > REFUSALS:
            return
        one = entry("refused", method, peer, _content(params))
        one.outcome, one.message = exc.kind, exc.message[:500]
        task = asyncio.get_running_loop().create_task(self.put(one))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def put(self, one: AuditEntry) -> int:
        """Its number; it is durable."""
        async with self._lock:
            work = asyncio.ensure_future(asyncio.to_thread(self._put, one))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait((work,))  # the next one builds on it
                raise
            except OSError as exc:
                raise DsecError("disk_full", f"the audit log cannot be written: {exc.strerror}", infra=True) from exc

    def _put(self, one: AuditEntry) -> int:
        if self._size >= self._max:
            self._base += self._count
            self._count = self._size = 0
            self._sum = logfile.anchor(_ident(self._base))
        line = _encode(msgspec.structs.replace(one, seq=self._count + 1))
        self._sum, self._size = logfile.write(self._path(self._base), self._sum, self._size, [line])
        self._count += 1
        if self._count == 1:
            for base in self._bases()[:-FILES]:
                self._path(base).unlink()
        return self._base + self._count

    async def read(self, after: int, limit: int, project: str) -> tuple[list[AuditEntry], int]:
        """Entries behind `after` of that subtree, oldest first; and the number of the newest there is."""
        async with self._lock:
            last = self._base + self._count
            return await asyncio.to_thread(self._read, after, limit, project), last

    def _read(self, after: int, limit: int, project: str) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        bases = self._bases()
        for base, end in zip(bases, [*bases[1:], None], strict=True):
            if end is not None and end <= after:
                continue
            with self._path(base).open("rb") as file:
                for line in file:
                    parts = logfile.split(line.rstrip(b"\n"))
                    try:
                        one = _decode(parts[1]) if parts is not None else None
                    except msgspec.MsgspecError:
                        one = None
                    if one is None or base + one.seq <= after or not within(one.project, project):
                        continue
                    found.append(msgspec.structs.replace(one, seq=base + one.seq, ref=one.ref))
                    if len(found) >= limit:
                        return found
        return found

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)


def entry(event: str, method: str, peer: Peer, params: Any = None, ref: int = 0) -> AuditEntry:
    return AuditEntry(
        event=event, at=round(time.time(), 3), principal=peer.principal, project=peer.project, uid=peer.uid,
        pid=peer.pid, method=method, params=params, ref=ref,
    )  # fmt: skip


def _ident(base: int) -> str:
    return f"audit-{base}"


def _content(params: Params) -> Any:
    size = len(_encode(params))
    return params if size <= PARAMS_MAX else {"bytes": size}
