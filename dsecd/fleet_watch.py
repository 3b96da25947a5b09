"""What a coordinator tells of itself and its hosts: status, doctor, traces that go through it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dsecd import spans
from dsecd.errors import DsecError
from dsecd.fleethosts import acting, at_host
from dsecd.wire import daemon, trace
from dsecd.wire import fleet as wire
from dsecd.wire.watch import LOOKS, public

if TYPE_CHECKING:
    from dsecd.fleet import Fleet
    from dsecd.fleet_front import Asked
    from dsecd.fleethosts import Host

KEPT: Final = 2000  # requests whose traces are kept
KEY_MAX: Final = 128  # as RequestKey: what is longer is refused by a host, and not kept here
DOCTOR_S: Final = 60.0  # a host's doctor starts programs; one that takes longer is not well
NAME: Final = "fleet"  # what traces call this process


class Watch:
    """`fleet.*` and `trace.*` of a coordinator, and what it keeps of requests that pass through it.

    A principal sees its own requests, and of hosts what they let it see.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._ring = spans.Ring(KEPT, NAME)
        self.methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "fleet.status": self._status, "fleet.cordon": self._cordon, "fleet.doctor": self._doctor,
            "trace.get": self._get, "trace.list": self._list,
        }  # fmt: skip

    def begin(self, method: str, sandbox: int | str | None, key: str | None, principal: str) -> spans.Trace | None:
        """Follow a request that has a request_id, or is answered here: its host follows the others."""
        if key is None and (method not in self._fleet.methods or method in LOOKS):
            return None
        if method.startswith("trace.") or (key is not None and len(key) > KEY_MAX):
            return None
        named = sandbox[:KEY_MAX] if isinstance(sandbox, str) else ""
        return self._ring.begin(key, method, named, principal, time.monotonic())

    def in_flight(self) -> Counter[str]:
        """Clients' requests that wait for a host, by its name."""
        return Counter(name for front in self._fleet.fronts for name in front.asked_hosts())

    # -- the fleet itself ---------------------------------------------------------------------------------------------
    async def _status(self, _asked: Asked, _params: wire.StatusParams) -> wire.Status:
        fleet, asked = self._fleet, self.in_flight()
        hosts = [host.public() for host in fleet.hosts.values()]
        for one in hosts:
            one.in_flight = asked[one.name]
        return wire.Status(hosts=hosts, placed=fleet.placed, refused=fleet.refused)

    async def _cordon(self, _asked: Asked, params: wire.Cordon) -> wire.Cordoned:
        hosts = self._fleet.hosts
        host = hosts.get(params.host)
        if host is None:
            raise DsecError("not_found", f"no host {params.host!r}; there are {', '.join(sorted(hosts)) or 'none'}")
        info: daemon.Info = await host.call("daemon.cordon", daemon.Cordon(on=params.on))
        host.view.why = "takes no new sandboxes" if info.cordoned else ""
        return wire.Cordoned(sandboxes=info.sandboxes)

    async def _doctor(self, _asked: Asked, _params: wire.DoctorParams) -> wire.Doctors:
        """All at once; one that cannot be asked is in the way of no other."""

        async def one(host: Host) -> wire.Examined:
            said = wire.Examined(name=host.name, url=host.config.url, version=host.version)
            try:
                async with asyncio.timeout(DOCTOR_S):
                    found: daemon.Doctor = await host.call("daemon.doctor", daemon.DoctorParams())
                said.checks = found.checks
            except TimeoutError:
                said.problem = f"its doctor did not answer within {DOCTOR_S:g} s"
            except DsecError as exc:
                said.problem = host.problem or exc.message
            return said

        return wire.Doctors(hosts=await asyncio.gather(*map(one, self._fleet.hosts.values())))

    # -- traces -------------------------------------------------------------------------------------------------------
    async def _get(self, _asked: Asked, params: trace.Get) -> trace.Traces:
        there = await self._there("trace.get", params)
        own = [joined(public(one, NAME), there) for one in self._ring.find(params.trace, _seen())]
        return trace.Traces(traces=[*own, *(one for found in there.values() for one in found)])

    async def _list(self, _asked: Asked, params: trace.ListTraces) -> trace.Traces:
        own = [public(one, NAME, whole=False) for one in self._ring.last(params.limit, _seen())]
        known = {(one.key, one.method) for one in own}
        there = await self._there("trace.list", params)
        found = own + [one for some in there.values() for one in some if (one.key, one.method) not in known]
        found.sort(key=lambda one: one.at, reverse=True)
        return trace.Traces(traces=found[: params.limit])

    async def _there(self, method: str, params: trace.Get | trace.ListTraces) -> dict[str, list[trace.Trace]]:
        """What hosts have, by their names; those that do not answer are left out."""
        answers = await self._fleet.ask_all(method, params)
        return {host.name: got.traces for host, got in answers.items() if isinstance(got, trace.Traces)}


def _seen() -> Callable[[str], bool]:
    """Whose requests whoever asks sees here: his own; who is no principal is the coordinator's operator."""
    principal = acting.get()
    return lambda owner: principal in ("", owner)


def joined(whole: trace.Trace, there: dict[str, list[trace.Trace]]) -> trace.Trace:
    """A request here, with what its hosts say of it below the span in which each was asked. Takes that out of `there`.

    Clocks of hosts are not compared: what a host took stands in the middle of what it took seen from here, so that the
    way there is as long as the way back.
    """
    out: list[trace.Span] = []
    for span in whole.spans:
        out.append(span)
        name = next((host for host in there if span.name == at_host(whole.method, host)), None)
        one = next((one for one in there.get(name or "", ()) if one.method == whole.method), None)
        if name is None or one is None:
            continue
        there[name] = [other for other in there[name] if other is not one]
        took = one.took_ms if one.took_ms is not None else span.took_ms
        way = max(0.0, ((span.took_ms or 0.0) - (took or 0.0)) / 2)
        start = span.start_ms + way
        said = one.method if one.outcome in ("", "ok") else f"{one.method}: {one.outcome}"
        out.append(trace.Span(said, "daemon", one.host, round(start, 3), one.took_ms, span.depth + 1))
        for inner in one.spans:
            moved, deeper = round(start + inner.start_ms, 3), span.depth + 1 + inner.depth
            out.append(msgspec.structs.replace(inner, start_ms=moved, depth=deeper))
        whole.left_out += one.left_out
    whole.spans = out
    return whole
