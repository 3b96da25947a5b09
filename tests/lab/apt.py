"""Debian packages for the lab: the product's own apt, with its lists in the lab's cache; of another suite, too."""

from __future__ import annotations

import re
from pathlib import Path

from cache import cache_dir

from dsecd.vmm.apt import NEEDS_BACKPORTS, PrivateApt, backports_of, codename, missing

__all__ = ["NEEDS_BACKPORTS", "Apt", "backports_of", "codename", "missing", "sources_of"]


class Apt(PrivateApt):
    """suite: empty for the machine's own; another one comes from the same mirrors. backports: of the suite, too."""

    def __init__(self, suite: str = "", *, backports: bool = False) -> None:
        self._other = suite if suite != codename() else ""
        self._backports = backports
        super().__init__(cache_dir() / "-".join(filter(None, ["apt", self._other, "backports" if backports else ""])))

    def _write_parts(self, machine: Path) -> None:
        super()._write_parts(machine)
        if self._other:
            for part in list(self.parts.iterdir()):
                text = sources_of(part.read_text(), self.suite, self._other)
                if text and not part.name.startswith("backports-"):
                    part.write_text(text)
                else:
                    part.unlink()
        for part in list(self.parts.iterdir()) if self._backports else ():
            if text := backports_of(part.read_text(), self._other or self.suite):
                part.with_name(f"backports-{part.name}").write_text(text)


def sources_of(text: str, suite: str, other: str) -> str:
    """The same sources with another suite, its updates and its security part; empty if they do not name the suite."""
    changed, count = re.subn(rf"(?<![\w-]){suite}(?=(?:-updates|-security)?\s)", other, text + "\n")
    return changed if count else ""
