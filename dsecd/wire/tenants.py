"""Messages of `project.*`, `principal.*`, `token.*`, `session.login` and `audit.*`: who may do what, and how much."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from dsecd.wire.access import Role
from dsecd.wire.base import Count, Name, Params, Result

Path = Annotated[str, Meta(max_length=255, pattern=r"^root(/[A-Za-z0-9][A-Za-z0-9._-]{0,31}){0,7}\Z")]
QuotaName = Literal["sandboxes", "cpu", "memory_mb", "disk_mb", "creates_per_s"]
Granted = Literal["viewer", "user", "admin"]
Whole = Annotated[int, Meta(ge=0, le=1 << 40)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Token = Annotated[str, Meta(min_length=16, max_length=256, pattern=r"^[A-Za-z0-9_-]+\Z")]


def token_id(sha256: str) -> str:
    """What a token is called: it names it, and opens nothing."""
    return sha256[:12]


class Quotas(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """What a project may hold on this host, all below it together. None: what its parent may. MiB, cores."""

    sandboxes: Whole | None = None
    cpu: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    memory_mb: Whole | None = None
    disk_mb: Whole | None = None
    creates_per_s: Annotated[float, Meta(ge=0.001, le=1e6)] | None = None


class Used(Struct, omit_defaults=True):
    """Held by the live sandboxes of a project and all below it; paused ones count in full, each call resumes them."""

    sandboxes: int = 0
    cpu: float = 0.0
    memory_mb: int = 0
    disk_mb: int = 0


class Login(Params):
    """`session.login`: from here on, this connection is that of the token's principal."""

    token: Token


class WhoamiParams(Params):
    """`session.whoami`."""


class Whoami(Result):
    """principal: `uid:N` of one without a name. uid: what owns its sandboxes, jobs and keys."""

    principal: str
    project: str
    role: Role
    uid: int


class CreateProject(Params):
    """`project.create`: below one of the caller's subtree, with no more than that one may have."""

    path: Path
    quotas: Quotas = Quotas()


class SetProject(Params):
    """`project.set`: those quotas that are given; `unset` ones are the parent's again."""

    path: Path
    quotas: Quotas = Quotas()
    unset: list[QuotaName] = []


class ByPath(Params):
    """`project.show`, `project.remove`."""

    path: Path


class ListProjects(Params):
    """`project.list`: the caller's and all below it."""


class Project(Result):
    """quotas: its own. limits: the least of its own and all above it, as far as the caller's subtree and beyond."""

    path: str
    quotas: Quotas = Quotas()
    limits: Quotas = Quotas()
    used: Used = msgspec.field(default_factory=Used)


class Projects(Result):
    projects: list[Project]


class AddPrincipal(Params):
    """`principal.add`. uid: whoever comes with that user id is it; only for the root project's admin to say."""

    name: Name
    project: Path
    role: Granted
    uid: Annotated[int, Meta(ge=1, le=(1 << 32) - 2)] | None = None


class ByName(Params):
    """`principal.remove`: with its tokens; its connections are cut. Its sandboxes go on."""

    name: Name


class ListPrincipals(Params):
    """`principal.list`: of the caller's subtree."""


class TokenInfo(Struct, omit_defaults=True):
    """id: the first 12 digits of its SHA-256."""

    id: str
    created: float
    label: str = ""


class Principal(Result):
    """number: what owns its sandboxes, jobs and keys, where a uid does for those without a name."""

    name: str
    project: str
    role: Role
    number: int
    uid: int | None = None
    tokens: list[TokenInfo] = []


class Principals(Result):
    principals: list[Principal]


class CreateToken(Params):
    """`token.create`: the caller makes the secret, and sends its SHA-256 alone: the daemon never keeps a secret."""

    principal: Name
    sha256: Digest
    label: Annotated[str, Meta(max_length=128)] = ""


class RevokeToken(Params):
    """`token.revoke`: connections that came with it are cut."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{12}\Z")]


class TokenMade(Result):
    id: str


class ReadAudit(Params):
    """`audit.read`: entries behind `after`, oldest first; of the caller's subtree."""

    after: Count = 0
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class AuditEntry(Struct, kw_only=True, omit_defaults=True):
    """event `asked`: about to be done. `done`: what came of entry `ref`. `refused`: before anything was done.

    outcome: "ok" or the error's kind. host: of a fleet.
    """

    seq: int = 0
    event: str
    at: float
    principal: str
    project: str
    uid: int
    pid: int = 0
    method: str
    params: Any = None
    ref: int = 0
    outcome: str = ""
    message: str = ""
    host: str = ""


class Audit(Result):
    """last: seq of the newest entry there is."""

    entries: list[AuditEntry]
    last: int
