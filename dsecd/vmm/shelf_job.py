"""One entry of a shelf, made by a child process in a workspace: under a deadline, there whole or not at all."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dsecd.aio import uninterrupted
from dsecd.erofs.store import Work
from dsecd.errors import DsecError
from dsecd.vmm.shelf import Shelf

T = TypeVar("T")


async def made(
    store: Shelf, make: Callable[[Work], Awaitable[None]], commit: Callable[[Work], T], limit_s: float, what: str,
    short: str,
) -> T:  # fmt: skip
    """What `commit` gives, which blocks. Cancelling ends `make` and all that it started; nothing half-made stays.

    what, short: the entry's name in the two errors of kind `timeout` and `disk_full`.
    """
    workspace = store.workspace()
    work = await asyncio.to_thread(workspace.__enter__)
    try:
        async with asyncio.timeout(limit_s):
            await make(work)
        return await uninterrupted(asyncio.to_thread(commit, work))
    except TimeoutError as exc:
        raise DsecError("timeout", f"{what} was not made within {limit_s:g} s", infra=True) from exc
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DsecError("disk_full", f"no space left for {short} in the store") from exc
        raise
    finally:
        await uninterrupted(asyncio.to_thread(workspace.__exit__, None, None, None))
