"""What became of a request that the death of a daemon interrupted."""

from __future__ import annotations

from typing import Any

from dsecd.errors import DsecError
from dsecd.sandbox.fork import fork, shown
from dsecd.sandbox.jobs import Jobs
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.networks import set_network
from dsecd.sandbox.record import public
from dsecd.wire import execs
from dsecd.wire import jobs as job_wire
from dsecd.wire import network as network_wire
from dsecd.wire import sandbox as wire
from dsecd.wire.base import Params
from dsecd.wire.trajectory import Who


def owner_of(who: Who, label: str) -> wire.Owner:
    """Whose is made for a request that is carried on without its connection."""
    return wire.Owner(who.uid, 0, label, principal=who.principal, project=who.project)


async def recover(manager: Manager, method: str, params: Params, who: Who) -> Any:
    """Its answer, from what the registry and the agents know; `outcome_unknown` when they do not."""
    key, uid = params.request_id or "", who.uid
    match params:
        case execs.Run(fresh=True):
            pass  # its copy ended with the daemon
        case execs.Run() | execs.Start():
            # None: in a full VM without dsec-agent nobody keeps a result.
            commands = (await manager.running(params.id)).commands
            ident = commands.find_request(uid, key) if commands is not None else None
            if commands is not None and ident is not None:
                if isinstance(params, execs.Run):
                    return await commands.again(ident)
                entry = commands.get(ident)
                return execs.Started(exec_id=ident, pid=await entry.command.started)
        case wire.Create():
            for record in manager.all((), {}, uid):
                if record.request == key:
                    return public(record)
            return manager.public(await manager.create(params.spec, owner_of(who, params.spec.owner), key))
        case wire.Fork():
            for record in manager.all((), {}, uid):  # those that were made: nobody knows of them
                if record.request == key:
                    await manager.stop(record.id, "the daemon was restarted before all copies were made")
            owner = owner_of(who, manager.record(params.id).spec.owner)
            return shown(manager, await fork(manager, params.id, params.count, owner, key))
        case network_wire.SetNetwork():
            return await set_network(manager, params.id, params.rules)
        case wire.Stop():
            return manager.public(await manager.stop(params.id, params.reason))
        case wire.ById() if method in ("sandbox.pause", "sandbox.resume"):
            act = manager.pausing.pause if method == "sandbox.pause" else manager.pausing.resume
            return manager.public(await act(params.id))
        case job_wire.ByJob():  # done twice is done once
            act_all = Jobs(manager).pause if method == "job.pause" else Jobs(manager).resume
            return await act_all(params.job, uid)
        case job_wire.StopJob():
            return await Jobs(manager).stop(params.job, uid, params.reason)
    raise DsecError("outcome_unknown", f"the daemon was restarted while {method} ran; look before doing it again")
