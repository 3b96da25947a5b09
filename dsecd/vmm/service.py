"""Our agent where it is a service of a full VM's own init: it may end there, and another one may come.

The guest is the tenant's, who may kill the agent, stop it, or talk in its place. So its end is not the sandbox's, and
nothing waits for it without an end. QEMU says whether anybody in the guest has the port open; a new agent ends the
connection that it does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Final

from dsecd.agent.address import AgentAddress
from dsecd.agent.files import wake
from dsecd.agent.frames import Field, Tag
from dsecd.agent.link import AgentLink
from dsecd.errors import DsecError
from dsecd.vmm.qmp import Qmp

log = logging.getLogger("dsecd.vmm")

GREET_S: Final = 90.0  # of an agent that has the port open, in a guest under emulation on a busy host
WAKE_S: Final = 30.0
LOOK_S: Final = 30.0  # QEMU tells of each change, and is asked as well
PAUSE_S: Final = (0.2, 30.0)  # after a connection that did not last: first, longest
LASTED_S: Final = 10.0
SEED: Final = 64
OURS: Final = "agent"  # ports as dsecd.vmm.qemu_args calls them
QEMUS: Final = "qga"
_CHANGED: Final = "VSERPORT_CHANGE"
# A full VM's root is its root: all capabilities, no filter.
_HELLO: Final[list[Field]] = [(Tag.CAPS, (1 << 64) - 1)]


class ServiceAgent:
    """Keeps the link of one VM connected while that runs. `link` is one object for all of the VM's life."""

    def __init__(self, ident: str, address: AgentAddress) -> None:
        self._ident = ident
        self.link = AgentLink.asleep(address, _HELLO, outlived=True)
        self._there = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    def begin(self, qmp: Qmp, *, slept: bool = False) -> None:
        """Its machine runs. slept: it was saved until now, so that its clock is wrong."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep(qmp, slept))

    async def answering(self, timeout: float) -> None:
        """Wait until it can be asked. `vmm` when it is not there in time, `sandbox_dead` when the VMM ended."""
        there, keeping = asyncio.ensure_future(self._there.wait()), self._keeping
        try:
            await asyncio.wait([there, *([keeping] if keeping else [])], timeout=timeout,
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        finally:
            there.cancel()
        if self._there.is_set():
            return
        if keeping is not None and keeping.done():
            raise DsecError("sandbox_dead", "the VMM ended")
        raise DsecError(
            "vmm", f"the agent in the guest was not there within {timeout:g} s: does it run?", retryable=True
        )

    async def suspend(self) -> None:
        """Its machine is saved, and the agent with its commands will be back."""
        await self._stop()
        await self.link.suspend()

    async def lose(self, reason: str) -> None:
        """Its machine goes on from another disk: commands are over."""
        await self._stop()
        await self.link.close(reason)

    async def release(self) -> None:
        """The daemon lets go of the sandbox, or the sandbox is over."""
        await self._stop()
        self.link.outlived = False
        await self.link.close()

    async def _stop(self) -> None:
        self._there.clear()
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping

    async def _keep(self, qmp: Qmp, slept: bool) -> None:
        """Connect, notice its end, connect to the next one. Ends with the VMM."""
        changed = qmp.notices[_CHANGED] = asyncio.Event()
        pause = PAUSE_S[0]
        with contextlib.suppress(DsecError):
            while True:
                await _port(qmp, changed, wanted=True)
                began = time.monotonic()
                if await self._greet(slept):
                    slept = False
                    self._there.set()
                    await self._until_gone(qmp, changed)
                    self._there.clear()
                pause = PAUSE_S[0] if time.monotonic() > began + LASTED_S else min(2 * pause, PAUSE_S[1])
                await asyncio.sleep(pause)

    async def _greet(self, slept: bool) -> bool:
        try:
            await self.link.connect_again(GREET_S)
            if slept:
                async with asyncio.timeout(WAKE_S):
                    await wake(self.link, time.time_ns(), secrets.token_bytes(SEED))
        except (DsecError, TimeoutError) as exc:
            log.info("the agent in the guest: %s", exc or "it did not wake", extra={"sandbox_id": self._ident})
            await self.link.close("it did not answer")
            return False
        return True

    async def _until_gone(self, qmp: Qmp, changed: asyncio.Event) -> None:
        closing = asyncio.ensure_future(_port(qmp, changed, wanted=False))
        try:
            await asyncio.wait((self.link.closed, closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
        if self.link.closed.done():
            return
        if not closing.cancelled() and closing.exception() is not None:  # noticed before the link's own end
            self.link.outlived = False
            await self.link.close("the VMM ended")
        else:
            await self.link.close("it was killed, or the guest was started anew")


async def _port(qmp: Qmp, changed: asyncio.Event, *, wanted: bool) -> None:
    """Wait until something in the guest has the port open, or nothing. `sandbox_dead` when the VMM ends."""
    while True:
        changed.clear()
        try:
            if await port_open(qmp, OURS) is wanted:
                return
        except DsecError as exc:
            if exc.kind == "sandbox_dead":
                raise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await changed.wait()


async def port_open(qmp: Qmp, port: str) -> bool:
    """Whether something in the guest has it open."""
    found = await qmp.run("query-chardev")
    devices = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return any(one.get("label") == port and one.get("frontend-open") is True for one in devices)
