"""The lab host has what the project relies on and the reference test host lacks. Needs no dsecd: if these fail, the lab
is broken and the other lab tests say nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvm_guest import KVM_EXIT_HLT, run_one

pytestmark = pytest.mark.lab

libc = ctypes.CDLL(None, use_errno=True)
BOOT_S = 60.0


def sh(line: str) -> str:
    done = subprocess.run(["sh", "-ec", line], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{line}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(source: Path, target: Path, kind: str, data: str = "") -> Iterator[None]:
    """mount(2) itself: mount(8) would put a loop device under a file."""
    target.mkdir(exist_ok=True)
    read_only = 1
    if libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), read_only, data.encode()):
        raise OSError(ctypes.get_errno(), f"mount {kind} of {source}")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(target), 0)


def test_systemd_is_pid_1_and_came_up() -> None:
    assert Path("/proc/1/comm").read_text() == "systemd\n"
    deadline = time.monotonic() + BOOT_S
    while (state := subprocess.run(["systemctl", "is-system-running"], capture_output=True, text=True).stdout) in (
        "starting\n",
        "initializing\n",
    ):
        assert time.monotonic() < deadline, f"still {state.strip()}: {sh('systemctl list-jobs --no-pager')}"
        time.sleep(0.5)
    failed = sh("systemctl --failed --no-legend --plain --no-pager")
    assert state.strip() == "running", f"{state.strip()}: {failed}"


def test_cgroup_v2_has_the_controllers() -> None:
    assert sh("stat -fc %T /sys/fs/cgroup") == "cgroup2fs"
    controllers = set(Path("/sys/fs/cgroup/cgroup.controllers").read_text().split())
    assert {"memory", "pids", "cpu", "io", "cpuset", "hugetlb"} <= controllers
    assert {"memory", "pids"} <= set(Path("/sys/fs/cgroup/cgroup.subtree_control").read_text().split())


def test_cgroup_freezes_and_reclaims() -> None:
    group = Path("/sys/fs/cgroup/lab-probe")
    group.mkdir()
    try:
        for name in ("cgroup.freeze", "cgroup.kill", "cgroup.pressure"):
            assert (group / name).exists(), name
        (group / "cgroup.freeze").write_text("1")
        assert "frozen 1" in (group / "cgroup.events").read_text()
        assert Path("/sys/fs/cgroup/system.slice/memory.reclaim").exists()
    finally:
        group.rmdir()


def test_apparmor_is_enabled() -> None:
    assert Path("/sys/module/apparmor/parameters/enabled").read_text().strip() == "Y"
    assert "apparmor" in Path("/sys/kernel/security/lsm").read_text().split(",")


def test_user_namespace_has_its_own_root() -> None:
    assert sh("unshare --user --map-root-user --mount --pid --fork --mount-proc id -u") == "0"


def test_seccomp_filters_are_there() -> None:
    assert "errno" in Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()


def test_erofs_mounts_from_a_file_without_a_loop_device(tmp_path: Path) -> None:
    tree, image, target = tmp_path / "tree", tmp_path / "image.erofs", tmp_path / "mnt"
    tree.mkdir()
    (tree / "hello").write_text("from erofs\n")
    sh(f"mkfs.erofs --quiet {image} {tree}")
    with mounted(image, target, "erofs"):
        assert (target / "hello").read_text() == "from erofs\n"
        assert str(image) not in sh("losetup --list --noheadings --output BACK-FILE")


def test_overlay_on_erofs(tmp_path: Path) -> None:
    tree, image, lower = tmp_path / "tree", tmp_path / "image.erofs", tmp_path / "lower"
    tree.mkdir()
    (tree / "a").write_text("old")
    sh(f"mkfs.erofs --quiet {image} {tree}")
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    with mounted(image, lower, "erofs"):
        sh(f"cd {tmp_path}; mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged")
        try:
            (tmp_path / "merged/a").write_text("new")
            assert (lower / "a").read_text() == "old"
        finally:
            sh(f"umount {tmp_path}/merged")


def test_kvm_runs_a_guest() -> None:
    assert run_one() == (KVM_EXIT_HLT, 42)


@pytest.mark.nested
def test_kvm_boots_linux_under_qemu() -> None:
    """A guest of the guest, without a root: it gets as far as looking for one, in 15 s."""
    command = "qemu-system-x86_64 -accel kvm -cpu host -M q35 -m 256 -nodefaults -display none -no-reboot"
    command += " -serial stdio -kernel /srv/vmlinux -append 'console=ttyS0 panic=-1' < /dev/null"
    shown = sh(f"timeout 60 {command} || test $? = 124")
    assert "TSC rate below hardware speed" not in sh("dmesg")  # vm.py says what becomes of guests then
    assert "Unable to mount root fs" in shown, shown[-2000:]
    assert "Hypervisor detected: KVM" in shown


@pytest.mark.parametrize(
    "node", ["cachefiles", "fuse", "net/tun", "loop-control", "userfaultfd", "ublk-control", "vhost-vsock", "zram0"]
)
def test_device_is_present(node: str) -> None:
    assert Path("/dev", node).is_char_device() or Path("/dev", node).is_block_device()


def test_erofs_can_be_served_on_demand() -> None:
    config = sh("zcat /proc/config.gz")
    assert "CONFIG_EROFS_FS_ONDEMAND=y" in config
    assert "CONFIG_CACHEFILES_ONDEMAND=y" in config


def test_swap_on_zram() -> None:
    disk = Path("/sys/block/zram0")
    (disk / "comp_algorithm").write_text("zstd")
    (disk / "disksize").write_text("64M")
    try:
        sh("mkswap -q /dev/zram0; swapon /dev/zram0")
        assert "/dev/zram0" in Path("/proc/swaps").read_text()
        sh("swapoff /dev/zram0")
    finally:
        (disk / "reset").write_text("1")


def test_damon_runs_on_this_host() -> None:
    """The lab owns its kdamonds, unlike the reference test host."""
    count = Path("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds")
    count.write_text("1")
    try:
        (count.parent / "0/contexts/nr_contexts").write_text("1")
        operations = (count.parent / "0/contexts/0/avail_operations").read_text().split()
        assert {"vaddr", "paddr"} <= set(operations)
    finally:
        count.write_text("0")


def test_nftables_sets_nat_and_logs_in_a_network_namespace() -> None:
    rules = (
        "table inet lab { set seen { type ipv4_addr; flags timeout; timeout 10s; elements = { 192.0.2.1 }; };"
        " chain out { type filter hook output priority 0; ct state established accept;"
        ' ip daddr @seen log prefix "lab " accept; reject; };'
        " chain nat { type nat hook postrouting priority 100; masquerade; }; }"
    )
    listed = sh(f"unshare --net sh -ec \"echo '{rules}' | nft -f -; nft list ruleset\"".replace('"lab "', '\\"lab \\"'))
    assert "192.0.2.1" in listed and "masquerade" in listed


def test_veth_and_netem() -> None:
    line = "ip link add name v0 type veth peer name v1; tc qdisc add dev v0 root netem delay 10ms; tc qdisc show dev v0"
    assert "netem" in sh(f"unshare --net sh -ec '{line}'")


def test_btrfs_in_a_loop_file_limits_a_subvolume(tmp_path: Path) -> None:
    image, target = tmp_path / "disk", tmp_path / "mnt"
    target.mkdir()
    sh(f"truncate -s 512M {image}; mkfs.btrfs -q {image}; mount -o loop {image} {target}")
    try:
        sh(f"cd {target}; btrfs quota enable .; btrfs -q subvolume create s; btrfs qgroup limit 20M s")
        written = subprocess.run(
            ["dd", "if=/dev/zero", f"of={target}/s/f", "bs=1M", "count=50"], capture_output=True, text=True
        )
        assert written.returncode and "quota" in written.stderr.lower(), written.stderr
        assert (target / "s/f").stat().st_size <= 20 << 20
        sh(f"cd {target}; btrfs -q subvolume snapshot s fork; test -e fork/f")
    finally:
        sh(f"umount {target}")


@pytest.mark.parametrize(
    ("make", "option"),
    [("mkfs.xfs -q", "prjquota"), ("mkfs.ext4 -q -O project,quota", "prjquota")],
    ids=["xfs", "ext4"],
)
def test_project_quota_can_be_mounted(tmp_path: Path, make: str, option: str) -> None:
    image, target = tmp_path / "disk", tmp_path / "mnt"
    target.mkdir()
    sh(f"truncate -s 320M {image}; {make} {image}; mount -o loop,{option} {image} {target}")
    try:
        assert option in sh(f"findmnt -no OPTIONS {target}")
    finally:
        sh(f"umount {target}")


@pytest.mark.parametrize("runtime", ["crun", "runc"])
def test_oci_runtime_is_there(runtime: str) -> None:
    assert runtime in sh(f"{runtime} --version")


def test_core_scheduling_is_compiled_in() -> None:
    """PR_SCHED_CORE answers EINVAL where it is not; without SMT siblings it may say ENODEV."""
    pr_sched_core, get, cookie = 62, 0, ctypes.c_ulonglong()
    if libc.prctl(pr_sched_core, get, 0, 0, ctypes.byref(cookie)):
        assert ctypes.get_errno() == 19, os.strerror(ctypes.get_errno())
