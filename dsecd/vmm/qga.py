"""QEMU's guest agent: the way into guests that have it and not ours (appliances, Windows).

The guest is hostile: every line is bounded, every answer typed, and what it says is data. An answer that came too late
for its question is told from the next one's by a delimited sync: 0xFF, then the number that we chose. Reference: QEMU's
qga/qapi-schema.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from dsecd.errors import DsecError

PORT: Final = "org.qemu.guest_agent.0"
MAX_LINE: Final = 24 << 20  # base64 of what a command printed; the agent itself keeps 16 MiB of each stream
COMMAND_S: Final = 10.0
SYNC_S: Final = 5.0
_POLL_S: Final = (0.02, 0.5)  # between looks whether a command has ended: first, longest
_DELIMITER: Final = b"\xff"

T = TypeVar("T")


class AgentError(DsecError):
    """The guest agent refused a command: `unsupported` when it does not know it, else `invalid`."""

    def __init__(self, command: str, word: str, text: str) -> None:
        unknown = word == "CommandNotFound"
        super().__init__(
            "unsupported" if unknown else "invalid",
            f"the guest's agent {'does not know' if unknown else 'refused'} {command}",
            detail={"said": text[:512]},
        )


class OsInfo(Struct):
    """What the guest says it is; any of it may be missing."""

    id: str = ""
    name: str = ""
    version: str = ""
    kernel_release: str = msgspec.field(default="", name="kernel-release")
    machine: str = ""


class GuestRan(Struct, frozen=True):
    """How a command in the guest ended. signal: that ended it, else 0."""

    exit_code: int
    signal: int
    stdout: bytes
    stderr: bytes
    truncated: bool


class _Answer(Struct):
    returned: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="return")
    error: msgspec.Raw = msgspec.Raw(b"")


class _Error(Struct):
    word: str = msgspec.field(default="", name="class")
    desc: str = ""


class _Started(Struct):
    pid: int


class _Status(Struct):
    exited: bool
    exitcode: int = 0
    signal: int = 0
    out: bytes = msgspec.field(default=b"", name="out-data")
    err: bytes = msgspec.field(default=b"", name="err-data")
    out_truncated: bool = msgspec.field(default=False, name="out-truncated")
    err_truncated: bool = msgspec.field(default=False, name="err-truncated")


class GuestAgent:
    """One connection to the host's end of the port. Commands are serialised."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._lock = asyncio.Lock()
        self._in_step = False

    @property
    def usable(self) -> bool:
        """False once the connection is over: a guest that said too much was hung up on, or the VMM ended."""
        return not self._writer.is_closing() and not self._reader.at_eof() and self._reader.exception() is None

    @classmethod
    async def connect(cls, path: Path, timeout: float = SYNC_S) -> GuestAgent:
        """Connect and wait until the guest's agent answers. `vmm` when it does not in time."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_LINE)
        except OSError as exc:
            raise DsecError("sandbox_dead", "the VMM ended") from exc
        agent = cls(reader, writer)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    # A guest that boots reads nothing, and what was sent to it then may be lost: ask again.
                    try:
                        await agent.run("guest-ping", timeout=min(1.0, timeout))
                    except DsecError as exc:
                        if exc.kind == "sandbox_dead":
                            raise
                        await asyncio.sleep(0.05)
                    else:
                        return agent
        except TimeoutError as exc:
            await agent.close()
            raise DsecError("vmm", f"the guest's agent did not answer within {timeout:g} s: does it run?") from exc
        except BaseException:
            await agent.close()
            raise

    async def run(self, command: str, *, timeout: float = COMMAND_S, **arguments: Any) -> None:
        """A command whose answer says nothing more."""
        await self.ask(command, msgspec.Raw, timeout=timeout, **arguments)

    async def ask(self, command: str, returns: type[T], *, timeout: float = COMMAND_S, **arguments: Any) -> T:
        """The command's answer, decoded as that type. Underscores in argument names become dashes; None is left out.

        AgentError when the agent refuses; `vmm` when there is no answer in time, or none that can be read.
        """
        given = {name.replace("_", "-"): value for name, value in arguments.items() if value is not None}
        asked: dict[str, Any] = {"execute": command} | ({"arguments": given} if given else {})
        async with self._lock:
            try:
                async with asyncio.timeout(timeout):
                    if not self._in_step:
                        await self._sync()
                    self._in_step = False  # until its answer is here
                    await self._send(msgspec.json.encode(asked) + b"\n")
                    answer = await self._line()
                    self._in_step = True
            except TimeoutError as exc:
                raise DsecError("vmm", f"the guest's agent did not answer {command} within {timeout:g} s") from exc
        return _decoded(command, answer, returns)

    async def os(self) -> OsInfo:
        return await self.ask("guest-get-osinfo", OsInfo)

    async def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes | None = None,
        timeout: float = 60.0,
    ) -> GuestRan:  # fmt: skip
        """Run a program to its end and take what it wrote. `timeout`: it did not end; it runs on in the guest."""
        started = await self.ask(
            "guest-exec", _Started, path=argv[0], arg=list(argv[1:]), capture_output=True, input_data=stdin,
            env=[f"{key}={value}" for key, value in env.items()] if env else None,
        )  # fmt: skip
        deadline, pause = time.monotonic() + timeout, _POLL_S[0]
        while True:
            status = await self.ask("guest-exec-status", _Status, pid=started.pid, timeout=max(COMMAND_S, timeout))
            if status.exited:
                cut = status.out_truncated or status.err_truncated
                return GuestRan(status.exitcode, status.signal, status.out, status.err, cut)
            if time.monotonic() + pause > deadline:
                raise DsecError("timeout", f"the command in the guest did not end within {timeout:g} s")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _POLL_S[1])

    async def set_time(self, now_ns: int) -> None:
        """After a resume: what the guest's clock missed."""
        await self.run("guest-set-time", time=now_ns)

    async def freeze(self) -> int:
        """Flush and freeze its file systems before a disk snapshot; how many. Thaw soon."""
        return await self.ask("guest-fsfreeze-freeze", int, timeout=30)

    async def thaw(self) -> int:
        return await self.ask("guest-fsfreeze-thaw", int, timeout=30)

    async def shutdown(self) -> None:
        """Ask the guest to power off. It does not answer that."""
        async with self._lock:
            async with asyncio.timeout(COMMAND_S):
                if not self._in_step:
                    await self._sync()
                self._in_step = False
                await self._send(b'{"execute":"guest-shutdown","arguments":{"mode":"powerdown"}}\n')

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _sync(self) -> None:
        """Skip what is left of earlier answers: they end before a delimiter and a number that nobody could know."""
        number = secrets.randbits(62)
        asked = {"execute": "guest-sync-delimited", "arguments": {"id": number}}
        # The delimiter in front ends whatever half a line the agent's parser holds.
        await self._send(_DELIMITER + msgspec.json.encode(asked) + b"\n")
        while True:
            line = await self._line()
            _, delimiter, rest = line.rpartition(_DELIMITER)
            if delimiter and rest.strip() == b'{"return": %d}' % number:
                return

    async def _send(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as exc:
            raise DsecError("sandbox_dead", "the VMM ended") from exc

    async def _line(self) -> bytes:
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as exc:
            await self.close()  # the rest of it would be taken for the next answer
            raise DsecError("vmm", f"the guest's agent said more than {MAX_LINE >> 20} MiB at once") from exc
        except (asyncio.IncompleteReadError, OSError) as exc:
            raise DsecError("sandbox_dead", "the VMM ended") from exc
        return line


def _decoded(command: str, line: bytes, returns: type[T]) -> T:
    try:
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.error:
            error = msgspec.json.decode(answer.error, type=_Error)
            raise AgentError(command, error.word, error.desc)
        if not answer.returned:
            raise DsecError("vmm", f"the guest's agent answered {command} with neither a result nor an error")
        return msgspec.json.decode(answer.returned, type=returns)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as exc:
        raise DsecError("vmm", f"the guest's agent answered {command} with what cannot be read") from exc
