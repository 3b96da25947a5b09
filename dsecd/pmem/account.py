"""What virtio-pmem costs: page structs in each guest; cached pages on the host, counted once however many map them.

In a guest every 4 KiB page of a pmem device takes a 64-byte `struct page` from the guest's own RAM (the device has no
other place for them), allocated in whole 2 MiB pages of the memory map. So an image of 1 GiB takes 16 MiB of every
guest that has it.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from dsecd._native import lib
from dsecd.errors import DsecError

_NO_CACHESTAT: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP})
_SHARE: Final = 64  # of 4096
_STEP: Final = 2 << 20


class PageCache(Struct, frozen=True):
    """Backing files of all machines, each counted once: how many, their bytes, and those in the page cache."""

    files: int = 0
    bytes: int = 0
    cached_bytes: int = 0


def guest_cost(sizes: Iterable[int]) -> int:
    """Bytes of a guest's RAM that devices of these sizes take, at most."""
    return sum(-(-size // _SHARE // _STEP) * _STEP for size in sizes)


def require_memory(memory: int, sizes: Sequence[int]) -> None:
    """Refuse a machine whose devices take more of its guest's RAM than the tenant asked for. DsecError `invalid`.

    What they take comes on top of that, and so is the host's to pay: a small machine must not cost a large one.
    """
    cost = guest_cost(sizes)
    if memory < cost:
        raise DsecError(
            "invalid",
            f"{memory >> 20} MiB of memory are too little: its images take {cost >> 20} MiB of a guest as pmem "
            "devices, so give it as much, or its layers as disks (root blk)",
            detail={"memory": memory, "pmem_cost": cost},
        )


async def page_cache(paths: Iterable[Path]) -> PageCache:
    """How much of these files the host has in memory. They are told apart by inode; what is gone counts for nothing."""
    return await asyncio.to_thread(_page_cache, list(paths))


def _page_cache(paths: Sequence[Path]) -> PageCache:
    seen: set[tuple[int, int]] = set()
    size = cached = 0
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            st = os.fstat(fd)
            if (st.st_dev, st.st_ino) not in seen:
                seen.add((st.st_dev, st.st_ino))
                size += st.st_size
                cached += cached_bytes(fd)
        finally:
            os.close(fd)
    return PageCache(len(seen), size, cached)


def cached_bytes(fd: int) -> int:
    """Bytes of an open file in the page cache; asking brings nothing in. Blocks, for a millisecond per GiB."""
    found: int = lib.dsec_cached_by_cachestat(fd)
    if -found in _NO_CACHESTAT:
        found = lib.dsec_cached_by_mincore(fd)
    if found < 0:
        raise OSError(-found, f"page cache of a file: {os.strerror(-found)}")
    return found
