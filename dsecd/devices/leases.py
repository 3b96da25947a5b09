"""Who has which device. Pure bookkeeping on one event loop, no I/O.

Fair: whoever asks first is served first, pool by pool. A request for several devices gets all of them or waits, and
while it waits nobody who came later takes from the pools it waits for; so large requests are not starved, and no two
requests hold what the other needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from msgspec import Struct

from dsecd.errors import DsecError

Held = dict[str, tuple[str, ...]]  # by pool: names of devices


class Pool(Struct):
    """share: leases that one device bears at once. members: devices that can be leased now, in order."""

    share: int
    members: tuple[str, ...] = ()


class Waiter(Struct, eq=False):
    owner: str
    wanted: Mapping[str, int]
    future: asyncio.Future[Held]


class Leases:
    """An owner has one lease at most; `release` takes all it has, and its place in the queue."""

    def __init__(self, pools: Mapping[str, int]) -> None:
        """pools: by name, the share of each."""
        self.pools = {name: Pool(share) for name, share in pools.items()}
        self._held: dict[str, Held] = {}
        self._queue: list[Waiter] = []
        self._users: dict[str, set[str]] = {}  # by device
        self._alone: set[str] = set()  # devices whose lease is exclusive

    def users(self, device: str) -> list[str]:
        return sorted(self._users.get(device, ()))

    def waiting(self, pool: str) -> int:
        return sum(pool in waiter.wanted for waiter in self._queue)

    def set_members(self, members: Mapping[str, Sequence[str]]) -> None:
        """What each pool has now. What is leased stays leased."""
        for name, pool in self.pools.items():
            pool.members = tuple(members.get(name, ()))
        self._serve()

    def check(self, wanted: Mapping[str, int]) -> None:
        """`not_found` for a pool that is not there."""
        for name in wanted:
            if name not in self.pools:
                known = ", ".join(sorted(self.pools)) or "none"
                raise DsecError("not_found", f"no device pool {name!r} in the configuration, which has: {known}")

    async def take(self, owner: str, wanted: Mapping[str, int], wait_s: float) -> Held:
        """Lease so many of each pool. `capacity`: they did not become free in time; `not_found`: there are not so many.

        Cancelled, or too late, it has left nothing. `conflict` when `abandon` came meanwhile.
        """
        self.check(wanted)
        for name, count in wanted.items():
            if (there := len(self.pools[name].members)) < count:
                raise DsecError(
                    "not_found", f"device pool {name} has {there} usable devices, and {count} were asked for"
                )
        waiter = Waiter(owner, wanted, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._serve()
        try:
            async with asyncio.timeout(wait_s):
                return await waiter.future
        except BaseException as exc:
            self.release(owner)
            if isinstance(exc, TimeoutError):
                what = f"no devices of pool {', '.join(sorted(wanted))} became free within {wait_s:g} s"
                raise DsecError("capacity", what, detail={"short": ["devices"]}) from exc
            raise

    def claim(self, owner: str, held: Held) -> None:
        """Take back what an owner had before the daemon was restarted. Of a pool that is no more: for itself alone."""
        for name, devices in held.items():
            pool = self.pools.get(name)
            self._give(owner, name, devices, alone=pool is None or pool.share == 1)

    def abandon(self, owner: str) -> None:
        """Let its `take` fail, if it still waits."""
        for waiter in self._queue:
            if waiter.owner == owner and not waiter.future.done():
                waiter.future.set_exception(DsecError("conflict", "it was ended while it waited for a device"))

    def release(self, owner: str) -> None:
        """Give back all it has, and its place in the queue. Nothing is no error."""
        self._queue = [waiter for waiter in self._queue if waiter.owner != owner]
        for devices in self._held.pop(owner, {}).values():
            for device in devices:
                users = self._users[device]
                users.discard(owner)
                if not users:
                    del self._users[device]
                    self._alone.discard(device)
        self._serve()

    def _serve(self) -> None:
        """Give to everybody in the queue who can be given all, and before whom nobody waits for the same pools."""
        blocked: set[str] = set()
        self._queue = [waiter for waiter in self._queue if not waiter.future.done()]  # cancelled, abandoned
        for waiter in list(self._queue):
            found = None if blocked & waiter.wanted.keys() else self._free(waiter.wanted)
            if found is None:
                blocked |= waiter.wanted.keys()
                continue
            self._queue.remove(waiter)
            for name, devices in found.items():
                self._give(waiter.owner, name, devices, alone=self.pools[name].share == 1)
            waiter.future.set_result(found)

    def _free(self, wanted: Mapping[str, int]) -> Held | None:
        """The least used ones of each pool; None when one has too few."""
        found: Held = {}
        for name, count in wanted.items():
            pool = self.pools[name]
            fit = [d for d in pool.members if d not in self._alone and len(self._users.get(d, ())) < pool.share]
            if len(fit) < count:
                return None
            found[name] = tuple(sorted(fit, key=lambda d: len(self._users.get(d, ())))[:count])
        return found

    def _give(self, owner: str, pool: str, devices: tuple[str, ...], *, alone: bool) -> None:
        self._held.setdefault(owner, {})[pool] = devices
        for device in devices:
            self._users.setdefault(device, set()).add(owner)
            if alone:
                self._alone.add(device)
