"""Verdicts as a pure function: every one of them, and what goes before what."""

from __future__ import annotations

import errno
import signal
from typing import Any, get_args

import pytest

from dsecd.agent.calls import CPU, OUTPUT, WALL, CallEnd
from dsecd.cgroup.meter import CallFigures
from dsecd.errors import DsecError
from dsecd.fncall.languages import find, languages
from dsecd.fncall.verdict import Ending, difference, same, verdict_of
from dsecd.fncallconfig import Language
from dsecd.wire.fncall import Limits, Verdict


def ending(*, oom: bool = False, pids: bool = False, **end: Any) -> Ending:
    fields: dict[str, Any] = {
        "code": 0, "signal": 0, "why": 0, "ran_us": 1, "cpu_us": 1, "space_full": False, "not_started": 0,
        "stdout": b"", "stderr": b"", "truncated": False, "files": {}, "refused": {}, **end,
    }  # fmt: skip
    return Ending(CallEnd(**fields), CallFigures(peak=0, oom=oom, pids_limit=pids), Limits())


CASES: list[tuple[Verdict, Ending]] = [
    ("ok", ending()),
    ("runtime_error", ending(code=3)),
    ("runtime_error", ending(code=139, signal=signal.SIGSEGV)),
    ("runtime_error", ending(code=127, not_started=errno.ENOENT)),
    ("denied", ending(code=127, not_started=errno.EACCES)),
    ("denied", ending(code=159, signal=signal.SIGSYS)),
    ("time_limit", ending(code=137, signal=signal.SIGKILL, why=CPU)),
    ("time_limit", ending(code=152, signal=signal.SIGXCPU)),
    ("wall_limit", ending(code=137, signal=signal.SIGKILL, why=WALL)),
    ("output_limit", ending(code=137, signal=signal.SIGKILL, why=OUTPUT, truncated=True)),
    ("output_limit", ending(code=153, signal=signal.SIGXFSZ)),
    ("output_limit", ending(truncated=True)),
    ("process_limit", ending(code=1, pids=True)),
    ("process_limit", ending(code=137, signal=signal.SIGKILL, why=WALL, pids=True)),
    ("memory_limit", ending(code=137, signal=signal.SIGKILL, oom=True)),
    ("memory_limit", ending(code=1, space_full=True)),
    ("memory_limit", ending(code=137, signal=signal.SIGKILL, why=WALL, oom=True, pids=True)),
    ("ok", ending(space_full=True)),
]


@pytest.mark.parametrize(("verdict", "ended"), CASES)
def test_each_ending_has_its_verdict(verdict: Verdict, ended: Ending) -> None:
    got, detail = verdict_of(ended, None, "lines")
    assert got == verdict
    assert bool(detail) == (verdict != "ok")


def test_a_wrong_answer_is_one_only_of_a_program_that_ended_well() -> None:
    assert verdict_of(ending(stdout=b"1\n"), b"2\n", "lines") == ("wrong_answer", "line 1: '1' instead of '2'")
    assert verdict_of(ending(stdout=b"1\n", code=1), b"2\n", "lines")[0] == "runtime_error"
    assert verdict_of(ending(stdout=b"2"), b"2\n", "lines")[0] == "ok"
    assert verdict_of(ending(stdout=b"2"), b"2\n", "exact")[0] == "wrong_answer"


def test_the_list_of_verdicts_is_covered() -> None:
    """`compile_error` and `infra` are said where they arise, all others here."""
    assert set(get_args(Verdict)) == {v for v, _ in CASES} | {"wrong_answer", "compile_error", "infra"}


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (b"a \nb\n\n", b"a\nb", True),
        (b"a\r\nb", b"a\nb", True),
        (b" a", b"a", False),
        (b"", b"\n\n", True),
        (b"a", b"", False),
    ],
)
def test_lines_are_compared_without_white_space_at_their_ends(one: bytes, other: bytes, equal: bool) -> None:
    assert same(one, other, "lines") is equal


def test_a_difference_is_one_short_sentence() -> None:
    assert difference(b"x" * 10_000, b"y") == f"line 1: '{'x' * 60}…' instead of 'y'"
    assert difference(b"1\n2\n3", b"1") == "3 lines instead of 1"
    assert difference(b"\xff\x1b[2J", b"") == "1 lines instead of 0"


def test_languages_of_the_configuration_replace_and_an_unknown_one_says_what_there_is() -> None:
    table = languages({"python": Language(file="x.py", run=["pypy", "x.py"])})
    assert find(table, "python").run == ["pypy", "x.py"]
    assert find(table, "cpp").compile[0] == "g++"
    with pytest.raises(DsecError, match="did you mean python"):
        find(table, "pyton")
    with pytest.raises(DsecError, match="there are bash, c, cpp"):
        find(table, "🙂" * 100)
