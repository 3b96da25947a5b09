"""A place of calls: a container whose agent runs one call after the other, and the limits around each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from dsecd.agent.calls import CallChannel, CallEnd, CallPlan
from dsecd.agent.link import AgentLink
from dsecd.cgroup.meter import CallFigures, CallMeter
from dsecd.errors import DsecError


class Where(Struct, frozen=True):
    """What places of one kind have in common. devices: asked for as a container does, `["gpu", "fuse:2"]`."""

    image: str
    devices: tuple[str, ...] = ()


class Place(Protocol):
    """What a place is made of; whoever has one calls `end`."""

    @property
    def link(self) -> AgentLink: ...
    @property
    def meter(self) -> CallMeter: ...
    @property
    def env(self) -> Mapping[str, str]:
        """Variables that its devices want every program to have."""

    async def end(self) -> None:
        """Kill and remove it, whatever state it is in."""


class Places(Protocol):
    """Where places come from: this room knows no images and no runtimes."""

    apparmor: str

    def check(self, where: Where) -> None:
        """Whether there may be places there: `not_found`, `invalid`."""

    async def start(self, where: Where) -> Place: ...


def zygote_command(profile: str, preload: list[str]) -> tuple[str, ...]:
    """The command line that makes an image's python3 a zygote (dsecd/fncall/zygote.py)."""
    text = Path(__file__).with_name("zygote.py").read_text()
    return ("python3", "-I", "-c", text, profile, *preload)


class Outcome(Struct, frozen=True):
    end: CallEnd
    figures: CallFigures


class Box:
    """One place with a cell ready, or nearly: `run` only after `ready`, and one at a time."""

    def __init__(self, place: Place, zygote: tuple[str, ...]) -> None:
        self._place = place
        self._channel = CallChannel(place.link)
        self._channel.open(zygote)
        self.calls = 0
        self.worth = 1  # how many it is good for

    @classmethod
    async def start(cls, places: Places, where: Where, zygote: tuple[str, ...]) -> Box:
        """Make one and wait for its first cell. `unsupported` when the image's python3 can be no zygote."""
        place = await places.start(where)
        try:
            box = cls(place, zygote)
            await box.ready()
        except BaseException:
            await asyncio.shield(place.end())
            raise
        return box

    @property
    def broken(self) -> bool:
        return self._channel.broken is not None or not self._place.link.alive

    @property
    def env(self) -> Mapping[str, str]:
        return self._place.env

    async def ready(self) -> None:
        await self._channel.ready()

    async def run(self, plan: CallPlan, memory: int, processes: int) -> Outcome:
        """Run it within these limits of bytes and tasks. A cancelled one is killed before this returns."""
        meter = self._place.meter
        self.calls += 1
        try:
            meter.begin(memory, processes)
            try:
                end = await self._channel.run(plan)
            except asyncio.CancelledError:
                with contextlib.suppress(DsecError, OSError):
                    await self._channel.ready()  # the next cell is there when everything of this one is gone
                    meter.end()
                raise
            return Outcome(end, meter.end())
        except OSError as exc:  # the group went away under it
            raise DsecError("sandbox_dead", f"the place of a call is gone: {exc.strerror}") from exc

    async def end(self) -> None:
        await self._place.end()
