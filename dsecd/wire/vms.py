"""Messages of `vm.*`: what only virtual machines have."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from dsecd.wire.base import Id, Params, Result


class ConsoleParams(Params):
    """`vm.console`: what the guest wrote to its serial console."""

    id: Id


class Console(Result):
    """The last 64 KiB. The guest's own words: not to be trusted, and full of escape sequences if it likes."""

    data: bytes


class SnapshotParams(Params):
    """`vm.snapshot`, `vm.revert`, `vm.drop`: one snapshot of a full VM's disk, by name."""

    id: Id
    name: Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class SnapshotsParams(Params):
    """`vm.snapshots`."""

    id: Id


class Snapshots(Result):
    """Names, oldest first."""

    names: list[str]
