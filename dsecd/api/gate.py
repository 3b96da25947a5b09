"""Whether a caller may do what he asks for. Only of those who are not the root project's admin; those may all."""

from __future__ import annotations

from typing import Any, Final

from dsecd.erofs.names import taken
from dsecd.errors import DsecError
from dsecd.rollout.service import Rollouts
from dsecd.sandbox.facts import forms
from dsecd.sandbox.manager import Manager
from dsecd.tenants.audit import AuditLog
from dsecd.wire.access import AUDITED, RANK, ROOT, within
from dsecd.wire.call import Call, Handler, Peer
from dsecd.wire.methods import METHODS

# They give an image a name, and names are everybody's.
_NAMING: Final = frozenset(
    ("image.import", "image.bootstrap", "image.collapse", "image.pull", "environment.import", "sandbox.pack_diff")
)


class Gate:
    """What a method's `access` says, held against the caller. An id outside his subtree is as one that is not there:
    whether somebody else has it is nothing to tell.
    """

    def __init__(self, manager: Manager, rollouts: Rollouts, audit: AuditLog) -> None:
        self._manager = manager
        self._rollouts = rollouts
        self._audit = audit

    def check(self, call: Call, params: Any) -> None:
        """`denied`, `not_found`."""
        try:
            self._check(call, params)
        except DsecError as exc:
            if call.name in AUDITED:
                self._audit.refused(call.name, params, call.peer, exc)
            raise

    def _check(self, call: Call, params: Any) -> None:
        peer, access = call.peer, call.method.access
        if access.scope == "host" and peer.project != ROOT and peer.role != "nobody":
            text = f"{call.name} is about the whole host, and {peer.principal} is of {peer.project}: ask {ROOT}'s admin"
            raise DsecError("denied", text, detail={"needs": ROOT})
        if RANK[peer.role] < RANK[access.role]:
            raise DsecError("denied", _who(peer, call.name, access.role), detail={"needs": access.role})
        if access.scope == "sandbox":
            record = self._manager.record(params.id)
            if not within(record.owner.project, peer.project):
                raise DsecError("not_found", f"no sandbox {params.id[:80]!r}")
            params.id = record.id  # the one that was looked at, whoever has that name when its turn comes
        if call.name in _NAMING:
            self._refuse_taken(params.name)

    def _refuse_taken(self, name: str | None) -> None:
        """A name that moved would be another image to everybody. (It may be taken yet: `Limits.new_name`.)"""
        if name is None:
            raise DsecError("denied", "names of images are everybody's: say the name that it is to have here")
        try:
            forms(self._manager.rooms.images, self._manager.rooms.vms.disks, name)
        except DsecError as exc:
            if exc.kind in ("not_found", "invalid"):
                return
            raise
        raise taken(name)

    def guarded(self, table: dict[str, Handler]) -> dict[str, Handler]:
        """The table with those handlers guarded whose subject must be looked up in the registry."""

        def around(handler: Handler) -> Handler:
            async def checked(call: Call, params: Any) -> Any:
                if call.peer.bounded and params.id is not None:
                    owner = await self._rollouts.owner(params.id)
                    if not within(owner.project, call.peer.project):
                        raise DsecError("not_found", f"no rollout {params.id[:80]!r}")
                return await handler(call, params)

            return checked

        return {
            name: around(handler) if METHODS[name].access.scope == "rollout" else handler
            for name, handler in table.items()
        }


def _who(peer: Peer, method: str, role: str) -> str:
    if peer.role == "nobody":
        return (
            f"{peer.principal} is no principal of this host: log in with a token ($DSEC_TOKEN_FILE), or ask an admin "
            f"(dsecctl principal add NAME --uid {peer.real_uid})"
        )
    return f"{method} is for the role {role}, and {peer.principal} is {peer.role} of {peer.project}: ask an admin of it"
