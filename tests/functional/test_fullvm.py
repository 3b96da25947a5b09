"""Full VMs under QEMU: images in, overlays, snapshots; a Debian with systemd: its agent, screen, keys and pointer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from agent_box import NATIVE
from daemonkit import CACHE, Daemon, asynchronous, host_suite
from vmkit import kernel

from dsecd.client import DSecFullVMRunArgs
from dsecd.errors import DsecError
from dsecd.vmm import debian_vm, disks, live_disks, screen
from dsecd.vmm.disk_job import DiskJob
from dsecd.vmm.disk_jobs import run_disk_job
from dsecd.vmm.disks import DiskStore, VmImage
from dsecd.vmm.machine import Drive, Limits, MachineSpec
from dsecd.vmm.qemu import QemuDriver, QemuMachine
from dsecd.vmm.qga import GuestAgent
from dsecd.wire import images as images_wire

LIMITS = Limits(uid=71_000_001, gid=71_000_001)
MIB = 1 << 20
BOOT_S = 300.0  # twenty on a quiet host
LIMIT = 1 << 30


def img(*words: str | Path) -> None:
    subprocess.run(["qemu-img", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "vmimages")


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A disk that is no multiple of a sector long, with data at both ends and a hole between."""
    path = tmp_path / "a.raw"
    with path.open("wb") as file:
        file.write(os.urandom(300_000))
        file.seek(20 * MIB)
        file.write(os.urandom(123))
    return path


async def brought(store: DiskStore, path: Path, name: str = "x", limit: int = LIMIT) -> VmImage:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return await run_disk_job(store, name, DiskJob(kind="stream", source="test", max_bytes=limit), fd)
    finally:
        os.close(fd)


# -- images ------------------------------------------------------------------------------------------------------------
@asynchronous
async def test_a_disk_comes_in_whatever_it_is(store: DiskStore, raw: Path, tmp_path: Path) -> None:
    whole = raw.read_bytes() + bytes(-raw.stat().st_size % 512)
    padded = tmp_path / "padded"
    padded.write_bytes(whole)
    img("convert", "-f", "raw", "-O", "qcow2", padded, tmp_path / "b.qcow2")
    img("convert", "-f", "raw", "-O", "qcow2", "-c", padded, tmp_path / "c.qcow2")
    img("snapshot", "-c", "old", tmp_path / "b.qcow2")
    subprocess.run(["xz", "-0k", raw], check=True)
    digests = set()
    for path in (raw, tmp_path / "a.raw.xz", tmp_path / "b.qcow2", tmp_path / "c.qcow2"):
        image = await brought(store, path)
        assert image.virtual_size == len(whole), path
        out = tmp_path / "out"
        img("convert", "-f", "qcow2", "-O", "raw", store.disk(image), out)
        assert out.read_bytes() == whole, path
        assert disks.snapshots(store.disk(image), Limits()) == (), "what is not the guest's bytes stays outside"
        digests.add(image.digest)
    assert len(digests) == 1
    found = store.disk(image).stat()
    assert (found.st_uid, found.st_mode & 0o777) == (0, 0o400)
    assert {path.name for path in store.root.iterdir()} == {"lock", "x"}


