"""Emptying a host: nobody new comes, who does nothing goes at once, commands have time to end, then all go."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from dsecd.sandbox.manager import Manager
from dsecd.wire.daemon import Drain, Drained

log = logging.getLogger("dsecd.sandbox")

REASON: Final = "this host is being emptied"
LOOK_S: Final = 0.2
AT_ONCE: Final = 32  # ended side by side


async def drain(manager: Manager, asked: Drain) -> Drained:
    """Returns when no sandbox is left. One whose command runs stays until that is over, or until the deadline; paused
    ones have nothing that could end, and go. What is refused from now on comes again after `daemon.cordon` with
    on=false or, without `cordon`, with the next daemon."""
    loop = asyncio.get_running_loop()
    admission = manager.admission
    admission.draining = True
    if asked.cordon:
        admission.cordon(True)
    deadline = loop.time() + asked.deadline_s
    stopped = cut = 0
    while found := manager.alive():
        late = loop.time() >= deadline
        going = [live for live in found if late or not live.busy]
        cut += sum(live.busy > 0 for live in going)
        limit = asyncio.Semaphore(AT_ONCE)

        async def end(ident: str, limit: asyncio.Semaphore = limit) -> None:
            async with limit:
                await manager.stop(ident, REASON)

        if going:
            stopped += len(going)
            log.info("emptying this host: %d sandboxes end, %d have commands that run", len(going),
                     len(found) - len(going))  # fmt: skip
            await asyncio.gather(*(end(live.record.id) for live in going))
        else:
            await asyncio.sleep(min(LOOK_S, max(0.01, deadline - loop.time())))
    return Drained(stopped=stopped, cut=cut)
