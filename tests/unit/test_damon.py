"""DAMON: the exact writes, their order, what is refused, and that nobody else's kdamond is touched."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from damonkit import FakeDamon
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.damon import guest, plan, policy
from dsecd.damon.host import HostDamon
from dsecd.damon.model import (
    AccessPattern,
    Context,
    Filter,
    Monitoring,
    Quotas,
    Region,
    Scheme,
    Stats,
    Target,
    Watermarks,
)
from dsecd.damon.plan import Write
from dsecd.damon.sysfs import Sysfs
from dsecd.errors import DsecError

RAM = (Region(0x1000, 0x9F000), Region(0x100000, 0x1FFE0000))
CONTEXT = Context(
    "paddr", (Target(regions=RAM),),
    (Scheme("pageout", AccessPattern(min_age_us=30_000_000), Quotas(10, 134217728, 1000),
            Watermarks("free_mem_rate", 1_000_000, 900, 800, 100), (Filter("anon"),)),),
    Monitoring(5000, 100_000, 1_000_000, 10, 1000),
)  # fmt: skip


@pytest.fixture
def damon(tmp_path: Path) -> FakeDamon:
    return FakeDamon(tmp_path / "kdamonds")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


def host(damon: FakeDamon) -> HostDamon:
    return HostDamon(damon.root.parent / "damon.json", sysfs=damon)


def test_guest_paddr_pageout_is_exactly_this_list() -> None:
    """The order of the crib sheet, 5 (a): what a file of is made before it is written, and `on` last."""
    c, s = "0/contexts/0/", "0/contexts/0/schemes/0/"
    assert plan.start(CONTEXT) == [
        ("nr_kdamonds", "1"), ("0/contexts/nr_contexts", "1"), (c + "operations", "paddr"),
        (c + "monitoring_attrs/intervals/sample_us", "5000"), (c + "monitoring_attrs/intervals/aggr_us", "100000"),
        (c + "monitoring_attrs/intervals/update_us", "1000000"), (c + "monitoring_attrs/nr_regions/min", "10"),
        (c + "monitoring_attrs/nr_regions/max", "1000"),
        (c + "targets/nr_targets", "1"), (c + "targets/0/regions/nr_regions", "2"),
        (c + "targets/0/regions/0/start", "4096"), (c + "targets/0/regions/0/end", "651264"),
        (c + "targets/0/regions/1/start", "1048576"), (c + "targets/0/regions/1/end", "536739840"),
        (c + "schemes/nr_schemes", "1"), (s + "action", "pageout"),
        (s + "access_pattern/sz/min", "4096"), (s + "access_pattern/sz/max", "18446744073709551615"),
        (s + "access_pattern/nr_accesses/min", "0"), (s + "access_pattern/nr_accesses/max", "0"),
        (s + "access_pattern/age/min", "300"), (s + "access_pattern/age/max", "4294967295"),
        (s + "quotas/ms", "10"), (s + "quotas/bytes", "134217728"), (s + "quotas/reset_interval_ms", "1000"),
        (s + "quotas/weights/sz_permil", "0"), (s + "quotas/weights/nr_accesses_permil", "1000"),
        (s + "quotas/weights/age_permil", "1000"),
        (s + "watermarks/metric", "free_mem_rate"), (s + "watermarks/interval_us", "1000000"),
        (s + "watermarks/high", "900"), (s + "watermarks/mid", "800"), (s + "watermarks/low", "100"),
        (s + "filters/nr_filters", "1"), (s + "filters/0/type", "anon"), (s + "filters/0/matching", "Y"),
        ("0/state", "on"),
    ]  # fmt: skip


def test_host_vaddr_writes_every_pid_and_no_regions() -> None:
    writes = plan.start(policy.host([41, 42]))
    at = "0/contexts/0/targets/"
    assert [w for w in writes if "/targets/" in w.path] == [
        (at + "nr_targets", "2"), (at + "0/pid_target", "41"), (at + "0/regions/nr_regions", "0"),
        (at + "1/pid_target", "42"), (at + "1/regions/nr_regions", "0"),
    ]  # fmt: skip
    assert ("0/contexts/0/operations", "vaddr") in writes
    assert not any("filters" in w.path for w in writes)  # vaddr knows no page types up to 6.12


def test_every_filter_writes_its_own_fields() -> None:
    filters = (Filter("memcg", memcg_path="/a"), Filter("addr", False, start=1, end=2), Filter("target"),
               Filter("young", allow=True))  # fmt: skip
    context = Context("vaddr", (Target(1),), (Scheme("stat", filters=filters),))
    at = "0/contexts/0/schemes/0/filters/"
    assert [(w.path.removeprefix(at), w.value) for w in plan.start(context) if w.path.startswith(at)] == [
        ("nr_filters", "4"), ("0/type", "memcg"), ("0/matching", "Y"), ("0/memcg_path", "/a"),
        ("1/type", "addr"), ("1/matching", "N"), ("1/addr_start", "1"), ("1/addr_end", "2"),
        ("2/type", "target"), ("2/matching", "Y"), ("2/damon_target_idx", "0"),
        ("3/type", "young"), ("3/matching", "Y"), ("3/allow", "Y"),
    ]  # fmt: skip


def test_units_become_the_kernels() -> None:
    """Ages round up to whole intervals, rates to samples; an age never exceeds the kernel's unsigned int."""
    pattern = AccessPattern(min_rate=100, max_rate=500, min_age_us=150_001, max_age_us=450_000)
    values = dict(plan.start(Context("vaddr", (Target(1),), (Scheme("cold", pattern),))))
    at = "0/contexts/0/schemes/0/access_pattern/"
    assert [values[at + name] for name in ("nr_accesses/min", "nr_accesses/max", "age/min", "age/max")] == [
        "2", "10", "2", "4",
    ]  # fmt: skip
    old = dict(plan.start(Context("vaddr", (Target(1),), (Scheme("cold", AccessPattern(min_age_us=1 << 60)),))))
    assert old[at + "age/min"] == "4294967295"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4))
