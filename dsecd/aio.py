"""One helper for asyncio: finish what must not be left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def uninterrupted(what: Awaitable[T]) -> T:
    """Wait for it even when cancelled, and only then be cancelled. For work in threads, which nothing can stop."""
    task = asyncio.ensure_future(what)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # asked again: still not done
        raise
