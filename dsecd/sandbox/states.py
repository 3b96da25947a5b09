"""All states of a sandbox and all legal moves, in one table. No I/O here.

Rules of this file: a state is left only by an event of the table; an illegal one raises `conflict` and names both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from dsecd.errors import DsecError
from dsecd.wire.sandbox import State

S = TypeVar("S", bound=str)

MOVES: Final[dict[State, dict[str, State]]] = {
    "creating": {"started": "running", "broke": "failed", "stop": "stopping"},
    "running": {"pause": "pausing", "stop": "stopping", "broke": "failed"},
    "pausing": {"paused": "paused", "unpaused": "running", "stop": "stopping", "broke": "failed"},
    "paused": {"resume": "resuming", "stop": "stopping", "broke": "failed"},
    "resuming": {"resumed": "running", "unresumed": "paused", "stop": "stopping", "broke": "failed"},
    "stopping": {"ended": "stopped", "broke": "failed"},
    "stopped": {},
    "failed": {},
}
LIVE: Final[frozenset[State]] = frozenset(s for s, moves in MOVES.items() if moves)
ENDED: Final[frozenset[State]] = frozenset(MOVES) - LIVE


def move(state: State, event: str) -> State:
    """The state after `event`; `conflict` when that cannot happen in `state`."""
    return moved(MOVES, "sandbox", state, event)


def moved(moves: Mapping[S, Mapping[str, S]], what: str, state: S, event: str) -> S:
    """As `move`, by another table."""
    try:
        return moves[state][event]
    except KeyError as exc:
        raise DsecError("conflict", f"a {what} that is {state} cannot take {event!r}") from exc
