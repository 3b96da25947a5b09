"""The SDK's calls that run commands in a sandbox, and connect to what listens there: a part of `Sandbox`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dsecd.client_streams import Process, Session, Tunnel
from dsecd.client_types import ExecResult
from dsecd.errors import DsecError
from dsecd.wire import base, execs

if TYPE_CHECKING:
    from dsecd.client import DSecClient


class SandboxExecCalls:
    """Commands, sessions and ports."""

    if TYPE_CHECKING:
        _client: DSecClient

        @property
        def id(self) -> str: ...

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

    async def connect_port(self, port: int) -> Tunnel:
        """A byte tunnel to a TCP port inside."""
        return await self._tunnel(execs.PortConnect(id=self.id, port=port))

    async def connect_vnc(self) -> Tunnel:
        """A connection to a full VM's screen, in VNC's protocol (RFC 6143): a viewer's end of it."""
        return await self._tunnel(execs.PortConnect(id=self.id, port="vnc"))

    async def _tunnel(self, params: execs.PortConnect) -> Tunnel:
        return Tunnel(await self._client.begin("port.connect", params, window=params.window))
