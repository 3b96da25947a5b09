"""The SDK: `DSecClient` and what it gives out. Asynchronous; `DSecSyncClient` is the same for plain code.

    async with DSecClient() as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian:12"))
        result = await sandbox.run_shell("echo hello")
        await sandbox.stop()

Every call raises `DsecError`, with a kind of the closed list in docs/protocol.md; `infra` says not to count it against
the model. Imports nothing of the daemon but the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeVar, cast

import msgspec

from dsecd.client_execs import SandboxExecCalls
from dsecd.client_files import SandboxFileCalls
from dsecd.client_fncall import DSecFnCallArgs, FnCallCalls
from dsecd.client_images import ImageCalls
from dsecd.client_jobs import JobCalls
from dsecd.client_link import Link
from dsecd.client_network import NetworkCalls, SandboxNetworkCalls
from dsecd.client_packs import PackCalls
from dsecd.client_rollout import RolloutCalls
from dsecd.client_streams import Process, Session, Tunnel
from dsecd.client_tenants import TenantCalls
from dsecd.client_trajectory import TrajectoryCalls
from dsecd.client_types import (
    DSecContainerRunArgs,
    DSecFullVMRunArgs,
    DSecMicroVMRunArgs,
    DSecNeeds,
    ExecResult,
    result_of,
)
from dsecd.errors import DsecError
from dsecd.wire import base, execs
from dsecd.wire import devices as device_wire
from dsecd.wire import environments as env_wire
from dsecd.wire import sandbox as wire
from dsecd.wire import screen as screen_wire
from dsecd.wire import vms as vm_wire
from dsecd.wire.peer import Notified, Peer, Pending

__all__ = [
    "DSecClient", "DSecContainerRunArgs", "DSecFnCallArgs", "DSecFullVMRunArgs", "DSecMicroVMRunArgs", "DSecNeeds",
    "DSecSyncClient", "DsecError", "ExecResult", "Process", "Sandbox", "SandboxFailed", "Session", "Tunnel",
]  # fmt: skip

T = TypeVar("T")
DEFAULT_URL: Final = "unix:///run/dsecd/dsecd.sock"


class DSecClient(
    ImageCalls, FnCallCalls, JobCalls, NetworkCalls, PackCalls, RolloutCalls, TenantCalls, TrajectoryCalls
):
    """One connection to one daemon. Many calls may be under way at once.

    url: `unix:///path` or `ssh://[user@]host[:port][/path]`; default $DSEC_URL, else the local daemon.
    again_s: how long calls wait for a connection that broke to be made again, instead of failing; each changing call
    then gets a request_id. Default 60 over ssh, else 0. `read_file`, `write_file` and `upload` are among them; other
    streams are not taken up again in their middle, but they begin on a new connection.
    token_file: whose token says who one is; default $DSEC_TOKEN_FILE, else the kernel says it.
    """

    def __init__(self, url: str | None = None, *, again_s: float | None = None, token_file: str | None = None) -> None:
        self.url = url or os.environ.get("DSEC_URL") or DEFAULT_URL
        self._link = Link(self.url, again_s, token_file)
        self._leases: dict[str, float] = {}
        self._lease_added = asyncio.Event()
        self._renewer: asyncio.Task[None] | None = None

    async def open(self) -> DSecClient:
        """Connect and agree on the protocol."""
        await self._link.open()
        return self

    async def close(self) -> None:
        """Sandboxes go on; leases are not renewed any more."""
        if self._renewer is not None:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
            self._renewer = None
        await self._link.close()

    async def __aenter__(self) -> DSecClient:
        return await self.open()

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def alive(self) -> bool:
        """Whether the connection stands, as far as is known."""
        return self._link.peer.alive

    async def begin(
        self, method: str, params: base.Params, *, window: int = 0, notified: Notified | None = None
    ) -> Pending:
        """A call whose bytes or notifications come in between. window: so many bytes may be streamed ahead to us."""
        return await self._link.begin(method, params, window=window, notified=notified)

    async def call(self, method: str, params: base.Params) -> Any:
        """Any method of the protocol, as its messages. The typed calls below are all made of it."""
        return await self._link.carry(method, params, lambda peer: peer.call(method, params))

    async def carry(self, method: str, params: base.Params, send: Callable[[Peer], Awaitable[T]]) -> T:
        """A call with streams that `send` can make from the start again."""
        return await self._link.carry(method, params, send, whole=True)

    async def ran(self, method: str, params: base.Params) -> ExecResult:
        """A call that runs something to its end; output that was sent ahead of the reply is put back into it."""
        ahead: dict[int, list[bytes]] = {1: [], 2: []}

        def notified(name: str, raw: msgspec.Raw) -> None:
            if name == "exec.output":
                piece = msgspec.json.decode(raw, type=base.ExecOutput)
                ahead.setdefault(piece.stream, []).append(piece.data)

        async def send(peer: Peer) -> execs.Ran:
            ahead[1].clear()
            ahead[2].clear()
            done: execs.Ran = await peer.start(method, params, notified=notified).finish()
            return done

        ran = await self._link.carry(method, params, send)
        if ran.sent_ahead:
            ran.stdout, ran.stderr = b"".join(ahead[1]), b"".join(ahead[2])
        return result_of(ran)

    # -- sandboxes ----------------------------------------------------------------------------------------------------
    async def run(
        self, args: DSecContainerRunArgs | DSecFullVMRunArgs, *, backend: Literal["auto"] | None = None,
        timeout: float | None = None, request_id: str | None = None,
    ) -> Sandbox:  # fmt: skip
        """Start one sandbox of whatever kind the arguments are of (or get the one of that name).

        backend "auto": of the lightest kind that fits `args.needs`; `info.choice` says which, and why.
        """
        spec = args.spec()
        if backend is not None:
            if spec.backend != "container":
                raise DsecError("invalid", f"these arguments ask for a {spec.backend}: auto takes DSecContainerRunArgs")
            spec.backend = backend
        params = wire.Create(spec=spec, timeout_s=timeout, request_id=request_id)
        return self._leased(await self.call("sandbox.create", params), args.lease_s)

    async def run_container(
        self, args: DSecContainerRunArgs, *, timeout: float | None = None, request_id: str | None = None
    ) -> Sandbox:
        """Start one container."""
        return await self.run(args, timeout=timeout, request_id=request_id)

    async def run_microvm(
        self, args: DSecMicroVMRunArgs, *, timeout: float | None = None, request_id: str | None = None
    ) -> Sandbox:
        """Start one microVM."""
        return await self.run(args, timeout=timeout, request_id=request_id)

    async def run_fullvm(
        self, args: DSecFullVMRunArgs, *, timeout: float | None = None, request_id: str | None = None
    ) -> Sandbox:
        """Start one full VM. Without dsec-agent in its image, of the calls for commands `exec` and `run_shell` work."""
        return await self.run(args, timeout=timeout, request_id=request_id)

    async def run_containers(
        self, args: DSecContainerRunArgs | list[DSecContainerRunArgs], count: int | None = None, *,
        timeout: float | None = None,
    ) -> list[Sandbox | SandboxFailed]:  # fmt: skip
        """Start many in one call: `count` of one kind, or one for each of a list. One result each, in order."""
        if isinstance(args, list):
            params = wire.CreateMany(specs=[one.spec() for one in args], timeout_s=timeout)
        else:
            params = wire.CreateMany(spec=args.spec(), count=count or 1, timeout_s=timeout)
        made: wire.Created = await self.call("sandbox.create_many", params)
        leases = [one.lease_s for one in args] if isinstance(args, list) else [args.lease_s] * len(made.results)
        return [
            self._leased(one.sandbox, lease) if one.sandbox is not None else SandboxFailed(one.error)
            for one, lease in zip(made.results, leases, strict=True)
        ]

    async def choose(
        self, needs: DSecNeeds | None = None, *, image: str | None = None, devices: Iterable[str] = ()
    ) -> wire.Chosen:
        """Which backend `auto` would take, why, and what would change it. Starts nothing."""
        params = wire.Choose(needs=needs or DSecNeeds(), image=image, devices=[*devices])
        return cast(wire.Chosen, await self.call("sandbox.choose", params))

    async def devices(self) -> device_wire.DevicePools:
        """The host's device pools, and who has what of them."""
        return cast(device_wire.DevicePools, await self.call("device.list", device_wire.ListDevices()))

    async def get(self, ident: str) -> Sandbox:
        """A sandbox by id or name."""
        return self._sandbox(await self.call("sandbox.get", wire.ById(id=ident)))

    async def fork(self, ident: str, count: int = 1) -> list[Sandbox | SandboxFailed]:
        """Copies, copy-on-write: of a container's files, of a microVM's memory and disk. One result each."""
        made: wire.Created = await self.call("sandbox.fork", wire.Fork(id=ident, count=count))
        return [
            self._leased(one.sandbox, _lease_of(one.sandbox)) if one.sandbox is not None else SandboxFailed(one.error)
            for one in made.results
        ]

    async def stop_many(self, sandboxes: Iterable[Sandbox]) -> int:
        """Stop them side by side; returns how many were stopped."""
        idents = [sandbox.id for sandbox in sandboxes]
        if not idents:
            return 0
        for ident in idents:
            self._leases.pop(ident, None)
        done: wire.StoppedMany = await self.call("sandbox.stop_many", wire.StopMany(ids=idents))
        return done.stopped

    def _sandbox(self, info: wire.Sandbox) -> Sandbox:
        return Sandbox(self, info)

    def _leased(self, info: wire.Sandbox, lease_s: float | None) -> Sandbox:
        if lease_s is not None:
            self.hold_lease(info.id, lease_s)
        return self._sandbox(info)

    # -- leases -------------------------------------------------------------------------------------------------------
    def hold_lease(self, ident: str, lease_s: float) -> None:
        """Renew this sandbox's lease in the background for as long as this client is open."""
        self._leases[ident] = lease_s
        self._lease_added.set()
        if self._renewer is None:
            self._renewer = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        while self._leases:
            self._lease_added.clear()
            with contextlib.suppress(TimeoutError):  # a new, shorter lease must not wait for an old, longer one
                async with asyncio.timeout(min(self._leases.values()) / 3):
                    await self._lease_added.wait()
                    continue
            if self._leases:
                with contextlib.suppress(DsecError):
                    done: wire.Renewed = await self.call("lease.renew", wire.Renew(ids=list(self._leases)))
                    for ident in done.gone:
                        self._leases.pop(ident, None)
        self._renewer = None

    # -- streams ------------------------------------------------------------------------------------------------------
    async def events(
        self, labels: Mapping[str, str] | None = None, *, since: int | None = None
    ) -> AsyncGenerator[wire.Event, None]:
        """Life-cycle events after `since` (None: from now on), for ever."""
        queue: asyncio.Queue[wire.Event | None] = asyncio.Queue()

        def notified(method: str, raw: msgspec.Raw) -> None:
            if method == "sandbox.event":
                queue.put_nowait(msgspec.json.decode(raw, type=wire.Event))

        params = wire.Events(labels=dict(labels or {}), since=since)
        pending = await self.begin("sandbox.events", params, notified=notified)
        pending.future.add_done_callback(lambda _f: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                yield event
            await pending.finish()
        finally:
            pending.cancel()

    async def list(
        self, labels: Mapping[str, str] | None = None, *, mine: bool = False, states: Iterable[wire.State] = (),
        job: str | None = None,
    ) -> list[Sandbox]:  # fmt: skip
        """Those that are alive, or that are in one of `states`."""
        params = wire.List(labels=dict(labels or {}), states=[*states], mine=mine, job=job)
        found: wire.Sandboxes = await self.call("sandbox.list", params)
        return [self._sandbox(info) for info in found.sandboxes]


class SandboxFailed(DsecError):
    """One of many that could not be made: an entry of `run_containers`' result, not raised."""

    def __init__(self, failed: wire.Failed | None) -> None:
        failed = failed or wire.Failed("internal", "the daemon sent neither a sandbox nor an error")
        super().__init__(cast(Any, failed.kind), failed.message, infra=failed.infra, retryable=failed.retryable)


class Sandbox(SandboxExecCalls, SandboxFileCalls, SandboxNetworkCalls):
    """One sandbox. `info` is what the daemon said last; `refresh` asks again."""

    def __init__(self, client: DSecClient, info: wire.Sandbox) -> None:
        self._client = client
        self.info = info

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.info.state}>"

    async def refresh(self) -> wire.Sandbox:
        self.info = await self._client.call("sandbox.get", wire.ById(id=self.id))
        return self.info

    async def stop(self) -> None:
        self._client._leases.pop(self.id, None)
        self.info = await self._client.call("sandbox.stop", wire.Stop(id=self.id))

    async def pause(self) -> None:
        self.info = await self._client.call("sandbox.pause", wire.ById(id=self.id))

    async def console(self) -> bytes:
        """The last 64 KiB that a microVM's guest wrote to its serial console."""
        answer: vm_wire.Console = await self._client.call("vm.console", vm_wire.ConsoleParams(id=self.id))
        return answer.data

    async def disk_snapshots(self) -> list[str]:
        """Names of the snapshots of a full VM's disk, oldest first."""
        found: vm_wire.Snapshots = await self._client.call("vm.snapshots", vm_wire.SnapshotsParams(id=self.id))
        return found.names

    async def disk_snapshot(self, name: str) -> None:
        """Take one, while it runs."""
        await self._client.call("vm.snapshot", vm_wire.SnapshotParams(id=self.id, name=name))

    async def disk_revert(self, name: str) -> None:
        """Boot it anew from one."""
        await self._client.call("vm.revert", vm_wire.SnapshotParams(id=self.id, name=name))

    async def screen(self) -> screen_wire.Picture:
        """What a full VM's screen shows now."""
        return cast(screen_wire.Picture, await self._client.call("screen.capture", screen_wire.Capture(id=self.id)))

    async def screen_input(self, **what: Any) -> None:
        """Move, click, type, press keys: the fields of `dsecd.wire.screen.Input`."""
        await self._client.call("screen.input", screen_wire.Input(id=self.id, **what))

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxFailed]:
        """Copies of it as it is now: of a container its files, without processes; of a microVM memory, too."""
        return await self._client.fork(self.id, count)

    async def pack_diff(self, name: str, **options: Any) -> env_wire.Packed:
        """What it wrote becomes the environment `name`, to start others from. Options as of `DSecClient.pack_diff`."""
        return await self._client.pack_diff(self.id, name, **options)

    async def resume(self) -> None:
        self.info = await self._client.call("sandbox.resume", wire.ById(id=self.id))

    async def extend(self, *, ttl_running_stop: float | None = None, ttl_total: float | None = None) -> None:
        params = wire.Extend(id=self.id, ttl_idle_s=ttl_running_stop, ttl_total_s=ttl_total)
        self.info = await self._client.call("sandbox.extend", params)

    async def stats(self) -> wire.Stats:
        return cast(wire.Stats, await self._client.call("sandbox.stats", wire.ById(id=self.id)))


def _lease_of(info: wire.Sandbox) -> float | None:
    """Of one that was made just now: what is left of it."""
    return None if info.lease_deadline is None else max(info.lease_deadline - time.time(), 0.5)


from dsecd.client_sync import DSecSyncClient  # noqa: E402 - it wraps the classes above
