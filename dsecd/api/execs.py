"""exec.*, session.* and port.*."""

from __future__ import annotations

import asyncio
import signal as signals

from dsecd.agent import files as ops
from dsecd.agent.command import STDERR, STDOUT, Command
from dsecd.agent.frames import Tag, Type
from dsecd.api.files import path_of
from dsecd.api.flows import tunnel
from dsecd.errors import DsecError
from dsecd.sandbox.commands import Commands, how
from dsecd.sandbox.fork import fleeting
from dsecd.sandbox.live import Live
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.sessions import Sessions
from dsecd.vmm.fullvm import FullVm
from dsecd.wire import base
from dsecd.wire import execs as wire
from dsecd.wire.call import Call


class ExecApi:
    """Commands in a sandbox."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self.commands = 0

    async def _full(self, ident: str) -> tuple[Live, Commands, Sessions]:
        """A sandbox with our agent in it, and what that makes possible. `unsupported` of one without."""
        live = await self._manager.answering(ident)
        if live.commands is None or live.sessions is None:
            raise DsecError("unsupported", "in a full VM without dsec-agent only exec.run works")
        return live, live.commands, live.sessions

    async def _command(self, ident: str, exec_id: str) -> Command:
        _, commands, _ = await self._full(ident)
        return commands.get(exec_id).command

    async def run(self, call: Call, params: wire.Run) -> wire.Ran:
        self.commands += 1
        if params.fresh or params.keep:
            return await self._run_fresh(call, params)
        live = await self._manager.answering(params.id)
        if live.guest is not None:
            return await live.guest.run(params, call.received)
        assert live.commands is not None
        result = await live.commands.run(params, call.peer.uid, call.received)
        return await self._manager.judge(live, result)

    async def _run_fresh(self, call: Call, params: wire.Run) -> wire.Ran:
        if params.keep and not params.fresh:
            raise DsecError("invalid", "keep is for fresh commands: what a sandbox has, its own commands see")
        for path in params.keep:
            if not path_of(path, None).strip(b"/"):
                raise DsecError("invalid", "keep names paths below /; without it, everything is kept")
        owner = call.peer.owner()
        async with fleeting(self._manager, params.id, owner, params.keep) as live:
            assert live.commands is not None
            result = await live.commands.run(params, call.peer.uid, call.received)
            return await self._manager.judge(live, result)

    async def start(self, call: Call, params: wire.Start) -> wire.Started:
        self.commands += 1
        _, commands, _ = await self._full(params.id)
        return await commands.start(params, call.peer.uid)

    async def wait(self, call: Call, params: wire.Wait) -> wire.Ran:
        live, commands, _ = await self._full(params.id)
        return await self._manager.judge(live, await commands.wait(params.exec_id))

    async def attach(self, call: Call, params: wire.Attach) -> wire.Ran:
        """Credit and output pass straight through between client and agent; nothing is held here."""
        live, commands, _ = await self._full(params.id)
        command = commands.get(params.exec_id).command
        if command.listened:
            raise DsecError("conflict", f"command {params.exec_id} is attached to already")
        async with command.reading:
            return await self._follow(call, params, live, command)

    async def _follow(self, call: Call, params: wire.Attach, live: Live, command: Command) -> wire.Ran:
        at = {STDOUT: params.stdout_from, STDERR: params.stderr_from}

        def output(stream: int, offset: int, data: memoryview) -> None:
            at[stream] = offset + len(data)
            call.notify("exec.output", base.ExecOutput(call.id, stream, offset, bytes(data)))

        def limit(stream: int, value: int) -> None:
            if stream in at:
                command.follow(stream, at[stream], value)

        command.listen(output)
        call.on_limit = limit
        try:
            for stream, offset in at.items():
                command.follow(stream, offset, offset + params.window)
            ended = await command.followed(at)
            return await self._manager.judge(live, wire.Ran(exec_id=params.exec_id, **how(ended)))
        finally:
            call.on_limit = None
            command.listen(None)
            for stream in at:
                command.unfollow(stream)

    async def stdin(self, call: Call, params: wire.Stdin) -> base.Empty:
        command = await self._command(params.id, params.exec_id)
        if params.data:
            await command.feed(params.data)
        if params.eof:
            command.feed_eof()
        return base.Empty()

    async def signal(self, call: Call, params: wire.Signal) -> base.Empty:
        command = await self._command(params.id, params.exec_id)
        command.kill(signals.SIGKILL if params.all else params.signal, everything=params.all)
        return base.Empty()

    async def resize(self, call: Call, params: wire.Resize) -> base.Empty:
        (await self._command(params.id, params.exec_id)).resize(params.rows, params.cols)
        return base.Empty()

    async def list(self, call: Call, params: wire.ListExecs) -> wire.Execs:
        _, commands, _ = await self._full(params.id)
        return wire.Execs(execs=commands.listing())

    async def open(self, call: Call, params: wire.SessionOpen) -> wire.Session:
        _, _, sessions = await self._full(params.id)
        return await sessions.open(params, call.peer.uid)

    async def line(self, call: Call, params: wire.SessionRun) -> wire.Ran:
        self.commands += 1
        live, _, sessions = await self._full(params.id)
        with live.use():
            result = await sessions.get(params.session_id).run(params, call.received)
        return await self._manager.judge(live, result)

    async def close(self, call: Call, params: wire.SessionRef) -> base.Empty:
        _, _, sessions = await self._full(params.id)
        sessions.close(params.session_id)
        return base.Empty()

    async def connect(self, call: Call, params: wire.PortConnect) -> wire.PortClosed:
        """A tunnel: both directions until both have ended, or one end is gone."""
        if params.port == "vnc":
            live = await self._manager.running(params.id)
            return await self._watch(call, live, params.window)
        live = await self._manager.answering(params.id)
        with ops.Exchange(live.link, f"port {params.port}") as exchange, live.use():
            exchange.request(Type.CONNECT, [(Tag.PORT, params.port)], ops.WINDOW)
            kind, _ = await exchange.recv()
            if kind is not Type.CONNECTED:
                raise DsecError("internal", f"the agent answered {kind.name} to a connect")
            inward = asyncio.ensure_future(self._inward(call, exchange))
            try:
                received = await self._outward(call, exchange, params.window)
            finally:
                inward.cancel()
            return wire.PortClosed(sent=exchange.sent, received=received)

    @staticmethod
    async def _watch(call: Call, live: Live, window: int) -> wire.PortClosed:
        if not isinstance(live.body, FullVm):
            raise DsecError("unsupported", "only full VMs have a screen: create one with backend fullvm")
        with await live.body.viewer() as sock, live.use():
            sent, received = await tunnel(call, sock, window)
            return wire.PortClosed(sent=sent, received=received)

    @staticmethod
    async def _inward(call: Call, exchange: ops.Exchange) -> None:
        async for chunk in call.inflow(ops.WINDOW):
            await exchange.put(chunk)
        exchange.put_eof()

    @staticmethod
    async def _outward(call: Call, exchange: ops.Exchange, window: int) -> int:
        flow = call.outflow(window)
        while True:
            kind, payload = await exchange.recv()
            if kind is Type.DATA:
                await flow.write(payload)
                exchange.took(len(payload), ops.WINDOW)
            elif kind is Type.EOF:
                call.notify("stream.eof", base.StreamEof(call.id))
            elif kind is Type.DONE:
                return flow.sent
