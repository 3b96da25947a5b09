"""A fleet that is only numbers: simulated hosts and a simulated clock under the real placement code.

Deterministic for a seed. Hosts answer creates late, are looked at now and then (so views are old), refuse what does not
fit, and die. Two coordinators place in turns and know nothing of each other but what looks show.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dsecd.errors import DsecError
from dsecd.placement import Policy, View, Want, place

HOSTS: Final = 160
CREATE_S: Final = 0.03  # from a placement to a sandbox that the host counts
LOOK_S: Final = 1.0
ALIVE: Final = 380_000
RATE: Final = 5_000
BURST: Final = 32_000
TRIES: Final = 8

Choose = Callable[[Sequence[View], Want, random.Random, set[str]], View | None]


@dataclass
class SimHost:
    """What a host really has."""

    name: str
    sandboxes_max: int = 4000
    cpu_max: float = 192 * 64.0
    memory_max_mb: int = 6 << 20
    alive: bool = True
    sandboxes: int = 0
    cpu: float = 0.0
    memory_mb: int = 0

    def take(self, want: Want) -> bool:
        fits = (
            self.alive and self.sandboxes < self.sandboxes_max and self.cpu + want.cpu <= self.cpu_max
            and self.memory_mb + want.memory_mb <= self.memory_max_mb
        )  # fmt: skip
        if fits:
            self.sandboxes += 1
            self.cpu += want.cpu
            self.memory_mb += want.memory_mb
        return fits

    def load(self) -> float:
        return max(
            self.sandboxes / self.sandboxes_max, self.cpu / self.cpu_max, self.memory_mb / self.memory_max_mb
        )  # fmt: skip


@dataclass
class Result:
    """balance: of loads, the greatest over the mean, of hosts that live. refused: for good. place_us: of each call."""

    alive: int = 0
    refused: int = 0
    retries: int = 0
    balance: float = 0.0
    burst_balance: float = 0.0
    place_us: list[float] = field(default_factory=list)

    def public(self) -> dict[str, Any]:
        return {
            "alive": self.alive, "refused": self.refused, "retries": self.retries, "balance": round(self.balance, 4),
            "burst_balance": round(self.burst_balance, 4),
        }  # fmt: skip


def ours(views: Sequence[View], want: Want, chance: random.Random, tried: set[str]) -> View | None:
    (found,) = place(views, [want], Policy(), chance, tried)
    return None if isinstance(found, DsecError) else found


def at_random(views: Sequence[View], want: Want, chance: random.Random, tried: set[str]) -> View | None:
    able = [view for view in views if not view.why and view.name not in tried]
    return _laid(chance.choice(able) if able else None, want)


def round_robin() -> Choose:
    turns = itertools.count()

    def choose(views: Sequence[View], want: Want, _chance: random.Random, tried: set[str]) -> View | None:
        able = [view for view in views if not view.why and view.name not in tried]
        return _laid(able[next(turns) % len(able)] if able else None, want)

    return choose


def _laid(view: View | None, want: Want) -> View | None:
    if view is not None:
        view.lay(want)
    return view


def wants(chance: random.Random) -> Want:
    """Sizes as tasks have them: most small, some large."""
    memory = chance.choices((512, 1024, 2048, 8192), (40, 40, 15, 5))[0]
    return Want(cpu=chance.choice((1.0, 1.0, 2.0, 4.0)), memory_mb=memory)


class Simulation:
    """One run of one way to choose."""

    def __init__(self, choose: Choose, seed: int = 1, coordinators: int = 2) -> None:
        self.chance = random.Random(seed)
        self.choose = choose
        self.hosts = {f"h{n}": SimHost(f"h{n}") for n in range(HOSTS)}
        self.views = [[self._view(host) for host in self.hosts.values()] for _ in range(coordinators)]
        self.now = 0.0
        self.result = Result()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        for views in self.views:
            for view in views:
                self._at(self.chance.random() * LOOK_S, lambda view=view: self._look(view))  # type: ignore[misc]

    @staticmethod
    def _view(host: SimHost) -> View:
        return View(host.name, sandboxes_max=host.sandboxes_max, cpu_max=host.cpu_max, memory_max_mb=host.memory_max_mb)

    def _at(self, moment: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._count), what))

    def until(self, moment: float) -> None:
        while self._events and self._events[0][0] <= moment:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = moment

    def _look(self, view: View) -> None:
        host, began = self.hosts[view.name], self.now
        if host.alive:
            view.seen(began, host.sandboxes, host.cpu, host.memory_mb)
        elif not view.why:
            view.lost("did not answer")
        self._at(self.now + LOOK_S * (0.8 + 0.4 * self.chance.random()), lambda: self._look(view))

    def create(self, want: Want, tried: set[str] | None = None) -> None:
        tried = tried if tried is not None else set()
        views = self.views[next(self._count) % len(self.views)]
        began = time.perf_counter()
        view = self.choose(views, want, self.chance, tried)
        self.result.place_us.append((time.perf_counter() - began) * 1e6)
        if view is None or len(tried) >= TRIES:
            self.result.refused += 1
            return
        self._at(self.now + CREATE_S * (0.5 + self.chance.random()), lambda: self._made(view, want, tried))

    def _made(self, view: View, want: Want, tried: set[str]) -> None:
        if self.hosts[view.name].take(want):
            view.settle(want, self.now)
            self.result.alive += 1
            return
        view.lay(want, -1)
        tried.add(view.name)
        self.result.retries += 1
        self.create(want, tried)

    def balance(self) -> float:
        loads = [host.load() for host in self.hosts.values() if host.alive]
        return max(loads) / statistics.mean(loads)

    def run(self) -> Result:
        """A burst of 32,000 at once, then 5,000 a second until 380,000 are alive; two hosts die on the way."""
        for _ in range(BURST):
            self.create(wants(self.chance))
        self.until(2.0)
        self.result.burst_balance = self.balance()
        step = 0.01
        dying = [100_000, 250_000]
        while self.result.alive < ALIVE:
            if dying and self.result.alive >= dying[0]:
                dying.pop(0)
                victim = self.hosts[f"h{self.chance.randrange(HOSTS)}"]
                victim.alive = False
                self.result.alive -= victim.sandboxes
            for _ in range(int(RATE * step)):
                self.create(wants(self.chance))
            self.until(self.now + step)
            if self.result.refused > ALIVE:
                raise RuntimeError("the simulated fleet refuses everything")
        self.until(self.now + 2.0)
        self.result.balance = self.balance()
        return self.result