def test_no_order_but_one_that_the_kernel_takes(targets: int, schemes: int, filters: int) -> None:
    """Any context: each file exists by the time it is written."""
    one = Scheme("pageout", filters=(Filter("anon"),) * filters, apply_interval_us=schemes * 1000)
    context = Context("vaddr", tuple(Target(os.getpid(), RAM[:n]) for n in range(targets)), (one,) * schemes)
    with tempfile.TemporaryDirectory() as work:
        fake = FakeDamon(Path(work) / "k")
        fake.apply(plan.start(context))
        assert fake.running()
        fake.apply(plan.change(context))
        fake.apply(plan.STOP)
        assert fake.count() == 0


def test_the_fake_refuses_what_the_kernel_refuses(damon: FakeDamon) -> None:
    """Any other order fails on it, so that passing it means something."""
    writes = plan.start(CONTEXT)
    for at in range(len(writes) - 1):
        name = writes[at].path.rpartition("/")[2]
        if name.startswith("nr_") and not name.endswith("permil"):
            with pytest.raises(DsecError):
                damon.apply([*writes[:at], *writes[at + 1 :]])
            damon.apply([Write("nr_kdamonds", "0")])
    damon.apply(writes)
    with pytest.raises(DsecError, match="another DAMON user") as busy:
        damon.apply(writes)
    assert busy.value.kind == "conflict"


@pytest.mark.parametrize(
    "context",
    [
        Context("paddr", (Target(),), ()),
        Context("paddr", (Target(pid=1, regions=RAM),), ()),
        Context("paddr", (Target(regions=RAM), Target(regions=RAM)), ()),
        Context("vaddr", (), ()),
        Context("vaddr", (Target(),), ()),
        Context("vaddr", (Target(0),), ()),
        Context("vaddr", (Target(1, (Region(5, 5),)),), ()),
        Context("vaddr", (Target(1, (Region(5, 9), Region(8, 10))),), ()),
        Context("vaddr", (Target(1),), (), Monitoring(sample_us=0)),
        Context("vaddr", (Target(1),), (), Monitoring(sample_us=200_000)),
        Context("vaddr", (Target(1),), (), Monitoring(min_regions=2)),
        Context("vaddr", (Target(1),), (Scheme("pageout", AccessPattern(min_size=2, max_size=1)),)),
        Context("vaddr", (Target(1),), (Scheme("pageout", AccessPattern(max_rate=1001)),)),
        Context("vaddr", (Target(1),), (Scheme("pageout", AccessPattern(min_age_us=2, max_age_us=1)),)),
        Context("vaddr", (Target(1),), (Scheme("pageout", watermarks=Watermarks("none", 1, 1, 2, 0)),)),
        Context("vaddr", (Target(1),), (Scheme("pageout", filters=(Filter("memcg"),)),)),
        Context("vaddr", (Target(1),), (Scheme("pageout", filters=(Filter("memcg", memcg_path="/a\nb"),)),)),
        Context("vaddr", (Target(1),), (Scheme("pageout", filters=(Filter("addr"),)),)),
        Context("vaddr", (Target(1),), (Scheme("pageout", filters=(Filter("target", target=1),)),)),
    ],
)
def test_nonsense_is_refused_before_anything_is_written(context: Context) -> None:
    for make in (plan.start, plan.change):
        with pytest.raises(DsecError) as refused:
            make(context)
        assert refused.value.kind == "invalid"


