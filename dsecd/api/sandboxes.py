"""sandbox.* and lease.renew."""

from __future__ import annotations

import asyncio
from typing import Final

from dsecd.errors import DsecError
from dsecd.sandbox.choose import choose
from dsecd.sandbox.fork import fork, shown
from dsecd.sandbox.manager import Manager
from dsecd.wire import base
from dsecd.wire import sandbox as wire
from dsecd.wire.access import within
from dsecd.wire.call import Call

AT_ONCE: Final = 64  # creations of one create_many under way; the backend bounds what really runs side by side


class SandboxApi:
    """All of them act through the manager."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def create(self, call: Call, params: wire.Create) -> wire.Sandbox:
        record = await self._manager.create(params.spec, _owner(call, params.spec), params.request_id or "")
        return self._manager.public(record)

    async def choose(self, call: Call, params: wire.Choose) -> wire.Chosen:
        facts = self._manager.facts
        return choose(await facts.chosen(params), await facts.host())

    async def create_many(self, call: Call, params: wire.CreateMany) -> wire.Created:
        specs = params.expanded()
        limit = asyncio.Semaphore(AT_ONCE)

        made: list[str] = []

        async def one(spec: wire.Spec) -> wire.CreateOne:
            async with limit:
                try:
                    record = await self._manager.create(spec, _owner(call, spec), params.request_id or "")
                    made.append(record.id)
                    return wire.CreateOne(sandbox=self._manager.public(record))
                except DsecError as exc:
                    return wire.CreateOne(error=wire.Failed.of(exc))

        leases = [spec.lease_s for spec in specs if spec.lease_s is not None]
        keeper = asyncio.ensure_future(self._keep(made, min(leases, default=3600.0) / 3, call.peer.uid))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(spec)) for spec in specs]
            self._manager.renew(made, call.peer.uid)
        finally:
            keeper.cancel()
        return wire.Created(results=[task.result() for task in tasks])

    async def _keep(self, made: list[str], every: float, uid: int) -> None:
        """Renew the leases of what a long create_many has made so far: its caller does not know of them yet."""
        while True:
            await asyncio.sleep(every)
            self._manager.renew(made, uid)

    def get(self, call: Call, params: wire.ById) -> wire.Sandbox:
        return self._manager.public(self._manager.record(params.id))

    def list(self, call: Call, params: wire.List) -> wire.Sandboxes:
        uid = call.peer.uid if params.mine else None
        found = self._manager.all(params.states, params.labels, uid, params.job, call.peer.project)
        if params.request is not None:
            found = [record for record in found if record.request == params.request]
        return wire.Sandboxes(sandboxes=[self._manager.public(record) for record in found])

    async def wait(self, call: Call, params: wire.Wait) -> wire.Sandbox:
        return self._manager.public(await self._manager.wait(params.id, set(params.states)))

    async def stop(self, call: Call, params: wire.Stop) -> wire.Sandbox:
        return self._manager.public(await self._manager.stop(params.id, params.reason))

    async def stop_many(self, call: Call, params: wire.StopMany) -> wire.StoppedMany:
        if not params.ids and not params.labels and not params.mine:
            raise DsecError("invalid", "stop_many needs ids, labels or mine; it does not stop everything by default")
        idents = list(params.ids)
        if not idents:
            uid = call.peer.uid if params.mine else None
            idents = [record.id for record in self._manager.all((), params.labels, uid, None, call.peer.project)]
        results = await asyncio.gather(*(self._stop_quietly(ident, call.peer.project) for ident in idents))
        return wire.StoppedMany(stopped=sum(results))

    async def _stop_quietly(self, ident: str, project: str) -> bool:
        try:
            if not within(self._manager.record(ident).owner.project, project):
                return False
            await self._manager.stop(ident, "stopped by request")
        except DsecError:
            return False
        return True

    async def pause(self, call: Call, params: wire.ById) -> wire.Sandbox:
        return self._manager.public(await self._manager.pausing.pause(params.id))

    async def resume(self, call: Call, params: wire.ById) -> wire.Sandbox:
        return self._manager.public(await self._manager.pausing.resume(params.id))

    async def fork(self, call: Call, params: wire.Fork) -> wire.Created:
        source = self._manager.record(params.id)
        found = await fork(self._manager, source.id, params.count, _owner(call, source.spec), params.request_id or "")
        return shown(self._manager, found)

    async def extend(self, call: Call, params: wire.Extend) -> wire.Sandbox:
        record = await self._manager.extend(params.id, params.ttl_idle_s, params.ttl_total_s)
        return self._manager.public(record)

    async def renew(self, call: Call, params: wire.Renew) -> wire.Renewed:
        return wire.Renewed(gone=self._manager.renew(params.ids, call.peer.uid))

    async def stats(self, call: Call, params: wire.ById) -> wire.Stats:
        return await self._manager.stats(params.id)

    async def events(self, call: Call, params: wire.Events) -> base.Empty:
        async for event in self._manager.events.follow(params.since):
            if within(event.project, call.peer.project) and all(
                event.labels.get(key) == value for key, value in params.labels.items()
            ):
                message = wire.Event(
                    call.id, event.seq, event.at, event.sandbox_id, event.event, event.state, event.text
                )
                await call.notify_bounded("sandbox.event", message)
        return base.Empty()


def _owner(call: Call, spec: wire.Spec) -> wire.Owner:
    return call.peer.owner(spec.owner)
