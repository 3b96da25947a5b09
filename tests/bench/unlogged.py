"""dsecd without its trajectories, to measure them against: requests are carried out and nothing is written down."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

from dsecd import main
from dsecd.sandbox.recorder import Recorder


async def unrecorded(
    _self: Recorder, _method: str, _params: Any, _who: Any, invoke: Callable[[], Awaitable[Any]]
) -> Any:
    return await invoke()


if __name__ == "__main__":
    Recorder.record = unrecorded  # type: ignore[method-assign]
    sys.exit(main.main())
