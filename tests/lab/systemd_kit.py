"""What the lab's tests of the installed daemon share: commands in the guest, its units, the SDK."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))
from erofs_kit import Tar

from dsecd.client import DSecClient, DSecContainerRunArgs, DsecError, Sandbox
from dsecd.vmm.kernel import KernelStore, describe
from dsecd.wire import images as image_wire

T = TypeVar("T")
CONFIG = Path("/etc/dsecd/dsecd.toml")
STATE = Path("/var/lib/dsecd")
PROGRAMS = Path("/usr/local/bin")  # on the unit's PATH
RELEASES = sorted(Path("/srv/bin").glob("*/firecracker"))
# A timer's interrupt that TCG's SVM loses (emulator.py) is not missed where there is a next one: QEMU's guests tick.
QEMU = """#!/bin/sh
case " $* " in *" -cpu host "*)
    for word; do
        shift
        test "$before" != -append || word="$word nohz=off highres=off"
        set -- "$@" "$word"
        before=$word
    done
esac
exec /usr/bin/qemu-system-x86_64 "$@"
"""
UP_S = 90.0  # everything is ten times slower under emulation


def sh(line: str, check: bool = True) -> str:
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=180)
    assert not check or done.returncode == 0, f"{line}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout.strip()


def show(unit: str, what: str) -> str:
    return sh(f"systemctl show -P {what} {unit}")


def until(what: str, holds: Callable[[], bool], seconds: float = UP_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, (
            f"{what}: not within {seconds:g} s\n{sh('journalctl -u dsecd -n 40', False)}"
        )
        time.sleep(0.1)


def run(work: Callable[[DSecClient], Coroutine[Any, Any, T]]) -> T:
    async def inside() -> T:
        async with DSecClient() as client:
            return await work(client)

    return asyncio.run(inside())


async def import_busybox(
    client: DSecClient, name: str, files: dict[str, bytes] | None = None, store: str = "local"
) -> None:
    """A base image of busybox and these files: quick to bring in and to start."""
    tar = Tar()
    for directory in ("bin", "etc", "proc", "sys", "dev", "tmp", "root", "data"):
        tar.dir(directory)
    tar.file("bin/busybox", Path("/bin/busybox").read_bytes(), mode=0o755)
    for program in ("sh", "cat", "sha256sum", "tail", "echo", "head", "sleep", "uname", "date"):
        tar.symlink(f"bin/{program}", "busybox")
    tar.file("etc/passwd", b"root:x:0:0::/root:/bin/sh\n")
    for file, content in (files or {}).items():
        tar.file(file, content)
    whole = tar.done()

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(whole), 1 << 20):
            yield whole[at : at + (1 << 20)]

    await client.import_image(image_wire.Import(name=name, store=store), chunks())


@contextlib.contextmanager
def microvm_host() -> Iterator[None]:
    """A guest kernel and VMMs, in a daemon that an administrator set up; stopped at the end."""
    for name in ("firecracker", "jailer") if RELEASES else ():
        shutil.copy(RELEASES[-1].with_name(name), PROGRAMS / name)
    (PROGRAMS / "qemu-system-x86_64").write_text(QEMU)
    (PROGRAMS / "qemu-system-x86_64").chmod(0o755)
    before = CONFIG.read_text()
    sh("systemctl start dsecd.socket && systemctl restart dsecd.service")
    until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")
    kernels = KernelStore(STATE / "kernels")
    if not kernels.list():
        with kernels.workspace() as work:
            made = work.path / "kernel"
            made.mkdir()
            shutil.copy("/srv/vmlinux", made / "vmlinux")
            shutil.copy("/srv/vmlinux.config", made / "config")
            (made / "vmlinux").chmod(0o644)
            describe(made, kind="files", source="lab", version="0", release="0")
            kernels.commit(work, "lab")
    try:
        yield
    finally:
        sh("systemctl stop dsecd.service dsecd.socket dsecd-sandboxes.service")
        CONFIG.write_text(before)
        for name in ("firecracker", "jailer", "qemu-system-x86_64"):
            (PROGRAMS / name).unlink(missing_ok=True)


@contextlib.contextmanager
def sandbox(image: str, **arguments: Any) -> Iterator[str]:
    """A running sandbox's id."""

    async def make(client: DSecClient) -> str:
        return (await client.run_container(DSecContainerRunArgs(container_image=image, **arguments), timeout=UP_S)).id

    async def end(client: DSecClient) -> None:
        with contextlib.suppress(DsecError):
            await (await client.get(ident)).stop()

    ident = run(make)
    try:
        yield ident
    finally:
        run(end)


async def shell(client: DSecClient, ident: str, line: str, **options: Any) -> Any:
    return await Sandbox(client, (await client.get(ident)).info).run_shell(line, **options)
