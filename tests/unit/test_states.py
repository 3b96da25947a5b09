"""The table of life-cycle moves."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.errors import DsecError
from dsecd.sandbox.states import ENDED, LIVE, MOVES, move
from dsecd.wire.sandbox import State

EVENTS = sorted({event for moves in MOVES.values() for event in moves})


def test_table_is_closed() -> None:
    """Every state of the wire has a row, every move leads to a state, and live and ended are all of them."""
    states = set(get_args(State))
    assert MOVES.keys() == states
    assert {target for moves in MOVES.values() for target in moves.values()} <= states
    assert states == LIVE | ENDED
    assert {"stopped", "failed"} == ENDED


def test_every_state_is_reached_and_can_end() -> None:
    """From `creating` every state can be reached, and from every live one an end."""
    reached = {"creating"}
    while more := {target for state in reached for target in MOVES[state].values()} - reached:
        reached |= more
    assert reached == set(MOVES)
    for state in LIVE:
        assert "broke" in MOVES[state], "anything can break at any time"
        assert "stop" in MOVES[state] or state == "stopping"


@pytest.mark.parametrize(
    ("state", "event"),
    [("stopped", "stop"), ("failed", "broke"), ("creating", "pause"), ("paused", "pause"), ("running", "resume"),
     ("stopping", "resume"), ("running", "started"), ("creating", "no such event")],
)  # fmt: skip
def test_illegal_move_is_a_conflict_that_names_both(state: State, event: str) -> None:
    with pytest.raises(DsecError, match=state) as caught:
        move(state, event)
    assert caught.value.kind == "conflict"
    assert event in caught.value.message


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_random_walks_end_for_good(events: list[str]) -> None:
    """No sequence of events leaves an ended state, and no event leads anywhere but the table says."""
    state: State = "creating"
    for event in events:
        try:
            following = move(state, event)
        except DsecError as error:
            assert error.kind == "conflict"
            continue
        assert state in LIVE
        assert MOVES[state][event] == following
        state = following
