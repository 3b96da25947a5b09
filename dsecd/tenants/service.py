"""Principals of this host: who a connection is, and every change, written to state.db before it is answered."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dsecd.errors import DsecError
from dsecd.sandbox.store import Statement, Store
from dsecd.tenants.ledger import Ledger
from dsecd.tenants.model import Actor, Principal, Project, Token, Tree
from dsecd.wire import tenants as wire
from dsecd.wire.access import ROOT, Role, within
from dsecd.wire.call import Peer

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS tenants (kind TEXT NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL,"
    " PRIMARY KEY (kind, name)) WITHOUT ROWID"
)
_KINDS: Final[dict[str, type[Any]]] = {"project": Project, "principal": Principal, "token": Token}
_encode = msgspec.json.Encoder().encode


class Tenants:
    """One per daemon. Changes take turns; what `tree` says is always what state.db says, or about to.

    on_change: called after one that concerns connections (dsecd.main).
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self.tree = Tree()
        self.ledger = Ledger(self.tree)
        self.on_change: Callable[[], None] = lambda: None

    async def open(self) -> None:
        await self._store.write([(_SCHEMA, ())])
        tree = self.tree
        for kind, name, body in await self._store.query("SELECT kind, name, body FROM tenants", ()):
            if kind == "number":
                tree.next_number = max(tree.next_number, msgspec.json.decode(body, type=int))
                continue
            found = msgspec.json.decode(body, type=_KINDS[kind])
            tables: dict[str, dict[str, Any]] = {
                "project": tree.projects, "principal": tree.principals, "token": tree.tokens
            }  # fmt: skip
            tables[kind][name] = found
            if isinstance(found, Principal) and found.uid is not None:
                tree.by_uid[found.uid] = found

    # -- who ----------------------------------------------------------------------------------------------------------
    def greet(self, peer: Peer) -> Peer:
        """By its user id. While there is no principal at all, whoever may open the socket is root's admin."""
        tree = self.tree
        if (known := tree.by_uid.get(peer.real_uid)) is not None:
            return _as(peer, known)
        role: Role = "admin" if peer.real_uid == 0 or not tree.principals else "nobody"
        name = f"uid:{peer.real_uid}"
        return Peer(peer.pid, peer.real_uid, peer.gid, name, ROOT, role, "", peer.real_uid, role != "admin")

    def login(self, peer: Peer, token: str) -> Peer:
        """`denied`: nobody's."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        known = self.tree.tokens.get(wire.token_id(digest))
        if known is None or known.sha256 != digest:
            raise DsecError("denied", "this token is nobody's on this host: it was revoked, or is of another one")
        return _as(peer, self.tree.principals[known.principal], known.id)

    def assume(self, peer: Peer, name: str) -> Peer:
        """Whom an admin of the root project asks for: a principal, or `uid:N` (a fleet says so of its clients)."""
        if peer.bounded:
            raise DsecError("denied", f"only an admin of the root project asks for others; {peer.principal} is none")
        if name.startswith("uid:") and name[4:].isdecimal() and len(name) <= 14:
            uid = int(name[4:])
            if uid == 0 != peer.real_uid:
                raise DsecError("denied", "only root asks for root")
            return self.greet(Peer(peer.pid, uid, peer.gid, real_uid=uid))
        known = self.tree.principals.get(name)
        if known is None:
            raise DsecError("denied", f"no principal {name[:80]!r} on this host: hosts of a fleet have the same ones")
        return _as(peer, known)

    def renewed(self, peer: Peer) -> Peer | None:
        """Who a connection is now; None: its principal or token is gone."""
        if peer.token:
            known = self.tree.tokens.get(peer.token)
            principal = self.tree.principals.get(known.principal) if known is not None else None
            return peer if principal is not None and principal.number == peer.uid else None
        return self.greet(peer)

    def gone(self, peer: Peer) -> bool:
        """Whether the principal or the token of a request is there no more."""
        if peer.principal.startswith("uid:"):
            return False
        known = self.tree.principals.get(peer.principal)
        return known is None or known.number != peer.uid or (peer.token != "" and peer.token not in self.tree.tokens)

    # -- changes ------------------------------------------------------------------------------------------------------
    async def create_project(self, actor: Actor, path: str, quotas: wire.Quotas) -> wire.Project:
        async with self._lock:
            made = self.tree.create_project(actor, path, quotas)
            await self._keep([_put("project", path, made)], lambda: self.tree.projects.pop(path, None))
            return self.public(made)

    async def set_project(self, actor: Actor, path: str, quotas: wire.Quotas, unset: list[Any]) -> wire.Project:
        async with self._lock:
            found = self.tree.projects.get(path)
            before = found.quotas if found is not None else wire.Quotas()
            found = self.tree.set_project(actor, path, quotas, unset)
            await self._keep([_put("project", path, found)], lambda: setattr(found, "quotas", before))
            return self.public(found)

    async def remove_project(self, actor: Actor, path: str) -> None:
        async with self._lock:
            found = self.tree.projects.get(path, Project(path))
            self.tree.remove_project(actor, path, self.ledger.used(path).sandboxes)
            await self._keep([_drop("project", path)], lambda: self.tree.projects.setdefault(path, found))

    async def add_principal(self, actor: Actor, params: wire.AddPrincipal) -> wire.Principal:
        async with self._lock:
            made = self.tree.add_principal(actor, params.name, params.project, params.role, params.uid)
            number = _put("number", "next", self.tree.next_number)
            undo = Actor("", ROOT, "admin")
            await self._keep(
                [_put("principal", made.name, made), number], lambda: self.tree.remove_principal(undo, made.name)
            )
            self.on_change()
            return self.shown(made)

    async def remove_principal(self, actor: Actor, name: str) -> None:
        async with self._lock:
            gone, tokens = self.tree.remove_principal(actor, name)

            def undo() -> None:
                self.tree.principals[name] = gone
                self.tree.tokens.update({token.id: token for token in tokens})
                if gone.uid is not None:
                    self.tree.by_uid[gone.uid] = gone

            await self._keep([_drop("principal", name), *(_drop("token", token.id) for token in tokens)], undo)
            self.on_change()

    async def create_token(self, actor: Actor, params: wire.CreateToken) -> wire.TokenMade:
        async with self._lock:
            made = Token(params.sha256, params.principal, round(time.time(), 3), params.label)
            self.tree.create_token(actor, made)
            await self._keep([_put("token", made.id, made)], lambda: self.tree.tokens.pop(made.id, None))
            return wire.TokenMade(id=made.id)

    async def revoke_token(self, actor: Actor, ident: str) -> None:
        async with self._lock:
            gone = self.tree.revoke_token(actor, ident)
            await self._keep([_drop("token", ident)], lambda: self.tree.tokens.setdefault(ident, gone))
            self.on_change()

    async def _keep(self, statements: list[Statement], undo: Callable[[], Any]) -> None:
        """What cannot be written has not happened. A caller that gives up does not stop it half-way."""
        work = asyncio.ensure_future(self._store.write(statements))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait((work,))
            if work.exception() is not None:
                undo()
            else:
                self.on_change()
            raise
        except DsecError:
            undo()
            raise

    # -- looking ------------------------------------------------------------------------------------------------------
    def projects(self, actor: Actor) -> list[wire.Project]:
        return [self.public(one) for path, one in sorted(self.tree.projects.items()) if within(path, actor.project)]

    def public(self, project: Project) -> wire.Project:
        path = project.path
        return wire.Project(
            path=path, quotas=project.quotas, limits=self.tree.limits(path),
            used=msgspec.structs.replace(self.ledger.used(path)),
        )  # fmt: skip

    def principals(self, actor: Actor) -> list[wire.Principal]:
        found = sorted(self.tree.principals.items())
        return [self.shown(one) for _, one in found if within(one.project, actor.project)]

    def shown(self, one: Principal) -> wire.Principal:
        tokens = [token.info for token in self.tree.tokens_of(one.name)]
        return wire.Principal(
            name=one.name, project=one.project, role=one.role, number=one.number, uid=one.uid, tokens=tokens
        )


def _as(peer: Peer, who: Principal, token: str = "") -> Peer:
    bounded = (who.project, who.role) != (ROOT, "admin")
    return Peer(peer.pid, who.number, peer.gid, who.name, who.project, who.role, token, peer.real_uid, bounded)


def _put(kind: str, name: str, body: Any) -> Statement:
    return "INSERT OR REPLACE INTO tenants (kind, name, body) VALUES (?, ?, ?)", (kind, name, _encode(body))


def _drop(kind: str, name: str) -> Statement:
    return "DELETE FROM tenants WHERE kind = ? AND name = ?", (kind, name)
