"""A disk for one configuration alone: ext4 on a loop device of its own, so that all that is written to it is counted.

It is made or attached anew for each, and unmounting drops its page cache: everything is read cold, without touching the
host's other caches. The loop device reads and writes its file directly, past the host's page cache.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.bench import host

SIZE: Final = 32 << 30  # sparse
SAMPLE_S: Final = 0.1


class Disk:
    """`file`: what backs it; removed by whoever removes the directory that it is in."""

    def __init__(self, file: Path, mount: Path) -> None:
        self._file, self.top = file, mount
        self._device = ""
        if not file.exists():
            with file.open("wb") as fresh:
                fresh.truncate(SIZE)
            # Inode tables now and not behind our back while we count.
            _run("mkfs.ext4", "-q", "-i", "32768", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(file))

    @contextlib.contextmanager
    def attached(self) -> Iterator[Path]:
        self._device = _run("losetup", "--find", "--show", "--direct-io=on", str(self._file)).strip()
        try:
            self.top.mkdir(exist_ok=True)
            _run("mount", self._device, str(self.top))
            try:
                yield self.top
            finally:
                self._unmount()
        finally:
            _run("losetup", "--detach", self._device)

    def _unmount(self) -> None:
        """What was killed may take a moment to let go of it."""
        until = time.monotonic() + 20
        while subprocess.run(["umount", str(self.top)], capture_output=True, check=False).returncode:
            if time.monotonic() > until:
                raise RuntimeError(f"{self.top} is still in use")
            time.sleep(0.2)

    def written(self) -> int:
        """Bytes that reached the device so far."""
        return host.written_bytes(Path(self._device).name)

    def flushed(self) -> int:
        """The same, once all that is dirty has been written."""
        fd = os.open(self.top, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        _run("sync", "--file-system", str(self.top))
        return self.written()


class Meter(threading.Thread):
    """Samples what a disk has written, as (seconds since the start, bytes)."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(name="meter", daemon=True)
        self._disk = disk
        self._ended = threading.Event()
        self.first = disk.flushed()
        self.began = time.monotonic()
        self.samples: list[tuple[float, int]] = [(0.0, 0)]
        self.start()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.samples.append((time.monotonic() - self.began, self._disk.written() - self.first))

    def end(self) -> int:
        """All that was written since the start, what was still dirty included."""
        self._ended.set()
        self.join()
        total = self._disk.flushed() - self.first
        self.samples.append((time.monotonic() - self.began, total))
        return total


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()[-300:]}")
    return done.stdout
