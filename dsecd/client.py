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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeVar, cast

import msgspec

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
from dsecd.trees import TreeReport, pack, unpack_stream
from dsecd.wire import base, execs, files
from dsecd.wire import devices as device_wire
from dsecd.wire import environments as env_wire
from dsecd.wire import sandbox as wire
from dsecd.wire import screen as screen_wire
from dsecd.wire import vms as vm_wire
from dsecd.wire.peer import Notified, Peer, Pending
from dsecd.wire.stream import CHUNK, Inflow

__all__ = [
    "DSecClient", "DSecContainerRunArgs", "DSecFnCallArgs", "DSecFullVMRunArgs", "DSecMicroVMRunArgs", "DSecNeeds",
    "DSecSyncClient", "DsecError", "ExecResult", "Process", "Sandbox", "SandboxFailed", "Session", "Tunnel",
]  # fmt: skip

T = TypeVar("T")
DEFAULT_URL: Final = "unix:///run/dsecd/dsecd.sock"
INLINE: Final = 1 << 20  # up to this a file travels in the request itself


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


class Sandbox(SandboxNetworkCalls):
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

    # -- commands -----------------------------------------------------------------------------------------------------
    async def run_shell(self, command: str, **options: Any) -> ExecResult:
        """Run a line with the image's /bin/sh. Options as in `exec`."""
        return await self._run(execs.Run(id=self.id, shell=command), **options)

    async def exec(self, argv: list[str], **options: Any) -> ExecResult:
        """Run a program. timeout: seconds, then it is killed with all its descendants and `timed_out` is set.

        stdin: bytes or text; env, cwd, user; cap_bytes: output kept per stream; request_id: the idempotency key. fresh:
        in a copy of its files that is made for this command: none of its processes, and nothing that it does stays.
        keep: paths; of what the sandbox wrote, a fresh command sees these, and the images' own files elsewhere.
        """
        return await self._run(execs.Run(id=self.id, argv=argv), **options)

    async def _run(
        self, params: execs.Run, *, timeout: float | None = None, stdin: bytes | str | None = None,
        env: Mapping[str, str] | None = None, cwd: str | None = None, user: str | None = None,
        cap_bytes: int = 8 << 20, request_id: str | None = None, fresh: bool = False,
        keep: Iterable[str] = (),
    ) -> ExecResult:  # fmt: skip
        data = stdin.encode() if isinstance(stdin, str) else stdin
        if data is not None and len(data) > base.MAX_INLINE:
            if fresh:
                raise DsecError("invalid", f"stdin of a fresh command is at most {base.MAX_INLINE} bytes: write a file")
            return await self._run_fed(params, data, timeout, env, cwd, user, cap_bytes, request_id)
        params.timeout_s, params.stdin, params.env, params.fresh = timeout, data, dict(env or {}), fresh
        params.cwd, params.user, params.cap_bytes, params.request_id = cwd, user, cap_bytes, request_id
        params.keep = [*keep]
        return await self._client.ran("exec.run", params)

    async def _run_fed(
        self, params: execs.Run, data: bytes, timeout: float | None, env: Mapping[str, str] | None, cwd: str | None,
        user: str | None, cap_bytes: int, request_id: str | None,
    ) -> ExecResult:  # fmt: skip
        """More stdin than one message holds: start, feed, wait."""
        started = await self.start(
            params.argv or ["/bin/sh", "-c", params.shell or ""], stdin=True, timeout=timeout, env=env, cwd=cwd,
            user=user, cap_bytes=cap_bytes, request_id=request_id,
        )  # fmt: skip
        await started.write(data, eof=True)
        return await started.wait()

    async def start(
        self, argv: list[str], *, stdin: bool = False, tty: bool = False, rows: int = 24, cols: int = 80,
        follow: bool = False, timeout: float | None = None, env: Mapping[str, str] | None = None,
        cwd: str | None = None, user: str | None = None, cap_bytes: int = 8 << 20, request_id: str | None = None,
    ) -> Process:  # fmt: skip
        """Start a program and go on. follow: `output` is read next, and from its first byte nothing is lost."""
        params = execs.Start(
            id=self.id, argv=argv, stdin=stdin, tty=tty, rows=rows, cols=cols, follow=follow, timeout_s=timeout,
            env=dict(env or {}), cwd=cwd, user=user, cap_bytes=cap_bytes, request_id=request_id,
        )  # fmt: skip
        started: execs.Started = await self._client.call("exec.start", params)
        return Process(self._client, self.id, started.exec_id)

    def process(self, exec_id: str) -> Process:
        """A command that was started before, perhaps by somebody else."""
        return Process(self._client, self.id, exec_id)

    async def session(
        self, *, shell: str = "/bin/sh", env: Mapping[str, str] | None = None, cwd: str | None = None,
        user: str | None = None,
    ) -> Session:  # fmt: skip
        """Open a shell that keeps its directory and variables."""
        params = execs.SessionOpen(id=self.id, shell=shell, env=dict(env or {}), cwd=cwd, user=user)
        opened: execs.Session = await self._client.call("session.open", params)
        return Session(self._client, self.id, opened.session_id)

    # -- files --------------------------------------------------------------------------------------------------------
    async def read_file(self, path: str | bytes, *, offset: int = 0, size: int = 0) -> bytes:
        """The bytes of a file; size 0: to its end."""
        params = files.Read(id=self.id, offset=offset, size=size, stream=True, **_path(path))

        async def send(peer: Peer) -> bytes:
            pending = peer.start("file.read", params, window=params.window)
            assert pending.inflow is not None
            chunks = [chunk async for chunk in pending.inflow]
            await pending.finish()
            return b"".join(chunks)

        return await self._client.carry("file.read", params, send)

    async def write_file(
        self, path: str | bytes, data: bytes | str, *, mode: int = 0o644, append: bool = False, exclusive: bool = False,
        uid: int | None = None, gid: int | None = None,
    ) -> int:  # fmt: skip
        """Replace a file (by rename); parent directories are made. Returns its size."""
        raw = data.encode() if isinstance(data, str) else data
        params = files.Write(id=self.id, mode=mode, append=append, exclusive=exclusive, uid=uid, gid=gid, **_path(path))
        if len(raw) <= INLINE:
            params.data = raw
            params.stream = False
        else:
            params.stream = True

        async def send(peer: Peer) -> files.Written:
            pending = peer.start("file.write", params)
            if params.stream:
                await pending.pour(_chunks(raw))
            return cast(files.Written, await pending.finish())

        return (await self._client.carry("file.write", params, send)).size

    async def list_dir(self, path: str | bytes) -> list[files.Entry]:
        found: files.Entries = await self._client.call("file.list", files.ListDir(id=self.id, **_path(path)))
        return found.entries

    async def stat(self, path: str | bytes, *, follow: bool = True) -> files.Stat:
        params = files.StatParams(id=self.id, follow=follow, **_path(path))
        return cast(files.Stat, await self._client.call("file.stat", params))

    async def mkdir(self, path: str | bytes, *, mode: int = 0o755, parents: bool = True) -> None:
        await self._client.call("file.mkdir", files.Mkdir(id=self.id, mode=mode, parents=parents, **_path(path)))

    async def remove(self, path: str | bytes, *, recursive: bool = False) -> None:
        await self._client.call("file.remove", files.Remove(id=self.id, recursive=recursive, **_path(path)))

    async def rename(self, path: str | bytes, to: str | bytes) -> None:
        target = _path(to)
        params = files.Rename(id=self.id, to=target.get("path", ""), to_raw=target.get("path_raw"), **_path(path))
        await self._client.call("file.rename", params)

    async def upload(
        self, local: str | os.PathLike[str], path: str | bytes, *, name: str | None = None, uid: int | None = 0,
        gid: int | None = None,
    ) -> TreeReport:  # fmt: skip
        """Copy a local file's or directory's content below `path`. Everything belongs to uid unless that is None.

        name: what the file or the directory itself is called below `path`.
        """
        params = files.Upload(id=self.id, uid=uid, gid=gid, **_path(path))

        async def send(peer: Peer) -> TreeReport:
            issues: list[str] = []
            done = await _unpacked(peer.start("tree.upload", params), pack(local, issues, name=name))
            return TreeReport(done.entries, [*issues, *done.issues])

        return await self._client.carry("tree.upload", params, send)

    async def upload_tar(
        self, stream: AsyncIterator[bytes], path: str | bytes, *, uid: int | None = None, gid: int | None = None
    ) -> TreeReport:
        """Unpack a tar stream below `path`. Entries belong to whom the tar says, or to uid."""
        params = files.Upload(id=self.id, uid=uid, gid=gid, **_path(path))
        done = await _unpacked(await self._client.begin("tree.upload", params), stream)
        return TreeReport(done.entries, done.issues)

    async def download(self, path: str | bytes, local: str | os.PathLike[str]) -> TreeReport:
        """Copy what is below `path` into a local directory. Nothing is ever written outside it."""
        pending, source = await self._download(path)
        issues = await unpack_stream(source, local)
        done: files.TreeDone = await pending.finish()
        return TreeReport(done.entries, [*done.issues, *issues])

    async def download_tar(self, path: str | bytes, write: Callable[[bytes], Awaitable[object]]) -> TreeReport:
        """What is below `path` as a tar, given to `write` piece by piece."""
        pending, source = await self._download(path)
        while chunk := await source.take():
            await write(chunk)
        done: files.TreeDone = await pending.finish()
        return TreeReport(done.entries, done.issues)

    async def _download(self, path: str | bytes) -> tuple[Pending, Inflow]:
        params = files.Download(id=self.id, **_path(path))
        pending = await self._client.begin("tree.download", params, window=params.window)
        assert pending.inflow is not None
        return pending, pending.inflow

    async def connect_port(self, port: int) -> Tunnel:
        """A byte tunnel to a TCP port inside."""
        return await self._tunnel(execs.PortConnect(id=self.id, port=port))

    async def connect_vnc(self) -> Tunnel:
        """A connection to a full VM's screen, in VNC's protocol (RFC 6143): a viewer's end of it."""
        return await self._tunnel(execs.PortConnect(id=self.id, port="vnc"))

    async def _tunnel(self, params: execs.PortConnect) -> Tunnel:
        return Tunnel(await self._client.begin("port.connect", params, window=params.window))


async def _unpacked(pending: Pending, stream: AsyncIterator[bytes]) -> files.TreeDone:
    await pending.pour(stream)
    return cast(files.TreeDone, await pending.finish())


def _lease_of(info: wire.Sandbox) -> float | None:
    """Of one that was made just now: what is left of it."""
    return None if info.lease_deadline is None else max(info.lease_deadline - time.time(), 0.5)


def _path(path: str | bytes) -> dict[str, Any]:
    if isinstance(path, str):
        return {"path": path}
    try:
        return {"path": path.decode()}
    except UnicodeDecodeError:
        return {"path_raw": path}


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(view), CHUNK):
        yield cast(bytes, view[start : start + CHUNK])


from dsecd.client_sync import DSecSyncClient  # noqa: E402 - it wraps the classes above
