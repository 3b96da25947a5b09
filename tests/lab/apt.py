"""Debian packages for the lab: the product's own apt, with its lists in the lab's cache; of another suite, too."""

from __future__ import annotations

import re
from pathlib import Path

from cache import cache_dir

from dsecd.vmm.apt import NEEDS_BACKPORTS, PrivateApt, backports_of, codename, missing

__all__ = ["NEEDS_BACKPORTS", "Apt", "backports_of", "codename", "missing", "sources_of"]


class Apt(PrivateApt):
    """suite: empty for the machine's own; another one comes from the same mirrors."""

    def __init__(self, suite: str = "") -> None:
        self._other = suite if suite != codename() else ""
        super().__init__(cache_dir() / (f"apt-{suite}" if self._other else "apt"))

    def _write_parts(self, machine: Path) -> None:
        super()._write_parts(machine)
        if not self._other:
            return
        for part in list(self.parts.iterdir()):
            text = "" if part.name.startswith("backports-") else sources_of(part.read_text(), self.suite, self._other)
            if text:
                part.write_text(text)
            else:
                part.unlink()


def sources_of(text: str, suite: str, other: str) -> str:
    """The same sources with another suite, its updates and its security part; empty if they do not name the suite."""
    changed, count = re.subn(rf"(?<![\w-]){suite}(?=(?:-updates|-security)?\s)", other, text + "\n")
    return changed if count else ""
