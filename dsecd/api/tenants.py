"""project.*, principal.*, token.*, audit.read, session.login and session.whoami."""

from __future__ import annotations

from dsecd.tenants.audit import AuditLog
from dsecd.tenants.model import Actor
from dsecd.tenants.service import Tenants
from dsecd.wire import base
from dsecd.wire import tenants as wire
from dsecd.wire.call import Call, Peer


class TenantApi:
    """People and agents use the same calls: what each may do is where its principal stands in the tree."""

    def __init__(self, tenants: Tenants, audit: AuditLog) -> None:
        self._tenants = tenants
        self._audit = audit

    def login(self, call: Call, params: wire.Login) -> wire.Whoami:
        """Not a coroutine: a request right behind it is the principal's already."""
        peer = self._tenants.login(call.connection.peer, params.token)
        call.connection.peer = peer
        return _whoami(peer)

    def whoami(self, call: Call, params: wire.WhoamiParams) -> wire.Whoami:
        return _whoami(call.peer)

    async def create(self, call: Call, params: wire.CreateProject) -> wire.Project:
        return await self._tenants.create_project(_actor(call), params.path, params.quotas)

    def list(self, call: Call, params: wire.ListProjects) -> wire.Projects:
        return wire.Projects(projects=self._tenants.projects(_actor(call)))

    def show(self, call: Call, params: wire.ByPath) -> wire.Project:
        return self._tenants.public(self._tenants.tree.project(_actor(call), params.path))

    async def set(self, call: Call, params: wire.SetProject) -> wire.Project:
        return await self._tenants.set_project(_actor(call), params.path, params.quotas, [*params.unset])

    async def remove(self, call: Call, params: wire.ByPath) -> base.Empty:
        await self._tenants.remove_project(_actor(call), params.path)
        return base.Empty()

    async def add(self, call: Call, params: wire.AddPrincipal) -> wire.Principal:
        return await self._tenants.add_principal(_actor(call), params)

    def principals(self, call: Call, params: wire.ListPrincipals) -> wire.Principals:
        return wire.Principals(principals=self._tenants.principals(_actor(call)))

    async def remove_principal(self, call: Call, params: wire.ByName) -> base.Empty:
        await self._tenants.remove_principal(_actor(call), params.name)
        return base.Empty()

    async def create_token(self, call: Call, params: wire.CreateToken) -> wire.TokenMade:
        return await self._tenants.create_token(_actor(call), params)

    async def revoke_token(self, call: Call, params: wire.RevokeToken) -> base.Empty:
        await self._tenants.revoke_token(_actor(call), params.id)
        return base.Empty()

    async def audit(self, call: Call, params: wire.ReadAudit) -> wire.Audit:
        entries, last = await self._audit.read(params.after, params.limit, call.peer.project)
        return wire.Audit(entries=entries, last=last)


def _actor(call: Call) -> Actor:
    return Actor(call.peer.principal, call.peer.project, call.peer.role)


def _whoami(peer: Peer) -> wire.Whoami:
    return wire.Whoami(principal=peer.principal, project=peer.project, role=peer.role, uid=peer.uid)
