"""From what a task declares and what this host can do to a backend. Pure: no I/O, one table, lightest row first.

The first row that gives all that the task needs, and that this host has, is taken. A row is passed over for a reason
that can be said in words; what would change the choice is found by asking again with one thing changed. Isolation is a
need like the others: no row that shares the host's kernel ever takes a hostile task, whatever else is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec
from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.wire import sandbox as wire

Gives = Literal["state", "device", "own-kernel", "system", "screen", "other-os"]
Form = Literal["layers", "disk"]

CALL_S: Final = 60.0  # longer ones would hold a warm container that others wait for


class Row(Struct, frozen=True):
    """What a backend gives. image: the form of image that it starts from."""

    backend: str
    image: Form
    gives: frozenset[Gives]


TABLE: Final = (
    Row("fncall", "layers", frozenset({"device"})),
    Row("container", "layers", frozenset({"state", "device"})),
    Row("microvm", "layers", frozenset({"state", "own-kernel"})),
    Row("fullvm", "disk", frozenset({"state", "own-kernel", "system", "screen", "other-os"})),
)

# Why a row without it will not do.
_WITHOUT: Final[dict[Gives, str]] = {
    "state": "keeps nothing between calls",
    "device": "gets no device of the host",
    "own-kernel": "shares the host's kernel",
    "system": "runs commands without an init of its own, mounts or modules",
    "screen": "has no screen",
    "other-os": "runs Linux programs only",
}
_FORMS: Final[dict[Form, str]] = {"layers": "starts from layers (base, workspace)", "disk": "starts from a disk image"}
# How a change of what is declared reads behind `if`: when it becomes true, and when it no longer is.
_CHANGED: Final = {
    "stateless": ("it were one call that keeps nothing", "it had to keep something between commands"),
    "kernel": ("it needed a kernel of its own", "it needed no kernel of its own"),
    "system": ("it needed a whole system (an init, Docker inside, mounts, modules)", "it needed no whole system"),
    "gui": ("it needed a screen", "it needed no screen"),
}


class Task(Struct, frozen=True, kw_only=True):
    """What is to run. images: the forms in which its image is here; layered: with a workspace or toolkits above it."""

    needs: wire.Needs = wire.Needs()
    device: bool = False
    images: frozenset[Form] = frozenset({"layers", "disk"})
    layered: bool = False

    def asks(self) -> Iterator[Gives]:
        """What its row must give."""
        needs = self.needs
        if not needs.stateless or (needs.life_s is not None and needs.life_s > CALL_S):
            yield "state"
        if needs.trust == "hostile" or needs.kernel:
            yield "own-kernel"
        if needs.system:
            yield "system"
        if needs.gui:
            yield "screen"
        if needs.os == "other":
            yield "other-os"
        if self.device:
            yield "device"


class Host(Struct, frozen=True, kw_only=True):
    """What this host lacks for each backend, in words; "" is nothing. emulated: its VMs run without KVM."""

    fncall: str = ""
    container: str = ""
    microvm: str = ""
    fullvm: str = ""
    emulated: bool = False


def against(row: Row, task: Task) -> str:
    """Why a backend does not fit what the task declares, whatever the host; "" when it does."""
    for asked in task.asks():
        if asked not in row.gives:
            if asked == "state" and task.needs.stateless:
                return f"is for calls of at most {CALL_S:g} s"
            hostile = asked == "own-kernel" and task.needs.trust == "hostile"
            return _WITHOUT[asked] + (", which hostile code must not" if hostile else "")
    if row.image not in task.images:
        return f"{_FORMS[row.image]}, and the image is none"
    return "takes no workspace and no toolkits" if task.layered and row.image == "disk" else ""


def _verdicts(task: Task, host: Host) -> list[wire.Considered]:
    found = []
    for row in TABLE:
        lacks: str = getattr(host, row.backend)
        found.append(wire.Considered(row.backend, against(row, task) or (f"cannot run here: {lacks}" if lacks else "")))
    return found


def choose(task: Task, host: Host) -> wire.Chosen:
    """The choice, its reason in a sentence, what was held against each, and what would change it."""
    considered = _verdicts(task, host)
    picked = _first(considered)
    changes = [
        wire.Change(what, other)
        for what, task_then, host_then in _variants(task, host)
        if (other := _first(_verdicts(task_then, host_then))) != picked
    ]
    return wire.Chosen(backend=picked, reason=_reason(picked, considered, host), considered=considered, changes=changes)


def require(task: Task, host: Host) -> wire.Choice:
    """As `choose`, for somebody who goes on with it; `unsupported` when nothing fits."""
    chosen = choose(task, host)
    if not chosen.backend:
        raise DsecError("unsupported", chosen.reason)
    return wire.Choice(chosen.backend, chosen.reason)


def unfit(backend: str, task: Task) -> str:
    """As `against`, by the backend's name."""
    return against(next(row for row in TABLE if row.backend == backend), task)


