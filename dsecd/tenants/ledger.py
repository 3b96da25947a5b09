"""What projects hold of their quotas, counted where it is held: a sandbox counts in its project and all above it.

Nothing of it is kept on disk: the registry says what lives, and a restart counts that again. Everything here runs
between two awaits of one thread, so a hundred clients at once cannot overshoot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.tenants.model import Tree
from dsecd.wire.access import ancestry
from dsecd.wire.sandbox import Spec
from dsecd.wire.tenants import Used

_COUNTED: Final = ("sandboxes", "cpu", "memory_mb", "disk_mb")
_FLAGS: Final = {"sandboxes": "sandboxes", "cpu": "cpu", "memory_mb": "memory", "disk_mb": "disk"}
_SLACK: Final = 1e-6  # of sums of fractions of cores


class _Bucket(Struct):
    """Creates that may still be begun now, as of `at` (monotonic)."""

    level: float
    at: float


class Ledger:
    """`allow` before a sandbox is begun, `take` once it is, `give_back` when it is over (dsecd.sandbox.admission)."""

    def __init__(self, tree: Tree, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree = tree
        self._clock = clock
        self._used: dict[str, Used] = {}
        self._buckets: dict[str, _Bucket] = {}

    def used(self, project: str) -> Used:
        return self._used.get(project, Used())

    def allow(self, project: str, spec: Spec) -> None:
        """`quota` says which one has no room. Allowed: it counts as a create, so the caller `take`s it at once."""
        asked = {"sandboxes": 1, "cpu": spec.cpu, "memory_mb": spec.memory_mb, "disk_mb": spec.disk_mb}
        if project not in self._tree.projects:
            raise DsecError("denied", f"the project {project} was removed")
        chain = [one for one in map(self._tree.projects.get, ancestry(project)) if one is not None]
        for one in chain:
            used = self.used(one.path)
            for name in _COUNTED:
                limit = getattr(one.quotas, name)
                if limit is not None and getattr(used, name) + asked[name] > limit + _SLACK:
                    raise _full(one.path, name, getattr(used, name), limit, asked[name])
        rates = [(one.path, rate) for one in chain if (rate := one.quotas.creates_per_s) is not None]
        levels = [(self._level(path, rate), path, rate) for path, rate in rates]
        for level, path, rate in levels:
            if level < 1:
                wait = (1 - level) / rate
                raise DsecError(
                    "quota",
                    f"project {path} may begin {rate:g} sandboxes a second (creates_per_s) and has just done so, one "
                    f"more is too soon: try again in {wait:.1f} s",
                    detail={"project": path, "quota": "creates_per_s", "used": rate, "limit": rate, "asked": 1,
                            "retry_after_s": round(wait, 3)},
                )  # fmt: skip
        now = self._clock()
        for level, path, _ in levels:
            self._buckets[path] = _Bucket(level - 1, now)

    def _level(self, path: str, rate: float) -> float:
        """A bucket holds one second's creates, and at least one."""
        most = max(1.0, rate)
        bucket = self._buckets.get(path)
        return most if bucket is None else min(most, bucket.level + (self._clock() - bucket.at) * rate)

    def take(self, project: str, spec: Spec) -> None:
        self._add(project, spec, 1)

    def give_back(self, project: str, spec: Spec) -> None:
        self._add(project, spec, -1)

    def _add(self, project: str, spec: Spec, sign: int) -> None:
        for path in ancestry(project):
            used = self._used.setdefault(path, Used())
            used.sandboxes += sign
            used.cpu += sign * spec.cpu
            used.memory_mb += sign * spec.memory_mb
            used.disk_mb += sign * spec.disk_mb
            if used.sandboxes == 0:  # with it go the rounding errors of fractions
                del self._used[path]


def _full(project: str, name: str, used: float, limit: float, asked: float) -> DsecError:
    return DsecError(
        "quota",
        f"project {project} uses {used:g} of {limit:g} {name}, and {asked:g} more would be too much: stop some of its "
        f"sandboxes, or have its quota raised (dsecctl project set {project} --{_FLAGS[name]})",
        detail={"project": project, "quota": name, "used": used, "limit": limit, "asked": asked},
    )
