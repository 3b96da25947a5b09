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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, cast

import msgspec

from dsecd.client_types import DSecContainerRunArgs, ExecResult, result_of
from dsecd.errors import DsecError
from dsecd.trees import TreeReport, pack, unpack_stream
from dsecd.wire import base, daemon, execs, files
from dsecd.wire import images as image_wire
from dsecd.wire import sandbox as wire
from dsecd.wire.peer import Peer, Pending
from dsecd.wire.ssh import forwarded
from dsecd.wire.stream import CHUNK, Inflow

__all__ = [
    "DSecClient", "DSecContainerRunArgs", "DSecSyncClient", "DsecError", "ExecResult", "Process", "Sandbox",
    "SandboxFailed", "Session", "Tunnel",
]  # fmt: skip

DEFAULT_URL: Final = "unix:///run/dsecd/dsecd.sock"
INLINE: Final = 1 << 20  # up to this a file travels in the request itself


class DSecClient:
    """One connection to one daemon. Many calls may be under way at once.

    url: `unix:///path` or `ssh://[user@]host[:port][/path]`; default $DSEC_URL, else the local daemon.
    """

    def __init__(self, url: str | None = None) -> None:
        self.url = url or os.environ.get("DSEC_URL") or DEFAULT_URL
        self._stack = contextlib.AsyncExitStack()
        self._peer: Peer | None = None
        self._leases: dict[str, float] = {}
        self._lease_added = asyncio.Event()
        self._renewer: asyncio.Task[None] | None = None

    async def open(self) -> DSecClient:
        """Connect and agree on the protocol."""
        if self.url.startswith("ssh://"):
            path = await self._stack.enter_async_context(forwarded(self.url))
        elif self.url.startswith("unix://"):
            path = self.url.removeprefix("unix://")
        else:
            raise DsecError("invalid", f"{self.url!r} is neither unix:///path nor ssh://host")
        try:
            self._peer = await Peer.connect_unix(path)
            self._stack.push_async_callback(self._peer.aclose)
            await self.call("daemon.hello", daemon.Hello(client=f"python/{os.getpid()}"))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def close(self) -> None:
        """Sandboxes go on; leases are not renewed any more."""
        if self._renewer is not None:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
            self._renewer = None
        await self._stack.aclose()
        self._peer = None

    async def __aenter__(self) -> DSecClient:
        return await self.open()

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def peer(self) -> Peer:
        if self._peer is None:
            raise DsecError("invalid", "the client is not open: use `async with` or `await client.open()`")
        return self._peer

    async def call(self, method: str, params: base.Params) -> Any:
        """Any method of the protocol, as its messages. The typed calls below are all made of it."""
        return await self.peer.call(method, params)

    async def ran(self, method: str, params: base.Params) -> ExecResult:
        """A call that runs something to its end; output that was sent ahead of the reply is put back into it."""
        ahead: dict[int, list[bytes]] = {1: [], 2: []}

        def notified(name: str, raw: msgspec.Raw) -> None:
            if name == "exec.output":
                piece = msgspec.json.decode(raw, type=base.ExecOutput)
                ahead.setdefault(piece.stream, []).append(piece.data)

        ran: execs.Ran = await self.peer.finish(self.peer.start(method, params, notified=notified))
        if ran.sent_ahead:
            ran.stdout, ran.stderr = b"".join(ahead[1]), b"".join(ahead[2])
        return result_of(ran)

    # -- sandboxes ----------------------------------------------------------------------------------------------------
    async def run_container(
        self, args: DSecContainerRunArgs, *, timeout: float | None = None, request_id: str | None = None
    ) -> Sandbox:
        """Start one container (or get the one of that name)."""
        params = wire.Create(spec=args.spec(), timeout_s=timeout, request_id=request_id)
        return self._leased(await self.call("sandbox.create", params), args.lease_s)

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

    async def get(self, ident: str) -> Sandbox:
        """A sandbox by id or name."""
        return self._sandbox(await self.call("sandbox.get", wire.ById(id=ident)))

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

    # -- images and the host ------------------------------------------------------------------------------------------
    async def images(self) -> list[image_wire.Image]:
        found: image_wire.Images = await self.call("image.list", image_wire.ListImages())
        return found.images

    async def import_image(
        self, params: image_wire.Import, stream: AsyncIterator[bytes] | None = None, progress: Any = None
    ) -> image_wire.Image:
        """Import an image; `stream` gives its tar. progress(base.Progress) is called now and then."""
        pending = self.peer.start("image.import", params, notified=_on_progress(progress))
        if stream is not None:
            await self.pour(pending, stream)
        return cast(image_wire.Image, await self.peer.finish(pending))

    async def bootstrap_image(self, params: image_wire.Bootstrap, progress: Any = None) -> image_wire.Image:
        """Make a Debian base on the daemon's host with mmdebstrap."""
        pending = self.peer.start("image.bootstrap", params, notified=_on_progress(progress))
        return cast(image_wire.Image, await self.peer.finish(pending))

    async def collapse_images(self, params: image_wire.Collapse, progress: Any = None) -> image_wire.Image:
        """Merge layers into one image, offline; they stay."""
        pending = self.peer.start("image.collapse", params, notified=_on_progress(progress))
        return cast(image_wire.Image, await self.peer.finish(pending))

    async def push_image(self, params: image_wire.Push, progress: Any = None) -> image_wire.Pushed:
        """Bring an image to a registry."""
        pending = self.peer.start("image.push", params, notified=_on_progress(progress))
        return cast(image_wire.Pushed, await self.peer.finish(pending))

    async def pull_image(self, params: image_wire.Pull, progress: Any = None) -> image_wire.Image:
        """Get an image that was pushed, with its data or lazily."""
        pending = self.peer.start("image.pull", params, notified=_on_progress(progress))
        return cast(image_wire.Image, await self.peer.finish(pending))

    async def pour(self, pending: Pending, stream: AsyncIterator[bytes]) -> None:
        """Send a stream under the server's credit. When the call ends early, its own error is what counts."""
        assert pending.outflow is not None
        try:
            async for chunk in stream:
                await pending.outflow.write(chunk)
        except DsecError:
            if not pending.future.done():
                raise
        except BaseException:
            self.peer.notify("$/cancelRequest", base.Cancel(pending.ident))
            raise
        self.peer.end_upload(pending)

    async def events(
        self, labels: Mapping[str, str] | None = None, *, since: int | None = None
    ) -> AsyncGenerator[wire.Event, None]:
        """Life-cycle events after `since` (None: from now on), for ever."""
        queue: asyncio.Queue[wire.Event | None] = asyncio.Queue()

        def notified(method: str, raw: msgspec.Raw) -> None:
            if method == "sandbox.event":
                queue.put_nowait(msgspec.json.decode(raw, type=wire.Event))

        params = wire.Events(labels=dict(labels or {}), since=since)
        pending = self.peer.start("sandbox.events", params, notified=notified)
        pending.future.add_done_callback(lambda _f: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                yield event
            await self.peer.finish(pending)
        finally:
            if not pending.future.done():
                self.peer.notify("$/cancelRequest", base.Cancel(pending.ident))

    async def list(
        self, labels: Mapping[str, str] | None = None, *, mine: bool = False, states: Iterable[wire.State] = ()
    ) -> list[Sandbox]:
        """Those that are alive, or that are in one of `states`."""
        params = wire.List(labels=dict(labels or {}), states=[*states], mine=mine)
        found: wire.Sandboxes = await self.call("sandbox.list", params)
        return [self._sandbox(info) for info in found.sandboxes]


class SandboxFailed(DsecError):
    """One of many that could not be made: an entry of `run_containers`' result, not raised."""

    def __init__(self, failed: wire.Failed | None) -> None:
        failed = failed or wire.Failed("internal", "the daemon sent neither a sandbox nor an error")
        super().__init__(cast(Any, failed.kind), failed.message, infra=failed.infra, retryable=failed.retryable)


class Sandbox:
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

        stdin: bytes or text; env, cwd, user; cap_bytes: output kept per stream; request_id: the idempotency key.
        """
        return await self._run(execs.Run(id=self.id, argv=argv), **options)

    async def _run(
        self, params: execs.Run, *, timeout: float | None = None, stdin: bytes | str | None = None,
        env: Mapping[str, str] | None = None, cwd: str | None = None, user: str | None = None,
        cap_bytes: int = 8 << 20, request_id: str | None = None,
    ) -> ExecResult:  # fmt: skip
        data = stdin.encode() if isinstance(stdin, str) else stdin
        if data is not None and len(data) > base.MAX_INLINE:
            return await self._run_fed(params, data, timeout, env, cwd, user, cap_bytes, request_id)
        params.timeout_s, params.stdin, params.env = timeout, data, dict(env or {})
        params.cwd, params.user, params.cap_bytes, params.request_id = cwd, user, cap_bytes, request_id
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
        peer = self._client.peer
        params = files.Read(id=self.id, offset=offset, size=size, stream=True, **_path(path))
        pending = peer.start("file.read", params, window=params.window)
        assert pending.inflow is not None
        chunks = [chunk async for chunk in pending.inflow]
        await peer.finish(pending)
        return b"".join(chunks)

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
        pending = self._client.peer.start("file.write", params)
        if params.stream:
            await self._client.pour(pending, _chunks(raw))
        done: files.Written = await self._client.peer.finish(pending)
        return done.size

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
        issues: list[str] = []
        report = await self.upload_tar(pack(local, issues, name=name), path, uid=uid, gid=gid)
        return TreeReport(report.entries, [*issues, *report.issues])

    async def upload_tar(
        self, stream: AsyncIterator[bytes], path: str | bytes, *, uid: int | None = None, gid: int | None = None
    ) -> TreeReport:
        """Unpack a tar stream below `path`. Entries belong to whom the tar says, or to uid."""
        pending = self._client.peer.start("tree.upload", files.Upload(id=self.id, uid=uid, gid=gid, **_path(path)))
        await self._client.pour(pending, stream)
        done: files.TreeDone = await self._client.peer.finish(pending)
        return TreeReport(done.entries, done.issues)

    async def download(self, path: str | bytes, local: str | os.PathLike[str]) -> TreeReport:
        """Copy what is below `path` into a local directory. Nothing is ever written outside it."""
        pending, source = self._download(path)
        issues = await unpack_stream(source, local)
        done: files.TreeDone = await self._client.peer.finish(pending)
        return TreeReport(done.entries, [*done.issues, *issues])

    async def download_tar(self, path: str | bytes, write: Callable[[bytes], Awaitable[object]]) -> TreeReport:
        """What is below `path` as a tar, given to `write` piece by piece."""
        pending, source = self._download(path)
        while chunk := await source.take():
            await write(chunk)
        done: files.TreeDone = await self._client.peer.finish(pending)
        return TreeReport(done.entries, done.issues)

    def _download(self, path: str | bytes) -> tuple[Pending, Inflow]:
        params = files.Download(id=self.id, **_path(path))
        pending = self._client.peer.start("tree.download", params, window=params.window)
        assert pending.inflow is not None
        return pending, pending.inflow

    async def connect_port(self, port: int) -> Tunnel:
        """A byte tunnel to a TCP port inside."""
        params = execs.PortConnect(id=self.id, port=port)
        return Tunnel(self._client, self._client.peer.start("port.connect", params, window=params.window))


class Process:
    """A command that was started. `output` follows it; `wait` gives what was kept."""

    def __init__(self, client: DSecClient, sandbox: str, ident: str) -> None:
        self._client = client
        self._ref: dict[str, Any] = {"id": sandbox, "exec_id": ident}
        self.id = ident
        self.ended: ExecResult | None = None  # how it ended, once `output` has come to its end; without output
        self.missed = 0  # bytes written before `output` began that were over the cap

    async def wait(self, *, timeout: float | None = None) -> ExecResult:
        """Its result. timeout: of this call, not of the command."""
        return await self._client.ran("exec.wait", execs.Wait(timeout_s=timeout, **self._ref))

    async def write(self, data: bytes, *, eof: bool = False) -> None:
        """Feed its stdin; waits while the command does not read."""
        for start in range(0, len(data), CHUNK):
            await self._client.call("exec.stdin", execs.Stdin(data=data[start : start + CHUNK], **self._ref))
        if eof:
            await self._client.call("exec.stdin", execs.Stdin(eof=True, **self._ref))

    async def signal(self, number: int = 15, *, everything: bool = False) -> None:
        await self._client.call("exec.signal", execs.Signal(signal=number, all=everything, **self._ref))

    async def resize(self, rows: int, cols: int) -> None:
        await self._client.call("exec.resize", execs.Resize(rows=rows, cols=cols, **self._ref))

    async def output(self, *, stdout_from: int = 0, stderr_from: int = 0) -> AsyncGenerator[tuple[int, bytes], None]:
        """(1, data) of stdout and (2, data) of stderr as they come, to the end. Not reading makes the command wait."""
        peer = self._client.peer
        queue: asyncio.Queue[base.ExecOutput | None] = asyncio.Queue()

        def notified(method: str, raw: msgspec.Raw) -> None:
            if method == "exec.output":
                queue.put_nowait(msgspec.json.decode(raw, type=base.ExecOutput))

        params = execs.Attach(stdout_from=stdout_from, stderr_from=stderr_from, **self._ref)
        at = {1: stdout_from, 2: stderr_from}
        pending = peer.start("exec.attach", params, notified=notified)
        pending.future.add_done_callback(lambda _f: queue.put_nowait(None))
        try:
            while (item := await queue.get()) is not None:
                self.missed += item.offset - at[item.stream]
                at[item.stream] = item.offset + len(item.data)
                yield item.stream, item.data
                limit = at[item.stream] + params.window
                peer.notify("stream.credit", base.StreamCredit(pending.ident, limit, item.stream))
            self.ended = result_of(await peer.finish(pending))
        finally:
            if not pending.future.done():
                peer.notify("$/cancelRequest", base.Cancel(pending.ident))


class Session:
    """An open shell."""

    def __init__(self, client: DSecClient, sandbox: str, ident: str) -> None:
        self._client = client
        self._ref: dict[str, Any] = {"id": sandbox, "session_id": ident}
        self.id = ident

    async def run(
        self, line: str, *, timeout: float | None = None, cap_bytes: int = 8 << 20, request_id: str | None = None
    ) -> ExecResult:
        """Run one line (or several) in it."""
        params = execs.SessionRun(
            shell=line, timeout_s=timeout, cap_bytes=cap_bytes, request_id=request_id, **self._ref
        )
        return await self._client.ran("session.run", params)

    async def close(self) -> None:
        await self._client.call("session.close", execs.SessionRef(**self._ref))

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


class Tunnel:
    """Bytes to and from a port inside."""

    def __init__(self, client: DSecClient, pending: Pending) -> None:
        self._client = client
        self._pending = pending

    async def read(self) -> bytes:
        """The next bytes; b"" at the end."""
        assert self._pending.inflow is not None
        return await self._pending.inflow.take()

    async def write(self, data: bytes) -> None:
        assert self._pending.outflow is not None
        await self._pending.outflow.write(data)

    def write_eof(self) -> None:
        self._client.peer.end_upload(self._pending)

    async def close(self) -> None:
        if not self._pending.future.done():
            self._client.peer.notify("$/cancelRequest", base.Cancel(self._pending.ident))
        with contextlib.suppress(DsecError):
            await self._client.peer.finish(self._pending)


def _on_progress(progress: Callable[[base.Progress], None] | None) -> Callable[[str, msgspec.Raw], None]:
    def notified(method: str, raw: msgspec.Raw) -> None:
        if method == "progress" and progress is not None:
            progress(msgspec.json.decode(raw, type=base.Progress))

    return notified


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
