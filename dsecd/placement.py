"""Which host gets a sandbox: filter, then the least loaded of a few drawn at random. Pure; the fleet and its simulator
use the same code.

A view of a host is as old as the last look at it. What was placed since is laid over it (`Overlay`), so that a burst
between two looks does not all go where the last look saw room.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import msgspec
from msgspec import Struct

from dsecd.errors import DsecError

MUCH = 0.25  # of a host's load
BURST = "burst"  # tag of hosts that only take what may leave, and only when the others are full


class Want(Struct, frozen=True):
    """What one sandbox needs. MiB, cores. images: of its stack. group: its replicas are spread over hosts."""

    backend: str = "container"
    cpu: float = 1.0
    memory_mb: int = 1024
    disk_mb: int = 4096
    images: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    group: str = ""


class View(Struct):
    """One host as it was last seen. images, devices: by name; None: nobody knows, the host itself has the word.

    *_max: what it may promise in all; used: what it has promised. why: why it takes nothing now; "" it does.
    """

    name: str
    tags: frozenset[str] = frozenset()
    backends: frozenset[str] = frozenset({"container"})
    images: frozenset[str] | None = None
    devices: frozenset[str] | None = None
    sandboxes_max: int = 4000
    cpu_max: float = 1.0
    memory_max_mb: int = 1
    sandboxes: int = 0
    cpu: float = 0.0
    memory_mb: int = 0
    why: str = ""
    # Laid over: placed, and not in a look yet.
    placed: int = 0
    placed_cpu: float = 0.0
    placed_memory_mb: int = 0
    groups: dict[str, int] = {}
    done: deque[tuple[float, Want]] = msgspec.field(default_factory=deque)

    def load(self) -> float:
        """The fullest of what binds, 0 to 1."""
        return max(
            (self.sandboxes + self.placed) / self.sandboxes_max,
            (self.cpu + self.placed_cpu) / self.cpu_max,
            (self.memory_mb + self.placed_memory_mb) / self.memory_max_mb,
        )

    def fits(self, want: Want) -> bool:
        return self._room(want, self.placed, self.placed_cpu, self.placed_memory_mb)

    def might(self, want: Want) -> bool:
        """As far as the last look goes: what was placed since may be in it already, and count twice."""
        return self._room(want, 0, 0.0, 0)

    def _room(self, want: Want, placed: int, cpu: float, memory_mb: int) -> bool:
        return (
            self.sandboxes + placed < self.sandboxes_max
            and self.cpu + cpu + want.cpu <= self.cpu_max
            and self.memory_mb + memory_mb + want.memory_mb <= self.memory_max_mb
        )

    def lay(self, want: Want, sign: int = 1) -> None:
        """It gets one more, or (-1) it is known by now, or did not come to be."""
        self.placed += sign
        self.placed_cpu += sign * want.cpu
        self.placed_memory_mb += sign * want.memory_mb
        if want.group:
            count = self.groups.pop(want.group, 0) + sign
            if count:  # groups come and go by the thousand
                self.groups[want.group] = count

    def settle(self, want: Want, at: float) -> None:
        """What was laid over has come to be, at this moment: a look that begins later has it."""
        self.done.append((at, want))

    def seen(self, began: float, sandboxes: int, cpu: float, memory_mb: int) -> None:
        """A look that began then, and what it saw promised."""
        while self.done and self.done[0][0] < began:
            self.lay(self.done.popleft()[1], -1)
        self.sandboxes, self.cpu, self.memory_mb = sandboxes, cpu, memory_mb

    def lost(self, why: str) -> None:
        """It cannot be reached."""
        self.why = why
        while self.done:
            self.lay(self.done.popleft()[1], -1)


class Policy(Struct, frozen=True):
    """draws: hosts compared for one placement. burst_above: load of all others together, beyond which hosts tagged
    `burst` take containers whose images are all in burst_images."""

    draws: int = 3
    burst_above: float = 0.8
    burst_images: frozenset[str] = frozenset()


def unfit(view: View, want: Want) -> str:
    """Why this host cannot have it now, whatever its load; "" it can."""
    return view.why or lacks(view, want)


def lacks(view: View, want: Want) -> str:
    """Why this host never can; "" it can."""
    if want.backend not in ("auto", *view.backends):
        return f"has no {want.backend}"
    if view.images is not None and (absent := [ref for ref in want.images if ref not in view.images]):
        return f"has no image {absent[0]}"
    if view.devices is not None and (absent := [ref for ref in want.devices if ref not in view.devices]):
        return f"has no device pool {absent[0]}"
    return ""


def eligible(
    views: Iterable[View], want: Want, policy: Policy, chance: random.Random, tried: Collection[str] = ()
) -> list[View]:
    """Hosts that may have it and have room, as far as is known, in any order.

    `unsupported`: none ever can; `capacity`: none now.
    """
    able = [view for view in views if view.name not in tried]
    reasons = {view.name: why for view in able if (why := unfit(view, want))}
    able = [view for view in able if view.name not in reasons]
    home = [view for view in able if BURST not in view.tags]
    room = [view for view in home if view.fits(want)]
    if _may_leave(want, policy) and (not home or not room or _together(home) > policy.burst_above):
        room += [view for view in able if BURST in view.tags and view.fits(want)]
    if not room:  # the hosts have the last word
        room = [view for view in home if view.might(want)]
    if room:
        chance.shuffle(room)
        return room
    if able or tried:
        raise DsecError("capacity", f"no host has room for it now ({len(able) + len(tried)} could have it)")
    said = "; ".join(f"{name} {why}" for name, why in sorted(reasons.items())[:4])
    raise DsecError("unsupported" if reasons else "capacity", f"no host can have it: {said or 'there is none'}")


def place(
    views: Sequence[View], wants: Sequence[Want], policy: Policy, chance: random.Random, tried: Collection[str] = ()
) -> list[View | DsecError]:
    """A host for each, laid over its view, or why there is none."""
    out: list[View | DsecError] = []
    for want in wants:
        few = len(views) <= policy.draws or want.group
        found = [] if few else _drawn(views, want, policy, chance, tried)
        try:
            found = found or eligible(views, want, policy, chance, tried)
        except DsecError as exc:
            out.append(exc)
            continue
        if want.group:
            best = min(found, key=lambda view: (view.groups.get(want.group, 0), view.load()))
        else:
            best = min(found[: policy.draws], key=View.load)
        best.lay(want)
        out.append(best)
    return out


def by_key(ranked: Sequence[View], want: Want, policy: Policy) -> list[View]:
    """Where what has a key goes: hosts in the order that belongs to the key (`ranked`), to the host to take. The first
    that may have it: whoever asks again with that key, wherever, comes to the same one, even when the first call is
    still on its way. Only one that is much fuller than the next few is passed over."""
    able = sorted((view for view in ranked if not unfit(view, want) and view.fits(want)), key=lambda v: BURST in v.tags)
    few = able[: policy.draws]
    least = min((view.load() for view in few), default=0.0)
    return [next(view for view in few if view.load() <= least + MUCH)] if few else list(ranked)


def _drawn(
    views: Sequence[View], want: Want, policy: Policy, chance: random.Random, tried: Collection[str]
) -> list[View]:
    """A few at random that may have it and have room: as if all had been filtered first. []: look at all of them."""
    if _may_leave(want, policy):
        return []
    found: list[View] = []
    for _ in range(4 * policy.draws):
        view = views[int(chance.random() * len(views))]
        if view.fits(want) and view.name not in tried and BURST not in view.tags and not unfit(view, want):
            found.append(view)
            if len(found) == policy.draws:
                break
    return found


def _may_leave(want: Want, policy: Policy) -> bool:
    return want.backend == "container" and bool(want.images) and policy.burst_images.issuperset(want.images)


def _together(views: Sequence[View]) -> float:
    """Load of these hosts as if they were one."""
    if not views:
        return math.inf
    return max(
        sum(view.sandboxes + view.placed for view in views) / sum(view.sandboxes_max for view in views),
        sum(view.cpu + view.placed_cpu for view in views) / sum(view.cpu_max for view in views),
        sum(view.memory_mb + view.placed_memory_mb for view in views) / sum(view.memory_max_mb for view in views),
    )
