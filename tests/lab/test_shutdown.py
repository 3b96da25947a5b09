"""What a shutdown does to the units, in its order: emptied first, then the daemon and the sandboxes' group.

The machine itself stays up: all units are stopped in one transaction, as shutdown.target does.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from systemd_kit import import_busybox, run, sh, show, until

from dsecd.client import DSecClient, DSecContainerRunArgs, DsecError

pytestmark = pytest.mark.lab

UNITS = "dsecd-drain.service dsecd.service dsecd-sandboxes.service dsecd-images.service"


def test_commands_have_time_to_end_before_the_sandboxes_stop() -> None:
    sh("mkdir -p /run/systemd/system/dsecd-drain.service.d")
    sh("printf '[Service]\\nExecStop=\\nExecStop=/usr/bin/dsecctl drain --shutdown --deadline 20s\\n'"
       " >/run/systemd/system/dsecd-drain.service.d/lab.conf; systemctl daemon-reload")  # fmt: skip
    sh(f"systemctl start dsecd.socket {UNITS}")
    until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")

    since = int(time.time())

    async def work(client: DSecClient) -> None:
        await import_busybox(client, "base:down")
        args = DSecContainerRunArgs(container_image="base:down", memory_limit_mb=64)
        idle, quick, slow = [await client.run_container(args, timeout=90) for _ in range(3)]
        ends = asyncio.create_task(quick.run_shell("sleep 5; echo done", timeout=60))
        never = asyncio.create_task(slow.run_shell("sleep 600", timeout=900))
        await asyncio.sleep(1)
        began = time.monotonic()
        stop = asyncio.create_task(asyncio.to_thread(sh, f"systemctl stop {UNITS}"))
        assert (await ends).stdout == "done\n"
        with pytest.raises(DsecError) as cut:
            await never
        assert (cut.value.kind, cut.value.infra) == ("sandbox_dead", True), cut.value
        await stop
        assert time.monotonic() - began >= 20
        said = sh(f"journalctl -o cat -u dsecd SANDBOX_ID={idle.id} -n 3")
        assert "this host is being emptied" in said

    run(work)
    try:
        order = sh(f"journalctl -o cat _PID=1 --since @{since} | grep -E '^Stopp(ed|ing) dsecd'").splitlines()
        expected = [
            "Stopped dsecd-drain",
            "Stopping dsecd.service",
            "Stopped dsecd.service",
            "Stopping dsecd-sandboxes",
        ]
        at = [next(n for n, line in enumerate(order) if line.startswith(start)) for start in expected]
        assert at == sorted(at), order
        assert sh("findmnt -rn -t overlay,erofs -o TARGET | grep dsecd", False) == ""
        assert sh("find /sys/fs/cgroup/dsec.slice -mindepth 2 -type d", False) == ""
    finally:
        sh("rm -r /run/systemd/system/dsecd-drain.service.d; systemctl daemon-reload")
        sh(f"systemctl start {UNITS}")
    until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")

    async def again(client: DSecClient) -> None:  # it was no cordon
        await (await client.run_container(DSecContainerRunArgs(container_image="base:down"), timeout=90)).stop()

    run(again)
    sh(f"systemctl stop dsecd.socket {UNITS}")
