"""An image for calls, and what tests of FnCall share: compilers, a whole Python, numpy."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import daemonkit
import leftovers
import pytest
from daemonkit import Daemon

from dsecd.client import DSecFnCallArgs, DSecSyncClient

PACKAGES = ("python3", "python3-numpy", "gcc", "g++", "libc6-dev")
IMAGE = "judge:test"


def judge_tar() -> Path:
    """A Debian with compilers and numpy as a tar, made once and kept: the recipe is in its name."""
    suite = daemonkit.host_suite()
    key = sha256(repr((suite, PACKAGES, 1)).encode()).hexdigest()[:12]
    target = daemonkit.CACHE / f"test-judge-{suite}-{key}.tar"
    daemonkit.CACHE.mkdir(parents=True, exist_ok=True)
    with open(daemonkit.CACHE / "test-judge.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            daemonkit.bootstrap(suite, target, PACKAGES)
    return target


# What comes and goes in the groups of places: their agents, cells and zygotes.
_OF_PLACES = re.compile(
    r"process \d+ \((dsec-agent|init|python3|sh|main|crun|dsec-launch|g?cc1?|cc1plus|g\+\+|ld|as|bash)"
)


@contextlib.contextmanager
def judging(
    directory: Path, watched: list[Path], daemon: dict[str, Any] | None = None, **config: Any
) -> Iterator[Daemon]:
    """A daemon with the image; its pools grow and shrink as they like while it runs, and go with it.

    daemon: what else its configuration has; config: what [fncall] has.
    """
    fncall = {"image": IMAGE, "warm_images": ["small:test"], **config}
    with daemonkit.started(directory, watched, fncall=fncall, **(daemon or {})) as one:

        def tolerates(item: str) -> bool:
            return (item.startswith("cgroup ") and one.cgroup_base in item) or bool(_OF_PLACES.match(item))

        async def fill() -> None:
            async with one.client() as client:
                await one.import_tar(client, judge_tar(), IMAGE)

        daemonkit.run(fill())
        leftovers.tolerated.append(tolerates)
        try:
            yield one
        finally:
            leftovers.tolerated.remove(tolerates)


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory, watched: list[Path]) -> Iterator[Daemon]:
    """The daemon that tests of calls share."""
    with judging(tmp_path_factory.mktemp("judge"), watched) as one:
        yield one


@pytest.fixture
def calls(judge: Daemon) -> Iterator[DSecSyncClient]:
    with DSecSyncClient(judge.url) as client:
        yield client


def python(code: str, **more: Any) -> DSecFnCallArgs:
    return DSecFnCallArgs(language="python", code=code, **more)


def cold_python(code: str, **more: Any) -> DSecFnCallArgs:
    """The same by an interpreter that is started for it."""
    return DSecFnCallArgs(argv=["python3", "p.py"], files={"p.py": code.encode()}, **more)


def c(code: str, **more: Any) -> DSecFnCallArgs:
    return DSecFnCallArgs(language="c", code=code, **more)


def cpp(code: str, **more: Any) -> DSecFnCallArgs:
    return DSecFnCallArgs(language="cpp", code=code, **more)


def sh(code: str, **more: Any) -> DSecFnCallArgs:
    return DSecFnCallArgs(language="sh", code=code, **more)
