"""Rollouts' pure parts: the table of states, who is whose trainer, the relay's book."""

from __future__ import annotations

import asyncio
import contextlib
from typing import get_args

import pytest
from msgspec import Raw

from dsecd.errors import DsecError
from dsecd.rollout.record import Record, Whose
from dsecd.rollout.states import ENDED, LIVE, MOVES, move
from dsecd.rollout.steps import canonical
from dsecd.rollout.trainers import Scope, Trainer, Trainers
from dsecd.wire.rollouts import Limits, State
from dsecd.wire.sandbox import Owner, Spec
from dsecd.worker.relay import OPEN_MAX, Book


# -- states -----------------------------------------------------------------------------------------------------------
def test_every_state_has_a_row_is_reached_and_can_end() -> None:
    assert set(MOVES) == set(get_args(State)) == LIVE | ENDED
    reached, todo = {"starting"}, ["starting"]
    while todo:
        for state in MOVES[todo.pop()].values():  # type: ignore[index]
            if state not in reached:
                reached.add(state)
                todo.append(state)
    assert reached == set(MOVES)
    assert {"done", "failed", "stopped"} == ENDED
    for state in LIVE - {"finishing"}:
        assert MOVES[state]["end"] == "finishing", "whatever happens, it is decided once"


def test_an_illegal_move_names_state_and_event() -> None:
    for state, moves in MOVES.items():
        for event in {event for row in MOVES.values() for event in row} - moves.keys():
            with pytest.raises(DsecError, match=f"{state} cannot take '{event}'") as caught:
                move(state, event)
            assert caught.value.kind == "conflict"


def record(uid: int, job: str, ident: str) -> Record:
    spec = Spec(image="x")
    return Record(
        id=ident, owner=Owner(uid, 1), job=job, agent_spec=spec, worker_spec=spec, task=Raw(b"{}"), program=["x"],
        limits=Limits(),
    )  # fmt: skip


# -- trainers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (Scope(5, "a"), Scope(5, "a"), True),
        (Scope(5, "a"), Scope(5, "b"), False),
        (Scope(5, "a"), Scope(6, "a"), False),
        (Scope(0, "a"), Scope(6, "a"), True),
        (Scope(5, "a"), Scope(5, "a", "r1"), True),
        (Scope(0, "a"), Scope(5, "a", "r1"), True),
        (Scope(5, "a", "r1"), Scope(5, "a", "r1"), True),
        (Scope(5, "a", "r1"), Scope(5, "a", "r2"), False),
        (Scope(5, ""), Scope(5, "a"), False),
    ],
)
def test_who_takes_over_from_whom(one: Scope, other: Scope, meet: bool) -> None:
    assert one.meets(other) is other.meets(one) is meet
    trainers = Trainers()
    first = trainers.attach(one, 1)
    second = trainers.attach(other, 1)
    assert trainers.of(record(other.uid, other.job, other.rollout or "r9")) is second

    async def lost() -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await first.take()
        return ""

    if meet:
        with pytest.raises(DsecError, match="another trainer attached"):
            asyncio.run(lost())
    else:
        assert asyncio.run(lost()) == ""


def test_a_job_is_one_users() -> None:
    one = record(5, "a", "r1")
    assert [Whose(uid, job).covers(one) for uid, job in ((5, "a"), (5, None), (0, "a"), (6, "a"), (5, "b"))] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_trainer_is_never_given_more_than_its_window() -> None:
    async def work() -> None:
        trainer = Trainer(Scope(5, "a"), 2)
        for step in (1, 2, 3, 3, 1):
            trainer.offer(("r", step))
        assert [await trainer.take(), await trainer.take()] == [("r", 1), ("r", 2)]
        third = asyncio.ensure_future(trainer.take())
        await asyncio.sleep(0)
        assert not third.done()
        trainer.answered(("r", 2))
        assert await third == ("r", 3)
        trainer.answered(("r", 1))
        fourth = asyncio.ensure_future(trainer.take())
        await asyncio.sleep(0)
        assert not fourth.done(), "what was offered twice is delivered once"
        fourth.cancel()

    asyncio.run(work())


def test_a_rollout_that_ends_unanswered_gives_its_room_back() -> None:
    async def work() -> None:
        trainer = Trainer(Scope(5, "a"), 2)
        for ref in (("r", 1), ("r", 2), ("r", 3), ("s", 1)):
            trainer.offer(ref)
        assert [await trainer.take(), await trainer.take()] == [("r", 1), ("r", 2)]
        third = asyncio.ensure_future(trainer.take())
        await asyncio.sleep(0)
        trainer.over("r")
        async with asyncio.timeout(5):
            assert await third == ("s", 1)

    asyncio.run(work())


# -- bodies -----------------------------------------------------------------------------------------------------------
def test_equal_values_are_equal_bytes() -> None:
    assert canonical(b'{"b": 1, "a": [1.50, "\\u00e9"]}') == canonical(b'{"a":[1.5,"\xc3\xa9"],"b":1}')  # type: ignore[arg-type]
    assert canonical(b"[1]") != canonical(b"[1.0]")  # type: ignore[arg-type]
    for bad in (b"", b"{", b"[" * 10_000, b"\xff"):
        with pytest.raises(DsecError, match="not JSON") as caught:
            canonical(bad)  # type: ignore[arg-type]
        assert caught.value.kind == "invalid"


# -- the relay's book -------------------------------------------------------------------------------------------------
def test_a_scaffold_that_hung_up_and_asks_again_gets_its_answer() -> None:
    book = Book()
    first = book.enter({"q": 1})
    assert first is not None
    first.left = True
    book.settle(first.ident, 200, "a")
    assert book.enter({"q": 1}) is first
    assert first.answer == (200, b'"a"')
    assert not first.left


def test_the_same_question_of_two_who_wait_is_two_questions() -> None:
    book = Book()
    first, second = book.enter({"q": 1}), book.enter({"q": 1})
    assert first is not None
    assert second is not None
    assert first is not second


def test_what_is_answered_stays_answered() -> None:
    book = Book()
    item = book.enter({})
    assert item is not None
    for body in ("first", "second"):
        book.settle(item.ident, 200, body)
    book.settle(99, 200, "nobody asked")
    assert item.answer == (200, b'"first"')


def test_the_relay_holds_so_many_and_no_more() -> None:
    book = Book()
    items = [book.enter(number) for number in range(OPEN_MAX + 1)]
    assert None not in items[:-1]
    assert items[-1] is None
    assert items[0] is not None
    book.close(items[0])
    assert book.enter("again") is not None
    assert items[1] is not None
    items[1].left = True
    assert book.enter("in place of one who left") is not None
    assert book.enter("more") is None
