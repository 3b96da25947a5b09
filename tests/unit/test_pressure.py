"""What guests are asked for when the host is short of memory."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dsecd.agent.frames import Fields, Tag, fields
from dsecd.sandbox import pressure
from dsecd.sandbox.pressure import Pressure, target

MIB = 1 << 20


@pytest.mark.parametrize(
    ("memory", "total", "free", "expected"),
    [
        (512, 480, 400, 140),  # uses 112: that and a quarter
        (512, 480, 480, 96),  # uses next to nothing: the least
        (512, 480, 0, 512),  # uses all: nothing to ask for
        (512, 1 << 40, 1 << 40, 96),  # a guest that lies only harms itself
        (64, 60, 0, 64),
    ],
)
def test_target(memory: int, total: int, free: int, expected: int) -> None:
    assert target(memory * MIB, total * MIB, free * MIB) == expected * MIB


class FakeVm:
    def __init__(self, ident: str) -> None:
        self.id = ident
        self.link = None
        self.spec = type("Spec", (), {"memory": 512 * MIB})
        self.targets: list[int] = []

    async def balloon(self, size: int) -> None:
        self.targets.append(size // MIB)


def test_asks_once_short_and_gives_back_with_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    async def said(_link: Any) -> Fields:
        return Fields(fields([(Tag.MEM_TOTAL, 480 * MIB), (Tag.MEM_AVAILABLE, 400 * MIB)]))

    monkeypatch.setattr(pressure, "guest_stats", said)
    vm = FakeVm("a")
    parts = iter([0.5, 0.05, 0.15, 0.25, 0.25])
    watcher = Pressure(lambda: cast(Any, [vm]), lambda: next(parts))

    async def go() -> None:
        for _ in range(5):
            await watcher.once()

    asyncio.run(go())
    assert vm.targets == [140, 512]
