"""dsecd-images.service: images on demand under the real systemd, its FD store, and the service being killed under load.

Runs in the lab VM after `make install`, where images are mounted through fscache. The store is a local directory.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from systemd_kit import import_busybox, run, sandbox, sh, shell, show, until

from dsecd.client import DSecClient
from dsecd.wire import execs
from dsecd.wire import images as image_wire

pytestmark = pytest.mark.lab

UNIT = "dsecd-images.service"
CONFIG = Path("/etc/dsecd/dsecd.toml")
FAR = Path("/srv/far")
FILES = {f"data/f{n:02}": random.Random(n).randbytes(1 << 20) for n in range(16)}
SUMS = "".join(f"{hashlib.sha256(content).hexdigest()}  /{name}\n" for name, content in FILES.items())
CHECK = "sha256sum -c /sums >/tmp/out.$$ 2>&1 && echo right || tail -n 3 /tmp/out.$$"


@pytest.fixture(scope="module", autouse=True)
def units() -> Iterator[None]:
    before = CONFIG.read_text()
    FAR.mkdir()
    CONFIG.write_text(f'{before}\nimage_read_timeout_s = 20\n[stores.far]\nkind = "path"\npath = "{FAR}"\n')
    sh(f"systemctl restart {UNIT} && systemctl start dsecd.socket && systemctl restart dsecd.service")
    until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")
    run(fill)
    yield
    run(forget)
    CONFIG.write_text(before)
    shutil.rmtree(FAR)
    sh(f"systemctl stop dsecd.service dsecd.socket dsecd-sandboxes.service {UNIT}")


async def fill(client: DSecClient) -> None:
    await import_busybox(client, "base:far", {"sums": SUMS.encode(), **FILES}, "far")


async def forget(client: DSecClient) -> None:
    """Its store leaves the configuration, too."""
    await client.call("image.remove", image_wire.ByRef(ref="base:far"))


@pytest.fixture
def box() -> Iterator[str]:
    """A running sandbox's id, on an image of which nothing is here yet: the cache is the kernel's, and was emptied."""
    # dsecd unmounts what nobody uses. The trace of the last test would have everything fetched ahead.
    sh(f"systemctl stop dsecd.service {UNIT} && rm -rf /var/lib/dsecd/cache /var/lib/dsecd/images/*/trace")
    sh(f"systemctl start {UNIT} dsecd.service")

    with sandbox("base:far", memory_limit_mb=128) as ident:
        yield ident


def kept() -> int:
    return int(show(UNIT, "NFileDescriptorStore"))


def back(pid: str) -> None:
    until("another server runs", lambda: show(UNIT, "MainPID") not in ("0", pid))
    until("it serves", lambda: show(UNIT, "ActiveState") == "active")


def test_doctor_names_the_driver() -> None:
    report = {check["name"]: check for check in json.loads(sh("dsecctl --json doctor"))}
    assert report["image mounts: fscache"]["level"] == "ok"
    assert report["image mounts: fanotify"]["level"] == "warn"
    assert "pre-content" in report["image mounts: fanotify"]["text"]


def test_killed_and_restarted_under_load(box: str) -> None:
    """Four commands read everything while the unit is killed and restarted again and again: they only wait."""
    assert sh("findmnt -rn -t erofs -o OPTIONS").count("fsid=") == 1
    assert kept() == 2  # the group, and the device

    async def work(client: DSecClient) -> set[str]:
        commands = [asyncio.create_task(shell(client, box, CHECK, timeout=300)) for _ in range(4)]
        ended: set[str] = set()
        while len(ended) < 4 and not all(command.done() for command in commands):
            await asyncio.sleep(0.3)
            pid = show(UNIT, "MainPID")
            if len(ended) % 2:
                await asyncio.to_thread(sh, f"systemctl restart {UNIT}")
            else:
                os.kill(int(pid), signal.SIGSTOP)  # whoever reads from here on waits
                await asyncio.sleep(0.5)
                os.kill(int(pid), signal.SIGKILL)
                await asyncio.to_thread(back, pid)
            ended.add(pid)
        for command in commands:
            assert (await command).stdout == "right\n"
        return ended

    assert len(run(work)) >= 2
    assert kept() == 2
    assert "inherited" in sh(f"journalctl -u {UNIT} -b --no-pager")


def test_only_the_store_has_them(box: str) -> None:
    """The daemon, which has copies, dies at the same time: the FD store alone keeps readers waiting."""

    async def begin(client: DSecClient) -> str:
        started: execs.Started = await client.call("exec.start", execs.Start(id=box, shell=CHECK))
        return started.exec_id

    exec_id = run(begin)
    pids = [int(show(unit, "MainPID")) for unit in ("dsecd.service", UNIT)]
    os.kill(pids[1], signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until("the daemon is back", lambda: show("dsecd.service", "MainPID") not in ("0", str(pids[0])))
    until("it is ready", lambda: show("dsecd.service", "ActiveState") == "active")

    async def finish(client: DSecClient) -> None:
        result: execs.Ran = await client.call("exec.wait", execs.Wait(id=box, exec_id=exec_id))
        assert (result.exit_code, result.stdout) == (0, b"right\n")
        assert (await client.get(box)).info.state == "running"

    run(finish)
    assert kept() == 2


def test_store_away_and_back(box: str) -> None:
    """A command fails for want of data, and it is the platform's fault; then the same read works."""
    away = FAR.with_name("away")

    async def work(client: DSecClient) -> None:
        failed = await shell(client, box, "cat /data/f14 >/dev/null", timeout=300)
        assert failed.exit_code != 0 and "error" in failed.stderr.lower()
        away.rename(FAR)
        assert (await shell(client, box, CHECK, timeout=300)).stdout == "right\n"

    async def warm(client: DSecClient) -> None:
        assert (await shell(client, box, "cat /bin/busybox | tail -c 1 >/dev/null; echo right")).stdout == "right\n"

    run(warm)  # or the command could not even be started, which is an error of another kind
    FAR.rename(away)
    began = time.monotonic()
    try:
        run(work)
    finally:
        if away.exists():
            away.rename(FAR)
    assert time.monotonic() - began > 19
    assert "image_error" in sh("journalctl -u dsecd.service -b --no-pager")
