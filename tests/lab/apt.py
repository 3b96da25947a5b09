"""Debian packages for the lab, from the machine's own apt sources plus backports where the suite is too old.

The machine's apt set-up is read and never written: the lab has its own source parts and package lists in the cache.
No mirror is named here: backports come from the URIs which the machine already uses for its main suite.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from cache import LabError, cache_dir

# Suites whose kernel source and QEMU are too old for the lab; every later one has both in its main part.
NEEDS_BACKPORTS = {"bookworm"}
LISTS_MAX_AGE_S = 24 * 3600.0


def codename() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise LabError("/etc/os-release names no VERSION_CODENAME, so the Debian suite is unknown")


def machine_sources() -> list[Path]:
    parts = sorted(Path("/etc/apt/sources.list.d").glob("*.sources")) + sorted(
        Path("/etc/apt/sources.list.d").glob("*.list")
    )
    single = Path("/etc/apt/sources.list")
    return [*([single] if single.is_file() and single.read_text().strip() else []), *parts]


def backports_of(text: str, suite: str) -> str:
    """The same sources with `<suite>-backports` as their suite; empty if the text does not list the suite itself."""
    found: list[str] = []
    for stanza in text.split("\n\n"):
        lines = [line for line in stanza.splitlines() if not line.startswith("#")]
        suites = next((line.partition(":")[2].split() for line in lines if line.startswith("Suites:")), [])
        if suite in suites:
            found.append("\n".join(f"Suites: {suite}-backports" if x.startswith("Suites:") else x for x in lines))
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["deb"] and suite in words:
            found.append(" ".join(f"{suite}-backports" if word == suite else word for word in words))
    return "\n\n".join(found) + "\n" if found else ""


class Apt:
    """apt with the lab's own view of the sources; the packages it installs go to the machine as usual."""

    def __init__(self) -> None:
        self.suite = codename()
        self.root = cache_dir() / "apt"
        self.parts = self.root / "parts"
        self.lists = self.root / "lists"
        self._write_parts()
        self._refresh()

    def _write_parts(self) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir(parents=True)
        (self.lists / "partial").mkdir(parents=True, exist_ok=True)
        for source in machine_sources():
            shutil.copy(source, self.parts / f"{source.stem}{source.suffix}")
            extra = backports_of(source.read_text(), self.suite) if self.suite in NEEDS_BACKPORTS else ""
            if extra:
                (self.parts / f"lab-backports-{source.stem}{source.suffix}").write_text(extra)

    def options(self) -> list[str]:
        settings = {
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": str(self.parts),
            "Dir::State::lists": str(self.lists),
            "APT::Sandbox::User": "root",  # the cache lies in a home directory that _apt cannot enter
            "DPkg::Lock::Timeout": "900",  # a colleague's apt-get is waited for, not failed on
        }
        return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]

    def run(self, tool: str, *words: str, cwd: Path | None = None) -> str:
        command = [tool, *self.options(), *words]
        done = subprocess.run(
            command, cwd=cwd, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, capture_output=True, text=True
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
            raise LabError(f"{tool} {' '.join(words)} failed: {reason[0]}")
        return done.stdout

    def _refresh(self) -> None:
        stamp = self.root / "stamp"
        with contextlib.suppress(FileNotFoundError):
            if time.time() - stamp.stat().st_mtime < LISTS_MAX_AGE_S:
                return
        try:
            self.run("apt-get", "-qq", "update")
        except LabError:
            if not stamp.exists():
                raise
            return  # offline: old lists still name the kernel and root that were cached with them
        stamp.touch()

    def candidate(self, package: str) -> str:
        for line in self.run("apt-cache", "policy", package).splitlines():
            if line.strip().startswith("Candidate:"):
                version = line.partition(":")[2].strip()
                if version != "(none)":
                    return version
        raise LabError(f"no apt source of this machine offers the package {package}")

    def download(self, package: str, into: Path) -> Path:
        self.run("apt-get", "-qq", "download", package, cwd=into)
        return next(into.glob(f"{package}_*.deb"))

    def install(self, packages: Sequence[str], *, backports: bool = False) -> None:
        """Install what is missing; `backports` prefers that suite where the lab has it."""
        target = ["-t", f"{self.suite}-backports"] if backports and self.suite in NEEDS_BACKPORTS else []
        self.run("apt-get", "-qq", "-y", "--no-install-recommends", *target, "install", *packages)


def missing(packages: Sequence[str]) -> list[str]:
    """Those of the packages that are not installed."""
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages]
    seen = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    have = {line.split()[0] for line in seen if line.endswith(" installed")}
    return [package for package in packages if package not in have]
