"""The registry's thread and the table of request keys, at the edges where both could stop for everybody."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsecd.errors import DsecError
from dsecd.sandbox.replay import Replay
from dsecd.sandbox.store import Store
from dsecd.wire import files
from dsecd.wire.stream import Inflow, Upload
from dsecd.wire.trajectory import Who


@pytest.mark.parametrize("value", [1 << 63, "\ud800", object()])
def test_a_value_that_sqlite_does_not_take_fails_for_itself_alone(tmp_path: Path, value: object) -> None:
    async def work() -> None:
        store = Store(tmp_path / "state.db")
        try:
            queries = [store.query("SELECT ?", (one,)) for one in (1, value, 2)]
            first, bad, last = await asyncio.gather(*queries, return_exceptions=True)
            assert (first, last) == ([(1,)], [(2,)])
            assert isinstance(bad, DsecError)
            assert bad.kind == "internal"
            async with asyncio.timeout(5):
                await store.write([("CREATE TABLE t (a)", ()), ("INSERT INTO t VALUES (3)", ())])
                with pytest.raises(DsecError):
                    await store.write([("INSERT INTO t VALUES (4)", ()), ("INSERT INTO t VALUES (?)", (value,))])
                assert await store.query("SELECT a FROM t", ()) == [(3,)]
        finally:
            store.close()

    asyncio.run(work())


def test_a_stream_that_failed_and_is_asked_again_in_the_same_turn_of_the_loop() -> None:
    """Its task has ended and is still in the table when the next one looks."""

    async def nothing(*_: object, **__: object) -> Any:
        return []  # without a turn of the loop

    async def work() -> None:
        store: Any = SimpleNamespace(query=nothing, write=nothing)
        recorder: Any = SimpleNamespace(begin=lambda *_, **__: nothing_made(), failure=nothing)
        replay = Replay(store, recorder, nothing)
        again: list[asyncio.Task[Any]] = []

        def ask(fails: bool) -> asyncio.Task[Any]:
            async def invoke() -> str:
                if fails:
                    again.append(ask(fails=False))
                    raise DsecError("network", "cut off")
                return "done"

            params = files.Write(id="s", path="/x", stream=True, request_id="k")
            upload = Upload(lambda _: inflow)
            inflow = Inflow(lambda _: None)
            return asyncio.ensure_future(replay.once("file.write", params, Who(0, 1), invoke, upload))

        async def nothing_made() -> None:
            return None

        first = ask(fails=True)
        async with asyncio.timeout(5):
            with pytest.raises(DsecError):
                await first
            assert await again[0] == "done"

    asyncio.run(work())
