"""A daemon for the demo and the benches, outside pytest: everything of it is gone at the end, Ctrl-C or not."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

TREE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TREE / "tests"), str(TREE / "tests/functional")]  # as pytest has them

import leftovers  # noqa: E402 - found through the line above
from daemonkit import Daemon, chunks_of, guest_kernels, host_suite  # noqa: E402

from dsecd import __version__  # noqa: E402
from dsecd.client import DSecClient  # noqa: E402
from dsecd.erofs.model import FORMAT  # noqa: E402
from dsecd.wire import images as image_wire  # noqa: E402

__all__ = ["CACHE", "Base", "OwnDaemon", "chunks_of", "guest_kernels", "own_daemon", "stop_on_sigterm", "uninterrupted"]

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsecd"


class OwnDaemon(Daemon):
    """As the tests' daemon, in /var/tmp (which is on disk: /tmp may be memory), deaf to the terminal's Ctrl-C."""

    program: tuple[str, ...] = ("-m", "dsecd.main")

    def __init__(self, directory: Path, **config: Any) -> None:
        super().__init__(directory, **config)
        self._others = {_pid(item) for item in leftovers.processes(os.getpid())}  # not this daemon's to end

    def spawn(self) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [*self.enter, sys.executable, *self.program, "-c", str(self.write_config())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
            )  # fmt: skip

    def everything(self) -> list[str]:
        """What exists of it now: mounts, loop devices, control groups, processes, directories."""
        roots = [self.directory, self._short]
        found = leftovers.mounts_below(roots) | leftovers.loops_below(roots)
        found |= {item for item in leftovers.cgroups_named(os.getpid()) if f"{self.cgroup_base}/" in item + "/"}
        found |= {f"directory {root}" for root in roots if root.exists()}
        processes = leftovers.processes(os.getpid())
        return sorted(found | {item for item in processes if _pid(item) not in self._others})

    def end(self) -> list[str]:
        """Stop all; returns what could not be removed. Where the daemon died, a new one ends its sandboxes."""
        if self.process is None or self.process.poll() is not None:
            self.process = None
            with contextlib.suppress(RuntimeError):
                self.start()
        left = self.destroy()
        return sorted({*left, *leftovers.left(set(), lambda: set(self.everything()))})


def _pid(item: str) -> str:
    """Of `process 4711 (name, S)`."""
    return item.split()[1]


@contextlib.contextmanager
def own_daemon(purpose: str, base: Base, kind: type[OwnDaemon] = OwnDaemon, **config: Any) -> Iterator[OwnDaemon]:
    """A daemon that has the base if it is in the cache, and its end. RuntimeError when something is left behind."""
    directory = Path(tempfile.mkdtemp(prefix=f"dsecd-{purpose}-", dir="/var/tmp"))
    directory.chmod(0o711)
    config = {"host_tag": purpose, "log_level": "warning", "id_first_slot": 2000, "id_last_slot": 3999, **config}
    daemon = kind(directory, **config)
    try:
        base.restore(daemon)
        daemon.start()
        yield daemon
    finally:
        with uninterrupted():
            left = daemon.end()
    if left:
        raise RuntimeError("left behind: " + "; ".join(left))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not end the tidying up."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def stop_on_sigterm() -> None:
    """SIGTERM ends the program as Ctrl-C does, with everything tidied up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


# -- the base image, made once -----------------------------------------------------------------------------------------
class Base:
    """A Debian base that `image.bootstrap` makes, and its copy in the cache: named by its recipe and our version."""

    def __init__(self, name: str, packages: list[str]) -> None:
        self.name = name
        self.packages = packages
        self.suite = host_suite()
        key = hashlib.sha256(repr((name, self.suite, packages, FORMAT, __version__)).encode()).hexdigest()[:12]
        self.kept = CACHE / f"images-{self.suite}-{key}"

    @property
    def cached(self) -> bool:
        return self.kept.is_dir()

    def restore(self, daemon: Daemon) -> None:
        """Into a state directory that has no images yet."""
        if self.cached:
            _copy(self.kept, daemon.state / "images")

    async def make(self, daemon: Daemon, client: DSecClient) -> None:
        """By the daemon, and kept. Nothing to do when it was restored."""
        if any(image.name == self.name for image in await client.images()):
            return
        await client.call("image.bootstrap", image_wire.Bootstrap(name=self.name, include=self.packages))
        fresh = self.kept.with_name(f"{self.kept.name}.{os.getpid()}")
        CACHE.mkdir(parents=True, exist_ok=True)
        try:
            _copy(daemon.state / "images", fresh)
            with contextlib.suppress(OSError):  # somebody else was faster
                fresh.rename(self.kept)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", "--reflink=auto", f"{source}/.", str(target)], check=True)
