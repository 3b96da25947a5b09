"""sandbox.pack_diff and environment.*"""

from __future__ import annotations

import asyncio
import socket

import msgspec

from dsecd.api.flows import inflow, outflow, teller
from dsecd.api.images import ImageApi
from dsecd.envconfig import EnvConfig
from dsecd.erofs.envjobs import run_export, run_load
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.packing import pack
from dsecd.wire import environments as wire
from dsecd.wire.call import Call
from dsecd.wire.images import Image

_WHAT = {
    "max_mb": "most data of a pack, in MiB",
    "max_files": "most files of a pack",
    "forbidden": "a path that keeps a pack from being made",
    "secrets_max_kb": "larger files are not searched for secrets",
    "scrub": "residue of builders: left out",
    "separate_accounts": "builders may not start what they packed",
}


class EnvironmentApi:
    """Packs run in processes of their own, at most two at once, as imports do."""

    def __init__(self, manager: Manager, images: ImageApi) -> None:
        self._manager = manager
        self._images = images
        self._store = manager.rooms.images

    async def pack_diff(self, call: Call, params: wire.PackDiff) -> wire.Packed:
        owner = call.peer.owner(params.label)
        async with self._images.slots:
            made, left_out = await pack(
                self._manager, params.id, params.name, owner, answers=params.leave_out, progress=teller(call),
                limits=self._images.limits(call),
            )  # fmt: skip
        return wire.Packed(image=self._images.shown(made), left_out=left_out)

    async def export(self, call: Call, params: wire.Export) -> wire.Exported:
        async with self._images.slots:
            ours, theirs = socket.socketpair()
            with ours:
                ours.setblocking(False)
                with theirs:
                    work = asyncio.ensure_future(
                        run_export(
                            self._store,
                            params.ref,
                            theirs.fileno(),
                            progress=teller(call),
                            limits=self._images.limits(call),
                        )
                    )
                    work.add_done_callback(lambda _: theirs.close())  # the end of the stream, however it ended
                    try:
                        await outflow(call, ours, params.window)
                        done = await work
                    finally:
                        work.cancel()
                        await asyncio.wait([work])
        return wire.Exported(digest=done.digest, size=done.sent_bytes)

    async def import_(self, call: Call, params: wire.Load) -> Image:
        async with self._images.slots, inflow(call) as fd:
            made = await run_load(
                self._store, fd, name=params.name or "", progress=teller(call), limits=self._images.limits(call)
            )
        return self._images.shown(made)

    def rules(self, call: Call, params: wire.RulesParams) -> wire.Rules:
        return wire.Rules(rules=readable(self._manager.rooms.environments))


def readable(config: EnvConfig) -> list[wire.Rule]:
    """The rules one by one, as people read them."""
    found: list[wire.Rule] = []
    for key in EnvConfig.__struct_fields__:
        value = getattr(config, key)
        if key == "secrets":
            found += [wire.Rule(f"secrets.{name}", one, "content that keeps a pack from being made")
                      for name, one in value.items()]  # fmt: skip
        elif isinstance(value, tuple):
            found += [wire.Rule(key, one, _WHAT[key]) for one in value]
        else:
            found.append(wire.Rule(key, msgspec.json.encode(value).decode(), _WHAT[key]))
    return found
