"""What every backend gives for one sandbox, so that nothing above knows which kind it is."""

from __future__ import annotations

import asyncio
from typing import Protocol

from dsecd.agent.link import AgentLink
from dsecd.cgroup.groups import CgroupStats

Disk = tuple[int, int] | None  # bytes used of its writable disk, and their limit; None: the disk pool knows


class Body(Protocol):
    """A container or a VM that runs or is paused. `pid` 0: no process of it is left while it is paused."""

    id: str

    @property
    def link(self) -> AgentLink | None:
        """None: there is no agent of ours in it."""

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done when it ended by itself; `reason` says why."""

    @property
    def reason(self) -> str: ...

    @property
    def pid(self) -> int: ...
    @property
    def started(self) -> int: ...

    def kill(self) -> None:
        """SIGKILL to all of it; its resources are ended by the backend's `end`."""

    async def counters(self) -> tuple[int, int, Disk]:
        """OOM kills and times the task limit was hit so far; its disk."""

    async def stats(self) -> tuple[CgroupStats, Disk]:
        """What it uses; its disk. As with `counters`, a guest is asked once for all of it."""

    async def memory(self) -> tuple[int, int]:
        """Bytes of the host's memory it uses, and bytes that are swapped out."""

    async def pause(self) -> None:
        """Stop it. When this raises, it runs on."""

    async def give_back(self) -> int | None:
        """Once it is paused: let its memory go; bytes that became free. `resume` and `kill` cut it short.

        Once for each pause, however often it is called. None: it was paused by an earlier daemon, which did it.
        """

    async def resume(self) -> None:
        """Let it go on. The link is the same object, its commands too.

        When this raises, it is paused as before; of kind `sandbox_dead`: it is over.
        """

    async def release(self) -> None:
        """The daemon goes: let go of it."""
