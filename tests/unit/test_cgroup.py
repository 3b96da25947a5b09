"""Control groups against a tree of plain files: layouts, limits, figures, recovery."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsecd.cgroup.groups import UNIT, CgroupLimits, Cgroups, SandboxCgroup, oci_resources
from dsecd.errors import DsecError

V1 = ("memory", "pids", "cpu", "cpuacct", "freezer")


def group(path: Path, **files: str) -> Path:
    """A cgroup directory as the kernel would fill it; `_` in a keyword stands for `.` where there is one."""
    path.mkdir(parents=True, exist_ok=True)
    core = {
        "cgroup.procs": "", "cgroup.freeze": "0", "cgroup.kill": "", "cgroup.events": "populated 0\nfrozen 0\n",
        "cgroup.max.descendants": "max", "cgroup.max.depth": "max", "cgroup.controllers": "",
        "cgroup.subtree_control": "",
    }  # fmt: skip
    for name, text in (core | files).items():
        (path / name).write_text(text)
    return path


@pytest.fixture
def v2(tmp_path: Path) -> Cgroups:
    for path in (tmp_path, tmp_path / "dsecd"):
        group(path, **{"cgroup.controllers": "cpuset cpu io memory pids"})
    return Cgroups.detect(tmp_path, systemd=tmp_path / "no-systemd")


@pytest.fixture
def hybrid(tmp_path: Path) -> Cgroups:
    for name in V1:
        (tmp_path / name / "dsecd/box").mkdir(parents=True)
        (tmp_path / name / "cgroup.procs").write_text("")
    group(tmp_path / "unified")
    return Cgroups.detect(tmp_path)


def v2_box(v2: Cgroups) -> SandboxCgroup:
    group(
        v2.unified / "box",
        **{
            "memory.current": "5000000\n", "memory.peak": "6000000\n", "memory.max": "max", "memory.swap.max": "0",
            "memory.stat": "anon 100\nfile 200\nkernel 7\n", "memory.events": "low 0\noom 3\noom_kill 2\n",
            "pids.current": "4", "pids.max": "max", "pids.events": "max 9\n", "cpu.max": "max 100000",
            "cpu.weight": "100", "cpu.stat": "usage_usec 1234\nthrottled_usec 55\n", "memory.reclaim": "",
        },
    )  # fmt: skip
    return v2.sandbox("box")


def test_detects_layouts(v2: Cgroups) -> None:
    assert (v2.layout, v2.base, v2.unified) == ("v2", "/dsecd", v2.root / "dsecd")
    assert v2.obstacle() is None


def test_detects_hybrid(hybrid: Cgroups) -> None:
    assert (hybrid.layout, hybrid.unified) == ("hybrid", hybrid.root / "unified/dsecd")
    assert hybrid.sandbox("box").oci_path == "/dsecd/box"


def test_hybrid_with_a_v2_controller_says_how_to_free_it(hybrid: Cgroups) -> None:
    assert hybrid.obstacle() is None
    (hybrid.root / "unified/cgroup.controllers").write_text("hugetlb\n")
    assert "mount -t cgroup -o hugetlb" in (hybrid.obstacle() or "")


def test_pure_v1_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    with pytest.raises(DsecError, match="unified_cgroup_hierarchy") as caught:
        Cgroups.detect(tmp_path)
    assert caught.value.kind == "unsupported"


def test_hybrid_without_memory_is_refused(hybrid: Cgroups) -> None:
    (hybrid.root / "memory/cgroup.procs").unlink()
    with pytest.raises(DsecError, match="memory"):
        Cgroups.detect(hybrid.root)


@pytest.mark.parametrize("base", ["/", "dsecd", "/a/../b"])
def test_bad_bases(tmp_path: Path, base: str) -> None:
    group(tmp_path)
    with pytest.raises(DsecError) as caught:
        Cgroups.detect(tmp_path, base)
    assert caught.value.kind == "invalid"


def test_under_systemd_the_unit_of_our_slice_is_the_base(tmp_path: Path) -> None:
    group(tmp_path)
    (tmp_path / "dsec.slice" / UNIT).mkdir(parents=True)
    (tmp_path / "other.slice" / UNIT).mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/dsec.slice/dsecd.service\n")
    found = Cgroups.detect(tmp_path, own=own, systemd=tmp_path)
    assert found.base == f"/dsec.slice/{UNIT}"
    own.write_text("0::/user.slice/user-0.slice/session-1.scope\n")  # a daemon started by hand
    assert Cgroups.detect(tmp_path, own=own, systemd=tmp_path).base == f"/dsec.slice/{UNIT}"


def test_under_systemd_without_the_unit(tmp_path: Path) -> None:
    group(tmp_path)
    own = tmp_path / "own"
    own.write_text("0::/x\n")
    with pytest.raises(DsecError, match=UNIT):
        Cgroups.detect(tmp_path, own=own, systemd=tmp_path)


def test_prepare_says_which_controllers_do_not_arrive(v2: Cgroups) -> None:
    # Plain files keep the last write only, as a kernel would after refusing all others.
    with pytest.raises(DsecError, match="memory, pids, cpu") as caught:
        v2.prepare()
    assert caught.value.kind == "unsupported"


def test_prepare_moves_processes_out_of_the_parent(v2: Cgroups) -> None:
    group(v2.unified / "holder")
    (v2.unified / "cgroup.procs").write_text("4242\n")
    (v2.unified / "cgroup.subtree_control").write_text("memory pids cpu io cpuset")
    v2.prepare()
    assert (v2.unified / "holder/cgroup.procs").read_text() == "4242"
    assert v2.list_existing() == []


def test_prepare_on_hybrid_touches_only_the_unified_tree(hybrid: Cgroups) -> None:
    hybrid.prepare()
    assert hybrid.unified.is_dir()
    assert not (hybrid.root / "freezer/cgroup.subtree_control").exists()


def test_create_delegates_the_directory_and_procs_only(v2: Cgroups, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: changed.append(f"{path.name} {uid}:{gid}"))
    box = v2_box(v2)
    box.create_unified(1 << 20)
    assert changed == ["cgroup.procs 1048576:1048576", "box 1048576:1048576"]
    assert int((box.unified / "cgroup.max.descendants").read_text()[:4]) == 1024
    fd = box.open_fd()
    assert os.readlink(f"/proc/self/fd/{fd}") == str(box.unified)
    os.close(fd)


def test_stats_v2(v2: Cgroups) -> None:
    stats = v2_box(v2).stats()
    assert (stats.memory_bytes, stats.memory_peak, stats.anon, stats.file) == (5_000_000, 6_000_000, 100, 200)
    assert (stats.cpu_usec, stats.throttled_usec, stats.pids) == (1234, 55, 4)
    assert (stats.oom_kills, stats.pids_max_hits) == (2, 9)


def test_stats_v1(hybrid: Cgroups) -> None:
    root = hybrid.root
    (root / "memory/dsecd/box/memory.usage_in_bytes").write_text("5000000\n")
    (root / "memory/dsecd/box/memory.stat").write_text("rss 1\ntotal_rss 100\ntotal_cache 200\n")
    (root / "memory/dsecd/box/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (root / "pids/dsecd/box/pids.events").write_text("max 9\n")
    (root / "cpuacct/dsecd/box/cpuacct.usage").write_text("1234567\n")
    (root / "cpu/dsecd/box/cpu.stat").write_text("nr_periods 1\nnr_throttled 1\nthrottled_time 55000\n")
    stats = hybrid.sandbox("box").stats()
    assert (stats.memory_bytes, stats.anon, stats.file) == (5_000_000, 100, 200)
    assert (stats.cpu_usec, stats.throttled_usec, stats.oom_kills, stats.pids_max_hits) == (1234, 55, 2, 9)


def test_stats_of_a_group_that_is_gone_are_zero_on_v2(v2: Cgroups) -> None:
    assert v2.sandbox("gone").stats().memory_bytes == 0


def test_stats_of_a_group_that_is_gone_are_zero_on_hybrid(hybrid: Cgroups) -> None:
    assert hybrid.sandbox("gone").oom_kills() == 0


def test_seal_takes_back_what_a_runtime_gave_away(v2: Cgroups, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: changed.append(f"{path.name} {uid}:{gid}"))
    box = v2_box(v2)
    box.seal()
    names = ["cgroup.threads", "cgroup.subtree_control", "memory.oom.group", "memory.reclaim"]
    assert changed == [f"{name} 0:0" for name in names]


def test_limits_v2(v2: Cgroups) -> None:
    box = v2_box(v2)
    for name in ("memory.max", "pids.max", "cpu.max", "cpu.weight"):
        (box.unified / name).write_text("")
    box.set_limits(memory=64 << 20, pids=100, cpu=0.5)
    read = {name: (box.unified / name).read_text() for name in ("memory.max", "pids.max", "cpu.max", "cpu.weight")}
    assert read == {"memory.max": "67108864", "pids.max": "100", "cpu.max": "50000 100000", "cpu.weight": "50"}


@pytest.mark.parametrize(("now", "order"), [(1 << 30, ["limit", "memsw"]), (1 << 24, ["memsw", "limit"])])
def test_limits_v1_keep_memory_below_memory_and_swap(
    hybrid: Cgroups, monkeypatch: pytest.MonkeyPatch, now: int, order: list[str]
) -> None:
    memory = hybrid.root / "memory/dsecd/box"
    (memory / "memory.limit_in_bytes").write_text(str(now))
    (memory / "memory.memsw.limit_in_bytes").write_text(str(now))
    written: list[str] = []
    monkeypatch.setattr("dsecd.cgroup.files.write", lambda path, value: written.append(path.name))
    hybrid.sandbox("box").set_limits(memory=64 << 20, pids=100, cpu=2)
    assert [name.split(".")[1].replace("limit_in_bytes", "limit") for name in written[:2]] == order
    assert written[2:] == ["pids.max", "cpu.cfs_period_us", "cpu.cfs_quota_us", "cpu.shares"]


def test_limits_of_a_group_that_is_gone(v2: Cgroups) -> None:
    with pytest.raises(DsecError) as caught:
        v2.sandbox("gone").set_limits(memory=64 << 20, pids=100, cpu=1)
    assert caught.value.kind == "not_found"


@pytest.mark.parametrize(("memory", "pids", "cpu"), [(0, 1, 1.0), (1 << 30, 0, 1.0), (1 << 30, 1, 0.0), (-1, 1, 1.0)])
def test_limits_too_small(memory: int, pids: int, cpu: float) -> None:
    with pytest.raises(DsecError) as caught:
        CgroupLimits(memory, pids, cpu)
    assert caught.value.kind == "invalid"


def test_oci_resources() -> None:
    found = oci_resources(CgroupLimits(64 << 20, 100, 1.5))
    assert found["memory"] == {"limit": 64 << 20, "swap": 64 << 20}
    assert found["cpu"] == {"quota": 150_000, "period": 100_000, "shares": 1536}
    assert "swap" not in oci_resources(CgroupLimits(64 << 20, 100, 1.5), swap_accounting=False)["memory"]


def test_a_freeze_that_never_completes_is_undone(v2: Cgroups) -> None:
    box = v2_box(v2)
    with pytest.raises(DsecError) as caught:
        box.freeze(timeout=0.05)
    assert caught.value.kind == "timeout"
    assert (box.unified / "cgroup.freeze").read_text() == "0"


def test_freeze_sees_the_event(v2: Cgroups) -> None:
    box = v2_box(v2)
    (box.unified / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    box.freeze(timeout=0.05)
    assert box.is_frozen() and box.is_populated()


def test_list_existing_looks_in_every_hierarchy(hybrid: Cgroups) -> None:
    (hybrid.root / "pids/dsecd/only-pids").mkdir()
    group(hybrid.root / "unified/dsecd/only-unified")
    assert hybrid.list_existing() == ["box", "only-pids", "only-unified"]
    assert len(hybrid.sandbox("box").paths()) == len(V1)


def test_remove_takes_the_leaves_first_in_every_hierarchy(hybrid: Cgroups) -> None:
    (hybrid.root / "unified/dsecd/box/e0/e1").mkdir(parents=True)
    hybrid.sandbox("box").remove(timeout=0.1)
    assert hybrid.list_existing() == []
    hybrid.sandbox("box").remove(timeout=0.1)


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "holder"])
def test_ids_are_names(v2: Cgroups, bad: str) -> None:
    with pytest.raises(DsecError):
        v2.sandbox(bad)
