"""`make test-lab`: boots a lab VM, installs this work tree in it as a user would, runs the `lab` tests there.

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

from cache import LabError
from delivery import PROJECT, read_disk, wheels, write_disk
from kernel import kernel, say
from rootfs import base_tar, rootfs
from vm import LabVM, Result

OUT = PROJECT / "build" / "lab"
RESULTS = "/srv/results"
INSTALL_S = 900.0  # one or two minutes on an idle host
TESTS_S = 1800.0
WITHOUT_PROJECT = ["tests/lab/test_host.py", "tests/lab/test_tools.py"]
# The installed interpreter: a console script's first line names it, wherever `make install` put its environment.
INSTALLED_PYTHON = "sed -n '1s/^#! *//p' \"$(command -v dsecd)\""


def forward(stream: str, data: bytes) -> None:
    sink = sys.stdout if stream == "stdout" else sys.stderr
    sink.buffer.write(data)
    sink.flush()


def step(label: str, started: float) -> None:
    say(f"lab: {label} ({time.monotonic() - started:.1f} s)")


def install(vm: LabVM) -> str:
    """`make install` in the guest; the interpreter that has the project."""
    started = time.monotonic()
    result = vm.run("make -C /srv/project install PREFIX=/usr 2>&1", INSTALL_S)
    if result.status:
        forward("stdout", result.stdout[-8000:])
        raise LabError(f"make install in the guest {'timed out' if result.timed_out else f'ended {result.status}'}")
    step("installed the project", started)
    return vm.check(INSTALLED_PYTHON, 10).strip() or "/usr/bin/python3"


def pytest(vm: LabVM, python: str, arguments: list[str]) -> Result:
    # -P: what is tested is the installed project, not the source tree that happens to be the working directory.
    command = [python, "-P", "-B", "-u", "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "lab"]
    command += [f"--junitxml={RESULTS}/junit.xml", *arguments]
    return vm.run(f"cd /srv/project && PYTHONPATH=/srv/lab-site exec {shlex.join(command)}", TESTS_S, forward)


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
    image, vmlinux, wheel_dir, base = rootfs(say), kernel(), wheels(say), base_tar(say)
    delivery = scratch / "delivery.tar"
    write_disk(delivery, wheel_dir, vmlinux, base, venv=not options.fresh)
    step("kernel, root and delivery are ready", started)
    with LabVM(vmlinux, image, OUT / "console.log", delivery) as vm:
        say(f"lab: Linux {vm.release} with systemd answered {vm.boot_s:.1f} s after power-on")
        vm.unpack_delivery()
        vm.check(["mkdir", "-p", RESULTS], 10)
        if options.exec:
            result = vm.run(options.exec, TESTS_S, forward)
            bring_out(vm)
            return result.status
        python = "/usr/bin/python3" if options.no_install else install(vm)
        result = pytest(vm, python, options.pytest or (WITHOUT_PROJECT if options.no_install else ["tests/lab"]))
        status = result.status
        try:
            bring_out(vm)
            vm.power_off()
        except LabError as failure:  # the tests' own status is the news, unless it was good
            print(f"lab: {failure}", file=sys.stderr)
            status = status or 1
    if result.timed_out:
        print(f"lab: the tests did not end within {TESTS_S:.0f} s", file=sys.stderr)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the lab tests in a VM.")
    parser.add_argument("--no-install", action="store_true", help="test the host features alone, without the project")
    parser.add_argument("--fresh", action="store_true", help="install on a bare system, making the environment there")
    parser.add_argument("--exec", metavar="LINE", help="run this shell line in the guest instead of the tests")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest (default: tests/lab), after --")
    options = parser.parse_args()
    # Without this a terminated run would skip its own clean-up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with sole_run(), tempfile.TemporaryDirectory(prefix=".run-", dir=OUT) as scratch:
            return lab(options, Path(scratch))
    except LabError as failure:
        print(f"lab: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
