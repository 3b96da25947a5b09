"""Tenants of a fleet: each host has all of them, and asks nobody. What changes them goes to all hosts, or to none.

Quotas are of each host. A token is looked for on one host; from then on the client's requests carry its principal's
name (`as`), which the hosts hold against their own tables.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from dsecd.errors import DsecError
from dsecd.wire import base
from dsecd.wire import tenants as wire
from dsecd.wire.peer import Peer

if TYPE_CHECKING:
    from dsecd.fleet import Fleet
    from dsecd.fleet_front import Asked, Front

Handler = Callable[["Asked", Any], Awaitable[Any]]
_CHANGES = (
    "project.create", "project.set", "project.remove", "principal.add", "principal.remove", "token.create",
    "token.revoke",
)  # fmt: skip


def methods(fleet: Fleet) -> dict[str, Handler]:
    """What the fleet answers itself."""
    tenants = _Tenants(fleet)
    return dict.fromkeys(_CHANGES, tenants.change) | {
        "session.login": tenants.login, "session.whoami": tenants.one, "principal.list": tenants.one,
        "project.list": tenants.projects, "project.show": tenants.project, "audit.read": tenants.audit,
    }  # fmt: skip


class _Tenants:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def login(self, asked: Asked, params: wire.Login) -> wire.Whoami:
        """On a connection of its own: that of the fleet stays the fleet's."""
        for host in self._fleet.up():
            if host.path is None:
                continue
            peer = await Peer.connect_unix(host.path)
            try:
                found: wire.Whoami = await peer.call("session.login", params)
            finally:
                await peer.aclose()
            digest = hashlib.sha256(params.token.encode()).hexdigest()
            asked.front.principal, asked.front.token = found.principal, wire.token_id(digest)
            return found
        raise DsecError("network", "no host of this fleet can be reached")

    async def one(self, asked: Asked, params: base.Params) -> Any:
        """Of any host: all have the same."""
        return next(iter(await self._all(asked.method, params)))

    async def change(self, asked: Asked, params: base.Params) -> Any:
        """To all hosts; while one is away nothing is changed, lest it be another one's truth."""
        if away := sorted(host.name for host in self._fleet.hosts.values() if host.problem):
            raise DsecError(
                "network", f"host {away[0]} cannot be reached, so nothing was changed on any: try again when it is "
                "back, or take it out of the inventory",
            )  # fmt: skip
        answers = await self._fleet.ask_all(asked.method, params)
        for host, answer in answers.items():
            if isinstance(answer, DsecError):
                raise DsecError(
                    answer.kind, f"host {host.name}: {answer.message}", infra=answer.infra, retryable=answer.retryable,
                    detail=answer.detail | {"host": host.name},
                )  # fmt: skip
        match params:  # hosts cut what is theirs; behind the answer, which may go to one of these
            case wire.RevokeToken():
                self._drop(lambda front: front.token == params.id)
            case wire.ByName():
                self._drop(lambda front: front.principal == params.name)
        return next(iter(answers.values()))

    def _drop(self, whose: Callable[[Front], bool]) -> None:
        for front in filter(whose, list(self._fleet.fronts)):
            asyncio.get_running_loop().call_soon(front.drop)

    async def projects(self, asked: Asked, params: wire.ListProjects) -> wire.Projects:
        """What each uses on all hosts; its quotas are of each."""
        found: dict[str, list[wire.Project]] = {}
        for answer in await self._all(asked.method, params):
            for one in answer.projects:
                found.setdefault(one.path, []).append(one)
        return wire.Projects(projects=[_together(some) for _, some in sorted(found.items())])

    async def project(self, asked: Asked, params: wire.ByPath) -> wire.Project:
        return _together(await self._all(asked.method, params))

    async def audit(self, asked: Asked, params: wire.ReadAudit) -> wire.Audit:
        """Of all hosts, by time; `after` counts on each."""
        entries: list[wire.AuditEntry] = []
        last = 0
        for host, answer in (await self._fleet.ask_all(asked.method, params)).items():
            if isinstance(answer, DsecError):
                raise answer
            entries += [msgspec.structs.replace(one, host=host.name) for one in answer.entries]
            last = max(last, answer.last)
        return wire.Audit(entries=sorted(entries, key=lambda one: one.at), last=last)

    async def _all(self, method: str, params: base.Params) -> list[Any]:
        answers = list((await self._fleet.ask_all(method, params)).values())
        good = [one for one in answers if not isinstance(one, DsecError)]
        if not good:
            raise answers[0] if answers else DsecError("network", "no host of this fleet can be reached")
        return good


def _together(some: list[wire.Project]) -> wire.Project:
    used = wire.Used(**{
        name: sum(getattr(one.used, name) for one in some) for name in wire.Used.__struct_fields__
    })  # fmt: skip
    return msgspec.structs.replace(some[0], used=used)
