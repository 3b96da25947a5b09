"""The daemon is upgraded under running sandboxes, and no command is lost or run twice; its configuration is reloaded.

The other version is this one with another number: a wheel of its own, put in place by `make install`.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from systemd_kit import CONFIG, import_busybox, microvm_host, run, sh, show, until

from dsecd.client import DSecClient, DSecContainerRunArgs, DSecMicroVMRunArgs, Sandbox
from dsecd.wire.daemon import Hello, Welcome

pytestmark = pytest.mark.lab

BASE = "base:upgrade"
CONTAINERS, VMS = 50, 2
NEW = "9.9.9"
PYTHON = "/usr/lib/dsecd/venv/bin/python"
STEP_S, WHOLE_S = 120.0, 480.0
# Says that it runs, on a counter of its own, and waits to be let go.
COMMAND = "echo x >>/root/count; while [ ! -e /root/go ]; do sleep 1; done; echo done"


@pytest.fixture(scope="module", autouse=True)
def units() -> Iterator[None]:
    with microvm_host():
        lines = [line for line in CONFIG.read_text().splitlines() if not line.startswith("vm_driver")]
        CONFIG.write_text("\n".join(['vm_driver = "qemu"', *lines, ""]))  # not behind a table that others opened
        sh("systemctl restart dsecd.service")
        until("dsecd is active", lambda: show("dsecd.service", "ActiveState") == "active")
        run(lambda client: import_busybox(client, BASE))
        yield


def wheel_of(version: str, work: Path) -> Path:
    """The installed project's wheel, under another version."""
    (built,) = Path("/srv/built").glob("dsecd-*.whl")
    old = built.name.split("-")[1]
    sh(f"cd {work} && {PYTHON} -m wheel unpack -q {built} 2>/dev/null || {PYTHON} -m wheel unpack {built}")
    tree = work / f"dsecd-{old}"
    (tree / f"dsecd-{old}.dist-info").rename(tree / f"dsecd-{version}.dist-info")
    for path in (tree / "dsecd/__init__.py", tree / f"dsecd-{version}.dist-info/METADATA"):
        text = path.read_text()
        assert old in text, path
        path.write_text(text.replace(old, version, 1))
    sh(f"cd {work} && {PYTHON} -m wheel pack {tree}")
    (made,) = work.glob(f"dsecd-{version}-*.whl")
    return made


def install(wheel: Path) -> None:
    sh(f"make -s -C /srv/project install PREFIX=/usr WHEEL={wheel}")


async def version(client: DSecClient) -> str:
    said: Welcome = await client.call("daemon.hello", Hello())
    return said.version


@pytest.mark.nested
def test_no_command_is_lost_when_the_daemon_is_upgraded(tmp_path: Path) -> None:
    (old,) = Path("/srv/built").glob("dsecd-*.whl")
    wheel = wheel_of(NEW, tmp_path)

    async def made(client: DSecClient) -> list[Sandbox]:
        args = DSecContainerRunArgs(container_image=BASE, memory_limit_mb=32, disk_limit_mb=64)
        found = [one for one in await client.run_containers(args, CONTAINERS) if isinstance(one, Sandbox)]
        assert len(found) == CONTAINERS
        vm = DSecMicroVMRunArgs(container_image=BASE, memory_limit_mb=128, disk_limit_mb=256)
        return found + [await client.run_microvm(vm, timeout=STEP_S) for _ in range(VMS)]

    async def ok(box: Sandbox, line: str) -> str:
        done = await box.run_shell(line, timeout=STEP_S)
        assert (done.exit_code, done.timed_out) == (0, False), f"{box.info.backend} {box.id}: {line}: {done}"
        return done.stdout

    async def work() -> None:
        async with asyncio.timeout(WHOLE_S), DSecClient(again_s=STEP_S) as client:
            assert await version(client) != NEW
            boxes = await made(client)
            commands = [
                asyncio.create_task(one.run_shell(COMMAND, timeout=WHOLE_S, request_id=f"upgrade-{one.id}"))
                for one in boxes
            ]
            for one in boxes:  # all of them run
                await ok(one, "while [ ! -e /root/count ]; do sleep 1; done")
            pid = show("dsecd.service", "MainPID")
            await asyncio.to_thread(install, wheel)
            await asyncio.to_thread(sh, "systemctl restart dsecd.service")
            assert show("dsecd.service", "MainPID") not in ("0", pid)
            assert await version(client) == NEW
            assert not any(command.done() for command in commands)
            assert len(await client.list()) == CONTAINERS + VMS
            for one in boxes:
                await ok(one, "echo >/root/go")
            results = await asyncio.gather(*commands)
            assert [(one.exit_code, one.stdout) for one in results] == [(0, "done\n")] * len(boxes)
            counts = [await ok(one, "cat /root/count") for one in boxes]
            assert counts == ["x\n"] * len(boxes), "none ran twice"
            await client.stop_many(boxes)

    try:
        asyncio.run(work())
    finally:
        install(old)
        sh("systemctl stop dsecd.service dsecd-sandboxes.service && systemctl start dsecd.service")


def test_a_reload_changes_what_can_change_and_refuses_what_is_wrong() -> None:
    before = CONFIG.read_text()
    pid = show("dsecd.service", "MainPID")
    try:
        CONFIG.write_text("max_sandboxes = 7\n" + before)
        sh("systemctl reload dsecd.service")
        assert sh("dsecctl info --json").count('"sandboxes_max":7,') == 1
        CONFIG.write_text("max_sandboxes = seven\n" + before)
        done = subprocess.run(["systemctl", "reload", "dsecd.service"], capture_output=True, text=True)
        assert done.returncode != 0
        assert "dsecd.toml" in sh("journalctl -o cat -u dsecd -n 20")
        assert sh("dsecctl info --json").count('"sandboxes_max":7,') == 1
        assert show("dsecd.service", "ActiveState") == "active"
    finally:
        CONFIG.write_text(before)
    sh("systemctl reload dsecd.service")
    assert show("dsecd.service", "MainPID") == pid
