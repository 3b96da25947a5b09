"""A store that is a directory: local, NFS, CephFS, 3FS, sshfs, whatever the host has mounted.

A shared file system may hang for as long as its server is away, and a thread in such a read cannot be woken. So reads
run in a few threads of this store's own, the caller waits only until its deadline, and when all of them hang, further
reads fail at once instead of piling up.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from threading import Lock
from typing import Final

from dsecd.erofs.stores import StoreConfig, unreadable
from dsecd.errors import DsecError

THREADS: Final = 8
BLOB: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class DirectoryStore:
    """Blobs are files directly in the directory."""

    def __init__(self, name: str, config: StoreConfig) -> None:
        if not config.path.startswith("/"):
            raise DsecError("invalid", f"store {name}: path {config.path!r} is not absolute")
        self.name = name
        self.path = Path(config.path)
        self._pool = ThreadPoolExecutor(THREADS, f"store-{name}")
        self._under_way = 0
        self._lock = Lock()

    def read(self, blob: str, offset: int, size: int, timeout_s: float) -> bytes:
        if BLOB.fullmatch(blob) is None:
            raise DsecError("image", f"store {self.name}: {blob[:80]!r} is not the name of a blob")
        with self._lock:
            if self._under_way >= THREADS:
                raise unreadable(self.name, blob, f"{THREADS} reads hang already")
            self._under_way += 1
        future = self._pool.submit(self._read, blob, offset, size)
        future.add_done_callback(lambda _f: self._ended())
        try:
            return future.result(timeout_s)
        except Late as exc:
            raise unreadable(self.name, blob, f"no answer within {timeout_s:g} s") from exc
        except OSError as exc:
            raise unreadable(self.name, blob, exc.strerror or str(exc), errno=exc.errno) from exc

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _read(self, blob: str, offset: int, size: int) -> bytes:
        fd = os.open(self.path / blob, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            parts: list[bytes] = []
            while size > 0:
                part = os.pread(fd, size, offset)
                if not part:
                    raise unreadable(self.name, blob, f"ends at {offset}: it is truncated")
                parts.append(part)
                offset += len(part)
                size -= len(part)
            return b"".join(parts)
        finally:
            os.close(fd)
