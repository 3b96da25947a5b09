"""The installed daemon's microVMs under the lab VM's KVM, by the real Firecracker and by QEMU; and nothing left.

The drivers alone are tested in test_firecracker.py and tests/functional. Firecracker is skipped where this machine has
none to send along (delivery.py says where it is looked for).
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from systemd_kit import CONFIG, RELEASES, STATE, import_busybox, microvm_host, run, sh, show, until

from dsecd.client import DSecClient, DSecMicroVMRunArgs, Sandbox

pytestmark = pytest.mark.lab

SLICE = Path("/sys/fs/cgroup/dsec.slice/dsecd-sandboxes.service")
MADE_S = 180  # a guest of a guest under emulation
BASE = "base:busybox"


@pytest.fixture(scope="module", autouse=True)
def units() -> Iterator[None]:
    with microvm_host():
        run(lambda client: import_busybox(client, BASE))
        yield


@pytest.fixture(params=["firecracker", "qemu"])
def driver(request: pytest.FixtureRequest) -> str:
    """One line in the configuration says which."""
    if request.param == "firecracker" and not RELEASES:
        pytest.skip("no Firecracker was sent along: put firecracker and jailer into ~/.cache/dsecd/bin")
    lines = [line for line in CONFIG.read_text().splitlines() if not line.startswith("vm_driver")]
    CONFIG.write_text("\n".join([*lines, f'vm_driver = "{request.param}"\n']))
    sh("systemctl restart dsecd.service")
    until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")
    return str(request.param)


def running() -> list[str]:
    """Pids of all VMMs."""
    return sh("pgrep -x 'firecracker|jailer|qemu-system-x86'", check=False).split()


async def text(box: Sandbox, line: str) -> str:
    result = await box.run_shell(line, timeout=MADE_S)
    assert result.exit_code == 0, f"{line}: {result.exit_code} {result.stderr}"
    return result.stdout.strip()


@pytest.mark.nested
def test_a_life_through_the_daemon(driver: str) -> None:
    """Made, used, saved, loaded, copied, taken back from a daemon that was killed, ended; then nothing is left."""
    report = {check["name"]: check for check in json.loads(sh("dsecctl --json doctor"))}
    assert report["KVM"]["level"] == report["microVMs"]["level"] == report["guest kernel"]["level"] == "ok"
    assert report["microVMs"]["text"].startswith(driver)
    assert report["microVMs"]["text"].endswith("(kvm)")
    mounts = sh("findmnt -rn -o TARGET | grep -v /run/dsecd/images/ | sort")
    try:
        ident = run(_made_and_used)
        pid = show("dsecd.service", "MainPID")
        os.kill(int(pid), signal.SIGKILL)
        until("a new daemon", lambda: show("dsecd.service", "MainPID") not in ("0", pid))
        until("it is ready", lambda: show("dsecd.service", "ActiveState") == "active")
        run(lambda client: _kept(client, ident))
    finally:
        run(_all_ended)
    assert running() == []
    assert [path.name for path in (STATE / "vms").iterdir() if not path.name.startswith(".")] == []
    assert [path.name for path in SLICE.iterdir() if ident in path.name] == []
    assert not Path("/run/dsecd/sandboxes", ident).exists()
    assert sh("findmnt -rn -o TARGET | grep -v /run/dsecd/images/ | sort") == mounts


async def _kept(client: DSecClient, ident: str) -> None:
    box = await client.get(ident)
    assert box.info.state == "running"
    assert await text(box, "cat /root/word /dev/shm/word") == "kept\nkept"
    await box.stop()


async def _all_ended(client: DSecClient) -> None:
    await client.stop_many(await client.list())


async def _made_and_used(client: DSecClient) -> str:
    args = DSecMicroVMRunArgs(container_image=BASE, memory_limit_mb=128, disk_limit_mb=256, pids_limit=64)
    began = time.monotonic()
    box = await client.run_microvm(args, timeout=MADE_S)
    print(f"running after {time.monotonic() - began:.1f} s")
    assert box.info.backend == "microvm"
    (pid,) = running()
    assert "CapEff:\t0000000000000000" in Path(f"/proc/{pid}/status").read_text()
    assert box.id in Path(f"/proc/{pid}/cgroup").read_text()

    ran = await box.run_shell("cat; echo $WORD; uname -n >&2; exit 7", stdin=b"in ", env={"WORD": "x"}, timeout=MADE_S)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (7, "in x\n", "sandbox\n")
    assert (await box.run_shell("sleep 600", timeout=2)).timed_out
    data = secrets.token_bytes(3 << 20)
    await box.write_file("/root/data", data)
    assert await box.read_file("/root/data") == data
    await text(box, "echo kept > /root/word; echo kept > /dev/shm/word")

    waiting = asyncio.create_task(box.run_shell("echo before; sleep 5; echo after", timeout=MADE_S))
    await asyncio.sleep(2)
    began = time.monotonic()
    await box.pause()
    assert running() == []
    paused = time.monotonic()
    await box.resume()
    print(f"paused in {paused - began:.1f} s, resumed in {time.monotonic() - paused:.1f} s")
    assert (await waiting).stdout == "before\nafter\n"
    assert await text(box, "cat /root/word /dev/shm/word") == "kept\nkept"
    assert abs(int(await text(box, "date +%s")) - time.time()) < 60

    began = time.monotonic()
    copies = await box.fork(2)
    print(f"two copies in {time.monotonic() - began:.1f} s")
    boxes = [one for one in copies if isinstance(one, Sandbox)]
    assert len(boxes) == 2, copies
    assert len(running()) == 3
    seeds = set()
    for one in boxes:
        assert await text(one, "cat /root/word /dev/shm/word") == "kept\nkept"
        seeds.add(await text(one, "cat /proc/sys/kernel/random/uuid"))
        await text(one, "echo other > /root/word")
    assert len(seeds) == 2
    assert await text(box, "cat /root/word") == "kept"
    await client.stop_many(boxes)
    assert running() == [pid for pid in running() if box.id in Path(f"/proc/{pid}/cgroup").read_text()] != []
    return box.id
