"""From how a call ended to its verdict: pure functions, no I/O."""

from __future__ import annotations

import errno
import os
import signal as signals
from typing import Final

from msgspec import Struct

from dsecd.agent.calls import CPU, OUTPUT, WALL, CallEnd
from dsecd.cgroup.meter import CallFigures
from dsecd.wire.fncall import Limits, Match, Verdict

_NOT_ALLOWED: Final = (errno.EACCES, errno.EPERM)


class Ending(Struct, frozen=True):
    """Everything a verdict depends on."""

    end: CallEnd
    figures: CallFigures
    limits: Limits


def verdict_of(ending: Ending, expected: bytes | None, match: Match) -> tuple[Verdict, str]:
    """The verdict and a sentence. What the platform ended comes before what the program did, and memory before both:
    a program that is out of memory may end in any way."""
    end, limits = ending.end, ending.limits
    if end.not_started:
        return _not_started(end.not_started)
    limit = _limit(ending)
    if limit is not None:
        return limit
    if end.signal:
        return _signalled(end.signal)
    if end.code != 0:
        return "runtime_error", f"exit status {end.code}"
    if end.truncated:
        return "output_limit", f"more than {limits.output_kb} KiB of output"
    if expected is not None and not same(end.stdout, expected, match):
        return "wrong_answer", difference(end.stdout, expected)
    return "ok", ""


def _limit(ending: Ending) -> tuple[Verdict, str] | None:
    """The limit at which it was stopped, or failed."""
    end, figures, limits = ending.end, ending.figures, ending.limits
    failed = end.code != 0
    if figures.oom:
        return "memory_limit", f"more than {limits.memory_mb} MiB of memory"
    if figures.pids_limit:
        return "process_limit", f"more than {limits.processes} processes and threads"
    if end.why == CPU or end.signal == signals.SIGXCPU:
        return "time_limit", f"more than {limits.cpu_s:g} s of processor time"
    if end.why == WALL:
        return "wall_limit", f"more than {wall_s(limits):g} s"
    if end.why == OUTPUT:
        return "output_limit", f"more than {limits.output_kb} KiB of output"
    if end.signal == signals.SIGXFSZ:
        return "output_limit", f"a file of more than {limits.file_mb} MiB"
    if failed and end.space_full:
        return "memory_limit", f"more than {limits.disk_mb} MiB of files"
    return None


def _not_started(number: int) -> tuple[Verdict, str]:
    reason = os.strerror(number)
    if number in _NOT_ALLOWED:
        return "denied", f"the program may not be executed: {reason}"
    return "runtime_error", f"the program cannot be executed: {reason}"


def _signalled(number: int) -> tuple[Verdict, str]:
    if number == signals.SIGSYS:
        return "denied", "a system call that is not allowed"
    try:
        name = signals.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return "runtime_error", f"ended by {name}"


def wall_s(limits: Limits) -> float:
    """Its wall limit, given or made from the CPU limit."""
    return limits.wall_s if limits.wall_s is not None else 2 * limits.cpu_s + 2


def same(output: bytes, expected: bytes, match: Match) -> bool:
    """`lines`: white space at ends of lines and empty lines at the end do not count."""
    if output == expected:
        return True
    return match == "lines" and _lines(output) == _lines(expected)


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def difference(output: bytes, expected: bytes) -> str:
    """Where the first line differs, with both, shortened."""
    ours, theirs = _lines(output), _lines(expected)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if one != other:
            return f"line {number}: {_shown(one)} instead of {_shown(other)}"
    if len(ours) != len(theirs):
        return f"{len(ours)} lines instead of {len(theirs)}"
    return "white space differs"


def _shown(line: bytes) -> str:
    text = line[:60].decode("utf-8", "replace")
    return repr(text + "…" if len(line) > 60 else text)
