"""What is counted of a server's requests, and kept of what they did."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dsecd import spans
from dsecd.metrics import DAEMON
from dsecd.wire import trace as wire
from dsecd.wire.access import within
from dsecd.wire.base import Params

if TYPE_CHECKING:
    from dsecd.wire.call import Call

REQUESTS: Final = DAEMON.counter(
    "dsecd_requests",
    "Requests that ended, by how: ok, an error's kind, or gone (the client left).",
    ("method", "outcome"),
)
SECONDS: Final = DAEMON.histogram(
    "dsecd_request_seconds", "From a request's last byte to its answer, by method.", ("method",)
)
# Asked again and again by whoever watches: they would push everything else out of the ring.
LOOKS: Final = frozenset((
    "daemon.hello", "daemon.info", "daemon.stats", "device.list", "fleet.status", "image.list", "job.list",
    "lease.renew", "sandbox.get", "sandbox.list", "sandbox.stats", "trace.get", "trace.list",
))  # fmt: skip
IN_FLIGHT: Final = DAEMON.gauge("dsecd_requests_in_flight", "Requests that were read and not answered yet.")


class Watch:
    """One per server that is watched. What only looks is not followed, unless it has a request_id."""

    def __init__(self, keep: int, host: str) -> None:
        self.ring = spans.Ring(keep, host)
        self.host = host

    def begin(self, call: Call, params: Params) -> None:
        """In the task that works for it."""
        IN_FLIGHT.values[()] += 1
        if params.request_id is None and call.name in LOOKS:
            return
        sandbox = getattr(params, "id", "")
        call.trace = self.ring.begin(params.request_id, call.name, sandbox, call.peer.project, call.received)
        spans.current.set(call.trace)

    def end(self, call: Call) -> None:
        """It was answered, or need not be any more."""
        IN_FLIGHT.values[()] -= 1
        self.count(call)
        if call.trace is not None:
            call.trace.ended, call.trace.outcome = time.monotonic(), call.outcome

    def count(self, call: Call) -> None:
        """All there is to a plain request, which never waits."""
        REQUESTS.add(1, call.name, call.outcome)
        SECONDS.observe(time.monotonic() - call.received, call.name)


class TraceCalls:
    """`trace.*` of a daemon."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def get(self, call: Call, params: wire.Get) -> wire.Traces:
        return self._all(self._watch.ring.find(params.trace, _seen(call)))

    def list(self, call: Call, params: wire.ListTraces) -> wire.Traces:
        return self._all(self._watch.ring.last(params.limit, _seen(call)), whole=False)

    def _all(self, found: Any, *, whole: bool = True) -> wire.Traces:
        return wire.Traces(traces=[public(one, self._watch.host, whole=whole) for one in found])


def _seen(call: Call) -> Callable[[str], bool]:
    """Which projects' requests the caller sees: those of its own and below; the root project's admin all."""
    peer = call.peer
    return lambda project: not peer.bounded or within(project, peer.project)


def public(kept: spans.Trace, host: str, *, whole: bool = True) -> wire.Trace:
    """As it is answered. whole=False: only what `trace.list` tells."""
    return wire.Trace(
        kept.key, kept.method, host, kept.at, _ms(kept.began, kept.ended), kept.outcome, kept.sandbox,
        [
            wire.Span(one.name, one.place, one.host or host, round((one.began - kept.began) * 1000, 3),
                 _ms(one.began, one.ended), one.depth)
            for one in kept.spans
        ] if whole else [],
        kept.left_out,
    )  # fmt: skip


def _ms(began: float, ended: float | None) -> float | None:
    return None if ended is None else round((ended - began) * 1000, 3)
