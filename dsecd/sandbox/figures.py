"""What a sandbox uses, and which limits it hit."""

from __future__ import annotations

import asyncio

from dsecd.sandbox.live import Live, Rooms
from dsecd.sandbox.record import Record
from dsecd.wire import sandbox as wire
from dsecd.wire.execs import Ran


async def judge(rooms: Rooms, live: Live, result: Ran) -> list[str]:
    """Add to a result which limits the sandbox hit while it ran. Costs nothing for a command that succeeded.

    Returns what is to be told of its images: reads that failed for want of their store are not the command's fault.
    """
    body = live.body
    if result.exit_code == 0 or body is None:
        return []
    ooms, hits, disk = await body.counters()
    result.oom, live.oom_seen = ooms > live.oom_seen, ooms
    result.pids_limit, live.pids_seen = hits > live.pids_seen, hits
    used, limit = disk or await _usage(rooms, body.id)
    result.disk_full = used >= limit - limit // 64
    return [text for digest in live.record.layers if (text := await _image_trouble(rooms, live, digest))]


async def _image_trouble(rooms: Rooms, live: Live, digest: str) -> str:
    """Of one layer, since it was last asked; "" none."""
    trouble = await asyncio.to_thread(rooms.mounts.trouble, digest)
    if trouble is None or trouble.denied <= live.denied_seen.get(digest, 0):
        return ""
    live.denied_seen[digest] = trouble.denied
    return f"reads of image {digest[7:19]} failed ({trouble.kind}): {trouble.why}"


async def stats(rooms: Rooms, live: Live, record: Record) -> wire.Stats:
    """Of one that has a body."""
    assert live.body is not None
    figures, disk = await live.body.stats()
    used, limit = disk or await _usage(rooms, record.id)
    network = rooms.network.use(record.id)
    return wire.Stats(
        id=record.id,
        memory_bytes=figures.memory_bytes,
        memory_peak_bytes=figures.memory_peak,
        memory_limit_bytes=record.spec.memory_mb << 20,
        reclaimed_bytes=record.reclaimed,
        swapped_bytes=figures.swap,
        cpu_usec=figures.cpu_usec,
        throttled_usec=figures.throttled_usec,
        pids=figures.pids,
        pids_limit=record.spec.pids,
        disk_bytes=used,
        disk_limit_bytes=limit,
        oom_kills=figures.oom_kills,
        devices=record.devices,
        network_out_bytes=network.out_bytes,
        network_out_packets=network.out_packets,
        network_in_bytes=network.in_bytes,
        network_in_packets=network.in_packets,
        network_refused=network.refused,
    )


async def _usage(rooms: Rooms, ident: str) -> tuple[int, int]:
    """Bytes used of its disk space, and their limit."""
    return await asyncio.to_thread(rooms.pool.usage, ident)
