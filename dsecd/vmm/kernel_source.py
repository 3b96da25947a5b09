"""A lean guest kernel from the distribution's source package and a configuration fragment: unpack, configure, compile.

Never patches the source, never uses modules. The caller brings `make`, and with it decides what it may use and when it
ends. Standard library only: tests/lab builds its kernel with this, too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsecd.errors import DsecError
from dsecd.vmm.apt import PrivateApt

FRAGMENT: Final = Path(__file__).with_name("guest.config")
BUILD_PACKAGES: Final = ("gcc", "make", "flex", "bison", "bc", "libelf-dev", "libssl-dev", "xz-utils")
UNPACK_S: Final = 600.0

Make = Callable[[Path, str], None]  # (tree, target): raises DsecError when it fails


def source_package(apt: PrivateApt) -> str:
    """The package with the source of the suite's newest kernel, as linux-source-6.12."""
    for name in apt.depends("linux-source"):
        if re.fullmatch(r"linux-source-[0-9.]+", name):
            return name
    raise DsecError("unsupported", "the package linux-source does not say which kernel's source it stands for")


def unpack(apt: PrivateApt, package: str, work: Path) -> Path:
    """Download it and unpack it below `work`; the tree."""
    deb = apt.download(package, work)
    try:
        for command in (
            ["dpkg-deb", "-x", str(deb), str(work / "deb")],
            ["tar", "-xJf", str(work / "deb/usr/src" / f"{package}.tar.xz"), "-C", str(work)],
        ):
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=UNPACK_S)
    except (subprocess.SubprocessError, FileNotFoundError) as exc:
        raise DsecError("image", f"{package} cannot be unpacked: {_said(exc)}") from exc
    shutil.rmtree(work / "deb")
    deb.unlink()
    return work / package


def _said(exc: Exception) -> str:
    error = exc.stderr if isinstance(exc, subprocess.CalledProcessError) else b""
    lines = error.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:400] if lines else str(exc)[:400]


def build(tree: Path, fragment: str, out: Path, make: Make) -> None:
    """Configure and compile the tree; leave `vmlinux` and `config` in `out`, and no tree."""
    make(tree, "allnoconfig")
    with (tree / ".config").open("a") as config:
        config.write(fragment)  # the last value of an option counts
    make(tree, "olddefconfig")
    settled = (tree / ".config").read_text()
    if lost := lost_options(fragment, settled):
        what = ", ".join(lost[:20])
        raise DsecError("unsupported", f"the kernel's configuration lost {what}: a dependency is not in the fragment")
    make(tree, "vmlinux")
    (tree / "vmlinux").rename(out / "vmlinux")
    (out / "config").write_text(settled)
    shutil.rmtree(tree)


def lost_options(fragment: str, settled: str) -> list[str]:
    """Options of the fragment whose line is not in the settled configuration, in the fragment's order."""
    have = set(settled.splitlines())
    wanted = re.findall(r"^CONFIG_\w+=.*$", fragment, re.MULTILINE)
    return [line for line in wanted if line not in have]
