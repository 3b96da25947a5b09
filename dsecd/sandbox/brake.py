"""The brake: while those who run wait for the host, nobody new comes.

Pressure is the kernel's own figure (PSI, Documentation/accounting/psi.rst): the share of the last ten seconds in which
tasks waited. A sandbox that thrashes at its own memory limit waits, too, and is counted in the host's figure; so memory
only counts while the host itself is short of it, else one tenant could close a host for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from dsecd.sandbox.pressure import available

log = logging.getLogger("dsecd.sandbox")

PRESSURE: Final = Path("/proc/pressure")
RELEASE: Final = 0.5  # of the limit: below it creates come in again, so that it does not go to and fro
SHORT: Final = 0.15  # of the host's memory is available: memory pressure is the host's own
_LINE: Final = {"cpu": "some", "memory": "full", "io": "full"}


class Limits(Struct, frozen=True, kw_only=True):
    """Percent of ten seconds; 100: never."""

    cpu: float = 100.0
    memory: float = 100.0
    io: float = 100.0


def measured(root: Path = PRESSURE) -> bool:
    """Whether this kernel measures pressure (CONFIG_PSI, and not switched off by psi=0)."""
    return _read(root, "memory") is not None


def _read(root: Path, what: str) -> float | None:
    """avg10 in percent; None where it is not measured."""
    try:
        for line in (root / what).read_text().splitlines():
            kind, *words = line.split()
            if kind == _LINE[what]:
                return float(dict(word.split("=", 1) for word in words)["avg10"])
    except (OSError, ValueError, KeyError):
        pass  # not there, or open and not enabled (EOPNOTSUPP)
    return None


class Brake:
    """Looked at by each create: three short reads from the kernel's memory."""

    def __init__(self, limits: Limits, root: Path = PRESSURE, look: Callable[[], float] = available) -> None:
        self.limits = limits
        self._root, self._look = root, look
        self._held: set[str] = set()

    def reason(self) -> str:
        """Why nobody new may come now; "" when they may."""
        why = []
        for what in _LINE:
            limit: float = getattr(self.limits, what)
            value = _read(self._root, what) if limit < 100 else None
            if value is None or (what == "memory" and self._look() > SHORT):
                self._let_go(what)
            elif value > (limit * RELEASE if what in self._held else limit):
                self._hold(what, value, limit)
                why.append(
                    f"tasks waited for {what} {value:g} % of the last 10 s (above {limit:g} % nobody new comes, "
                    f"until it is below {limit * RELEASE:g} %)"
                )
            else:
                self._let_go(what)
        return "; ".join(why)

    def _hold(self, what: str, value: float, limit: float) -> None:
        if what not in self._held:
            self._held.add(what)
            log.warning("no new sandboxes: %s pressure %g %%, limit %g %%", what, value, limit)

    def _let_go(self, what: str) -> None:
        if what in self._held:
            self._held.discard(what)
            log.info("new sandboxes come again: %s pressure is low", what)
