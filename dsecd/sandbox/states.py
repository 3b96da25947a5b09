"""All states of a sandbox and all legal moves, in one table. No I/O here.

Rules of this file: a state is left only by an event of the table; an illegal one raises `conflict` and names both.
"""

from __future__ import annotations

from typing import Final

from dsecd.errors import DsecError
from dsecd.wire.sandbox import State

MOVES: Final[dict[State, dict[str, State]]] = {
    "creating": {"started": "running", "broke": "failed", "stop": "stopping"},
    "running": {"pause": "pausing", "stop": "stopping", "broke": "failed"},
    "pausing": {"paused": "paused", "unpaused": "running", "stop": "stopping", "broke": "failed"},
    "paused": {"resume": "resuming", "stop": "stopping", "broke": "failed"},
    "resuming": {"resumed": "running", "stop": "stopping", "broke": "failed"},
    "stopping": {"ended": "stopped", "broke": "failed"},
    "stopped": {},
    "failed": {},
}
LIVE: Final[frozenset[State]] = frozenset(s for s, moves in MOVES.items() if moves)
ENDED: Final[frozenset[State]] = frozenset(MOVES) - LIVE


def move(state: State, event: str) -> State:
    """The state after `event`; `conflict` when that cannot happen in `state`."""
    try:
        return MOVES[state][event]
    except KeyError as exc:
        raise DsecError("conflict", f"a sandbox that is {state} cannot take {event!r}") from exc
