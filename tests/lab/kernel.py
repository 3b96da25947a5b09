"""The lab kernel: Debian's kernel source, built once with `kernel.config`, everything in one vmlinux.

`kernel()` gives the cached build for the source version that apt offers now and the fragment beside this file; VM
guests elsewhere in the tests may call it with a fragment of their own. Never patches the source, never uses modules.
Run as a program it builds and prints the path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from apt import Apt, missing
from cache import LabError, cache_dir, key_of, product

SOURCE = "linux-source-6.12"
FRAGMENT = Path(__file__).with_name("kernel.config")
BUILD_PACKAGES = ["gcc", "make", "flex", "bison", "bc", "libelf-dev", "libssl-dev", "xz-utils"]

Progress = Callable[[str], None]


def say(line: str) -> None:
    print(line, flush=True)


def kernel(fragment: Path = FRAGMENT, progress: Progress = say) -> Path:
    """Path of a vmlinux that has every option of the fragment."""
    text = fragment.read_text()
    apt = Apt()
    version = apt.candidate(SOURCE)
    key = key_of([SOURCE, version, text])

    def make(work: Path) -> None:
        progress(f"lab: building Linux {version} with {fragment.name}; about ten minutes on two cores, once")
        if absent := missing(BUILD_PACKAGES):
            apt.install(absent)
        build(unpack(apt, work), text, work)
        progress("lab: kernel built")

    return product("kernel", key, make) / "vmlinux"


def unpack(apt: Apt, work: Path) -> Path:
    deb = apt.download(SOURCE, work)
    subprocess.run(["dpkg-deb", "-x", deb, work / "deb"], check=True)
    subprocess.run(["tar", "-xJf", work / "deb/usr/src" / f"{SOURCE}.tar.xz", "-C", work], check=True)
    shutil.rmtree(work / "deb")
    deb.unlink()
    return work / SOURCE


def build(tree: Path, fragment: str, out: Path) -> None:
    """Configure and compile the tree; leave `vmlinux` and `config` in out, and no tree."""
    make(tree, "allnoconfig")
    with (tree / ".config").open("a") as config:
        config.write(fragment)  # the last value of an option counts
    make(tree, "olddefconfig")
    settled = (tree / ".config").read_text()
    if lost := lost_options(fragment, settled):
        raise LabError(f"the kernel configuration lost {', '.join(lost)}: a dependency is missing from the fragment")
    make(tree, f"-j{os.cpu_count() or 1}", "vmlinux")
    (tree / "vmlinux").rename(out / "vmlinux")
    (out / "config").write_text(settled)
    shutil.rmtree(tree)


def lost_options(fragment: str, settled: str) -> list[str]:
    """Options of the fragment whose line is not in the settled configuration, in the fragment's order."""
    have = set(settled.splitlines())
    wanted = re.findall(r"^CONFIG_\w+=.*$", fragment, re.MULTILINE)
    return [line for line in wanted if line not in have]


def make(tree: Path, *words: str) -> None:
    log = cache_dir() / "kernel-build.log"  # kept after a failure, for whoever has to look
    with log.open("ab" if words[0] != "allnoconfig" else "wb") as sink:
        done = subprocess.run(["make", "-C", tree, *words], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    if done.returncode:
        raise LabError(f"make {words[-1]} of the lab kernel failed; see {log}")


if __name__ == "__main__":
    try:
        print(kernel(progress=lambda line: print(line, file=sys.stderr, flush=True)))
    except LabError as failure:
        sys.exit(f"lab: {failure}")
