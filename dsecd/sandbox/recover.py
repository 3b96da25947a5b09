"""What became of a request that the death of a daemon interrupted."""

from __future__ import annotations

from typing import Any

from dsecd.errors import DsecError
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.record import public
from dsecd.wire import execs
from dsecd.wire import sandbox as wire
from dsecd.wire.base import Params


async def recover(manager: Manager, method: str, params: Params, uid: int) -> Any:
    """Its answer, from what the registry and the agents know; `outcome_unknown` when they do not."""
    key = params.request_id or ""
    match params:
        case execs.Run() | execs.Start():
            live = await manager.running(params.id)
            assert live.commands is not None
            ident = live.commands.find_request(uid, key)
            if ident is not None:
                if isinstance(params, execs.Run):
                    return await live.commands.again(ident)
                entry = live.commands.get(ident)
                return execs.Started(exec_id=ident, pid=await entry.command.started)
        case wire.Create():
            for record in manager.all((), {}, uid):
                if record.request == key:
                    return public(record)
            return manager.public(await manager.create(params.spec, wire.Owner(uid, 0, params.spec.owner), key))
        case wire.Stop():
            return manager.public(await manager.stop(params.id, params.reason))
    raise DsecError("outcome_unknown", f"the daemon was restarted while {method} ran; look before doing it again")