def test_a_field_that_this_kernel_lacks_says_so(tmp_path: Path) -> None:
    old = FakeDamon(tmp_path / "old", absent=frozenset({"apply_interval_us"}))
    old.apply(plan.start(CONTEXT))  # the default needs no such file
    old.apply(plan.STOP)
    scheme = Scheme("pageout", apply_interval_us=1000)
    with pytest.raises(DsecError, match="has no 0/contexts/0/schemes/0/apply_interval_us") as refused:
        old.apply(plan.start(Context("paddr", CONTEXT.targets, (scheme,))))
    assert refused.value.kind == "unsupported"


def test_real_files_only_are_written(tmp_path: Path) -> None:
    """On a kernel without DAMON nothing is made: a path that is not there stays so."""
    nothing = Sysfs(tmp_path)
    assert not nothing.present()
    with pytest.raises(DsecError) as refused:
        nothing.apply(plan.start(CONTEXT))
    assert refused.value.kind == "unsupported"
    assert list(tmp_path.iterdir()) == []


def test_host_makes_changes_and_removes_one_kdamond(damon: FakeDamon, process: subprocess.Popen[bytes]) -> None:
    """Two processes come and go; stats are asked for in between."""

    async def life() -> None:
        ours = host(damon)
        assert ours.obstacle() == ""
        assert await ours.stats() is None
        await ours.watch(os.getpid())
        await ours.watch(process.pid)
        assert damon.read("0/contexts/0/targets/1/pid_target") == str(process.pid)
        assert await ours.stats() == Stats(0, 0, 0, 0, 0)
        await ours.forget(os.getpid())
        assert damon.read("0/contexts/0/targets/nr_targets") == "1"
        assert damon.running()
        await ours.forget(process.pid)

    asyncio.run(life())
    assert damon.count() == 0
    assert [w for w in damon.log if w[0].endswith("state")] == [
        ("0/state", "on"), ("0/state", "commit"), ("0/state", "update_schemes_stats"), ("0/state", "commit"),
        ("0/state", "off"),
    ]  # fmt: skip
    assert sorted(p.name for p in damon.root.parent.iterdir()) == ["kdamonds"]  # no record is left


@pytest.mark.parametrize("on", [True, False])
def test_anothers_kdamond_is_never_touched(damon: FakeDamon, on: bool) -> None:
    damon.apply(plan.start(CONTEXT) if on else plan.start(CONTEXT)[:-1])
    damon.log.clear()
    ours = host(damon)
    assert "another DAMON user" in ours.obstacle()
    with pytest.raises(DsecError) as refused:
        asyncio.run(ours.watch(os.getpid()))
    assert refused.value.kind == "conflict"
    asyncio.run(ours.stop())
    assert damon.log == []


def test_a_kernel_modules_kdamond_is_a_conflict_and_leaves_nothing(damon: FakeDamon) -> None:
    damon.exclusive = True
    ours = host(damon)
    with pytest.raises(DsecError) as refused:
        asyncio.run(ours.watch(os.getpid()))
    assert refused.value.kind == "conflict"
    assert damon.count() == 0


def test_no_vaddr_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    damon = FakeDamon(tmp_path / "k", operations="paddr")
    with pytest.raises(DsecError, match="CONFIG_DAMON_VADDR") as refused:
        asyncio.run(host(damon).watch(os.getpid()))
    assert refused.value.kind == "unsupported"
    assert damon.count() == 0


def test_no_damon_at_all_is_said(tmp_path: Path) -> None:
    ours = HostDamon(tmp_path / "damon.json", sysfs=Sysfs(tmp_path / "none"))
    assert "CONFIG_DAMON_SYSFS" in ours.obstacle()
    with pytest.raises(DsecError) as refused:
        asyncio.run(ours.watch(os.getpid()))
    assert refused.value.kind == "unsupported"


def test_the_next_daemon_takes_its_kdamond_back_and_no_other(
    damon: FakeDamon, process: subprocess.Popen[bytes]
) -> None:
    asyncio.run(host(damon).watch(os.getpid()))  # that daemon is killed now
    asyncio.run(host(damon).watch(process.pid))
    assert damon.running()
    assert damon.read("0/contexts/0/targets/0/pid_target") == str(process.pid)
    damon.thread = process.pid  # ours ended, and somebody made another since
    damon.run_out()
    damon.write("0/state", "on")
    with pytest.raises(DsecError) as refused:
        asyncio.run(host(damon).watch(os.getpid()))
    assert refused.value.kind == "conflict"


def test_it_starts_again_after_it_ran_out_of_processes(damon: FakeDamon) -> None:
    async def life() -> None:
        ours = host(damon)
        await ours.watch(os.getpid())
        damon.run_out()
        assert await ours.stats() is None
        await ours.watch(os.getpid())
        assert damon.running()
        await ours.stop()

    asyncio.run(life())
    assert damon.count() == 0


