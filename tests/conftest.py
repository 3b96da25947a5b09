"""For every test: nothing may be left of it. tests/leftovers.py says what is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest

leftovers.watch_tasks()


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories below which no mount and no loop device may be left; fixtures add their own."""
    return [tmp_path_factory.getbasetemp()]


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, watched: list[Path]) -> Iterator[None]:
    """Compares before and after. What fixtures of a wider scope hold is there before."""
    leftovers.take_pending()

    def take() -> set[str]:
        return {item for item in leftovers.picture(watched) if not any(ours(item) for ours in leftovers.tolerated)}

    before = take()
    failed_before = request.session.testsfailed
    yield
    left = leftovers.take_pending() + leftovers.left(before, take)
    if left:
        note = " (the test itself failed too)" if request.session.testsfailed > failed_before else ""
        pytest.fail("left behind" + note + ":\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_at_all(watched: list[Path]) -> Iterator[None]:
    """The same for the whole session: all wider fixtures are over when this one ends."""

    def take() -> set[str]:
        return leftovers.picture(watched)

    before = take()
    yield
    left = leftovers.left(before, take, patience=10.0)
    if left:
        pytest.fail("left behind by the session:\n  " + "\n  ".join(left), pytrace=False)
