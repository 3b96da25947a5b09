"""One kdamond of this daemon over all its VMM processes, and never a hand on anybody else's.

What there is exactly one of on a host: the daemon makes kdamond 0 when the first machine comes, changes its targets as
machines come and go, and removes it with the last. A kdamond that was there before is somebody else's: `conflict`.

The daemon may die meanwhile. `record` (in the state directory) says which kernel thread is ours, with its start time,
so that the next daemon takes it back and no other.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from dsecd import proc
from dsecd.damon import plan, policy
from dsecd.damon.model import Stats
from dsecd.damon.sysfs import Sysfs
from dsecd.errors import DsecError

T = TypeVar("T")

PATIENCE_S: Final = 15.0  # a kdamond answers at its next turn, which comes within its update interval
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class _Record(Struct, frozen=True):
    boot: str
    pid: int
    started: int


class HostDamon:
    """Reclaims cold memory of the processes it is told of. Calls are serialised; each ends within PATIENCE_S."""

    def __init__(self, record: Path, settings: policy.Policy = policy.HOST, sysfs: Sysfs | None = None) -> None:
        self._record = record
        self._settings = settings
        self._sysfs = sysfs or Sysfs()
        self._targets: dict[int, int] = {}  # pid: start time
        self._made = False
        self._turn = asyncio.Lock()
        self._call: asyncio.Future[Any] | None = None

    def obstacle(self) -> str:
        """Why it cannot be used here; empty: nothing is in the way. Changes nothing, and so cannot tell whether the
        kernel has vaddr: the first `watch` does."""
        if not self._sysfs.present():
            return "this kernel has no DAMON with a sysfs interface (CONFIG_DAMON_SYSFS)"
        if self._sysfs.count() and not self._ours():
            return "another DAMON user has kdamonds on this host"
        return ""

    async def watch(self, pid: int) -> None:
        """From now on also this process. Whoever ends it calls `forget`; one that just dies does no harm."""
        started = proc.start_time(pid)
        if started is None:
            raise DsecError("sandbox_dead", f"process {pid} is gone: DAMON cannot watch it")
        async with self._turn:
            await self._follow(self._targets | {pid: started})

    async def forget(self, pid: int) -> None:
        """No longer this one; with the last one the kdamond goes."""
        async with self._turn:
            if pid in self._targets:
                await self._follow({known: at for known, at in self._targets.items() if known != pid})

    async def stats(self) -> Stats | None:
        """What the scheme has done; None when nothing is watched."""
        async with self._turn:
            if not self._made or not await self._in_thread(self._sysfs.running):
                return None
            return await self._in_thread(self._sysfs.stats)

    async def stop(self) -> None:
        """Remove our kdamond, whatever it watches. Not for the daemon's own end: machines stay then, and so does it."""
        async with self._turn:
            await self._follow({})

    async def _follow(self, targets: dict[int, int]) -> None:
        """Watch these, those of them that still live. The old targets stay known when the kernel refuses."""
        for last in (False, False, True):
            alive = {pid: at for pid, at in targets.items() if proc.start_time(pid) == at}
            try:
                await self._in_thread(functools.partial(self._set, tuple(alive)))
            except DsecError:
                # a process that dies while its pid is written is EINVAL to the kernel: then without it
                if last or alive == {pid: at for pid, at in alive.items() if proc.start_time(pid) == at}:
                    raise
            else:
                self._targets = alive
                return

    def _set(self, pids: Sequence[int]) -> None:
        if not pids:
            self._remove()
            return
        if not self._made:
            self._made = self._claim()
        if self._made and self._sysfs.running():
            self._sysfs.apply(plan.change(policy.host(pids, self._settings)))
        else:
            self._make(pids)

    def _claim(self) -> bool:
        """Is there one of an earlier daemon of ours? Somebody else's is a conflict."""
        if not self._sysfs.present():
            raise DsecError("unsupported", "this kernel has no DAMON with a sysfs interface: set no host policy")
        if not self._sysfs.count():
            return False
        if not self._ours():
            raise DsecError(
                "conflict",
                "another DAMON user has kdamonds on this host, which dsecd does not touch: set no host policy",
            )
        return True

    def _make(self, pids: Sequence[int]) -> None:
        first, rest = _split(plan.start(policy.host(pids, self._settings)))
        try:
            self._sysfs.apply(first)
            self._made = True
            if "vaddr" not in self._sysfs.operations():
                raise DsecError("unsupported", "this kernel's DAMON cannot watch processes (CONFIG_DAMON_VADDR)")
            self._sysfs.apply(rest)
            self._write_record()
        except BaseException:
            self._remove()
            raise

    def _remove(self) -> None:
        if not self._made and not self._ours():
            return
        if self._sysfs.running():
            self._sysfs.apply(plan.STOP[:1])
        self._sysfs.apply(plan.STOP[1:])
        self._made = False
        self._record.unlink(missing_ok=True)

    def _ours(self) -> bool:
        try:
            record = msgspec.json.decode(self._record.read_bytes(), type=_Record)
        except (FileNotFoundError, msgspec.MsgspecError):
            return False
        if record.boot != _boot_id() or not self._sysfs.present() or self._sysfs.count() != 1:
            return False
        pid = self._sysfs.pid()
        # stopped: it ended by itself with the last process it watched
        return pid is None or (pid == record.pid and proc.start_time(pid) == record.started)

    def _write_record(self) -> None:
        pid = self._sysfs.pid()
        started = None if pid is None else proc.start_time(pid)
        if pid is None or started is None:
            raise DsecError("vmm", "the kdamond ended as soon as it was started")
        temporary = self._record.with_name(self._record.name + ".new")
        temporary.write_bytes(msgspec.json.encode(_Record(_boot_id(), pid, started)))
        temporary.rename(self._record)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        if self._call is not None and not self._call.done():
            raise DsecError("vmm", "DAMON has not answered an earlier write yet: see the kernel's log")
        self._call = asyncio.ensure_future(asyncio.to_thread(call))
        self._call.add_done_callback(_seen)
        # a thread in the kernel cannot be cancelled: it is left to itself, and nothing is written beside it
        done, _ = await asyncio.wait({self._call}, timeout=PATIENCE_S)
        if not done:
            raise DsecError("vmm", f"DAMON did not answer within {PATIENCE_S:.0f} s: see the kernel's log")
        result: T = self._call.result()
        return result


def _split(writes: list[plan.Write]) -> tuple[list[plan.Write], list[plan.Write]]:
    """What makes the context's files, and what fills them."""
    return writes[:2], writes[2:]


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def _seen(call: asyncio.Future[Any]) -> None:
    """Whoever waited has given up by then; the exception must not be called lost."""
    if not call.cancelled():
        call.exception()
