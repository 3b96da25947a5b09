"""Where files cannot be shared, a container is not made to stand still for a copy of all its bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsecd.disk.prjquota import _shares
from dsecd.errors import DsecError
from dsecd.sandbox.snapshot import snapshot


def test_a_pool_without_copies_refuses() -> None:
    pool = SimpleNamespace(why_no_copies=lambda: "the file system of /x shares no blocks between files")
    live = SimpleNamespace(record=SimpleNamespace(id="t0-1"))
    rooms: Any = SimpleNamespace(pool=pool)

    async def take() -> None:
        async with snapshot(rooms, live):  # type: ignore[arg-type]
            raise AssertionError

    with pytest.raises(DsecError, match="shares no blocks") as caught:
        asyncio.run(take())
    assert caught.value.kind == "unsupported"


def test_sharing_is_found_out_and_leaves_nothing(tmp_path: Path) -> None:
    assert _shares(tmp_path) in (True, False)
    assert _shares(Path("/dev/shm")) is False
    assert list(tmp_path.iterdir()) == []
