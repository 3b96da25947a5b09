"""Disk pools on real kernels: limits that hold, copies, crashes, and nothing left behind. Needs root and btrfs."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.disk import DiskPool, PoolConfig, Space, btrfs_ioctl, linux, loop, open_pool, probe, remove_pool
from dsecd.disk.btrfs import BtrfsPool
from dsecd.errors import DsecError

MIB = 1 << 20
UID = 7 << 20
AS_TENANT = ["setpriv", "--bounding-set=-sys_resource"]  # with that capability ext4 lets one past any limit
LOOP = PoolConfig(driver="loop-btrfs", size_bytes=1024 * MIB, reserve_bytes=64 * MIB)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    reason = probe(tmp_path).why_not.get("loop-btrfs")
    if reason:
        pytest.skip(reason)
    yield tmp_path
    remove_pool(tmp_path)
    assert not [m for m in linux.mounts() if m.target.is_relative_to(tmp_path)]
    deadline = time.monotonic() + 20
    while loops(tmp_path):  # the device goes with its last opener, and udev may just be looking at it
        assert time.monotonic() < deadline, loops(tmp_path)
        time.sleep(0.05)


def loops(below: Path) -> list[str]:
    """Backing files of loop devices."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(FileNotFoundError):
            found.append(path.read_text())
    return [backing for backing in found if str(below) in backing]


@pytest.fixture
def pool(state: Path) -> Iterator[DiskPool]:
    pool = open_pool(state, LOOP)
    yield pool
    pool.close()


