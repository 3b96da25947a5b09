"""The rules of delegation, without I/O: a tree of projects, and the principals in it.

Whoever changes something is an `Actor`. It acts below its own project alone, gives no role above its own, and no
project more than the one above it has. Its own project's quotas it cannot change: they were given to it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.wire.access import RANK, ROOT, Role, ancestry, within
from dsecd.wire.tenants import Granted, Quotas, TokenInfo, token_id

NAMES: Final = Quotas.__struct_fields__
FIRST_NUMBER: Final = 1 << 32  # of principals: no uid is one of these
MOST: Final = 10_000  # projects, principals: each; and 64 tokens of one principal
MOST_TOKENS: Final = 64


class Actor(Struct, frozen=True):
    """Who asks. role: what it may do in its project and below."""

    name: str
    project: str
    role: Role


class Project(Struct):
    path: str
    quotas: Quotas = Quotas()


class Token(Struct):
    """sha256 is all that is kept of it."""

    sha256: str
    principal: str
    created: float
    label: str = ""

    @property
    def id(self) -> str:
        return token_id(self.sha256)

    @property
    def info(self) -> TokenInfo:
        return TokenInfo(self.id, self.created, self.label)


class Principal(Struct):
    """number: never given twice, so what a removed one owned is nobody's afterwards."""

    name: str
    project: str
    role: Granted
    number: int
    uid: int | None = None


