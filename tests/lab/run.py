"""`make test-lab`: boots a lab VM, installs this work tree in it as a user would, runs the `lab` tests there.

Without arguments there are two VMs, one after the other: the tests with guests of the guest (marked `nested`) have
their own. KVM there stands on an SVM that QEMU emulates, and what goes wrong with it looks as if we had lost a command.
So the first failure ends such a VM, and a new one goes on from that test: what is ours fails in each.

Prints the guest's pytest output as it comes and ends with its status. Leaves {junit.xml,journal.txt,units.txt,
console.log} of each VM in build/lab/<n>/. With --exec it runs one shell line in a fresh VM instead, to look around.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from apt import codename
from cache import LabError
from delivery import PROJECT, built, read_disk, wheels, write_disk
from kernel import kernel, say
from rootfs import base_tar, rootfs
from vm import MEMORY_MIB, LabVM, Output, Result

from dsecd.errors import DsecError

OUT = PROJECT / "build" / "lab"
RESULTS = "/srv/results"
INSTALL_S = 900.0  # one or two minutes on an idle host
TESTS_S = 2700.0
NESTED_S, NESTED_WHOLE_S = 1200.0, 2100.0  # of one VM, which takes ten minutes where all goes well, and of all
NESTED_VMS = 3
TESTS_FAILED, NOTHING_LEFT = 1, 5  # of pytest's statuses
VERDICT = re.compile(rb"^(tests/lab/\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)
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


def pytest(vm: LabVM, python: str, arguments: list[str], seconds: float, output: Output) -> Result:
    # -P: what is tested is the installed project, not the source tree that happens to be the working directory.
    command = [python, "-P", "-B", "-u", "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    command += [f"--junitxml={RESULTS}/junit.xml", *arguments]
    # Debian 13's /tmp is a tmpfs, which gives no EROFS to mount, and holds half of the memory.
    setting = "PYTHONPATH=/srv/lab-site TMPDIR=/var/tmp"
    return vm.run(f"cd /srv/project && {setting} exec {shlex.join(command)}", seconds, output)


def bring_out(vm: LabVM, out: Path) -> None:
    """The witnesses."""
    vm.run(f"journalctl -b -o short-precise --no-hostname > {RESULTS}/journal.txt", 60)
    vm.run(f"systemctl list-units --all --no-pager > {RESULTS}/units.txt", 30)
    read_disk(vm.collect(RESULTS), out)


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

    numbers = itertools.count(1)

    def vm(tests: list[str], seconds: float, output: Output = forward) -> int:
        out = OUT / str(next(numbers))
        out.mkdir()
        with LabVM(vmlinux, image, out / "console.log", delivery, options.memory) as machine:
            return run(machine, out, options, fresh, tests, seconds, output)

    if options.exec or options.pytest or options.no_install:
        return vm(["-m", "lab", *(options.pytest or WITHOUT_PROJECT)], TESTS_S)
    status = vm(["-m", "lab and not nested", "tests/lab"], TESTS_S)
    return nested(vm) or status


def nested(vm: Callable[[list[str], float, Output], int]) -> int:
    """Their status. A VM in which one fails, or that stands still or ends, leaves it and the rest to the next."""
    passed = Passed()
    ends = time.monotonic() + NESTED_WHOLE_S
    for left in reversed(range(NESTED_VMS)):
        done = [word for test in passed.tests for word in ("--deselect", test)]
        seconds = min(NESTED_S, ends - time.monotonic())
        try:
            status = vm(["-x", "-m", "lab and nested", *done, "tests/lab"], seconds, passed.forward)
        except LabError as failure:
            if not left or time.monotonic() > ends:
                raise
            print(f"lab: {failure.message}", file=sys.stderr)
        else:
            if done and status == NOTHING_LEFT:
                return 0
            if status != TESTS_FAILED or not left or time.monotonic() > ends:
                return status
        say("lab: a new VM goes on from there")
    raise AssertionError("the last one returns or raises")


class Passed:
    """The tests that pytest says have passed, or were skipped, out of its output as it comes."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}  # of a test: one that has passed may be an error yet, when it is torn down
        self._line = b""

    @property
    def tests(self) -> list[str]:
        return [test for test, verdict in self._last.items() if verdict in ("PASSED", "SKIPPED")]

    def forward(self, stream: str, data: bytes) -> None:
        forward(stream, data)
        if stream != "stdout":
            return
        text = self._line + data
        whole, _, self._line = text.rpartition(b"\n")
        self._last |= {test.decode(): verdict.decode() for test, verdict in VERDICT.findall(whole)}


def run(
    vm: LabVM, out: Path, options: argparse.Namespace, fresh: bool, tests: list[str], seconds: float, output: Output
) -> int:
    """The status of these tests in this VM; LabError where they did not end."""
    say(f"lab: Linux {vm.release} with systemd answered {vm.boot_s:.1f} s after power-on")
    vm.unpack_delivery()
    vm.check(["mkdir", "-p", RESULTS], 10)
    if options.exec:
        result = vm.run(options.exec, TESTS_S, forward)
        bring_out(vm, out)
        return result.status
    python = "/usr/bin/python3" if options.no_install else install(vm, fresh)
    result = pytest(vm, python, tests, seconds, output)
    status = result.status
    try:
        bring_out(vm, out)
        vm.power_off()
    except DsecError as failure:  # the tests' own status is the news, unless it was good
        print(f"lab: {failure.message}", file=sys.stderr)
        status = status or 1
    if result.timed_out:
        raise LabError(f"the tests did not end within {seconds:.0f} s")
    return status


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
