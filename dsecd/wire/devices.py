"""Messages of `device.*`."""

from __future__ import annotations

from msgspec import Struct

from dsecd.wire.base import Params, Result


class ListDevices(Params):
    """`device.list`."""


class Device(Struct, omit_defaults=True):
    """One device of a pool. sandboxes: who has it. problem: why nobody can lease it; "" they can."""

    name: str
    file: str
    sandboxes: list[str] = []
    problem: str = ""


class DevicePool(Struct):
    """share: sandboxes that may have one device at once. waiting: requests in the queue."""

    name: str
    share: int
    devices: list[Device]
    waiting: int = 0


class FileProblem(Struct):
    """A CDI file or directory that cannot be used."""

    file: str
    text: str


class DevicePools(Result):
    pools: list[DevicePool]
    problems: list[FileProblem] = []