def write_until_refused(path: Path, size: int) -> tuple[int, int]:
    """(bytes that fit, errno or 0), counted after an fsync."""
    written, block = 0, os.urandom(MIB // 4)
    fd = -1
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        while written < size:
            written += os.write(fd, block)
        os.fsync(fd)
    except OSError as error:
        return written, error.errno or -1
    finally:
        if fd >= 0:
            os.close(fd)
    return written, 0


def sync(pool: DiskPool) -> None:
    subprocess.run(["sync", "--file-system", str(pool.root)], check=True)


def settle(pool: DiskPool, seconds: float = 20) -> None:
    """Wait until the kernel's cleaner and our collector are through. The cleaner runs once a commit interval."""
    subprocess.run(["mount", "-o", "remount,commit=1", str(pool.root)], check=True)
    deadline = time.monotonic() + seconds
    while True:
        sync(pool)
        if pool.collect():
            return
        assert time.monotonic() < deadline, "rubbish is still there"
        time.sleep(0.2)


def test_a_space_belongs_to_its_owner(pool: DiskPool) -> None:
    space = pool.create("box", 20 * MIB, UID)
    for path in (space.upper, space.work):
        info = path.stat()
        assert (info.st_uid, info.st_gid, info.st_mode & 0o7777) == (UID, UID, 0o755)
    assert pool.list() == ["box"]
    used, limit = pool.usage("box")
    assert limit == 20 * MIB and used < MIB
    assert pool.open("box") == space


def test_limit_stops_one_and_hurts_no_other(pool: DiskPool) -> None:
    """A 50 MB write into 20 MB stops at the limit; a neighbour goes on; after deleting, so does the victim."""
    full, other = pool.create("full", 20 * MIB, UID), pool.create("other", 20 * MIB, UID)
    fitted, error = write_until_refused(full.upper / "big", 50 * MIB)
    assert error in (errno.EDQUOT, errno.ENOSPC)
    assert 15 * MIB <= fitted <= 20 * MIB
    assert pool.usage("full")[0] <= 20 * MIB
    assert write_until_refused(other.upper / "file", 10 * MIB) == (10 * MIB, 0)
    (full.upper / "big").unlink()
    sync(pool)
    assert write_until_refused(full.upper / "again", 10 * MIB) == (10 * MIB, 0)


def test_usage_follows_writes_without_a_commit(pool: DiskPool) -> None:
    space = pool.create("box", 64 * MIB, UID)
    (space.upper / "f").write_bytes(os.urandom(8 * MIB))
    assert 8 * MIB <= pool.usage("box")[0] <= 10 * MIB


def test_inodes_run_out_too(pool: DiskPool) -> None:
    """btrfs has no inode table: empty files are metadata, and that counts."""
    space = pool.create("box", 4 * MIB, UID)
    with pytest.raises(OSError) as caught:
        for i in range(200_000):
            (space.upper / f"{i:0200d}").touch()
    assert caught.value.errno in (errno.EDQUOT, errno.ENOSPC)
    other = pool.create("other", 4 * MIB, UID)
    (other.upper / "f").touch()


def test_set_limit_both_ways(pool: DiskPool) -> None:
    space = pool.create("box", 4 * MIB, UID)
    assert write_until_refused(space.upper / "a", 8 * MIB)[1] != 0
    pool.set_limit("box", 32 * MIB)
    assert pool.usage("box")[1] == 32 * MIB
    assert write_until_refused(space.upper / "b", 8 * MIB) == (8 * MIB, 0)
    pool.set_limit("box", 2 * MIB)
    sync(pool)
    assert write_until_refused(space.upper / "c", MIB)[1] != 0
    (space.upper / "b").unlink()


def test_clone_shares_bytes_and_nothing_else(pool: DiskPool) -> None:
    source = pool.create("src", 20 * MIB, UID)
    (source.upper / "f").write_bytes(b"before")
    (source.work / "work").mkdir()  # as overlayfs leaves it
    copy = pool.clone("src", "dst", 20 * MIB, UID)
    (source.upper / "f").write_bytes(b"source")
    assert (copy.upper / "f").read_bytes() == b"before"
    (copy.upper / "f").write_bytes(b"copy")
    assert (source.upper / "f").read_bytes() == b"source"
    assert list(copy.work.iterdir()) == []
    assert copy.work.stat().st_uid == UID


def test_a_chain_of_clones_cannot_outgrow_the_limit(pool: DiskPool) -> None:
    """What a source used counts in its clone: otherwise each generation would get a limit's worth more."""
    source = pool.create("g0", 20 * MIB, UID)
    assert write_until_refused(source.upper / "f0", 14 * MIB)[1] == 0
    sync(pool)
    copy = pool.clone("g0", "g1", 20 * MIB, UID)
    used, limit = pool.usage("g1")
    assert limit == 20 * MIB and 14 * MIB <= used <= 16 * MIB
    fitted, error = write_until_refused(copy.upper / "f1", 20 * MIB)
    assert error and fitted <= 7 * MIB
    pool.destroy("g0")
    assert (copy.upper / "f0").stat().st_size == 14 * MIB
    pool.set_limit("g1", 40 * MIB)
    assert pool.usage("g1")[1] == 40 * MIB
    assert write_until_refused(copy.upper / "f2", 10 * MIB)[1] == 0


def test_kernels_without_simple_quotas(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full accounting, as on 6.1: the same limits, and the same room in a clone."""
    monkeypatch.setattr("dsecd.disk.btrfs._enable_quota", lambda fd: btrfs_ioctl.enable_quota(fd, simple=False))
    pool = open_pool(state, LOOP)
    assert isinstance(pool, BtrfsPool) and pool.quota_mode() == "qgroup"
    source = pool.create("src", 20 * MIB, UID)
    assert write_until_refused(source.upper / "f", 14 * MIB)[1] == 0
    copy = pool.clone("src", "dst", 20 * MIB, UID)
    assert 14 * MIB <= pool.usage("dst")[0] <= 16 * MIB and pool.usage("dst")[1] == 20 * MIB
    fitted, error = write_until_refused(copy.upper / "g", 20 * MIB)
    assert error and fitted <= 7 * MIB
    pool.close()


def test_clone_for_another_owner_moves_every_id(pool: DiskPool) -> None:
    source, target = pool.create("src", 20 * MIB, UID), 9 << 20
    upper = source.upper
    (upper / "dir").mkdir()
    for name in ("plain", "setuid", "host"):
        (upper / name).write_text(name)
    os.chown(upper / "plain", UID + 1000, UID + 100)
    os.chown(upper / "setuid", UID, UID)
    (upper / "setuid").chmod(0o4755)
    os.link(upper / "plain", upper / "dir/hard")
    (upper / "link").symlink_to("/nowhere")
    os.chown(upper / "link", UID + 5, UID + 5, follow_symlinks=False)
    os.setxattr(upper / "dir", "trusted.overlay.opaque", b"y")
    os.mknod(upper / "gone", 0o600 | 0o020000, 0)  # a whiteout
    copy = pool.clone("src", "dst", 20 * MIB, target).upper
    assert copy.stat().st_uid == target
    assert ((copy / "plain").stat().st_uid, (copy / "plain").stat().st_gid) == (target + 1000, target + 100)
    assert (copy / "plain").stat().st_ino == (copy / "dir/hard").stat().st_ino
    assert ((copy / "setuid").stat().st_uid, (copy / "setuid").stat().st_mode & 0o7777) == (target, 0o4755)
    assert (copy / "link").lstat().st_uid == target + 5
    assert (copy / "host").stat().st_uid == 0, "not one of the source's ids: left alone"
    assert os.getxattr(copy / "dir", "trusted.overlay.opaque") == b"y"
    assert (copy / "gone").lstat().st_rdev == 0
    assert (upper / "plain").stat().st_uid == UID + 1000, "the source is untouched"


def test_destroy_gives_everything_back(pool: DiskPool, state: Path) -> None:
    """Name at once, then bytes, quota groups and, through discard, the host's disk."""
    assert isinstance(pool, BtrfsPool)
    groups = pool._sysfs / "qgroups"
    before = {p.name for p in groups.iterdir()}
    free = pool.free()[0]
    for i in range(8):
        space = pool.create(f"box{i}", 64 * MIB, UID)
        assert write_until_refused(space.upper / "f", 16 * MIB)[1] == 0
    sync(pool)
    grown = (state / "pool.img").stat().st_blocks
    for name in pool.list():
        pool.destroy(name)
    assert pool.list() == []
    settle(pool)
    assert {p.name for p in groups.iterdir()} == before
    assert pool.free()[0] > free - 32 * MIB
    deadline = time.monotonic() + 60
    while (state / "pool.img").stat().st_blocks > grown // 2:
        assert time.monotonic() < deadline, "freed blocks stay allocated on the host"
        sync(pool)
        time.sleep(0.5)


def test_destroy_while_something_is_open(pool: DiskPool) -> None:
    space = pool.create("box", 20 * MIB, UID)
    with (space.upper / "f").open("w") as file:
        pool.destroy("box")
        assert not space.path.exists()
        file.write("still works")
    pool.destroy("box")


def test_errors_have_kinds(pool: DiskPool) -> None:
    pool.create("box", 20 * MIB, UID)
    for call, kind in (
        (lambda: pool.create("box", 20 * MIB, UID), "conflict"),
        (lambda: pool.create("../up", 20 * MIB, UID), "invalid"),
        (lambda: pool.create(".hidden", 20 * MIB, UID), "invalid"),
        (lambda: pool.create("small", 0, UID), "invalid"),
        (lambda: pool.create("huge", 1 << 60, UID), "invalid"),
        (lambda: pool.open("none"), "not_found"),
        (lambda: pool.usage("none"), "not_found"),
        (lambda: pool.clone("none", "b", 20 * MIB, UID), "not_found"),
        (lambda: pool.clone("box", "box", 20 * MIB, UID), "conflict"),
    ):
        with pytest.raises(DsecError) as caught:
            call()  # type: ignore[no-untyped-call]
        assert caught.value.kind == kind
    assert pool.list() == ["box"]


def test_restart_adopts_the_mounted_pool(state: Path) -> None:
    first = open_pool(state, LOOP)
    space = first.create("box", 20 * MIB, UID)
    (space.upper / "f").write_text("kept")
    first.close()
    with (space.upper / "f").open("a") as running:  # a sandbox goes on while the daemon is away
        second = open_pool(state, LOOP)
        running.write("!")
    assert (second.open("box").upper / "f").read_text() == "kept!"
    assert second.usage("box")[1] == 20 * MIB
    assert len([m for m in linux.mounts() if m.target == state / "pool"]) == 1
    second.close()


def test_reboot_mounts_the_image_again(state: Path) -> None:
    first = open_pool(state, LOOP)
    (first.create("box", 20 * MIB, UID).upper / "f").write_text("kept")
    first.close()
    linux.umount(state / "pool")
    second = open_pool(state, LOOP)
    assert (second.open("box").upper / "f").read_text() == "kept"
    assert write_until_refused(second.open("box").upper / "big", 30 * MIB)[1] != 0, "limits are still on"
    second.close()


def test_a_pool_that_another_mount_namespace_holds_is_no_second_one(state: Path) -> None:
    """A runtime that sets up a container has all mounts of the host for a moment. Through a second loop device btrfs
    would mount the image as another file system, without what was not committed yet, and both would write to it."""
    first = open_pool(state, LOOP)
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo there; exec sleep 60"]
    holder = subprocess.Popen(private, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        with holder.stdout:
            assert holder.stdout.readline() == b"there\n"
        (first.create("box", 20 * MIB, UID).upper / "f").write_text("kept")
        first.close()
        linux.umount(state / "pool")
        second = open_pool(state, LOOP)
        assert (second.open("box").upper / "f").read_text() == "kept"
        assert len(loops(state)) == 1
        second.close()
    finally:
        holder.kill()
        holder.wait()


def test_half_made_things_are_collected(state: Path) -> None:
    (state / "pool.img.new").write_bytes(b"killed in mkfs")
    first = open_pool(state, LOOP)
    assert not (state / "pool.img.new").exists()
    first.create("box", 20 * MIB, UID).path.rename(state / "pool/.new-box")
    first.close()
    second = open_pool(state, LOOP)
    assert os.listdir(state / "pool") == []
    second.create("box", 20 * MIB, UID)
    second.close()


def test_an_image_that_is_none(state: Path) -> None:
    (state / "pool.img").write_bytes(bytes(300 * MIB))
    with pytest.raises(DsecError, match="no usable btrfs"):
        open_pool(state, LOOP)


def test_too_small_a_host(state: Path) -> None:
    with pytest.raises(DsecError, match="256 MiB") as caught:
        open_pool(state, PoolConfig(driver="loop-btrfs", size_bytes=MIB))
    assert caught.value.kind == "capacity"
    assert not (state / "pool.img").exists()


def test_grows_under_live_sandboxes_and_never_shrinks(state: Path) -> None:
    first = open_pool(state, LOOP)
    first.create("box", 20 * MIB, UID)
    first.close()
    second = open_pool(state, PoolConfig(driver="loop-btrfs", size_bytes=2048 * MIB, reserve_bytes=0))
    assert second.free()[1] >= 2000 * MIB
    second.close()
    third = open_pool(state, LOOP)
    assert third.free()[1] >= 2000 * MIB and third.list() == ["box"]
    third.close()


def test_full_pool_is_a_shortage_not_a_disaster(state: Path) -> None:
    pool = open_pool(state, PoolConfig(driver="loop-btrfs", size_bytes=256 * MIB, reserve_bytes=0))
    hog = pool.create("hog", 1 << 40, UID)
    assert write_until_refused(hog.upper / "f", 1024 * MIB)[1] == errno.ENOSPC
    with contextlib.suppress(DsecError):  # metadata may still fit
        pool.create("late", MIB, UID)
    pool.destroy("hog")
    settle(pool)
    started = time.monotonic()
    while True:  # block groups that were data go back to the pool a little later, and metadata needs one of them
        try:
            space = pool.create("next", 64 * MIB, UID)
            break
        except DsecError as error:
            assert error.kind == "capacity" and time.monotonic() < started + 30
            time.sleep(0.2)
    print(f"usable again after {time.monotonic() - started:.1f} s")
    assert write_until_refused(space.upper / "f", 32 * MIB) == (32 * MIB, 0)
    pool.close()


CHURN = """
import sys
from pathlib import Path
from dsecd.disk import PoolConfig, open_pool
pool = open_pool(Path(sys.argv[1]), PoolConfig(driver="loop-btrfs", size_bytes=1 << 30))
print("ready", flush=True)
for i in range(1_000_000):
    pool.create(f"box{i}", 4 << 20, 7 << 20)
    if i % 7 == 0:
        pool.clone(f"box{i}", f"copy{i}", 4 << 20, 8 << 20)
    if i >= 5:
        pool.destroy(f"box{i - 5}")
"""


def test_kill_at_any_instant(state: Path) -> None:
    """Whatever is listed after a restart is whole; whatever was half-made or half-deleted is gone."""
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", CHURN, str(state)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            time.sleep(random.uniform(0.02, 0.3))
            child.send_signal(signal.SIGKILL)
        pool = open_pool(state, LOOP)
        assert sorted(os.listdir(pool.root)) == pool.list()
        for name in pool.list():
            space = pool.open(name)
            owner = (8 if name.startswith("copy") else 7) << 20
            assert (space.upper.stat().st_uid, space.work.stat().st_uid) == (owner, owner)
            assert space.limit_bytes == 4 * MIB
            pool.destroy(name)
        settle(pool)
        pool.close()


OVERLAY = """
import ctypes, os, sys
stage, base = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
check(libc.unshare(0x20000))
check(libc.mount(None, b"/", None, 0x44000, None))
os.chdir(stage)
check(libc.mount(b"overlay", b"root", b"overlay", 0, b"lowerdir=lower,upperdir=s/upper,workdir=s/work"))
ask, told = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    check(libc.unshare(0x10000000))
    os.write(ask[1], b"x")
    os.read(told[0], 1)
    os.setgid(0)
    os.setuid(0)
    os.chdir("root")
    os.execvp("sh", ["sh", "-ec", sys.argv[3]])
os.read(ask[0], 1)
for kind in ("uid", "gid"):
    with open(f"/proc/{child}/{kind}_map", "w") as file:
        file.write(f"0 {base} 1048576")
os.write(told[1], b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def in_overlay(tmp_path: Path, space: Space, script: str) -> subprocess.CompletedProcess[str]:
    """Run `script` as root of the sandbox's user namespace in an overlay on the space."""
    stage = tmp_path / f"stage-{space.sandbox_id}"
    for name in ("lower/d", "root"):
        (stage / name).mkdir(parents=True, exist_ok=True)
    if not (stage / "s").exists():
        (stage / "s").symlink_to(space.path)
    (stage / "lower/file").write_text("lower")
    (stage / "lower/d/old").write_text("lower")
    for path in (stage / "lower", *(stage / "lower").rglob("*")):
        os.chown(path, UID, UID)
    for parent in stage.parents:  # the namespace's root is nobody here; a real sandbox never sees this path
        if parent.is_relative_to(tmp_path.parent.parent) and parent.stat().st_mode & 0o111 != 0o111:
            parent.chmod(0o711)
    # As the launcher does: overlayfs writes with its mounter's rights, and this one passes ext4's limits.
    command = [*AS_TENANT, sys.executable, "-c", OVERLAY, str(stage), str(UID), script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_overlay_upper_from_a_user_namespace(pool: DiskPool, tmp_path: Path) -> None:
    space = pool.create("box", 20 * MIB, UID)
    done = in_overlay(
        tmp_path,
        space,
        "id -u; rm file; rm -r d; mkdir d; touch d/new; ln d/new hard; chown 1000:1000 d/new; mkfifo pipe; ls d",
    )
    assert (done.returncode, done.stdout.split()) == (0, ["0", "new"]), done.stderr
    whiteout = (space.upper / "file").lstat()
    assert (whiteout.st_mode & 0o170000, whiteout.st_rdev) == (0o020000, 0)
    assert os.getxattr(space.upper / "d", "trusted.overlay.opaque") == b"y"
    assert (space.upper / "d/new").stat().st_uid == UID + 1000


def test_overlay_writes_stop_at_the_limit(pool: DiskPool, tmp_path: Path) -> None:
    space = pool.create("box", 20 * MIB, UID)
    done = in_overlay(tmp_path, space, "dd if=/dev/urandom of=big bs=1M count=50 conv=fsync")
    assert done.returncode != 0
    assert "Disk quota exceeded" in done.stderr or "No space left" in done.stderr
    assert pool.usage("box")[0] <= 20 * MIB
    # A full space can be cleaned from inside, and used again.
    refill = "dd if=/dev/urandom of=big bs=1M count=50 conv=fsync 2>&1 || rm big; sync; echo small > small; rm file"
    pool.set_limit("box", 21 * MIB)  # else overlayfs cannot make its work/work, and mounts read-only
    done = in_overlay(tmp_path, space, refill)
    assert done.returncode == 0, done.stderr


def test_a_clone_of_a_full_space_mounts_writable(pool: DiskPool, tmp_path: Path) -> None:
    space = pool.create("full", 20 * MIB, UID)
    assert write_until_refused(space.upper / "big", 50 * MIB)[1] != 0
    copy = pool.clone("full", "copy", 20 * MIB, UID)
    done = in_overlay(tmp_path, copy, "echo small > small; rm big")
    assert done.returncode == 0, done.stderr


def test_a_clone_of_an_overlay_mounts_again(pool: DiskPool, tmp_path: Path) -> None:
    space = pool.create("box", 20 * MIB, UID)
    assert in_overlay(tmp_path, space, "rm file; echo mine > d/old").returncode == 0
    copy = pool.clone("box", "copy", 20 * MIB, UID)
    done = in_overlay(tmp_path, copy, "cat d/old; test ! -e file; echo more > d/more")
    assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
    assert not (space.upper / "d/more").exists()


@pytest.fixture(params=["xfs", "ext4"])
def quota_state(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system with project quota; a state directory on it."""
    command = {
        "xfs": ["mkfs.xfs", "-q", "-s", "size=4096"],
        "ext4": ["mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota"],
    }
    image, point = tmp_path / "fs.img", tmp_path / "mnt"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(512 * MIB)
    try:
        subprocess.run([*command[request.param], str(image)], check=True, capture_output=True)
    except FileNotFoundError as error:
        pytest.skip(f"{error.filename} is not installed")
    fd, device = loop.attach(image)
    try:
        linux.mount(str(device), point, request.param, 0, "prjquota")
    except OSError as error:
        pytest.skip(f"this kernel mounts no {request.param} with project quota: {error.strerror}")
    finally:
        os.close(fd)
    yield point
    linux.umount(point)


@pytest.fixture
def quota_pool(quota_state: Path) -> Iterator[DiskPool]:
    found = probe(quota_state)
    if found.driver != "prjquota":
        pytest.skip(found.why_not["prjquota"])
    pool = open_pool(quota_state, PoolConfig(driver="auto"))
    yield pool
    pool.close()


def tenant_writes(path: Path, size: int) -> tuple[int, bool]:
    """(bytes that fit, refused?)"""
    dd = ["dd", "if=/dev/urandom", f"of={path}", "bs=256k", f"count={size >> 18}", "conv=fsync"]
    done = subprocess.run([*AS_TENANT, *dd], check=False, capture_output=True, text=True)
    refused = "Disk quota exceeded" in done.stderr or "No space left" in done.stderr
    assert refused or done.returncode == 0, done.stderr
    return path.stat().st_size, refused


def test_project_quota_limits_copies_and_collects(quota_pool: DiskPool) -> None:
    pool = quota_pool
    assert pool.driver == "prjquota"
    full, other = pool.create("full", 20 * MIB, UID), pool.create("other", 20 * MIB, UID)
    fitted, refused = tenant_writes(full.upper / "big", 50 * MIB)
    assert refused and 15 * MIB <= fitted <= 20 * MIB
    assert tenant_writes(other.upper / "f", 10 * MIB) == (10 * MIB, False)
    assert 10 * MIB <= pool.usage("other")[0] <= 11 * MIB
    copy = pool.clone("other", "copy", 20 * MIB, 9 << 20)
    assert ((copy.upper / "f").stat().st_size, (copy.upper).stat().st_uid) == (10 * MIB, 9 << 20)
    assert tenant_writes(copy.upper / "more", 20 * MIB)[1]
    pool.destroy("full")
    assert pool.list() == ["copy", "other"]
    assert pool.collect() and sorted(os.listdir(pool.root)) == ["copy", "other"]


def test_project_quota_holds_under_an_overlay(quota_pool: DiskPool, tmp_path: Path) -> None:
    """ext4 excuses CAP_SYS_RESOURCE of whoever mounted the overlay: the launcher must have dropped it."""
    space = quota_pool.create("box", 20 * MIB, UID)
    done = in_overlay(tmp_path, space, "dd if=/dev/urandom of=big bs=1M count=50 conv=fsync")
    assert done.returncode != 0
    assert "Disk quota exceeded" in done.stderr or "No space left" in done.stderr
    assert quota_pool.usage("box")[0] <= 20 * MIB
    quota_pool.set_limit("box", 21 * MIB)  # see test_overlay_writes_stop_at_the_limit
    assert in_overlay(tmp_path, space, "rm big; echo small > small; rm file").returncode == 0


def test_project_quota_limits_inodes(quota_pool: DiskPool) -> None:
    space = quota_pool.create("box", 16 * MIB, UID)
    script = 'for i in $(seq 10000); do : > "$i" || exit 1; done'
    done = subprocess.run(
        [*AS_TENANT, "sh", "-c", script], cwd=space.upper, check=False, capture_output=True, text=True
    )
    assert done.returncode != 0 and len(os.listdir(space.upper)) < 5000, done.stderr
