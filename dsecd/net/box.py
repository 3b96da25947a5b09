"""One sandbox's end of the network: its rules, what was learnt for them, and what it was refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from dsecd.net.filter import set_name
from dsecd.net.netlink import Nftables
from dsecd.net.refusals import Refusals
from dsecd.net.rules import Grant, Policy

GRACE_S: Final = 300.0  # an address stays open longer than its name's answer says: programs keep what they looked up


class Box:
    """What the daemon knows of it. The forwarder asks it (`forwarder.Asker`)."""

    def __init__(self, ident: str, slot: int, tell: Callable[[str], None]) -> None:
        self.id, self.slot = ident, slot
        self.rules: dict[str, bool] = {}
        self.policy = Policy()
        self.sets: list[str] = []
        self.six = False
        self.refusals = Refusals(tell)
        self.nftables: Nftables | None = None
        self._open_until: dict[tuple[str, str], float] = {}

    def become(self, rules: Mapping[str, bool], policy: Policy, sets: list[str]) -> None:
        """What the packet filter has from now on."""
        self.rules, self.policy, self.sets = dict(rules), policy, sets
        self._open_until = {key: until for key, until in self._open_until.items() if key[0] in sets}

    def for_name(self, name: str) -> tuple[Grant, ...]:
        return self.policy.for_name(name)

    def refused(self, what: str) -> None:
        self.refusals.add(what)

    def versions(self) -> tuple[int, ...]:
        return (4, 6) if self.six else (4,)

    def learn(self, grants: tuple[Grant, ...], addresses: list[str], ttl: int) -> None:
        """See `forwarder.Asker`. What is open for longer than that already costs nothing."""
        moment = time.monotonic()
        wanted = [
            (set_name(self.slot, grant.mark, 6 if ":" in address else 4), address)
            for grant in grants
            for address in addresses
        ]
        due = [one for one in wanted if self._open_until.get(one, 0.0) < moment + ttl]
        if not due:
            return
        if self.nftables is None:
            raise OSError("the router is gone")
        self.nftables.put(due, ttl + GRACE_S)
        if len(self._open_until) > 16384:  # what went by itself
            self._open_until = {key: until for key, until in self._open_until.items() if until > moment}
        self._open_until.update(dict.fromkeys(due, moment + ttl + GRACE_S - 1))

    def learnt(self) -> list[str]:
        """Addresses that are open because a name was asked for."""
        moment = time.monotonic()
        return sorted({address for (_, address), until in self._open_until.items() if until > moment})
