"""A `kdamonds` directory that behaves as the kernel's: real files, whose writes are judged before they land.

The rules are those of mm/damon/sysfs.c (6.12): directories come with an nr_ write and lose what was in them; one
kdamond at work makes nr_kdamonds and `on` EBUSY; what the kernel cannot parse or does not know is EINVAL.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from dsecd.damon.sysfs import Sysfs

_ACTIONS = {"willneed", "cold", "pageout", "hugepage", "nohugepage", "lru_prio", "lru_deprio", "stat"}
_FILTERS = {"anon", "memcg", "young", "addr", "target"}
_COUNTS = {"nr_kdamonds", "nr_contexts", "nr_targets", "nr_schemes", "nr_regions", "nr_filters"}
_FILTER_FILES = ("type", "matching", "memcg_path", "addr_start", "addr_end", "damon_target_idx")

_SCHEME = (
    "action", "apply_interval_us", "access_pattern/sz/min", "access_pattern/sz/max", "access_pattern/nr_accesses/min",
    "access_pattern/nr_accesses/max", "access_pattern/age/min", "access_pattern/age/max", "quotas/ms", "quotas/bytes",
    "quotas/reset_interval_ms", "quotas/weights/sz_permil", "quotas/weights/nr_accesses_permil",
    "quotas/weights/age_permil", "watermarks/metric", "watermarks/interval_us", "watermarks/high", "watermarks/mid",
    "watermarks/low", "filters/nr_filters", "stats/nr_tried", "stats/sz_tried", "stats/nr_applied", "stats/sz_applied",
    "stats/qt_exceeds",
)  # fmt: skip
_CONTEXT = (
    "avail_operations", "operations", "monitoring_attrs/intervals/sample_us", "monitoring_attrs/intervals/aggr_us",
    "monitoring_attrs/intervals/update_us", "monitoring_attrs/nr_regions/min", "monitoring_attrs/nr_regions/max",
    "targets/nr_targets", "schemes/nr_schemes",
)  # fmt: skip
_CHILDREN = {
    "nr_kdamonds": ("state", "pid", "contexts/nr_contexts"),
    "nr_contexts": _CONTEXT,
    "nr_targets": ("pid_target", "regions/nr_regions"),
    "nr_regions": ("start", "end"),
    "nr_schemes": _SCHEME,
    "nr_filters": _FILTER_FILES,
}


class FakeDamon(Sysfs):
    """log: every write that was tried. absent: files this kernel lacks. thread: the pid of a running kdamond."""

    def __init__(
        self, root: Path, *, operations: str = "vaddr fvaddr paddr", absent: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(root)
        self.log: list[tuple[str, str]] = []
        self.thread = os.getpid()
        self.exclusive = False  # DAMON_RECLAIM or another module has a kdamond of its own
        self._avail = operations
        self._absent = absent
        root.mkdir()
        (root / "nr_kdamonds").write_text("0\n")

    def write(self, path: str, value: str) -> None:
        self.log.append((path, value))
        target = self.root / path
        if not target.exists():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
        name = target.name
        if name in _COUNTS and not path.endswith("monitoring_attrs/nr_regions"):
            self._count(target, value)
        elif name == "state":
            self._state(target, value)
        else:
            self._judge(name, value)
            target.write_text(value + "\n")

    def run_out(self) -> None:
        """All that was watched has died: the kdamond ends by itself."""
        (self.root / "0/state").write_text("off\n")
        (self.root / "0/pid").write_text("-1\n")

    def at_work(self) -> bool:
        return any(state.read_text().strip() == "on" for state in self.root.glob("*/state"))

    def _count(self, target: Path, value: str) -> None:
        if target.name == "nr_kdamonds" and self.at_work():
            raise OSError(errno.EBUSY, "busy")
        number = self._int(value)
        if target.name == "nr_contexts" and number > 1:
            raise OSError(errno.EINVAL, "one context")
        for child in target.parent.iterdir():
            if child.is_dir():
                shutil.rmtree(child)
        for index in range(number):
            for file in _CHILDREN[target.name]:
                if Path(file).name not in self._absent:
                    made = target.parent / str(index) / file
                    made.parent.mkdir(parents=True, exist_ok=True)
                    made.write_text(self._initial(file))
        target.write_text(f"{number}\n")

    def _initial(self, file: str) -> str:
        return {"avail_operations": self._avail, "state": "off", "pid": "-1", "action": "stat"}.get(file, "0") + "\n"

    def _state(self, target: Path, value: str) -> None:
        running = target.read_text().strip() == "on"
        if value == "on":
            if running or self.exclusive:
                raise OSError(errno.EBUSY, "busy")
            self._valid(target.parent)
            target.write_text("on\n")
            (target.parent / "pid").write_text(f"{self.thread}\n")
        elif value == "off" or (value in ("commit", "update_schemes_stats") and running):
            if value == "off":
                self.run_out()
            if value == "commit":
                self._valid(target.parent)
        else:
            raise OSError(errno.EINVAL, "invalid")

    def _valid(self, kdamond: Path) -> None:
        """What damon_sysfs_build_ctx looks at: the context, its intervals, that processes live, regions in order."""
        context = kdamond / "contexts/0"
        if not context.exists():
            raise OSError(errno.EINVAL, "no context")
        for target in context.glob("targets/[0-9]*"):
            pid = int((target / "pid_target").read_text())
            if (context / "operations").read_text().strip() != "paddr" and not Path(f"/proc/{pid}").exists():
                raise OSError(errno.EINVAL, "no such process")
            count = int((target / "regions/nr_regions").read_text())
            ends = [int((target / f"regions/{n}/{at}").read_text()) for n in range(count) for at in ("start", "end")]
            if ends != sorted(ends):
                raise OSError(errno.EINVAL, "regions")
        sample, aggregation = (
            int((context / f"monitoring_attrs/intervals/{name}").read_text()) for name in ("sample_us", "aggr_us")
        )
        least = int((context / "monitoring_attrs/nr_regions/min").read_text())
        if least < 3 or sample > aggregation:
            raise OSError(errno.EINVAL, "attrs")

    def _judge(self, name: str, value: str) -> None:
        known = {
            "operations": self._avail.split(), "action": _ACTIONS, "type": _FILTERS,
            "metric": ("none", "free_mem_rate"), "matching": ("Y", "N"), "allow": ("Y", "N"),
        }  # fmt: skip
        if name in ("pid", "avail_operations") or name in ("nr_tried", "sz_tried", "nr_applied", "sz_applied"):
            raise OSError(errno.EACCES, "read-only")
        if name in known and value not in known[name]:
            raise OSError(errno.EINVAL, "unknown word")
        if name not in known and name != "memcg_path":
            self._int(value)

    def _int(self, value: str) -> int:
        if not re.fullmatch(r"[0-9]+", value):
            raise OSError(errno.EINVAL, "not a number")
        return int(value)
