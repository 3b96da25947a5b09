"""The lab kernel: Debian's kernel source, built once with `kernel.config`, everything in one vmlinux.

`kernel()` gives the cached build for the source version that apt offers now and the fragment beside this file; VM
guests elsewhere in the tests may call it with a fragment of their own. Never patches the source, never uses modules.
Run as a program it builds and prints the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from apt import Apt, missing
from cache import LabError, cache_dir, key_of, product

from dsecd.errors import DsecError
from dsecd.vmm.kernel_source import BUILD_PACKAGES, build, unpack

SOURCE = "linux-source-6.12"
FRAGMENT = Path(__file__).with_name("kernel.config")

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
        build(unpack(apt, SOURCE, work), text, work, run_make)
        progress("lab: kernel built")

    return product("kernel", key, make) / "vmlinux"


def run_make(tree: Path, target: str) -> None:
    log = cache_dir() / "kernel-build.log"  # kept after a failure, for whoever has to look
    command = ["make", "-C", str(tree), f"-j{os.cpu_count() or 1}", target]
    with log.open("ab" if target != "allnoconfig" else "wb") as sink:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    if done.returncode:
        raise LabError(f"make {target} of the lab kernel failed; see {log}")


if __name__ == "__main__":
    try:
        print(kernel(progress=lambda line: print(line, file=sys.stderr, flush=True)))
    except DsecError as failure:
        sys.exit(f"lab: {failure.message}")
