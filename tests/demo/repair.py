"""One sandbox's way: a fault is seeded, the project's tests find it, it is mended through the file API, they pass."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Final

from dsecd.client import ExecResult, Sandbox
from tests.demo.faults import Fault
from tests.demo.layers import PYTHONPATH

TEST: Final = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
TEST_S: Final = 120.0
BASELINE: Final = "git init -q && git add -A && git commit -qm 'as released'"


@dataclass
class Repair:
    """How it went. `problem` is empty when all went as it must."""

    fault: Fault
    failed_before: int = 0
    passed_after: int = 0
    failed_after: int = 0
    seconds: float = 0.0
    problem: str = ""


async def repair(sandbox: Sandbox, fault: Fault, directory: str) -> Repair:
    """Seed, test, mend, test; git says what was changed and that nothing is at the end."""
    report = Repair(fault)
    started = time.monotonic()
    try:
        await _repair(sandbox, report, directory)
    except Wrong as exc:
        report.problem = str(exc)
    report.seconds = time.monotonic() - started
    return report


class Wrong(Exception):
    """Something went otherwise than it must."""


async def _repair(sandbox: Sandbox, report: Repair, directory: str) -> None:
    fault, path = report.fault, f"{directory}/{report.fault.path}"
    await _sh(sandbox, BASELINE, directory)
    await sandbox.write_file(path, fault.seed((await sandbox.read_file(path)).decode()))
    if await _sh(sandbox, "git diff --name-only", directory) != fault.path:
        raise Wrong("git does not see the fault")

    before = await _test(sandbox, directory)
    report.failed_before = _count(before, "failed") + _count(before, "error")
    if before.exit_code not in (1, 2) or not report.failed_before:  # 2: pytest could not even collect
        raise Wrong(f"the fault was not found: {_last(before)}")

    await sandbox.write_file(path, fault.fix((await sandbox.read_file(path)).decode()))
    if await _sh(sandbox, "git status --porcelain --untracked-files=no", directory):
        raise Wrong("the fix is not what was released")

    after = await _test(sandbox, directory)
    report.passed_after, report.failed_after = _count(after, "passed"), _count(after, "failed")
    if after.exit_code != 0 or not report.passed_after:
        raise Wrong(f"the tests fail after the fix: {_last(after)}")


async def _sh(sandbox: Sandbox, line: str, directory: str) -> str:
    done = await sandbox.run_shell(line, cwd=directory, timeout=60)
    if not done.ok:
        raise Wrong(f"{line}: {_last(done)}")
    return done.stdout.strip()


async def _test(sandbox: Sandbox, directory: str) -> ExecResult:
    result = await sandbox.exec(TEST, cwd=directory, env={"PYTHONPATH": f"src:{PYTHONPATH}"}, timeout=TEST_S)
    if result.timed_out:
        raise Wrong(f"the tests did not end within {TEST_S:g} s")
    return result


def _count(result: ExecResult, what: str) -> int:
    """From pytest's last line: `3 failed, 586 passed, 21 skipped in 4.46s`."""
    found = re.search(rf"(\d+) {what}", _last(result))
    return int(found[1]) if found else 0


def _last(result: ExecResult) -> str:
    lines = (result.stdout.strip() or result.stderr.strip()).splitlines()
    return lines[-1][:200] if lines else f"exit {result.exit_code}"
