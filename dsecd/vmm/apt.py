"""Debian packages without touching the machine's own apt: same sources and keys, but lists and downloads of our own.

Where a suite's kernels are too old for guests, its backports are added. They come from the URIs that the machine uses
for the suite, so no mirror is named here. Standard library only: tests/lab uses it before there is a venv.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dsecd.errors import DsecError, Kind

# Suites whose kernel and QEMU are too old; every later one has both in its main part.
NEEDS_BACKPORTS: Final = frozenset({"bookworm"})
LISTS_MAX_AGE_S: Final = 24 * 3600.0
COMMAND_S: Final = 900.0

_NETWORK_SIGNS: Final = ("Could not resolve", "Could not connect", "Connection", "Failed to fetch", "Temporary failure")


class PrivateApt:
    """apt below `root`, which it fills and nobody else needs. Methods block, for minutes on a slow line."""

    def __init__(self, root: Path, machine: Path = Path("/etc/apt")) -> None:
        self.suite = codename()
        self.root = root.resolve()  # apt takes other paths for relative to its own
        self.parts = self.root / "parts"
        self.lists = self.root / "lists"
        self._write_parts(machine)
        self._refresh()

    def _write_parts(self, machine: Path) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir(parents=True)
        (self.lists / "partial").mkdir(parents=True, exist_ok=True)
        (self.root / "cache").mkdir(exist_ok=True)
        for source in machine_sources(machine):
            shutil.copy(source, self.parts / source.name)
            extra = backports_of(source.read_text(), self.suite) if self.suite in NEEDS_BACKPORTS else ""
            if extra:
                (self.parts / f"backports-{source.name}").write_text(extra)

    def options(self) -> list[str]:
        settings = {
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": str(self.parts),
            "Dir::State::lists": str(self.lists),
            "Dir::Cache": str(self.root / "cache"),
            "Dir::Cache::archives": "/var/cache/apt/archives",  # what is installed from here is the machine's
            "APT::Sandbox::User": "root",  # our directories are closed to _apt
            "DPkg::Lock::Timeout": "900",  # somebody else's apt-get is waited for, not failed on
        }
        return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]

    def run(self, tool: str, *words: str, cwd: Path | None = None) -> str:
        """Its standard output.

        DsecError `network` when a mirror is out of reach, else `unsupported`, in apt's words.
        """
        command = [tool, *self.options(), *words]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        try:
            done = subprocess.run(
                command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=COMMAND_S, check=False,
            )  # fmt: skip
        except FileNotFoundError as exc:
            raise DsecError("unsupported", f"{tool} is not installed: kernels come from Debian packages") from exc
        except subprocess.TimeoutExpired as exc:
            raise DsecError("network", f"{tool} {words[-1]} did not end within {COMMAND_S:g} s") from exc
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("E:")] or done.stderr.splitlines()
            reason = said[0].strip() if said else f"status {done.returncode}"
            kind: Kind = "network" if any(sign in done.stderr for sign in _NETWORK_SIGNS) else "unsupported"
            raise DsecError(kind, f"{tool} {' '.join(words)} failed: {reason[:400]}")
        return done.stdout

    def _refresh(self) -> None:
        stamp = self.root / "stamp"
        try:
            if time.time() - stamp.stat().st_mtime < LISTS_MAX_AGE_S:
                return
        except FileNotFoundError:
            pass
        try:
            self.run("apt-get", "-qq", "update")
        except DsecError:
            if not stamp.exists():
                raise
            return  # offline: what old lists name may have been fetched before
        stamp.touch()

    def candidate(self, package: str) -> str:
        """The highest version that any source has; pins say nothing here. `not_found` when none has the package.

        Backports are not always the newest: a suite's security part has kernels of later series, too.
        """
        found = ""
        for line in self.run("apt-cache", "madison", package).splitlines():
            version = line.split("|")[1].strip() if line.count("|") == 2 else ""
            if version and (not found or higher(version, found)):
                found = version
        if not found:
            raise DsecError("not_found", f"no apt source of this host offers the package {package}")
        return found

    def depends(self, package: str) -> list[str]:
        """The packages that this one (its candidate) names as dependencies."""
        version = self.candidate(package)
        text = self.run("apt-cache", "show", f"{package}={version}")
        found = re.search(r"^Depends: (.*)$", text, re.MULTILINE)
        return [part.split()[0] for part in found[1].split(",")] if found else []

    def download(self, package: str, into: Path) -> Path:
        """The .deb; apt has checked it against the signed lists."""
        version = self.candidate(package)
        self.run("apt-get", "-qq", "download", f"{package}={version}", cwd=into)
        return next(into.glob(f"{package}_*.deb"))

    def install(self, packages: Sequence[str], *, newest: bool = False) -> None:
        """Install on the machine what is missing. newest: from backports where they are used, also over an old one."""
        target = ["-t", f"{self.suite}-backports"] if newest and self.suite in NEEDS_BACKPORTS else []
        self.run("apt-get", "-qq", "-y", "--no-install-recommends", *target, "install", *packages)


def higher(one: str, other: str) -> bool:
    """Whether the first is the higher version."""
    return subprocess.run(["dpkg", "--compare-versions", one, "gt", other], check=False).returncode == 0


def codename() -> str:
    try:
        name = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    except OSError:
        name = ""
    if not name:
        raise DsecError("unsupported", "/etc/os-release names no VERSION_CODENAME, so the Debian suite is unknown")
    return name


def machine_sources(machine: Path) -> list[Path]:
    folder = machine / "sources.list.d"
    single = machine / "sources.list"
    has_single = single.is_file() and single.read_text().strip()
    return [*([single] if has_single else []), *sorted(folder.glob("*.sources")), *sorted(folder.glob("*.list"))]


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


def missing(packages: Sequence[str]) -> list[str]:
    """Those of the packages that are not installed."""
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages]
    seen = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    have = {line.split()[0] for line in seen if line.endswith(" installed")}
    return [package for package in packages if package not in have]


def main(argv: list[str]) -> int:
    """`python3 -m dsecd.vmm.apt DIRECTORY PACKAGE...`: install the newest; for the Makefile."""
    try:
        PrivateApt(Path(argv[1])).install(argv[2:], newest=True)
    except DsecError as exc:
        sys.stderr.write(f"setup: {exc.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
