"""All states of a rollout and all legal moves, in one table. No I/O here.

That its sandboxes are paused is no state of it: a paused rollout waits where it is. `waiting_model` is `running` with a
step that has no answer, and is not written down: the trajectory says it.
"""

from __future__ import annotations

from typing import Final

from dsecd.sandbox.states import moved
from dsecd.wire.rollouts import State

MOVES: Final[dict[State, dict[str, State]]] = {
    "starting": {"started": "running", "end": "finishing"},
    "running": {"asked": "waiting_model", "end": "finishing"},
    "waiting_model": {"asked": "waiting_model", "answered": "running", "end": "finishing"},
    "finishing": {"done": "done", "failed": "failed", "stopped": "stopped"},
    "done": {},
    "failed": {},
    "stopped": {},
}
LIVE: Final[frozenset[State]] = frozenset(s for s, moves in MOVES.items() if moves)
ENDED: Final[frozenset[State]] = frozenset(MOVES) - LIVE


def move(state: State, event: str) -> State:
    """The state after `event`; `conflict` when that cannot happen in `state`."""
    return moved(MOVES, "rollout", state, event)
