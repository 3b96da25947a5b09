"""What sandboxes were refused: counted by what it was, bounded, and told once. What is in it a tenant can choose."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from msgspec import Struct

KEPT: Final = 256  # different ones of a sandbox; the ones that were not seen for longest go
TOLD_EACH_MINUTE: Final = 20  # events of a sandbox; the log has them all


class Refusal(Struct):
    """what: `name example.org` or `203.0.113.5 tcp 443`. Times are UNIX seconds."""

    what: str
    count: int
    first: float
    last: float


class Refusals:
    """Of one sandbox. tell: called with the words of what was not refused before."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._found: OrderedDict[str, Refusal] = OrderedDict()
        self._minute, self._told = 0.0, 0

    def add(self, what: str) -> None:
        moment = time.time()
        if (known := self._found.get(what)) is not None:
            known.count += 1
            known.last = moment
            self._found.move_to_end(what)
            return
        self._found[what] = Refusal(what, 1, moment, moment)
        if len(self._found) > KEPT:
            self._found.popitem(last=False)
        if moment - self._minute > 60:
            self._minute, self._told = moment, 0
        self._told += 1
        if self._told <= TOLD_EACH_MINUTE:
            self._tell(what)

    def list(self) -> list[Refusal]:
        """The last one seen is the last."""
        return list(self._found.values())
