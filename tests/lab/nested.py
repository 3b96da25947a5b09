"""Tests of guests of the lab's guest: they have more than one try.

KVM there stands on an SVM that QEMU emulates, and that is not sound under load. Seen with QEMU 10.0.2 and nothing of
ours running, eight small guests that tick beside a busy loop: of twelve three stood still for ever and one had a kernel
panic; once the lab's own kernel fell over in svm_vcpu_run. A guest that stands still looks as if we had lost a command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

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

    return tried