class Tree:
    """All projects, principals and tokens of this host. Every change is refused as a whole or done as a whole."""

    def __init__(self) -> None:
        self.projects: dict[str, Project] = {ROOT: Project(ROOT)}
        self.principals: dict[str, Principal] = {}
        self.tokens: dict[str, Token] = {}  # by id
        self.by_uid: dict[int, Principal] = {}
        self.next_number = FIRST_NUMBER

    # -- looking ------------------------------------------------------------------------------------------------------
    def project(self, actor: Actor, path: str) -> Project:
        """One of the actor's subtree; `not_found` alike for one outside and one that is not there."""
        found = self.projects.get(path) if within(path, actor.project) else None
        if found is None:
            raise DsecError(
                "not_found", f"no project {path[:80]!r} in {actor.project}: `project list` has those there are"
            )
        return found

    def principal(self, actor: Actor, name: str) -> Principal:
        found = self.principals.get(name)
        if found is None or not within(found.project, actor.project):
            raise DsecError(
                "not_found", f"no principal {name[:80]!r} in {actor.project}: `principal list` has those there are"
            )
        return found

    def limit(self, path: str, quota: str) -> tuple[float, str] | None:
        """The least that it and those above it may have, and whose that is; None: no limit."""
        found: tuple[float, str] | None = None
        for one in ancestry(path):
            value = getattr(self.projects[one].quotas, quota) if one in self.projects else None
            if value is not None and (found is None or value < found[0]):
                found = value, one
        return found

    def limits(self, path: str) -> Quotas:
        least = {name: self.limit(path, name) for name in NAMES}
        return Quotas(**{name: one[0] for name, one in least.items() if one is not None})  # type: ignore[arg-type]

    # -- projects -----------------------------------------------------------------------------------------------------
    def create_project(self, actor: Actor, path: str, quotas: Quotas) -> Project:
        _must(actor, "admin", "make a project")
        parent = path.rpartition("/")[0]
        if not parent or not within(parent, actor.project):
            raise DsecError("denied", f"{path} is not below {actor.project}, your project: make one below it")
        if parent not in self.projects:
            raise DsecError("not_found", f"no project {parent}: make that one first")
        if path in self.projects:
            raise DsecError("conflict", f"the project {path} is there already: `project set` changes its quotas")
        _room(len(self.projects), "projects")
        self._no_more(parent, quotas)
        made = self.projects[path] = Project(path, quotas)
        return made

    def set_project(self, actor: Actor, path: str, quotas: Quotas, unset: list[Any]) -> Project:
        _must(actor, "admin", "set quotas")
        found = self.project(actor, path)
        if path == actor.project != ROOT:
            raise DsecError("denied", f"{path} is your own project: its quotas are set by an admin of one above it")
        self._no_more(path.rpartition("/")[0], quotas)
        given = {name: value for name in NAMES if (value := getattr(quotas, name)) is not None}
        if both := sorted(given.keys() & set(unset)):
            raise DsecError("invalid", f"{both[0]} is to be set and unset at once: say one of them")
        found.quotas = msgspec.structs.replace(found.quotas, **(dict.fromkeys(unset) | given))
        return found

    def remove_project(self, actor: Actor, path: str, live: int) -> None:
        """live: how many sandboxes it has."""
        _must(actor, "admin", "remove a project")
        self.project(actor, path)
        if path == actor.project:
            raise DsecError("denied", f"{path} is your own project: an admin of one above it can remove it")
        below = [one for one in self.projects if one != path and within(one, path)]
        members = [one.name for one in self.principals.values() if one.project == path]
        if below or members or live:
            has = (
                f"the project {below[0]}"
                if below
                else f"the principal {members[0]}"
                if members
                else f"{live} sandboxes"
            )
            raise DsecError("conflict", f"{path} still has {has}: remove what is in it first")
        del self.projects[path]

    def _no_more(self, parent: str, quotas: Quotas) -> None:
        """No project is given more than the one above it has."""
        for name in NAMES:
            asked, has = getattr(quotas, name), self.limit(parent, name) if parent else None
            if asked is not None and has is not None and asked > has[0]:
                raise DsecError(
                    "denied",
                    f"{name} {asked:g} is more than the {has[0]:g} of {has[1]}: nobody hands on more than he holds",
                    detail={"project": has[1], "quota": name, "limit": has[0], "asked": asked},
                )

    # -- principals ---------------------------------------------------------------------------------------------------
    def add_principal(self, actor: Actor, name: str, project: str, role: Granted, uid: int | None) -> Principal:
        _must(actor, "admin", "add a principal")
        self.project(actor, project)
        if RANK[role] > RANK[actor.role]:
            raise DsecError("denied", f"you are {actor.role} of {actor.project} and cannot make anybody {role}")
        if name in self.principals:
            raise DsecError("conflict", f"there is a principal {name} on this host: take another name")
        if uid is not None and actor.project != ROOT:
            raise DsecError("denied", "user ids are the host's: only an admin of the root project says whose one is")
        if uid is not None and uid in self.by_uid:
            raise DsecError(
                "conflict", f"uid {uid} is principal {self.by_uid[uid].name} already: remove that one first"
            )
        _room(len(self.principals), "principals")
        made = self.principals[name] = Principal(name, project, role, self.next_number, uid)
        self.next_number += 1
        if uid is not None:
            self.by_uid[uid] = made
        return made

    def remove_principal(self, actor: Actor, name: str) -> tuple[Principal, list[Token]]:
        """It, and its tokens, which go with it."""
        _must(actor, "admin", "remove a principal")
        found = self.principal(actor, name)
        del self.principals[name]
        if found.uid is not None:
            del self.by_uid[found.uid]
        gone = self.tokens_of(name)
        for token in gone:
            del self.tokens[token.id]
        return found, gone

    # -- tokens -------------------------------------------------------------------------------------------------------
    def tokens_of(self, name: str) -> list[Token]:
        return [token for token in self.tokens.values() if token.principal == name]

    def create_token(self, actor: Actor, token: Token) -> Token:
        """For oneself, or as an admin for anybody of one's subtree."""
        self._for(actor, token.principal, "make a token for another principal")
        if token.id in self.tokens:
            raise DsecError("conflict", "there is this token already: make a new one")
        if len(self.tokens_of(token.principal)) >= MOST_TOKENS:
            raise DsecError("quota", f"{token.principal} has {MOST_TOKENS} tokens: revoke one first", retryable=False)
        self.tokens[token.id] = token
        return token

    def revoke_token(self, actor: Actor, ident: str) -> Token:
        token = self.tokens.get(ident)
        owner = self.principals.get(token.principal) if token is not None else None
        if token is None or owner is None or not within(owner.project, actor.project):
            raise DsecError("not_found", f"no token {ident!r} in {actor.project}: `principal list` has those there are")
        self._for(actor, token.principal, "revoke a token of another principal")
        return self.tokens.pop(ident)

    def _for(self, actor: Actor, name: str, what: str) -> None:
        if self.principal(actor, name).name != actor.name:
            _must(actor, "admin", what)


def _must(actor: Actor, role: Role, what: str) -> None:
    if RANK[actor.role] < RANK[role]:
        raise DsecError(
            "denied", f"{actor.name} is {actor.role} of {actor.project}; to {what}, one must be {role} there"
        )


def _room(count: int, what: str) -> None:
    if count >= MOST:
        raise DsecError(
            "quota", f"this host has {count} {what}, as many as it takes: remove some first", retryable=False
        )
