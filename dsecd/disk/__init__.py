"""Writable space with a hard limit and cheap copies: the upper half of every sandbox's root file system.

Knows nothing of images, sandboxes' states or mounts of overlays; it hands out directories. Start at `pool.py` for the
contract and `select.py` for which driver is used where.
"""

from dsecd.disk.pool import DiskPool, PoolConfig, Space
from dsecd.disk.select import open_pool, probe, remove_pool

__all__ = ["DiskPool", "PoolConfig", "Space", "open_pool", "probe", "remove_pool"]
