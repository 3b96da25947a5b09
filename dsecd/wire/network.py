"""Messages about networks of sandboxes: other rules, what they are now, what was refused."""

from __future__ import annotations

from msgspec import Struct

from dsecd.wire.base import Id, Params, Result
from dsecd.wire.sandbox import Rules


class SetNetwork(Params):
    """`sandbox.set_network`: these rules in place of all it had, at once. None allowed: it reaches nothing."""

    id: Id
    rules: Rules = {}


class NetworkOf(Params):
    """`network.get`, `network.log`."""

    id: Id


class ServicesParams(Params):
    """`network.services`."""


class SandboxNetwork(Result):
    """attached: it has a link at all. addresses: its own. open: what names that it asked for have opened."""

    id: str
    rules: dict[str, bool] = {}
    attached: bool = False
    addresses: list[str] = []
    open: list[str] = []


class Refusal(Struct):
    """Something that it tried and may not. what: `name HOST`, or `ADDRESS PROTOCOL PORT`. Times are UNIX seconds."""

    what: str
    count: int
    first_at: float
    last_at: float


class RefusalLog(Result):
    """The last one is the one seen last; at most 256, since the daemon started. Packets are sampled, names are not."""

    refusals: list[Refusal]


class Service(Struct):
    """What rules may call by name."""

    name: str
    hosts: list[str]
    ports: list[str]


class Services(Result):
    services: list[Service]
