"""`sandbox.pack_diff`: what a container or a microVM wrote becomes an environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from dsecd.erofs.envjobs import Upper, check_answers, run_pack
from dsecd.erofs.model import Builder, Limits, Manifest, Progress
from dsecd.errors import DsecError
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.snapshot import snapshot
from dsecd.sandbox.vmpack import upper_stream
from dsecd.wire import sandbox as wire


async def pack(
    manager: Manager, ident: str, name: str, builder: wire.Owner, *, answers: Sequence[str] = (),
    progress: Callable[[Progress], None] = lambda _: None, limits: Limits | None = None,
) -> tuple[Manifest, int]:  # fmt: skip
    """The environment, and how many entries were left out. It stands still for an instant; if paused, it stays so."""
    check_answers(answers)
    live, rooms = manager.standing(ident), manager.rooms
    record = live.record
    if record.backend == "fullvm":
        raise DsecError(
            "unsupported",
            f"full VMs cannot be packed, and {record.id} is one: "
            "take its files out with tree.download and import them as a workspace",
        )
    progress(Progress("snapshot", 0))
    with live.use():
        async with contextlib.AsyncExitStack() as stack:
            below, source = tuple(record.layers), f"packed from {record.id} ({record.spec.image})"
            if record.backend == "microvm":
                stream = await stack.enter_async_context(upper_stream(manager, live))
                upper = Upper(stream=stream, below=below, source=source)
            else:
                space = await stack.enter_async_context(snapshot(rooms, live))
                path = rooms.pool.root / space / "upper"
                upper = Upper(path=path, id_base=rooms.slots.base(record.slot), below=below, source=source)
            return await run_pack(
                rooms.images, name, upper, Builder(builder.uid, builder.label), rooms.environments, answers=answers,
                progress=progress, limits=limits,
            )  # fmt: skip
