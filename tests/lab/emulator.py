"""A QEMU whose emulation can be trusted: the machine's own, or a later Debian's backport of it, unpacked in the cache.

QEMU 7 miscompiles: random double faults in the guest. QEMU 10 loses interrupts of CPUs that enter and leave guests of
their own: its SVM sets and clears bits of the word of pending interrupts without a lock, while other threads set theirs
(`helper_vmrun` in target/i386/tcg/system/svm_helper.c; 11 does it atomically), and who waits for a timer that was lost
waits for ever. Seen with 10.0.2, eight small guests that tick beside a busy loop: of twelve three stood still.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

from apt import Apt
from cache import key_of, product
from rootfs import mmdebstrap

PROGRAM = "qemu-system-x86_64"
PACKAGE = "qemu-system-x86"
OLDEST = 11
SUITE = "trixie"  # whose backports have it
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
FIRMWARE = [Path("usr/share/qemu"), Path("usr/share/seabios")]


@functools.cache
def qemu() -> list[str]:
    """How its command line begins; looked for once in a run, not for each VM."""
    own = shutil.which(PROGRAM)
    if own and major(own) >= OLDEST:
        return [own]
    apt = Apt(SUITE, backports=True)
    options = ["--variant=extract", f"--include={PACKAGE}", f'--aptopt=APT::Default-Release "{SUITE}-backports"']
    key = key_of([SUITE, apt.candidate(PACKAGE), *options])
    root = product("qemu", key, lambda work: mmdebstrap(SUITE, options, work / "tree", apt.parts)) / "tree"
    # By its own loader, so that it needs nothing of this machine's libraries and no root directory of its own.
    libraries = root / LIBRARIES
    command = [libraries / "ld-linux-x86-64.so.2", "--library-path", libraries, root / "usr/bin" / PROGRAM]
    return [*map(str, command), *(word for path in FIRMWARE for word in ("-L", str(root / path)))]


def major(program: str) -> int:
    text = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.", text)
    return int(found[1]) if found else 0
