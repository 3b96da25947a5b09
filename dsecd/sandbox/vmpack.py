"""What a microVM wrote, as it is at one instant: told by a copy of it that runs for nothing else.

The copy has the source's memory, so that what was not on the disk yet is there, too; all commands in it stand still
before its agent reads a name. No kernel of the host ever mounts a tenant's file system. The source stands still while
its memory is saved; a paused one stays paused. A killed daemon's copies are swept by the next one: no record owns them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import socket
from collections.abc import AsyncIterator
from typing import Final

from dsecd.agent.files import WINDOW, Exchange, tree_issues
from dsecd.agent.frames import Fields, Type
from dsecd.agent.link import AgentLink
from dsecd.aio import uninterrupted
from dsecd.errors import DsecError
from dsecd.sandbox.ids import new_id
from dsecd.sandbox.live import Live
from dsecd.sandbox.manager import Manager
from dsecd.vmm.backend import Vm

FREEZE_S: Final = 30.0
_POLL_S: Final = 0.02


@contextlib.asynccontextmanager
async def upper_stream(manager: Manager, live: Live) -> AsyncIterator[int]:
    """A descriptor that gives its upper directory as a tar. If telling it fails, so does the block."""
    async with contextlib.AsyncExitStack() as stack:
        vm = await _copy(manager, live, stack)
        ours, theirs = socket.socketpair()
        stack.callback(theirs.close)
        stack.callback(ours.close)
        ours.setblocking(False)
        telling = asyncio.ensure_future(_tell(vm.link, ours))
        try:
            yield theirs.fileno()
            await telling
        except DsecError as exc:
            cause = telling.exception() if telling.done() and not telling.cancelled() else None
            if isinstance(cause, DsecError):  # else the packer had more to say
                raise cause from exc
            raise
        finally:
            telling.cancel()
            await asyncio.wait([telling])


async def _copy(manager: Manager, live: Live, stack: contextlib.AsyncExitStack) -> Vm:
    rooms, record = manager.rooms, live.record
    if why := rooms.pool.why_no_copies():
        raise DsecError("unsupported", f"its disk cannot be copied at one instant: {why}")
    manager.admission.check(record.spec)
    ident, slot = new_id(manager.tag), rooms.slots.take()
    stack.callback(rooms.slots.free, slot)
    base = rooms.slots.base(slot)
    stack.push_async_callback(asyncio.to_thread, rooms.pool.destroy, ident)
    await uninterrupted(asyncio.to_thread(rooms.pool.settle, record.id))
    async with live.lock:
        if not isinstance(live.body, Vm) or record.state not in ("running", "paused"):
            raise DsecError("sandbox_dead", f"sandbox {record.id} is {record.state}", sandbox_id=record.id)
        async with rooms.vms.template(live.body) as template:
            stack.push_async_callback(asyncio.to_thread, shutil.rmtree, template.directory, True)
            limit = rooms.vms.disk_limit(record)
            await uninterrupted(asyncio.to_thread(rooms.pool.clone, record.id, ident, limit, base))
    card = None
    if template.spec.nics:  # it has a card, too, from which nothing is reached
        stack.push_async_callback(rooms.network.detach, ident)
        card = await rooms.network.attach_tap(ident, slot, "tap", {})
    stack.push_async_callback(rooms.vms.end, ident)
    vm = await rooms.vms.clone_of(ident, "", template, base, rooms.pool, card)
    stack.push_async_callback(vm.release)
    return vm


async def _tell(link: AgentLink, to: socket.socket) -> None:
    with contextlib.closing(to):
        try:
            async with asyncio.timeout(FREEZE_S) as deadline:
                while not await _told(link, to, deadline):  # noqa: ASYNC110 - its commands do not all stand still yet
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as exc:
            raise DsecError("vmm", f"its commands did not stand still within {FREEZE_S:g} s: pack it again") from exc


async def _told(link: AgentLink, to: socket.socket, deadline: asyncio.Timeout) -> bool:
    loop = asyncio.get_running_loop()
    with Exchange(link, "the upper directory") as exchange:
        exchange.request(Type.UPPER, [], WINDOW)
        while True:
            try:
                kind, payload = await exchange.recv()
            except DsecError as exc:
                if exc.detail.get("errno") == errno.EAGAIN:
                    return False
                raise
            deadline.reschedule(None)  # from here on the pack's own holds
            if kind is Type.DONE:
                if issues := tree_issues(Fields(payload)):
                    raise DsecError("image", f"not all of it can be packed: {issues[0]}")
                return True
            await loop.sock_sendall(to, payload)
            exchange.took(len(payload), WINDOW)
