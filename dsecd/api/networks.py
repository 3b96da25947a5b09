"""sandbox.set_network and network.*"""

from __future__ import annotations

from dsecd.net.rules import Grant
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.networks import set_network, shown
from dsecd.wire import network as wire
from dsecd.wire.call import Call


class NetworkApi:
    """What sandboxes may reach."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._network = manager.rooms.network

    async def set(self, call: Call, params: wire.SetNetwork) -> wire.SandboxNetwork:
        return await set_network(self._manager, params.id, params.rules)

    def get(self, call: Call, params: wire.NetworkOf) -> wire.SandboxNetwork:
        return shown(self._manager, params.id)

    def log(self, call: Call, params: wire.NetworkOf) -> wire.RefusalLog:
        found = self._network.refusals(self._manager.record(params.id).id)
        return wire.RefusalLog(refusals=[wire.Refusal(one.what, one.count, one.first, one.last) for one in found])

    def services(self, call: Call, params: wire.ServicesParams) -> wire.Services:
        return wire.Services(services=[_service(one) for _, one in sorted(self._network.services.items())])


def _service(grant: Grant) -> wire.Service:
    ports = [f"{one.first}-{one.last}/{one.protocol}" if one.first < one.last else f"{one.first}/{one.protocol}"
             for one in grant.ports]  # fmt: skip
    return wire.Service(grant.key, [*grant.names, *map(str, grant.networks)], ports)
