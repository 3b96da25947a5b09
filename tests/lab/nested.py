"""Tests of guests of the lab's guest: they have a lab VM of their own (run.py), and more than one try.

KVM there stands on an SVM that QEMU emulates; emulator.py says what became of guests under its older versions. A guest
that stands still looks as if we had lost a command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import pytest

P = ParamSpec("P")
TRIES = 3
AGAIN: list[str] = []  # why there were more; conftest.py shows it


def nested(test: Callable[P, None]) -> Callable[P, None]:
    """The test must clean up after itself, failed or not, and may be run again with the same fixtures."""

    @functools.wraps(test)
    def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        for left in reversed(range(TRIES)):
            try:
                test(*args, **kwargs)
                break
            except Exception as exc:
                if not left:
                    raise
                AGAIN.append(f"{test.__name__}: {exc!r}"[:2000])

    return pytest.mark.nested(tried)