def isolation(spec: wire.Spec) -> wire.Needs:
    """What is asked for of a sandbox that is there already: its needs, and a VM where one was named."""
    needs = spec.needs or wire.Needs()
    return msgspec.structs.replace(needs, kernel=True) if spec.backend in ("microvm", "fullvm") else needs


def check(backend: str, task: Task) -> None:
    """A backend that was named is never replaced: `unsupported` when it does not fit what was declared beside it."""
    if why := unfit(backend, task):
        raise DsecError("unsupported", f"backend {backend} was asked for, but it {why}: leave the choice to `auto`")


def _first(considered: list[wire.Considered]) -> str:
    return next((one.backend for one in considered if not one.why), "")


def _reason(picked: str, considered: list[wire.Considered], host: Host) -> str:
    if not picked:
        return "no backend fits: " + "; ".join(f"{one.backend} {one.why}" for one in considered)
    order = [one.backend for one in considered]
    passed = [f"{one.backend} {one.why}" for one in considered[: order.index(picked)]]
    slow = " (emulated here: there is no KVM)" if host.emulated and picked in ("microvm", "fullvm") else ""
    return f"{picked}{slow} is the lightest that fits" + (": " + "; ".join(passed) if passed else "")


def _variants(task: Task, host: Host) -> Iterator[tuple[str, Task, Host]]:
    """Everything with one thing changed, in words that follow `if`."""
    needs = task.needs
    for name, words in _CHANGED.items():
        was: bool = getattr(needs, name)
        yield words[was], _with(task, msgspec.structs.replace(needs, **{name: not was})), host
    hostile = needs.trust == "hostile"
    text = "it were trusted to share the host's kernel" if hostile else "it were hostile"
    yield text, _with(task, msgspec.structs.replace(needs, trust="normal" if hostile else "hostile")), host
    other = needs.os == "other"
    text = "it ran on Linux" if other else "it did not run on Linux"
    yield text, _with(task, msgspec.structs.replace(needs, os="linux" if other else "other")), host
    if needs.stateless and needs.life_s is not None and needs.life_s > CALL_S:
        shorter = msgspec.structs.replace(needs, life_s=CALL_S)
        yield f"it took {CALL_S:g} s or less", _with(task, shorter), host
    text = "it needed no device" if task.device else "it needed a device"
    yield text, msgspec.structs.replace(task, device=not task.device), host
    for row in TABLE:
        if row.image not in task.images:
            forms = frozenset[Form]({row.image})
            changed = msgspec.structs.replace(task, images=forms, layered=False)
            yield f"its image were one that {row.backend} starts from", changed, host
        if lacks := getattr(host, row.backend):
            yield f"{row.backend} could run here ({lacks})", task, msgspec.structs.replace(host, **{row.backend: ""})


def _with(task: Task, needs: wire.Needs) -> Task:
    return msgspec.structs.replace(task, needs=needs)
