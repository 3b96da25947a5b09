"""The SDK's calls about networks: a part of `Sandbox`, and of `DSecClient`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from dsecd.wire import base
from dsecd.wire import network as wire

if TYPE_CHECKING:
    from dsecd.client import DSecClient


class SandboxNetworkCalls:
    """What this sandbox may reach."""

    if TYPE_CHECKING:
        _client: DSecClient

        @property
        def id(self) -> str: ...

    async def set_network(self, rules: Mapping[str, bool], *, request_id: str | None = None) -> wire.SandboxNetwork:
        """These rules in place of all it had: `{"pypi": True, "example.org:443": True}`; `{}` cuts it off.

        They hold when this returns; connections that they do not allow any more are cut.
        """
        params = wire.SetNetwork(id=self.id, rules=dict(rules), request_id=request_id)
        return cast(wire.SandboxNetwork, await self._client.call("sandbox.set_network", params))

    async def network(self) -> wire.SandboxNetwork:
        return cast(wire.SandboxNetwork, await self._client.call("network.get", wire.NetworkOf(id=self.id)))

    async def network_log(self) -> list[wire.Refusal]:
        """What it tried to reach and may not; the last one seen is the last."""
        found: wire.RefusalLog = await self._client.call("network.log", wire.NetworkOf(id=self.id))
        return found.refusals


class NetworkCalls:
    """What all rules may name."""

    if TYPE_CHECKING:

        async def call(self, method: str, params: base.Params) -> Any: ...

    async def network_services(self) -> list[wire.Service]:
        found: wire.Services = await self.call("network.services", wire.ServicesParams())
        return found.services
