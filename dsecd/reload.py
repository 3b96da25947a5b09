"""The configuration, read again while the daemon runs.

A closed list of keys takes effect at once; what else changed is named and waits for a restart. A file that is wrong in
any way changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from dsecd.config import DEFAULT_PATH, Config, load
from dsecd.errors import DsecError
from dsecd.sandbox.admission import Capacity
from dsecd.sandbox.brake import Limits
from dsecd.sandbox.manager import Manager
from dsecd.wire.daemon import Reloaded

log = logging.getLogger("dsecd")

# Keys by what they belong to. Of a table, `table.key`; the whole table where all of it may change.
ADMISSION: Final = {"max_sandboxes", "cpu_overcommit", "memory_overcommit", "disk_overcommit"}
BRAKE: Final = {"pressure_cpu", "pressure_memory", "pressure_io"}
TRAJECTORY: Final = {"trajectory_keep_days", "trajectory_max_mb"}
LIVE: Final = frozenset(
    {*ADMISSION, *BRAKE, *TRAJECTORY, "log_level", "image_linger_s", "environments", "network.services"}
)
_BY_KEY: Final = ("network",)  # tables of which only some keys are live


def changes(old: Config, new: Config) -> list[str]:
    """Names of keys that differ."""
    return sorted(_differences(old, new, ""))


def _differences(old: Struct, new: Struct, prefix: str) -> Iterator[str]:
    for key in old.__struct_fields__:
        before, after = getattr(old, key), getattr(new, key)
        if before == after:
            continue
        if prefix == "" and key in _BY_KEY:
            yield from _differences(before, after, f"{key}.")
        else:
            yield prefix + key


def limits(config: Config) -> Limits:
    return Limits(cpu=config.pressure_cpu, memory=config.pressure_memory, io=config.pressure_io)


class Reloader:
    """config: the one that the daemon runs with, changed in place. path: its file; None: there was none at start."""

    def __init__(
        self, path: Path | None, config: Config, manager: Manager, capacity: Callable[[Config], Awaitable[Capacity]]
    ) -> None:
        self._path = path
        self._config, self._manager, self._capacity = config, manager, capacity
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def reload(self) -> Reloaded:
        """`invalid`, with file and line, for a file that is wrong: all stays as it was."""
        async with self._lock:
            path = self._path or (DEFAULT_PATH if DEFAULT_PATH.exists() else None)
            new = await asyncio.to_thread(load, path) if path else Config()
            found = changes(self._config, new)
            changed = [key for key in found if key in LIVE]
            await self._apply(new, changed)
            waiting = [key for key in found if key not in LIVE]
            if waiting:
                log.warning("configuration: %s: in force after a restart only", ", ".join(waiting))
            log.info("configuration read again: %s", ", ".join(changed) or "nothing to change")
            return Reloaded(changed=changed, needs_restart=waiting)

    def hangup(self) -> None:
        """SIGHUP: the same, with nobody to tell."""

        async def work() -> None:
            try:
                await self.reload()
            except DsecError as exc:
                log.error("the configuration stays as it was: %s", exc.message)

        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _apply(self, new: Config, changed: list[str]) -> None:
        config, manager = self._config, self._manager
        # Measured again in any case: the limits of the slice may be others now. Keys that need a restart wait.
        promised = {key: getattr(new, key) for key in ADMISSION}
        capacity = await self._capacity(msgspec.structs.replace(config, **promised))
        if "network.services" in changed:
            services = msgspec.structs.replace(config.network, services=new.network.services)
            await manager.rooms.network.become(services)
            config.network = services
        for key in changed:
            if "." not in key:
                setattr(config, key, getattr(new, key))
        manager.admission.capacity = capacity
        manager.admission.brake.limits = limits(config)
        manager.rooms.environments = config.environments
        manager.rooms.mounts.linger_s = config.image_linger_s
        logging.getLogger().setLevel(config.log_level.upper())
