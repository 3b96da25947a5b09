"""QEMU's control socket: JSON commands one at a time, events, deadlines.

QEMU has the guest's bytes in its memory and may have been taken over by them, so every line is bounded and typed, and
what it says is only ever shown, compared or counted. Reference: QEMU's docs/interop/qmp-spec.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from dsecd.errors import DsecError

MAX_LINE: Final = 4 << 20  # a ringbuf-read of 64 KiB of the worst bytes is the longest that we ask for
COMMAND_S: Final = 10.0
_KEEP_EVENTS: Final = 64


class _Number(Struct):
    major: int
    minor: int
    micro: int


class _Version(Struct):
    qemu: _Number


class _Hello(Struct):
    version: _Version


class _Greeting(Struct):
    hello: _Hello = msgspec.field(name="QMP")


class QmpError(DsecError):
    """QEMU refused a command. `word`: QEMU's own class of error."""

    def __init__(self, command: str, word: str, text: str) -> None:
        super().__init__("vmm", f"QEMU refused {command}: {text[:300]}")
        self.word = word


class Qmp:
    """One connection. Commands are serialised; `events` keeps the names of the last 64 events.

    notices: by an event's name, what to set whenever it comes.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._lock = asyncio.Lock()
        self._next = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._task = asyncio.get_running_loop().create_task(self._listen())
        self.events: deque[str] = deque(maxlen=_KEEP_EVENTS)
        self.happened = asyncio.Event()
        self.notices: dict[str, asyncio.Event] = {}
        self.version = ""

    @classmethod
    async def connect(cls, path: Path, timeout: float = COMMAND_S) -> Qmp:
        """Connect and leave negotiation mode. Of kind `vmm` when QEMU does not answer in time."""
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_LINE)
                try:
                    greeting = msgspec.json.decode(await reader.readline(), type=_Greeting)
                    qmp = cls(reader, writer)
                except BaseException:
                    writer.close()
                    raise
        except (OSError, TimeoutError, ValueError) as exc:
            raise DsecError("vmm", f"QEMU's control socket does not answer: {str(exc)[:200] or 'no greeting'}") from exc
        number = greeting.hello.version.qemu
        qmp.version = f"{number.major}.{number.minor}.{number.micro}"
        try:
            await qmp.run("qmp_capabilities")
        except BaseException:
            await qmp.close()
            raise
        return qmp

    async def run(self, command: str, timeout: float = COMMAND_S, fds: tuple[int, ...] = (), **arguments: Any) -> Any:
        """The command's `return`. QmpError when QEMU refuses; `vmm` at the deadline, `sandbox_dead` when it is gone.

        Underscores in argument names become dashes. fds go along by SCM_RIGHTS (for `getfd`, `add-fd`).
        """
        async with self._lock:
            self._next += 1
            asked = {"execute": command, "id": self._next}
            if arguments:
                asked["arguments"] = {name.replace("_", "-"): value for name, value in arguments.items()}
            self._answer = asyncio.get_running_loop().create_future()
            if self._task.done():
                raise _gone()
            self._send(msgspec.json.encode(asked) + b"\n", fds)
            try:
                async with asyncio.timeout(timeout):
                    answer = await self._answer
            except TimeoutError as exc:
                raise DsecError("vmm", f"QEMU did not answer {command} within {timeout:g} s") from exc
            finally:
                self._answer = None
        if "error" in answer:
            error = answer["error"] if isinstance(answer["error"], dict) else {}
            raise QmpError(command, str(error.get("class", "")), str(error.get("desc", "no reason")))
        return answer.get("return")

    async def until(self, event: str, timeout: float) -> None:
        """Wait for an event that comes after the last `events.clear()`."""
        try:
            async with asyncio.timeout(timeout):
                while event not in self.events:
                    if self._task.done():
                        raise _gone()
                    self.happened.clear()
                    await self.happened.wait()
        except TimeoutError as exc:
            raise DsecError("vmm", f"QEMU did not come to {event} within {timeout:g} s") from exc

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._writer.close()

    def _send(self, data: bytes, fds: tuple[int, ...]) -> None:
        if not fds:
            self._writer.write(data)
            return
        # The transport's own socket object cannot carry descriptors; the line is short and the buffer empty.
        with socket.socket(fileno=os.dup(self._writer.get_extra_info("socket").fileno())) as sock:
            socket.send_fds(sock, [data], list(fds))

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                message = msgspec.json.decode(line, type=dict[str, Any])
                if "event" in message:
                    name = str(message["event"])[:64]
                    self.events.append(name)
                    self.happened.set()
                    if name in self.notices:
                        self.notices[name].set()
                elif message.get("id") == self._next and self._answer is not None and not self._answer.done():
                    self._answer.set_result(message)
        except (OSError, ValueError, msgspec.DecodeError):
            pass  # the same as its end: QEMU is not to be talked to any more
        finally:
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(_gone())
            self.happened.set()


def _gone() -> DsecError:
    return DsecError("sandbox_dead", "the VMM ended")