@asynchronous
async def test_disks_that_name_other_files_or_lie_are_refused(store: DiskStore, raw: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"root's own" * 1000)
    good = tmp_path / "good.qcow2"
    img("convert", "-f", "raw", "-O", "qcow2", raw, good)
    backed, split, large, vmdk = (tmp_path / name for name in ("backed", "split", "large", "vmdk"))
    img("create", "-q", "-f", "qcow2", "-u", "-b", secret, "-F", "raw", backed, "1M")
    img("create", "-q", "-f", "qcow2", "-o", f"data_file={tmp_path}/data,data_file_raw=on", split, "1M")
    img("create", "-q", "-f", "qcow2", large, "100G")
    img("create", "-q", "-f", "vmdk", vmdk, "1M")
    bytes_of = good.read_bytes()
    looped = bytearray(bytes_of)
    (table,) = struct.unpack_from(">Q", looped, 40)  # its L1 table: every entry the same, beyond the file's end
    looped[table : table + 8] = struct.pack(">Q", (1 << 63) | (1 << 40))
    cases = {
        "is empty": b"",
        "has a backing file": backed.read_bytes(),
        "keeps its data in another file": split.read_bytes(),
        "is the limit": large.read_bytes(),
        "is vmdk": vmdk.read_bytes(),
        "is truncated": bytes_of[:40],
        "refused by qemu-img": bytes_of[: len(bytes_of) // 2],
        "by qemu-img: ": bytes(looped),
        "has no size": bytes_of[:24] + bytes(8) + bytes_of[32:],
        "is encrypted": bytes_of[:32] + struct.pack(">I", 1) + bytes_of[36:],
        "unknown features": bytes_of[:72] + struct.pack(">Q", 1 << 40) + bytes_of[80:],
        "of version 9": bytes_of[:4] + struct.pack(">I", 9) + bytes_of[8:],
        "clusters of 2^60": bytes_of[:20] + struct.pack(">I", 60) + bytes_of[24:],
    }
    for reason, content in cases.items():
        bad = tmp_path / "bad"
        bad.write_bytes(content)
        with pytest.raises(DsecError, match=reason.replace("^", r"\^")) as caught:
            await brought(store, bad)
        assert caught.value.kind == "image", reason
    assert store.list() == ()
    assert {path.name for path in store.root.iterdir()} == {"lock"}


@asynchronous
async def test_an_import_that_is_cancelled_leaves_nothing(store: DiskStore) -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, b"some of a disk")
        task = asyncio.ensure_future(run_disk_job(store, "x", DiskJob(kind="stream", max_bytes=LIMIT), reader))
        while not list(store.root.glob("tmp-*/spool")):
            await asyncio.sleep(0.02)
            assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        os.close(reader)
        os.close(writer)
    assert {path.name for path in store.root.iterdir()} == {"lock"}


