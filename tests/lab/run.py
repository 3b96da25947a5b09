"""`make test-lab`: boots a lab VM, installs this work tree in it as a user would, runs the `lab` tests there.

Without arguments there are two VMs, one after the other: the tests with guests of the guest have their own.

Prints the guest's pytest output as it comes and ends with its status. Leaves build/lab/{junit.xml,journal.txt,
units.txt,console.log}. With --exec it runs one shell line in a fresh VM instead, to look around.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from apt import codename
from cache import LabError
from delivery import PROJECT, built, read_disk, wheels, write_disk
from kernel import kernel, say
from rootfs import base_tar, rootfs
from vm import MEMORY_MIB, LabVM, Result

from dsecd.errors import DsecError

OUT = PROJECT / "build" / "lab"
RESULTS = "/srv/results"
INSTALL_S = 900.0  # one or two minutes on an idle host
TESTS_S = 2700.0
# Files with guests of the guest (nested.py): in a VM of their own, which is tried again if it stands still itself.
NESTED = [f"tests/lab/test_{name}.py" for name in ("firecracker", "host", "microvm_unit", "network", "upgrade")]
NESTED_S = 1200.0  # eight minutes where all goes well
NESTED_TRIES = 2
WITHOUT_PROJECT = ["tests/lab/test_host.py", "tests/lab/test_tools.py"]
# The installed interpreter: a console script's first line names it, wherever `make install` put its environment.
INSTALLED_PYTHON = "sed -n '1s/^#! *//p' \"$(command -v dsecd)\""


def forward(stream: str, data: bytes) -> None:
    sink = sys.stdout if stream == "stdout" else sys.stderr
    sink.buffer.write(data)
    sink.flush()


def step(label: str, started: float) -> None:
    say(f"lab: {label} ({time.monotonic() - started:.1f} s)")


def install(vm: LabVM, fresh: bool) -> str:
    """`make install` in the guest; the interpreter that has the project. fresh: everything is compiled there."""
    started = time.monotonic()
    source = "" if fresh else " WHEEL=$(echo /srv/built/dsecd-*.whl)"
    result = vm.run(f"make -C /srv/project install PREFIX=/usr{source} 2>&1", INSTALL_S)
    if result.status:
        forward("stdout", result.stdout[-8000:])
        raise LabError(f"make install in the guest {'timed out' if result.timed_out else f'ended {result.status}'}")
    step("installed the project", started)
    return vm.check(INSTALLED_PYTHON, 10).strip() or "/usr/bin/python3"


def pytest(vm: LabVM, python: str, arguments: list[str], seconds: float) -> Result:
    # -P: what is tested is the installed project, not the source tree that happens to be the working directory.
    command = [python, "-P", "-B", "-u", "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "lab"]
    command += [f"--junitxml={RESULTS}/junit.xml", *arguments]
    # Debian 13's /tmp is a tmpfs, which gives no EROFS to mount, and holds half of the memory.
    setting = "PYTHONPATH=/srv/lab-site TMPDIR=/var/tmp"
    return vm.run(f"cd /srv/project && {setting} exec {shlex.join(command)}", seconds, forward)


def bring_out(vm: LabVM) -> None:
    """The witnesses, into build/lab/."""
    vm.run(f"journalctl -b -o short-precise --no-hostname > {RESULTS}/journal.txt", 60)
    vm.run(f"systemctl list-units --all --no-pager > {RESULTS}/units.txt", 30)
    read_disk(vm.collect(RESULTS), OUT)


@contextlib.contextmanager
def sole_run() -> Iterator[None]:
    """build/lab/ to ourselves and empty: the last run's results, and what it left if it was killed, go."""
    OUT.parent.mkdir(exist_ok=True)
    with (OUT.parent / "lab.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("lab: waiting for another lab run in this tree to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(OUT, ignore_errors=True)
        OUT.mkdir()
        yield


def lab(options: argparse.Namespace, scratch: Path) -> int:
    started = time.monotonic()
    suite = options.suite or codename()
    fresh = options.fresh or suite != codename()  # what is compiled here is for the Python here
    image, vmlinux, wheel_dir, base = rootfs(say, suite), kernel(), wheels(say, suite), base_tar(say, suite)
    delivery = scratch / "delivery.tar"
    compiled = None if fresh else built(wheel_dir, scratch / "built")
    write_disk(delivery, wheel_dir, vmlinux, base, compiled)
    step("kernel, root and delivery are ready", started)

    def machine() -> LabVM:
        return LabVM(vmlinux, image, OUT / "console.log", delivery, options.memory)

    if options.exec or options.pytest or options.no_install:
        return run(machine(), options, fresh, options.pytest or WITHOUT_PROJECT, TESTS_S)[0]
    status, _ = run(machine(), options, fresh, ["tests/lab", *(f"--ignore={file}" for file in NESTED)], TESTS_S)
    for left in reversed(range(NESTED_TRIES)):
        try:
            ended, stuck = run(machine(), options, fresh, NESTED, NESTED_S)
        except LabError as failure:
            if not left:
                raise
            print(f"lab: {failure.message}", file=sys.stderr)
            stuck = True
        if not (stuck and left):
            break
        say("lab: that VM stood still: once more with a new one")
    return status or ended


def run(machine: LabVM, options: argparse.Namespace, fresh: bool, tests: list[str], seconds: float) -> tuple[int, bool]:
    """These tests in a VM of their own: their status, and whether they did not end."""
    with machine as vm:
        say(f"lab: Linux {vm.release} with systemd answered {vm.boot_s:.1f} s after power-on")
        vm.unpack_delivery()
        vm.check(["mkdir", "-p", RESULTS], 10)
        if options.exec:
            result = vm.run(options.exec, TESTS_S, forward)
            bring_out(vm)
            return result.status, False
        python = "/usr/bin/python3" if options.no_install else install(vm, fresh)
        result = pytest(vm, python, tests, seconds)
        status = result.status
        try:
            bring_out(vm)
            vm.power_off()
        except DsecError as failure:  # the tests' own status is the news, unless it was good
            print(f"lab: {failure.message}", file=sys.stderr)
            status = status or 1
    if result.timed_out:
        print(f"lab: the tests did not end within {seconds:.0f} s", file=sys.stderr)
    return status, result.timed_out


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the lab tests in a VM.")
    parser.add_argument("--no-install", action="store_true", help="test the host features alone, without the project")
    parser.add_argument("--suite", metavar="NAME", help="Debian of the guest (default: this machine's)")
    parser.add_argument("--fresh", action="store_true", help="compile and make the environment in the guest")
    parser.add_argument(
        "--memory", type=int, default=MEMORY_MIB, metavar="MIB", help="of the guest (default: %(default)s)"
    )
    parser.add_argument("--exec", metavar="LINE", help="run this shell line in the guest instead of the tests")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest (default: tests/lab), after --")
    options = parser.parse_args()
    # Without this a terminated run would skip its own clean-up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with sole_run(), tempfile.TemporaryDirectory(prefix=".run-", dir=OUT) as scratch:
            return lab(options, Path(scratch))
    except DsecError as failure:
        print(f"lab: {failure.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
