"""The checker of leftovers finds each kind of thing it is there for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@contextlib.contextmanager
def found(watched: Path, kind: str, count: int = 1) -> Iterator[None]:
    """Inside the block one more thing of this kind appears."""
    before = leftovers.picture([watched])
    assert leftovers.left(before, lambda: leftovers.picture([watched]), patience=0) == []
    yield
    extra = leftovers.left(before, lambda: leftovers.picture([watched]), patience=0)
    assert [item.split()[0] for item in extra] == [kind] * count, extra


def test_finds_a_descriptor(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack, found(tmp_path, "fd"):
        stack.enter_context(socket.socket())


def test_finds_a_child_and_a_zombie(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with found(tmp_path, "process"):
            child = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        with found(tmp_path, "process"):
            other = stack.enter_context(subprocess.Popen(["true"]))
            os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        child.kill()


def test_finds_a_grandchild(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack, found(tmp_path, "process", 2):
        shell = stack.enter_context(
            subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        )
        assert shell.stdout is not None
        stack.callback(shell.kill)
        stack.callback(os.kill, int(shell.stdout.readline()), 9)
        shell.stdout.close()


def test_finds_a_thread(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    with found(tmp_path, "thread"):
        thread.start()
    stop.set()
    thread.join()


def test_finds_a_task() -> None:
    """A task that asyncio.run would cancel without a word."""

    async def forgets() -> None:
        task = asyncio.get_running_loop().create_task(asyncio.sleep(60), name="forgotten")
        await asyncio.sleep(0)
        assert not task.done()

    leftovers.take_pending()
    asyncio.run(forgets())
    (left,) = leftovers.take_pending()
    assert "sleep" in left


@root_only
def test_finds_a_mount_and_a_loop_device(tmp_path: Path) -> None:
    image, point = tmp_path / "image", tmp_path / "point"
    point.mkdir()
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with found(tmp_path, "mount"):
        subprocess.run(["mount", "-t", "tmpfs", "x", point], check=True)
    subprocess.run(["umount", point], check=True)
    with found(tmp_path, "loop"):
        device = subprocess.run(["losetup", "-f", "--show", image], check=True, capture_output=True, text=True)
    subprocess.run(["losetup", "-d", device.stdout.strip()], check=True)


@root_only
def test_finds_a_cgroup_and_who_is_in_it(tmp_path: Path) -> None:
    top = Path("/sys/fs/cgroup/unified")
    group = (top if top.exists() else top.parent) / f"leftover-{os.getpid()}-x"
    with found(tmp_path, "cgroup"):
        group.mkdir()
    with subprocess.Popen(["sleep", "60"]) as child:
        (group / "cgroup.procs").write_text(str(child.pid))
        assert leftovers.processes(1 << 30, [f"cgroup {group}"]) == {f"process {child.pid} (sleep)"}
        child.kill()
    group.rmdir()


def test_waits_for_what_goes_by_itself(tmp_path: Path) -> None:
    before = leftovers.picture([tmp_path])
    thread = threading.Timer(0.2, lambda: None)
    thread.start()
    assert leftovers.left(before, lambda: leftovers.picture([tmp_path]), patience=3) == []
    thread.join()


FAILING = """
import socket
def test_leaks():
    global kept
    kept = socket.socket()
def test_fine():
    kept.close()
"""


def test_a_leak_fails_its_test_and_no_other(tmp_path: Path) -> None:
    """The real fixture in a real pytest: the leaking test fails at its end, the next one passes."""
    here = Path(__file__).parents[1]
    for name in ("conftest.py", "leftovers.py"):
        (tmp_path / name).write_text((here / name).read_text())
    (tmp_path / "test_it.py").write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "t", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "left behind:\n" in done.stdout
    assert "ERROR test_it.py::test_leaks" in done.stdout