def test_disks_come_and_go_through_the_daemon(fresh_daemon: Daemon, raw: Path, tmp_path: Path) -> None:
    def dsecctl(*argv: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "DSEC_URL": fresh_daemon.url, "LC_ALL": "C.UTF-8"}
        command = [Path(sys.executable).parent / "dsecctl", *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    made = dsecctl("image", "import", "--kind", "vm", "--profile", "desktop", "--agent", raw, "appliance:1")
    assert made.returncode == 0, made.stderr
    (image,) = json.loads(dsecctl("image", "list", "--kind", "vm", "--json").stdout)
    assert (image["name"], image["disk_mb"], image["profile"], image["agent"]) == ("appliance:1", 21, "desktop", True)
    assert image["digest"] == made.stdout.strip()
    assert "desktop" in dsecctl("image", "show", "appliance:1").stdout
    backed = tmp_path / "backed"
    img("create", "-q", "-f", "qcow2", "-u", "-b", "/etc/shadow", "-F", "raw", backed, "1M")
    refused = dsecctl("image", "import", "--kind", "vm", backed, "bad")
    assert refused.returncode == 1
    assert "has a backing file" in refused.stderr
    assert "[image]" in refused.stderr
    assert dsecctl("image", "import", "--kind", "vm", "--prefix", "x", raw, "bad").returncode == 1
    assert dsecctl("image", "import", "--kind", "vm", tmp_path, "bad").returncode == 1
    assert dsecctl("image", "rm", "appliance:1").returncode == 0
    # A client that dies half-way has sent half a disk, and that is no image.
    command = [Path(sys.executable).parent / "dsecctl", "image", "import", "--kind", "vm", "-", "half"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "DSEC_URL": fresh_daemon.url}) as client:
        assert client.stdin is not None
        client.stdin.write(raw.read_bytes()[:1000])
        client.stdin.flush()
        spools = fresh_daemon.state / "vmimages"
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in spools.glob("tmp-*/spool")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client.kill()
    while list(spools.glob("tmp-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads(dsecctl("image", "list", "--kind", "vm", "--json").stdout) == []
    assert {path.name for path in (fresh_daemon.state / "vmimages").iterdir()} == {"lock"}


@asynchronous
async def test_an_image_in_use_stays_as_it_is(fresh_daemon: Daemon, raw: Path) -> None:
    """A machine with nothing to boot: SeaBIOS runs, and that is enough to lie over an image."""

    async def stream() -> AsyncIterator[bytes]:
        yield raw.read_bytes()

    async with fresh_daemon.client() as client:
        params = images_wire.Import(name="blank", kind="vm")
        made = await client.import_image(params, stream())
        box = await client.run_fullvm(DSecFullVMRunArgs(vm_image="blank", memory_limit_mb=128), timeout=200)
        assert [image.used_by for image in await client.images() if image.kind == "vm"] == [1]
        for attempt in (
            lambda: client.call("image.remove", images_wire.ByRef(ref="blank")),
            lambda: client.import_image(params, stream()),
        ):
            with pytest.raises(DsecError, match="is in use") as caught:
                await attempt()
            assert caught.value.kind == "conflict"
        await box.stop()
        assert (await client.import_image(params, stream())).digest == made.digest
        await client.call("image.remove", images_wire.ByRef(ref="blank"))
        assert [image for image in await client.images() if image.kind == "vm"] == []


# -- overlays ----------------------------------------------------------------------------------------------------------
@asynchronous
async def test_a_disk_goes_back_to_its_snapshots(store: DiskStore, raw: Path, tmp_path: Path) -> None:
    image = await brought(store, raw)
    base, closed = store.disk(image), tmp_path / "closed"
    before = base.read_bytes()
    closed.mkdir(mode=0o700)
    overlay = closed / "disk"
    disks.make_overlay(image, overlay, LIMITS, 64 * MIB)
    assert overlay.stat().st_uid == LIMITS.uid

    def write(pattern: int) -> None:
        node = f"driver=qcow2,file.filename={overlay},backing.driver=qcow2,backing.file.filename={base}"
        subprocess.run(["qemu-io", "--image-opts", node, "-c", f"write -P {pattern} 32M 64k"], check=True,
                       capture_output=True)  # fmt: skip

    def holds(pattern: int) -> bool:
        node = f"driver=qcow2,file.filename={overlay},backing.driver=qcow2,backing.file.filename={base}"
        done = subprocess.run(["qemu-io", "-r", "--image-opts", node, "-c", f"read -P {pattern} 32M 64k",
                               "-c", "read -v 0 512"], capture_output=True, text=True)  # fmt: skip
        assert "00000000:  " + " ".join(f"{byte:02x}" for byte in raw.read_bytes()[:16]) in done.stdout
        return "Pattern verification failed" not in done.stdout + done.stderr

    write(1)
    disks.take_snapshot(overlay, LIMITS, "one")
    write(2)
    disks.take_snapshot(overlay, LIMITS, "two")
    write(3)
    assert disks.snapshots(overlay, LIMITS) == ("one", "two")
    assert holds(3)
    disks.revert(overlay, LIMITS, "one")
    assert holds(1)
    disks.revert(overlay, LIMITS, "two")
    assert holds(2)
    disks.drop_snapshot(overlay, LIMITS, "one")
    assert disks.snapshots(overlay, LIMITS) == ("two",)
    assert base.read_bytes() == before
    for name, kind in (("one", "not_found"), ("7", "invalid"), ("-x", "invalid"), ("a/b", "invalid")):
        with pytest.raises(DsecError) as caught:
            disks.revert(overlay, LIMITS, name)
        assert caught.value.kind == kind
    with pytest.raises(DsecError, match="has a snapshot 'two' already"):
        disks.take_snapshot(overlay, LIMITS, "two")
    with pytest.raises(DsecError, match="MiB and image 'x' needs 21"):
        disks.make_overlay(image, tmp_path / "small", LIMITS, MIB)


# -- a machine ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def debian() -> Iterator[tuple[DiskStore, VmImage]]:
    """`image bootstrap` of a Debian for VMs, made once and kept: the recipe is in its name."""
    recipe = repr((host_suite(), Path(debian_vm.__file__).read_text()))
    root = CACHE / f"debian-vm-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "debian-vm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for old in CACHE.glob("debian-vm-*/"):
            if old != root:
                shutil.rmtree(old)
        store = DiskStore(root)
        store.collect()
        if "debian-vm" not in store.names():
            job = DiskJob(
                kind="debian", suite=host_suite(), source="test", size=4 << 30, max_bytes=8 << 30, agent=True,
                agent_file=str(NATIVE / "dsec-agent"),
            )  # fmt: skip
            asyncio.run(run_disk_job(store, "debian-vm", job))
        has, ours = root / "agent", _sum(NATIVE / "dsec-agent")
        if not has.exists() or has.read_text() != ours:
            put_agent(store)
            has.write_text(ours)
    yield store, store.get("debian-vm")


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def put_agent(store: DiskStore) -> None:
    """The agent of this tree in place of the image's: seconds, where a bootstrap takes minutes."""
    disk, described = store.root / "debian-vm/disk.qcow2", store.root / "debian-vm/image.json"
    raw, path = store.root / "raw", f"/{debian_vm.AGENT_PATH}"
    try:
        img("convert", "-f", "qcow2", "-O", "raw", disk, raw)
        orders = f"rm {path}\nwrite {NATIVE / 'dsec-agent'} {path}\nset_inode_field {path} mode 0100755\n"
        subprocess.run(["debugfs", "-w", "-f", "-", raw], input=orders.encode(), check=True, capture_output=True)
        img("convert", "-f", "raw", "-O", "qcow2", raw, disk)
    finally:
        raw.unlink(missing_ok=True)
    image = msgspec.json.decode(described.read_bytes(), type=VmImage)
    image = msgspec.structs.replace(image, size=disk.stat().st_size, digest=f"sha256:{_sum(disk)}")
    described.write_bytes(msgspec.json.encode(image))


@contextlib.asynccontextmanager
async def booted(debian: tuple[DiskStore, VmImage], directory: Path) -> AsyncIterator[QemuMachine]:
    store, image = debian
    run = directory / "run"
    run.mkdir(mode=0o700)
    disks.make_overlay(image, directory / "disk", LIMITS)
    spec = MachineSpec(
        id="fullvm-test", directory=run, vcpus=2, memory=640 * MIB, kernel=kernel(),
        cmdline=("console=tty0", "console=ttyS0", f"root={image.root}", "rw"), memory_dir=directory / "ram",
        drives=(Drive(directory / "disk", format="qcow2", backing=store.disk(image)),), display=True,
        guest_agent=True, reboots=True, limits=LIMITS,
    )  # fmt: skip
    driver = QemuDriver.find(kvm=False)
    try:
        machine = await driver.start(spec)
        try:
            yield machine
        finally:
            await machine.release()
    finally:
        await driver.end(spec)
    assert list(run.iterdir()) == []


async def until(agent: GuestAgent, command: str, wanted: bytes, seconds: float = 240) -> None:
    """Wait until a shell line in the guest prints that."""
    said = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while wanted not in said:
                said = (await agent.exec(["/bin/sh", "-c", command], timeout=seconds)).stdout
                await asyncio.sleep(0.2)
            return
    pytest.fail(f"{command!r} said {said!r} and never {wanted!r}")


@pytest.mark.slow
@pytest.mark.network
@asynchronous
async def test_a_debian_with_a_screen(debian: tuple[DiskStore, VmImage], tmp_path: Path) -> None:
    async with booted(debian, tmp_path) as machine:
        agent = await GuestAgent.connect(machine.spec.directory / "qga.sock", BOOT_S)
        try:
            assert (await agent.os()).id == "debian"
            await commands(agent)
            await until(
                agent, "systemctl is-active getty@tty1 serial-getty@ttyS0; ls /dev/fb0", b"active\nactive\n/dev/fb0"
            )
            assert b"debian-vm login: root" in await machine.console()
            await on_screen(machine, agent)
            await pointed(machine, agent)
            await watched(machine)
            await snapped(machine, agent)
            await agent.shutdown()
            await machine.qmp.until("SHUTDOWN", 240)
        finally:
            await agent.close()
    overlay, base = tmp_path / "disk", debian[0].disk(debian[1])
    assert disks.snapshots(overlay, LIMITS) == ("live",)
    assert has_file(overlay, base, "/after", tmp_path)
    disks.revert(overlay, LIMITS, "live")
    assert not has_file(overlay, base, "/after", tmp_path)
    assert has_file(overlay, base, "/etc/fstab", tmp_path)


def has_file(overlay: Path, base: Path, name: str, work: Path) -> bool:
    """Whether the ext4 file system on the disk has that file."""
    node = f"driver=qcow2,file.filename={overlay},backing.driver=qcow2,backing.file.filename={base}"
    img("convert", "--image-opts", "-O", "raw", node, work / "look.raw")
    done = subprocess.run(
        ["debugfs", "-R", f"stat {name}", work / "look.raw"], capture_output=True, text=True, check=True
    )
    (work / "look.raw").unlink()
    return "Inode:" in done.stdout


async def commands(agent: GuestAgent) -> None:
    ran = await agent.exec(
        ["/bin/sh", "-c", "cat; echo $WORD; echo wrong >&2; exit 7"], env={"WORD": "hi"}, stdin=b"in "
    )
    assert (ran.exit_code, ran.stdout, ran.stderr, ran.truncated) == (7, b"in hi\n", b"wrong\n", False)
    assert (await agent.exec(["/bin/sh", "-c", "kill -9 $$"])).signal == 9
    assert len((await agent.exec(["head", "-c", "3000000", "/dev/urandom"])).stdout) == 3_000_000
    with pytest.raises(DsecError, match="refused guest-exec") as caught:
        await agent.exec(["/no/such/program"])
    assert caught.value.kind == "invalid"
    with pytest.raises(DsecError) as caught:
        await agent.run("guest-no-such-command")
    assert caught.value.kind == "unsupported"
    with pytest.raises(DsecError, match="did not end within 1 s"):
        await agent.exec(["sleep", "30"], timeout=1)
    assert (await agent.exec(["true"])).exit_code == 0


async def on_screen(machine: QemuMachine, agent: GuestAgent) -> None:
    before = await screen.capture(machine.qmp)
    assert before.width >= 640
    assert before.height >= 480
    text = "echo 'Az~!@#$%^&*()_+{}|:<>?`-=[];,./' \"\\\\\" > /tmp/typed\n"
    await screen.type_text(machine.qmp, text)
    await until(agent, "cat /tmp/typed", b"Az~!@#$%^&*()_+{}|:<>?`-=[];,./ \\")
    after = await screen.capture(machine.qmp)
    assert (after.width, after.height) == (before.width, before.height)
    assert after.png != before.png
    await screen.type_text(machine.qmp, "sleep 1000\n")
    await until(agent, "pgrep -x sleep | wc -l", b"2")  # and the one that `commands` left
    await screen.press(machine.qmp, ["ctrl+c"])
    await until(agent, "pgrep -x sleep | wc -l", b"1")
    for bad in ("ä", "€"):
        with pytest.raises(DsecError) as caught:
            await screen.type_text(machine.qmp, bad)
        assert caught.value.kind == "invalid"
    with pytest.raises(DsecError) as caught:
        await screen.press(machine.qmp, ["nosuchkey"])
    assert caught.value.kind == "invalid"


async def pointed(machine: QemuMachine, agent: GuestAgent) -> None:
    find = "grep -l Tablet /sys/class/input/event*/device/name | head -1 | cut -d/ -f5"
    device = (await agent.exec(["/bin/sh", "-c", find])).stdout.decode().strip()
    assert device
    record = f"(timeout 100 cat /dev/input/{device} > /tmp/events &) > /dev/null 2>&1; sleep 1; echo ready"
    assert (await agent.exec(["/bin/sh", "-c", record])).stdout == b"ready\n"
    await screen.move(machine.qmp, 799, 0, 800, 600)
    await screen.move(machine.qmp, 0, 599, 800, 600)
    await screen.click(machine.qmp, "right")
    seen: list[tuple[int, ...]] = []
    async with asyncio.timeout(240):
        while (1, 0x111, 0) not in seen:  # the button is up again
            events = (await agent.exec(["cat", "/tmp/events"])).stdout
            seen = [struct.unpack_from("<16xHHi", events, at) for at in range(0, len(events) - 23, 24)]
    assert (3, 0, 0x7FFF) in seen
    assert (3, 1, 0x7FFF) in seen
    assert [event[2] for event in seen if event[:2] == (1, 0x111)] == [1, 0]
    with pytest.raises(DsecError, match="outside of the screen"):
        await screen.move(machine.qmp, 800, 0, 800, 600)


async def watched(machine: QemuMachine) -> None:
    """VNC for somebody who is handed a socket."""
    loop = asyncio.get_running_loop()
    with await screen.vnc(machine.qmp) as sock:
        async with asyncio.timeout(60):
            assert await loop.sock_recv(sock, 12) == b"RFB 003.008\n"
            await loop.sock_sendall(sock, b"RFB 003.008\n")
            assert await loop.sock_recv(sock, 2) == b"\x01\x01"  # one way to log in, which is none
            await loop.sock_sendall(sock, b"\x01")
            assert await loop.sock_recv(sock, 4) == bytes(4)
            await loop.sock_sendall(sock, b"\x01")
            width, height = struct.unpack(">HH", (await loop.sock_recv(sock, 64))[:4])
    assert (width, height) != (0, 0)


async def snapped(machine: QemuMachine, agent: GuestAgent) -> None:
    """Snapshots of the disk of a running machine, its file systems frozen for the moment."""
    assert await live_disks.snapshots(machine.qmp) == ()
    await live_disks.take(machine.qmp, "live", agent)
    await live_disks.take(machine.qmp, "crash")
    assert await live_disks.snapshots(machine.qmp) == ("live", "crash")
    assert (await agent.exec(["/bin/sh", "-c", "touch /after && sync"])).exit_code == 0, "it was not thawed"
    await live_disks.drop(machine.qmp, "crash")
    assert await live_disks.snapshots(machine.qmp) == ("live",)
    for name, kind in (("live", "conflict"), ("7", "invalid")):
        with pytest.raises(DsecError) as caught:
            await live_disks.take(machine.qmp, name, agent)
        assert caught.value.kind == kind
    with pytest.raises(DsecError) as caught:
        await live_disks.drop(machine.qmp, "crash")
    assert caught.value.kind == "not_found"
