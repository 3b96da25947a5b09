"""What a coordinator counts, and the socket where that is read. docs/metrics.md has them all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsecd.metrics import FLEET
from dsecd.scrape import Process, Scrapes
from dsecd.wire.server import bound

if TYPE_CHECKING:
    from dsecd.fleet import Fleet

UP: Final = FLEET.gauge("dsec_fleet_host_up", "1: the host answers.", ("host",))
CORDONED: Final = FLEET.gauge("dsec_fleet_host_cordoned", "1: the host takes no new sandboxes.", ("host",))
LOAD: Final = FLEET.gauge(
    "dsec_fleet_host_load_ratio", "The fullest of sandboxes, CPU and memory that it has promised.", ("host",), "ratio"
)
IN_FLIGHT: Final = FLEET.gauge("dsec_fleet_host_requests_in_flight", "Clients' requests that wait for it.", ("host",))
PLACED: Final = FLEET.counter("dsec_fleet_host_placed", "Sandboxes and calls that it was given.", ("host",))
LOST: Final = FLEET.counter("dsec_fleet_host_lost", "How often it went while it was up.", ("host",))
CLIENTS: Final = FLEET.gauge("dsec_fleet_clients", "Clients that are connected.")
REQUESTS: Final = FLEET.counter("dsec_fleet_requests", "Requests that were read, by method.", ("method",))
REFUSED: Final = FLEET.counter("dsec_fleet_refused", "Sandboxes and calls that no host could have.")
RETRIES: Final = FLEET.counter(
    "dsec_fleet_retries", "A host refused, and another one was asked; by the error of the first.", ("kind",)
)


class Metrics:
    """One per coordinator."""

    def __init__(self, fleet: Fleet, path: Path) -> None:
        self._fleet, self._path = fleet, path
        self._process = Process(FLEET, "dsec_fleet")
        self._scrapes = Scrapes(FLEET, self._collect)
        self._lag: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen. `invalid`: it cannot."""
        if self._path.is_socket():  # of one that was killed
            self._path.unlink()
        await self._scrapes.serve(bound(self._path, 0o117))
        self._lag = asyncio.ensure_future(self._process.watch_lag())

    async def close(self) -> None:
        if self._lag is not None:
            self._lag.cancel()
            await asyncio.gather(self._lag, return_exceptions=True)
        await self._scrapes.close()
        self._path.unlink(missing_ok=True)

    async def _collect(self) -> None:
        self._process.look()
        CLIENTS.set(len(self._fleet.fronts))
        REFUSED.set(self._fleet.refused)
        for family in (UP, CORDONED, LOAD, IN_FLIGHT, PLACED, LOST):
            family.values.clear()  # of hosts that are not in the inventory any more
        asked = self._fleet.watch.in_flight()
        for name, host in self._fleet.hosts.items():
            UP.set(not host.problem, name)
            CORDONED.set(host.cordoned, name)
            LOAD.set(round(host.view.load(), 4), name)
            IN_FLIGHT.set(asked[name], name)
            PLACED.set(host.placed, name)
            LOST.set(host.losses, name)
