"""The socket of one rollout's worker, and all that can be done through it.

It lies in a directory of the rollout's own, which is bound into the worker and nowhere else; on the host it belongs to
the worker's root alone, and the kernel says at each connection who is there. Whoever is, is hostile: a closed list of
methods, on one sandbox, within quotas.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dsecd import __version__
from dsecd.container.bundle import ID_COUNT
from dsecd.devices.model import Bind
from dsecd.errors import DsecError
from dsecd.wire.base import PROTOCOL, Params
from dsecd.wire.call import Call, Handler, Interceptor, Peer
from dsecd.wire.daemon import Hello, Welcome
from dsecd.wire.limits import Limits
from dsecd.wire.methods import METHODS
from dsecd.wire.sandbox import Owner
from dsecd.wire.server import Server

INSIDE: Final = "/run/dsec"
ON_AGENT: Final = frozenset({
    "sandbox.get", "exec.run", "exec.start", "exec.attach", "exec.stdin", "exec.signal", "exec.resize", "exec.wait",
    "exec.list", "session.open", "session.run", "session.close", "port.connect", "file.read", "file.write", "file.list",
    "file.stat", "file.mkdir", "file.remove", "file.rename", "tree.upload", "tree.download",
})  # fmt: skip
OWN: Final = frozenset({"rollout.worker.task", "rollout.worker.ask", "rollout.worker.partial", "rollout.worker.result"})
# What one worker may make the daemon hold.
LIMITS: Final = Limits(connections=4, calls=64, frame=8 << 20, held=16 << 20, unsent=32 << 20)


class Channel:
    """`listen` before the worker is made, `belong` once its user ids are known, `close` at the end."""

    def __init__(self, directory: Path, rollout: str, owner: Owner) -> None:
        self.directory: Final = directory
        self._rollout = rollout
        self._owner = owner  # the rollout's: whom commands and keys belong to
        self._base: int | None = None
        self._server: Server | None = None
        self.agent = ""

    @property
    def bind(self) -> Bind:
        """What the worker sees of it."""
        return Bind(str(self.directory), INSIDE, noexec=True)

    async def listen(self, table: Mapping[str, Handler], own: Mapping[str, Handler], once: Interceptor) -> None:
        """In the same directory as before a restart: the worker finds the new socket under the old name."""
        self.directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        self.directory.parent.chmod(0o711)
        path = self.directory / "sock"
        path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            # Relative to the directory: a socket's path is at most 107 bytes, and ours begins where it is configured.
            fd = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.bind(f"/proc/self/fd/{fd}/sock")
            finally:
                os.close(fd)
            path.chmod(0o600)
            self._server = Server(self._handlers(table, own), self._once(once), LIMITS, self._greet)
            await self._server.serve(sock)
        except BaseException:
            sock.close()
            raise
        if self._base is not None:
            self.belong(self._base, self.agent)

    def belong(self, base: int, agent: str) -> None:
        """To the root of the user namespace at `base`, to be used on sandbox `agent`."""
        self._base, self.agent = base, agent
        if self._server is not None:
            os.chown(self.directory / "sock", base, base)

    async def close(self) -> None:
        """Cut the worker off; a daemon that stops does only this."""
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def remove(self) -> None:
        await self.close()
        await asyncio.to_thread(shutil.rmtree, self.directory, True)

    # -- who, and what ------------------------------------------------------------------------------------------------
    def _greet(self, peer: Peer) -> Peer | None:
        """Only the worker's own users; from here on it acts for the rollout's owner."""
        base = self._base
        if base is None or not base <= peer.uid < base + ID_COUNT:
            return None
        owner = self._owner
        return Peer(peer.pid, owner.uid, peer.gid, owner.principal, owner.project)

    def _handlers(self, table: Mapping[str, Handler], own: Mapping[str, Handler]) -> dict[str, Handler]:
        handlers: dict[str, Handler] = dict.fromkeys(METHODS, _denied)
        handlers |= {name: self._scoped(table[name]) for name in ON_AGENT}
        handlers |= {name: own[name] for name in OWN}
        handlers["daemon.hello"] = self._hello
        return handlers

    def _scoped(self, handler: Handler) -> Handler:
        async def scoped(call: Call, params: Any) -> Any:
            self._check(params)
            result = handler(call, params)
            return await result if inspect.isawaitable(result) else result

        return scoped

    def _once(self, once: Interceptor) -> Interceptor:
        """Keys of a worker are kept apart from those of all others."""

        async def scoped(call: Call, params: Params, invoke: Any) -> Any:
            if call.name not in ON_AGENT:
                return await invoke()
            self._check(params)
            if params.request_id is not None:
                params.request_id = f"{self._rollout}:{params.request_id}"
            return await once(call, params, invoke)

        return scoped

    def _check(self, params: Any) -> None:
        if params.id != self.agent or not self.agent:
            raise DsecError("denied", f"this worker may use sandbox {self.agent} and no other")

    def _hello(self, call: Call, params: Hello) -> Welcome:
        return Welcome(protocol=PROTOCOL, version=__version__, host="", uid=call.peer.uid, pid=0)


def _denied(call: Call, params: Params) -> None:
    raise DsecError("denied", f"a worker may not call {call.name}")
