"""Where things go: filters, room, spreading, and what a stale view costs. Pure."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fleetsim import Simulation, ours

from dsecd.errors import DsecError
from dsecd.placement import BURST, Policy, View, Want, place


def view(name: str, **more: object) -> View:
    values: dict[str, object] = {"sandboxes_max": 10, "cpu_max": 100.0, "memory_max_mb": 100_000, **more}
    return View(name, **values)  # type: ignore[arg-type]


def placed(
    views: list[View], wants: list[Want], policy: Policy | None = None, tried: tuple[str, ...] = ()
) -> list[str]:
    found = place(views, wants, policy or Policy(), random.Random(1), tried)
    return [one.name if isinstance(one, View) else one.kind for one in found]


def error(views: list[View], want: Want) -> DsecError:
    (found,) = place(views, [want], Policy(), random.Random(1))
    assert isinstance(found, DsecError)
    return found


def test_only_who_has_what_it_needs() -> None:
    views = [
        view("bare", images=frozenset({"a"}), devices=frozenset()),
        view("vm", backends=frozenset({"container", "microvm"}), images=frozenset({"a", "b"})),
        view("gpu", images=frozenset({"a"}), devices=frozenset({"gpu"})),
        view("gone", why="did not answer"),
    ]
    assert set(placed(views, [Want(backend="microvm", images=("a",))] * 3)) == {"vm"}
    assert set(placed(views, [Want(images=("a", "b"))] * 3)) == {"vm"}
    assert set(placed(views[:1] + views[2:], [Want(images=("a",), devices=("gpu",))] * 3)) == {"gpu"}
    said = error(views, Want(images=("nowhere",)))
    assert said.kind == "unsupported"
    assert "bare has no image nowhere" in said.message
    assert "gone did not answer" in said.message
    assert error([], Want()).kind == "capacity"


def test_full_hosts_get_nothing_and_full_fleets_say_capacity() -> None:
    views = [view("small", sandboxes_max=2), view("large", sandboxes_max=5)]
    assert Counter(placed(views, [Want()] * 7)) == {"small": 2, "large": 5}
    full = [view("a", sandboxes=10), view("b", sandboxes=9), view("c", memory_max_mb=1500, memory_mb=1000)]
    assert placed(full, [Want()]) == ["b"]
    full[1].seen(0.0, 10, 0.0, 0)
    assert placed(full, [Want()]) == ["capacity"]
    assert placed([view("a"), view("b")], [Want()] * 2, tried=("a",)) == ["b", "b"]
    assert placed([view("a")], [Want()], tried=("a",)) == ["capacity"]


def test_who_is_full_by_what_was_placed_since_has_the_last_word_itself() -> None:
    """It may be in the last look already, and count twice."""
    one = view("a", sandboxes_max=2)
    assert placed([one], [Want()] * 3) == ["a", "a", "a"]


def test_replicas_of_a_group_are_apart() -> None:
    views = [view(f"h{n}", sandboxes_max=100) for n in range(20)]
    names = placed(views, [Want(group="replicas")] * 20)
    assert len(set(names)) == 20


def test_what_may_leave_leaves_when_home_is_full() -> None:
    policy = Policy(burst_above=0.5, burst_images=frozenset({"public"}))
    views = [view("home"), view("cloud", tags=frozenset({BURST}), sandboxes_max=100)]
    names = placed(views, [Want(images=("public",))] * 8, policy)
    assert names[:5] == ["home"] * 5
    assert "cloud" in names[5:]
    views = [view("home"), view("cloud", tags=frozenset({BURST}))]
    secret = placed(views, [Want(images=("public", "secret"))] * 12, policy)
    assert Counter(secret) == {"home": 12}, "full or not: it may not leave"
    assert "cloud" not in placed(views, [Want(backend="microvm", images=("public",))], policy)


def test_what_was_placed_counts_until_a_look_has_it() -> None:
    one = view("a", sandboxes_max=2)
    assert placed([one], [Want()] * 2) == ["a", "a"]
    one.settle(Want(), at=10.0)
    one.settle(Want(), at=11.0)
    one.seen(began=10.5, sandboxes=1, cpu=1.0, memory_mb=1024)
    assert (one.sandboxes, one.placed) == (1, 1)
    one.seen(began=12.0, sandboxes=1, cpu=1.0, memory_mb=1024)  # one of them has ended
    assert (one.sandboxes, one.placed, one.placed_memory_mb) == (1, 0, 0)
    assert placed([one], [Want()]) == ["a"]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_simulator_is_deterministic_and_balanced(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetsim.ALIVE", 20_000)
    monkeypatch.setattr("fleetsim.BURST", 5_000)
    first, second = (Simulation(ours, seed).run() for _ in range(2))
    assert first.public() == second.public()
    assert first.refused == 0
    assert first.balance < 1.15
