"""Full VMs through the daemon: created, commanded, looked at, saved, taken back."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import stat
import struct
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from daemonkit import Daemon
from test_cli_live import DSECCTL, environment
from test_fullvm import debian as debian
from vmkit import kernel

from dsecd.client import DsecError, DSecFullVMRunArgs, Sandbox
from dsecd.vmm.disks import DiskStore, VmImage
from dsecd.vmm.kernel import KernelStore, describe

ARGS = DSecFullVMRunArgs(vm_image="debian-vm", memory_limit_mb=640, cpu_cores_limit=2, profile="desktop")


@pytest.fixture
def host(fresh_daemon: Daemon, debian: tuple[DiskStore, VmImage]) -> Daemon:
    """A daemon that has the Debian image and a kernel with everything built in."""
    equip(fresh_daemon, debian[0])
    return fresh_daemon


def equip(daemon: Daemon, store: DiskStore) -> None:
    """The image and the kernel."""
    target = daemon.state / "vmimages"
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", "--reflink=auto", store.root, target], check=True)
    kernels = KernelStore(daemon.state / "kernels")
    with kernels.workspace() as work:
        directory = work.path / "kernel"
        directory.mkdir()
        shutil.copy(kernel(), directory / "vmlinux")
        (directory / "vmlinux").chmod(0o644)
        shutil.copy(Path(kernel()).with_name("config"), directory / "config")
        describe(directory, kind="files", source="test", version="0", release="0")
        kernels.commit(work, "whole")


@pytest.mark.slow
@pytest.mark.network
def test_a_whole_life(host: Daemon, tmp_path: Path) -> None:
    """One machine for all, as a boot takes a minute: its agent is killed, it is saved, reverted and taken back."""

    async def first() -> tuple[str, str]:
        async with host.client() as client:
            box = await client.run_fullvm(ARGS, timeout=400)
            assert box.info.backend == "fullvm"
            await runs_commands(box)
            await moves_bytes(box, tmp_path)
            await shows_its_screen(box)
            await looked_at(box)
            await asyncio.to_thread(viewed, host, box.id)
            await outlives_its_agent(box)
            # Without QEMU's agent, ours must have the disk flushed (with it: test_fullvm.py).
            await box.run_shell("systemctl stop qemu-guest-agent; echo kept > /root/file")
            await box.disk_snapshot("clean")
            assert await box.disk_snapshots() == ["clean"]
            lost = asyncio.ensure_future(box.run_shell("echo changed > /root/file; sync; sleep 1000"))
            async with asyncio.timeout(60):
                while await box.read_file("/root/file") != b"changed\n":
                    await asyncio.sleep(0.1)
            await box.disk_revert("clean")
            with pytest.raises(DsecError, match="reverted") as caught:
                await lost
            assert caught.value.kind == "outcome_unknown"
            assert (await box.run_shell("cat /root/file")).stdout == "kept\n"
            goes_on = await box.start(["sh", "-c", "until test -e /root/go; do sleep 0.2; done; echo went on"])
            await box.run_shell("date -s 2001-02-03")
            await box.pause()
            return box.id, goes_on.id

    async def second(ident: str, goes_on: str) -> None:
        async with host.client() as client:
            box = await client.get(ident)
            assert box.info.state == "paused"
            at = int((await box.run_shell("date +%s")).stdout)
            assert abs(at - time.time()) < 300, "its clock was not set"
            await box.write_file("/root/go", b"")
            assert (await box.process(goes_on).wait()).stdout == "went on\n"

    async def third(ident: str) -> None:
        async with host.client() as client:
            box = await client.get(ident)
            assert (await box.run_shell("cat /root/file")).stdout == "kept\n"
            await box.run_shell("systemd-run sh -c 'sleep 1; systemctl poweroff'")
            async with asyncio.timeout(120):
                while (await box.refresh()).state != "failed":
                    await asyncio.sleep(0.5)

    ident, goes_on = asyncio.run(first())
    host.restart(politely=False)
    asyncio.run(second(ident, goes_on))
    host.restart()
    asyncio.run(third(ident))


async def looked_at(box: Sandbox) -> None:
    """VNC through the tunnel: a handshake, and one whole picture as bytes, which is more than the window."""
    tunnel = await box.connect_vnc()
    held = bytearray()

    async def take(size: int) -> bytes:
        while len(held) < size:
            piece = await tunnel.read()
            assert piece, "the screen's end closed"
            held.extend(piece)
        taken = bytes(held[:size])
        del held[:size]
        return taken

    async with asyncio.timeout(120):
        assert await take(12) == b"RFB 003.008\n"
        await tunnel.write(b"RFB 003.008\n")
        assert await take(2) == b"\x01\x01"  # one way to log in, which is none
        await tunnel.write(b"\x01")
        assert await take(4) == bytes(4)
        await tunnel.write(b"\x01")
        width, height, bits, *_format, name = struct.unpack(">HHB15sI", await take(24))
        await take(name)
        await tunnel.write(struct.pack(">BBHHHH", 3, 0, 0, 0, width, height))
        kind, rectangles = struct.unpack(">BxH", await take(4))
        assert kind == 0
        seen = 0
        for _ in range(rectangles):
            _x, _y, wide, high, coding = struct.unpack(">HHHHi", await take(12))
            assert coding == 0, "nothing but raw pixels was agreed on"
            seen += len(await take(wide * high * bits // 8))
        assert seen == width * height * bits // 8 > 1 << 20
        tunnel.write_eof()
        while await tunnel.read():
            pass
        await tunnel.close()


def commanded(host: Daemon, ident: str) -> None:
    """`dsecctl exec`, whose output comes at the end."""
    line = "cat; echo $WORD; echo wrong >&2; exit 3"
    argv = [DSECCTL, "exec", "-i", "-e", "WORD=x", ident, "--", "sh", "-c", line]
    done = subprocess.run(argv, input=b"in ", capture_output=True, env=environment(host), timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"in x\n", b"wrong\n")
    done = subprocess.run([DSECCTL, "exec", "-t", ident, "sh"], capture_output=True, env=environment(host), check=False)
    assert done.returncode == 2
    assert b"vm vnc" in done.stderr


def viewed(host: Daemon, ident: str) -> None:
    """`dsecctl vm vnc`, on a port and on a socket; both are gone with it."""
    for where in ("127.0.0.1:0", str(host.state.parent / "vnc")):
        argv = [DSECCTL, "vm", "vnc", "--listen", where, ident]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, env=environment(host)) as process:
            assert process.stderr is not None
            said = process.stderr.readline().decode()
            assert "the screen is at " in said
            name = said.split()[-1]
            for _viewer in range(2):
                with socket.socket(socket.AF_UNIX if name.startswith("/") else socket.AF_INET) as viewer:
                    viewer.settimeout(60)
                    host_port = name.rpartition(":")
                    viewer.connect(name if name.startswith("/") else (host_port[0], int(host_port[2])))
                    assert viewer.recv(12, socket.MSG_WAITALL) == b"RFB 003.008\n"
            if name.startswith("/"):
                assert stat.S_IMODE(Path(name).stat().st_mode) == 0o600
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert process.stderr.read().strip() == b""
        assert not Path(where).exists()


async def runs_commands(box: Sandbox) -> None:
    ran = await box.exec(["/bin/sh", "-c", "cat; echo $WORD; echo bad >&2; exit 3"], stdin=b"in ", env={"WORD": "x"})
    assert (ran.exit_code, ran.stdout, ran.stderr) == (3, "in x\n", "bad\n")
    assert (await box.run_shell("cat /proc/1/comm; pwd; tty", cwd="/tmp")).stdout == "systemd\n/tmp\nnot a tty\n"
    assert (await box.run_shell("id -un", user="nobody")).stdout == "nobody\n"
    assert (await box.run_shell("mount -t tmpfs x /mnt && umount /mnt && echo may")).stdout == "may\n"
    assert (await box.run_shell("setsid sleep 1000 & sleep 1000", timeout=1)).timed_out
    assert (await box.run_shell("pgrep -x sleep")).exit_code == 1, "a process outlived its command's time"
    async with await box.session() as session:
        await session.run("cd /usr; X=5")
        assert (await session.run("pwd; echo $X; (exit 4)")).stdout == "/usr\n5\n"
    terminal = await box.start(["sh"], tty=True, rows=33, cols=99, follow=True)
    said = ""
    async for _, data in terminal.output():
        said += data.decode()
        if said.endswith("# ") and "33 99" not in said:
            await terminal.write(b"stty size; exit 3\n")
    assert "33 99" in said
    assert terminal.ended is not None
    assert terminal.ended.exit_code == 3


async def moves_bytes(box: Sandbox, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4000  # with the byte that the serial line escapes
    await box.write_file("/root/data", data)
    assert await box.read_file("/root/data") == data
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/sub/file").write_bytes(data)
    assert (await box.upload(tmp_path / "tree", "/srv/tree")).issues == []
    assert [entry.name for entry in await box.list_dir("/srv/tree/sub")] == ["file"]
    (tmp_path / "back").mkdir()
    assert (await box.download("/srv/tree", tmp_path / "back")).issues == []
    assert (tmp_path / "back/sub/file").read_bytes() == data
    await box.start(["systemd-socket-activate", "-l", "127.0.0.1:7777", "--inetd", "-a", "cat"])
    async with asyncio.timeout(60):
        while (await box.run_shell("grep -q :1E61 /proc/net/tcp")).exit_code:
            await asyncio.sleep(0.2)
    tunnel = await box.connect_port(7777)
    await tunnel.write(data)
    tunnel.write_eof()
    back = b""
    while chunk := await tunnel.read():
        back += chunk
    await tunnel.close()
    assert back == data


async def shows_its_screen(box: Sandbox) -> None:
    picture = await box.screen()
    assert picture.png.startswith(b"\x89PNG")
    assert picture.width >= 640
    async with asyncio.timeout(120):  # the agent may be up before the console is
        while (await box.run_shell("test -e /root/typed")).exit_code:
            await box.screen_input(text="touch /root/typed", keys=["enter"])
            await asyncio.sleep(2)
    await box.screen_input(x=10, y=20, button="left")
    assert b"login" in await box.console()


async def outlives_its_agent(box: Sandbox) -> None:
    """Who waits for a command of an agent that was killed is told so; the next request finds the next agent."""
    running = await box.start(["sleep", "1000"])
    waiting = asyncio.ensure_future(running.wait())
    session = await box.session()
    await box.exec(["systemd-run", "sh", "-c", "sleep 1; systemctl kill -s KILL dsec-agent"])
    with pytest.raises(DsecError) as caught:
        await waiting
    assert caught.value.kind == "outcome_unknown"
    assert (await box.run_shell("echo back")).stdout == "back\n"
    assert (await box.run_shell("pgrep -x sleep")).exit_code == 1, "a command outlived its agent"
    assert await box.read_file("/proc/1/comm") == b"systemd\n"
    for gone in (running.wait(), session.run("true")):
        with pytest.raises(DsecError) as caught:
            await gone
        assert caught.value.kind == "not_found"
    # One that does not come back is an error of the platform, and soon; the machine and its screen go on.
    # Meanwhile somebody else speaks in its place.
    noise = "head -c 3000000 /dev/urandom > /dev/virtio-ports/dsec.agent"
    away = f"sleep 1; systemctl stop dsec-agent; {noise}; sleep 25; systemctl start dsec-agent"
    await box.exec(["systemd-run", "sh", "-c", away])
    async with asyncio.timeout(60):
        with pytest.raises(DsecError) as caught:
            while True:
                await box.run_shell("sleep 0.2")
        while caught.value.kind == "outcome_unknown":
            with pytest.raises(DsecError) as caught:
                await box.run_shell("true")
    assert (caught.value.kind, caught.value.retryable) == ("vmm", True)
    assert (await box.screen()).png
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(DsecError):
                assert (await box.run_shell("echo back")).stdout == "back\n"
                return


@pytest.mark.slow
@pytest.mark.network
def test_qemus_agent_alone_runs_whole_commands(host: Daemon) -> None:
    """The same disk, of which nobody says that our agent is in it."""
    described = host.state / "vmimages/debian-vm/image.json"
    image = msgspec.json.decode(described.read_bytes(), type=VmImage)
    described.chmod(0o600)
    described.write_bytes(msgspec.json.encode(msgspec.structs.replace(image, agent=False)))

    async def work() -> None:
        async with host.client() as client:
            box = await client.run_fullvm(ARGS, timeout=400)
            ran = await box.exec(["/bin/sh", "-c", "cat; echo $WORD; exit 3"], stdin=b"in ", env={"WORD": "x"})
            assert (ran.exit_code, ran.stdout) == (3, "in x\n")
            assert (await box.run_shell("cat /proc/1/comm", cwd="/tmp")).stdout == "systemd\n"
            assert (await box.run_shell("sleep 60", timeout=1)).timed_out
            await asyncio.to_thread(commanded, host, box.id)
            for refused in (box.read_file("/etc/hostname"), box.start(["true"]), box.session()):
                with pytest.raises(DsecError, match="without dsec-agent") as caught:
                    await refused
                assert caught.value.kind == "unsupported"
            await box.run_shell("date -s 2001-02-03")
            await box.pause()
            at = int((await box.run_shell("date +%s")).stdout)
            assert abs(at - time.time()) < 300, "its clock was not set"
            await box.stop()

    asyncio.run(work())


def test_refusals(fresh_daemon: Daemon) -> None:
    async def ask() -> list[DsecError]:
        found = []
        async with fresh_daemon.client() as client:
            for args in (
                DSecFullVMRunArgs(vm_image="no-such"),
                DSecFullVMRunArgs(vm_image="../etc"),
                DSecFullVMRunArgs(vm_image="no-such", memory_limit_mb=1 << 23),
            ):
                with pytest.raises(DsecError) as caught:
                    await client.run_fullvm(args)
                found.append(caught.value)
        return found

    missing, nonsense, large = asyncio.run(ask())
    assert missing.kind == "not_found"
    assert nonsense.kind == "invalid"
    assert large.kind in ("not_found", "invalid")
