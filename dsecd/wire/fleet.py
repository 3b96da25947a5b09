"""Messages of `fleet.*`: what a coordinator says of its hosts. A single daemon has none of them."""

from __future__ import annotations

from msgspec import Struct

from dsecd.wire.base import Name, Params, Result
from dsecd.wire.daemon import Check


class StatusParams(Params):
    """`fleet.status`."""


class Host(Struct, omit_defaults=True):
    """One host as it was last seen. tag: first part of its sandboxes' ids. problem: why nothing can be asked of it.

    pressure: why it takes no new sandboxes for the moment.
    load: the fullest of what binds, 0 to 1, with what was placed since. age_s: since it last answered. in_flight:
    clients' requests that wait for it. trouble: why it was lost last, trouble_s ago; it may be back.
    """

    name: str
    url: str
    tag: str = ""
    tags: list[str] = []
    version: str = ""
    problem: str = ""
    cordoned: bool = False
    pressure: str = ""
    sandboxes: int = 0
    sandboxes_max: int = 0
    cpu: float = 0.0
    cpu_max: float = 0.0
    memory_mb: int = 0
    memory_max_mb: int = 0
    load: float = 0.0
    age_s: float | None = None
    in_flight: int = 0
    trouble: str = ""
    trouble_s: float | None = None


class Status(Result):
    hosts: list[Host]
    placed: int = 0
    refused: int = 0


class Cordon(Params):
    """`fleet.cordon`: `host` takes no new sandboxes; on=false: it does again. The host itself keeps that."""

    host: Name
    on: bool = True


class Cordoned(Result):
    """sandboxes: how many it still has."""

    sandboxes: int


class DoctorParams(Params):
    """`fleet.doctor`: `daemon.doctor` of every host."""


class Examined(Struct, omit_defaults=True):
    """One host. problem: why it could not be asked; it has no checks then."""

    name: str
    url: str
    version: str = ""
    problem: str = ""
    checks: list[Check] = []


class Doctors(Result):
    hosts: list[Examined]
