"""What a container wrote, as it is at one instant: the copy-on-write picture that forks and packs are made from."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

from dsecd.aio import uninterrupted
from dsecd.container.backend import Container
from dsecd.errors import DsecError
from dsecd.sandbox.live import MIB, Live, Rooms


@contextlib.asynccontextmanager
async def snapshot(rooms: Rooms, live: Live) -> AsyncIterator[str]:
    """The name of a disk space that holds it, gone afterwards. The container stands still for this instant only.

    A killed daemon's are swept by the next one: no record owns them. `unsupported` where a copy would take as long as
    its bytes, since nothing inside would run for that time.
    """
    pool, record = rooms.pool, live.record
    if why := pool.why_no_copies():
        raise DsecError("unsupported", f"its files cannot be copied at one instant: {why}")
    name = f"{record.id}.{secrets.token_hex(4)}"
    limit, base = record.spec.disk_mb * MIB, rooms.slots.base(record.slot)
    try:
        await uninterrupted(asyncio.to_thread(pool.settle, record.id))
        async with live.lock:
            body = live.body
            if not isinstance(body, Container) or record.state not in ("running", "paused"):
                raise DsecError("sandbox_dead", f"sandbox {record.id} is {record.state}", sandbox_id=record.id)
            async with body.still() if record.state == "running" else contextlib.nullcontext():
                await uninterrupted(asyncio.to_thread(pool.clone, record.id, name, limit, base))
        yield name
    finally:
        await uninterrupted(asyncio.to_thread(pool.destroy, name))
