"""Answers of many hosts as one, and their events as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from dsecd.errors import DsecError
from dsecd.fleethosts import Host
from dsecd.wire import base, sandbox

S = TypeVar("S", bound=base.Result)
LOOK_S: Final = 0.5  # for hosts that came, or came back
BROKE: Final = ("network", "outcome_unknown", "shutting_down")


def good(answers: dict[Host, Any]) -> list[Any]:
    """Without the errors; raises one when there is nothing else."""
    good = [one for one in answers.values() if not isinstance(one, DsecError)]
    if not good:
        raise next(iter(answers.values()), None) or DsecError("network", "no host of this fleet can be reached")
    return good


def summed(found: list[S], **fixed: Any) -> S:
    """Numbers added up, lists united, tables of numbers added up; `fixed` as it is, the rest as the first has it."""
    out = msgspec.structs.replace(found[0], **fixed)
    for name in out.__struct_fields__:
        values = [getattr(one, name) for one in found]
        if name in fixed or isinstance(values[0], str | bool):
            continue
        if isinstance(values[0], dict):
            setattr(out, name, {key: sum(one.get(key, 0) for one in values) for one in values for key in one})
        elif isinstance(values[0], list):
            setattr(out, name, sorted({item for one in values for item in one}))
        else:
            setattr(out, name, sum(values))
    return out


async def follow(
    up: Callable[[], Iterable[Host]], params: sandbox.Events, send: Callable[[sandbox.Event], None]
) -> None:
    """Pass on the events of all hosts that are up, also of those that come later, or come back. Until it is cancelled,
    or a host refuses; what happens while a host is away is not known here."""

    def notified(_method: str, raw: msgspec.Raw) -> None:
        send(msgspec.json.decode(raw, type=sandbox.Event))

    async def one(host: Host) -> None:
        try:
            await host.call("sandbox.events", params, notified)
        except DsecError as exc:
            if exc.kind not in BROKE:
                raise

    tasks: dict[Host, asyncio.Task[None]] = {}
    try:
        while True:
            for host, task in list(tasks.items()):
                if task.done():
                    del tasks[host]
                    task.result()
            for host in up():
                if host not in tasks:
                    tasks[host] = asyncio.ensure_future(one(host))
            await asyncio.sleep(LOOK_S)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
