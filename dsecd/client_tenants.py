"""The SDK's calls of projects, principals, tokens and the audit log: a part of `DSecClient`; and token files."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dsecd.errors import DsecError
from dsecd.wire import base
from dsecd.wire import tenants as wire

if TYPE_CHECKING:
    from dsecd.client import DSecClient

T = TypeVar("T")
TOKEN_MAX: Final = 4096


def read_token(path: str) -> str:
    """The token in a file that only its owner can read; `denied` for one that others can."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise DsecError("invalid", f"the token file {path} cannot be read: {exc.strerror}") from exc
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise DsecError("invalid", f"the token file {path} is not a file")
        if about.st_mode & 0o077 or about.st_uid not in (0, os.geteuid()):
            raise DsecError(
                "denied", f"others can read the token file {path} or have made it: chmod 600, and have it yours"
            )
        content = file.read(TOKEN_MAX).strip()
    if not 16 <= len(content) <= 256 or not content.isascii():
        raise DsecError("invalid", f"the token file {path} holds no token: make one with `dsecctl token create`")
    return content.decode()


def new_token() -> tuple[str, str]:
    """A secret, and its SHA-256, which is all that a daemon gets of it."""
    token = "dsec_" + secrets.token_urlsafe(32)
    return token, hashlib.sha256(token.encode()).hexdigest()


class TenantCalls:
    """What each may do is where its principal stands in the tree of projects (docs/protocol.md, Tenants)."""

    if TYPE_CHECKING:

        async def call(self, method: str, params: base.Params) -> Any: ...

    async def whoami(self) -> wire.Whoami:
        found: wire.Whoami = await self.call("session.whoami", wire.WhoamiParams())
        return found

    async def create_project(self, path: str, quotas: wire.Quotas = wire.Quotas()) -> wire.Project:  # noqa: B008
        """Below one's own. Nobody hands on more than he holds."""
        made: wire.Project = await self.call("project.create", wire.CreateProject(path=path, quotas=quotas))
        return made

    async def projects(self) -> list[wire.Project]:
        """One's own and all below it, with what they use."""
        found: wire.Projects = await self.call("project.list", wire.ListProjects())
        return found.projects

    async def project(self, path: str) -> wire.Project:
        found: wire.Project = await self.call("project.show", wire.ByPath(path=path))
        return found

    async def set_project(self, path: str, quotas: wire.Quotas, unset: Iterable[wire.QuotaName] = ()) -> wire.Project:
        """Those quotas that are given; `unset` ones become the parent's again."""
        params = wire.SetProject(path=path, quotas=quotas, unset=[*unset])
        changed: wire.Project = await self.call("project.set", params)
        return changed

    async def remove_project(self, path: str) -> None:
        await self.call("project.remove", wire.ByPath(path=path))

    async def add_principal(
        self, name: str, project: str, role: wire.Granted, *, uid: int | None = None
    ) -> wire.Principal:
        params = wire.AddPrincipal(name=name, project=project, role=role, uid=uid)
        made: wire.Principal = await self.call("principal.add", params)
        return made

    async def principals(self) -> list[wire.Principal]:
        found: wire.Principals = await self.call("principal.list", wire.ListPrincipals())
        return found.principals

    async def remove_principal(self, name: str) -> None:
        """With its tokens. Its sandboxes go on."""
        await self.call("principal.remove", wire.ByName(name=name))

    async def create_token(self, principal: str, label: str = "") -> tuple[str, str]:
        """The secret, which is nowhere else, and its id, which revokes it."""
        token, digest = new_token()
        params = wire.CreateToken(principal=principal, sha256=digest, label=label)
        made: wire.TokenMade = await self.call("token.create", params)
        return token, made.id

    async def revoke_token(self, ident: str) -> None:
        await self.call("token.revoke", wire.RevokeToken(id=ident))

    async def audit(self, after: int = 0, limit: int = 100) -> list[wire.AuditEntry]:
        """Management calls of one's subtree, oldest first."""
        found: wire.Audit = await self.call("audit.read", wire.ReadAudit(after=after, limit=limit))
        return found.entries


class SyncTenantCalls:
    """The same, blocking."""

    if TYPE_CHECKING:
        aio: DSecClient

        def run(self, work: Coroutine[Any, Any, T]) -> T: ...

    def whoami(self) -> wire.Whoami:
        return self.run(self.aio.whoami())

    def create_project(self, path: str, quotas: wire.Quotas = wire.Quotas()) -> wire.Project:  # noqa: B008
        return self.run(self.aio.create_project(path, quotas))

    def projects(self) -> list[wire.Project]:
        return self.run(self.aio.projects())

    def project(self, path: str) -> wire.Project:
        return self.run(self.aio.project(path))

    def set_project(self, path: str, quotas: wire.Quotas, unset: Iterable[wire.QuotaName] = ()) -> wire.Project:
        return self.run(self.aio.set_project(path, quotas, unset))

    def remove_project(self, path: str) -> None:
        self.run(self.aio.remove_project(path))

    def add_principal(self, name: str, project: str, role: wire.Granted, *, uid: int | None = None) -> wire.Principal:
        return self.run(self.aio.add_principal(name, project, role, uid=uid))

    def principals(self) -> list[wire.Principal]:
        return self.run(self.aio.principals())

    def remove_principal(self, name: str) -> None:
        self.run(self.aio.remove_principal(name))

    def create_token(self, principal: str, label: str = "") -> tuple[str, str]:
        return self.run(self.aio.create_token(principal, label))

    def revoke_token(self, ident: str) -> None:
        self.run(self.aio.revoke_token(ident))

    def audit(self, after: int = 0, limit: int = 100) -> list[wire.AuditEntry]:
        return self.run(self.aio.audit(after, limit))