def test_a_process_that_died_is_left_out_of_the_next_change(damon: FakeDamon, process: subprocess.Popen[bytes]) -> None:
    async def life() -> None:
        ours = host(damon)
        await ours.watch(process.pid)
        process.kill()
        process.wait()
        await ours.watch(os.getpid())
        assert damon.read("0/contexts/0/targets/nr_targets") == "1"
        with pytest.raises(DsecError) as dead:
            await ours.watch(process.pid)
        assert dead.value.kind == "sandbox_dead"
        await ours.stop()

    asyncio.run(life())


def test_a_kernel_that_does_not_answer_costs_one_thread_and_a_sentence(
    damon: FakeDamon, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    write = damon.write

    def hangs(path: str, value: str) -> None:
        release.wait(20)
        write(path, value)

    async def life() -> None:
        ours = host(damon)
        with pytest.raises(DsecError, match="did not answer within"):
            await ours.watch(os.getpid())
        with pytest.raises(DsecError, match="earlier write"):
            await ours.watch(os.getpid())
        monkeypatch.setattr("dsecd.damon.host.PATIENCE_S", 10.0)
        release.set()
        await asyncio.sleep(0.2)
        await ours.watch(os.getpid())
        await ours.stop()

    monkeypatch.setattr("dsecd.damon.host.PATIENCE_S", 0.1)
    monkeypatch.setattr(damon, "write", hangs)
    asyncio.run(life())
    assert damon.count() == 0


IOMEM = """\
00000000-00000fff : Reserved
00001000-0009fbff : System RAM
000f0000-000fffff : System ROM
00100000-1ffdffff : System RAM
  01000000-01e00d0b : Kernel code
b0000000-bfffffff : PCI MMCONFIG 0000 [bus 00-ff]
100000000-13fffffff : Persistent Memory
  100000000-13fffffff : namespace0.0
140000000-1bfffffff : System RAM
"""


def test_a_guests_ram_is_read_from_its_iomem() -> None:
    assert guest.system_ram(IOMEM) == (
        Region(0x1000, 0x9F000), Region(0x100000, 0x1FFE0000), Region(0x140000000, 0x1C0000000),
    )  # fmt: skip
    cut = IOMEM[: IOMEM.index("System RAM\n", 200) + 6]
    assert guest.system_ram(cut) == (Region(0x1000, 0x9F000), Region(0x100000, 0x1FFE0000))


@pytest.mark.parametrize(
    "text",
    ["", "x", "00000000-00000000 : System RAM\n" * 9, "00000000-00000fff : System RAM\n",
     "ffffffffffffffff-0000000000000000 : System RAM\n", "00000000-fffffffffffffffe : System RAM\n"],
)  # fmt: skip
def test_a_guest_that_hides_or_invents_memory_is_refused(text: str) -> None:
    with pytest.raises(DsecError) as refused:
        guest.system_ram(text)
    assert refused.value.kind == "vmm"


def test_a_guest_with_endless_or_unordered_ranges_is_bounded() -> None:
    many = "".join(f"{n * 0x10000:08x}-{n * 0x10000 + 0x7FFF:08x} : System RAM\n" for n in range(1, 500))
    assert len(guest.system_ram(many)) == 32
    backwards = "00200000-002fffff : System RAM\n00100000-001fffff : System RAM\n"
    assert guest.system_ram(backwards) == (Region(0x200000, 0x300000),)


def test_guest_knobs_are_the_plan_below_the_kernels_root() -> None:
    knobs = guest.start(guest.system_ram(IOMEM))
    assert knobs[0] == ("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", "1")
    assert knobs[-1] == ("/sys/kernel/mm/damon/admin/kdamonds/0/state", "on")
    values = {path.rpartition("schemes/0/")[2]: value for path, value in knobs}
    assert values["filters/0/type"] == "anon"  # pages of files only
    assert values["access_pattern/age/min"] == "30"
    assert guest.stop()[0] == ("/sys/kernel/mm/damon/admin/kdamonds/0/state", "off")
    assert guest.change(RAM, policy.Policy(min_age_s=5))[-1][1] == "commit"
    marks = dict(guest.start(RAM, policy.Policy(high=900, mid=800, low=100, file_only=False)))
    assert any(p.endswith("watermarks/metric") and v == "free_mem_rate" for p, v in marks.items())
    assert not any("filters" in p for p in marks)


def test_guest_stats_are_numbers_or_refused() -> None:
    assert len(guest.stats_paths()) == 5
    assert guest.stats([b"1\n", b"2\n", b"3\n", b"4\n", b"5\n"]) == Stats(1, 2, 3, 4, 5)
    for answers in ([b"1"] * 4, [b"1"] * 4 + [b"x"], [b"1"] * 4 + [b"9" * 4000]):
        with pytest.raises(DsecError):
            guest.stats(answers)
    assert guest.reporting_order(4)[0][1] == "4"
    with pytest.raises(DsecError):
        guest.reporting_order(11)
