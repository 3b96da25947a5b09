"""Firecracker's API: JSON over HTTP on a Unix socket, one call at a time, each with a deadline.

Firecracker answers 204 (or 200 with a body) when it did what it was told and 400 with `fault_message` when not. A body
has at most 51,200 bytes, and a field that it does not know is an error there. A guest that escaped speaks through this
socket, so what comes back is bounded, typed, and only ever shown or compared. Reference: the API description of release
1.16.1 (tests/data/firecracker-1.16.1.json), which every request of ours is compared with in the tests.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from dsecd.errors import DsecError

MAX_BODY: Final = 51_200
CALL_S: Final = 10.0
_MAX_HEAD: Final = 8 << 10
_MAX_ANSWER: Final = 256 << 10
_SETTLE_S: Final = 2.0  # from a connection that broke to the end of the process that broke it

T = TypeVar("T")


class MachineConfig(Struct, frozen=True):
    vcpu_count: int
    mem_size_mib: int


class BootSource(Struct, frozen=True, omit_defaults=True):
    kernel_image_path: str
    boot_args: str
    initrd_path: str | None = None


class TokenBucket(Struct, frozen=True):
    """size tokens (bytes or operations) every refill_time milliseconds."""

    size: int
    refill_time: int


class RateLimiter(Struct, frozen=True, omit_defaults=True):
    bandwidth: TokenBucket | None = None
    ops: TokenBucket | None = None


class DriveConfig(Struct, frozen=True):
    drive_id: str
    path_on_host: str
    is_read_only: bool
    is_root_device: bool = False
    # A sandbox does not outlive its host's power, so the guest's flushes need not wait for the host's disk.
    cache_type: Literal["Unsafe"] = "Unsafe"


class PmemConfig(Struct, frozen=True):
    id: str
    path_on_host: str
    read_only: bool = True


class NetworkInterface(Struct, frozen=True):
    iface_id: str
    host_dev_name: str
    guest_mac: str


class Vsock(Struct, frozen=True):
    guest_cid: int
    uds_path: str


class Balloon(Struct, frozen=True):
    amount_mib: int
    deflate_on_oom: bool
    free_page_reporting: bool


class BalloonUpdate(Struct, frozen=True):
    amount_mib: int


class Entropy(Struct, frozen=True):
    rate_limiter: RateLimiter


class Action(Struct, frozen=True):
    action_type: Literal["InstanceStart"]


class VmState(Struct, frozen=True):
    state: Literal["Paused", "Resumed"]


class SnapshotCreate(Struct, frozen=True):
    snapshot_path: str
    mem_file_path: str
    snapshot_type: Literal["Full"] = "Full"


class MemBackend(Struct, frozen=True):
    backend_path: str
    backend_type: Literal["File"] = "File"


class NetworkOverride(Struct, frozen=True):
    iface_id: str
    host_dev_name: str


class SnapshotLoad(Struct, frozen=True):
    snapshot_path: str
    mem_backend: MemBackend
    network_overrides: tuple[NetworkOverride, ...]
    resume_vm: bool = False


class InstanceInfo(Struct, frozen=True):
    """GET /"""

    id: str
    state: Literal["Not started", "Running", "Paused"]
    vmm_version: str


class _Fault(Struct, frozen=True):
    fault_message: str


class Api:
    """The API of one Firecracker process. `ended`: done when that process is, with the reason as a sentence's end."""

    def __init__(self, path: Path, ended: asyncio.Future[str]) -> None:
        self._path = str(path)
        self._ended = ended
        self._lock = asyncio.Lock()  # Firecracker has one thread for it

    async def put(self, path: str, body: Struct, timeout: float | None = None) -> None:
        """`vmm`: refused, or no answer in time. `sandbox_dead`: Firecracker is gone."""
        await self._call("PUT", path, msgspec.json.encode(body), timeout)

    async def patch(self, path: str, body: Struct, timeout: float | None = None) -> None:
        """Errors as `put`."""
        await self._call("PATCH", path, msgspec.json.encode(body), timeout)

    async def get(self, path: str, into: type[T], timeout: float | None = None) -> T:
        """Errors as `put`."""
        answer = await self._call("GET", path, b"", timeout)
        try:
            return msgspec.json.decode(answer, type=into)
        except msgspec.DecodeError as exc:
            raise DsecError("vmm", f"Firecracker's answer to GET {path} makes no sense: {exc}") from exc

    async def _call(self, method: str, path: str, body: bytes, timeout: float | None) -> bytes:
        timeout = CALL_S if timeout is None else timeout
        if len(body) > MAX_BODY:
            raise DsecError("vmm", f"{method} {path} has {len(body)} bytes; Firecracker takes at most {MAX_BODY}")
        async with self._lock:
            talking = asyncio.ensure_future(self._talk(method, path, body))
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.wait((talking, self._ended), return_when=asyncio.FIRST_COMPLETED)
                    if not talking.done() or (talking.exception() is not None and await self._dies()):
                        raise DsecError("sandbox_dead", f"Firecracker is gone: {self._ended.result()}")
                    status, answer = talking.result()
            except TimeoutError as exc:
                raise DsecError("vmm", f"Firecracker did not answer {method} {path} within {timeout:g} s") from exc
            except (OSError, EOFError, ValueError) as exc:
                what = str(exc) or type(exc).__name__
                raise DsecError("vmm", f"Firecracker broke off its answer to {method} {path}: {what[:200]}") from exc
            finally:
                talking.cancel()
                await asyncio.gather(talking, return_exceptions=True)
        if status not in (200, 204):
            raise DsecError("vmm", f"Firecracker refused {method} {path}: {_fault(status, answer)}")
        return answer

    async def _dies(self) -> bool:
        """A connection broke: because the process ends?"""
        await asyncio.wait((self._ended,), timeout=_SETTLE_S)
        return self._ended.done()

    async def _talk(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """One request on a connection of its own. OSError, EOFError or ValueError when the answer is none."""
        reader, writer = await asyncio.open_unix_connection(self._path, limit=_MAX_HEAD)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
            if body:
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"\r\n" + body)
            await writer.drain()
            try:
                status, length = _head(await reader.readuntil(b"\r\n\r\n"))
            except asyncio.LimitOverrunError as exc:
                raise ValueError("its head is too long") from exc
            return status, await reader.readexactly(length)
        finally:
            writer.transport.abort()


def _head(head: bytes) -> tuple[int, int]:
    """Status and length of the body."""
    lines = head.decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    status = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (status.isascii() and status.isdigit()):
        raise ValueError("it is not HTTP")
    length = 0
    for line in lines[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            length = int(value.strip()) if value.strip().isascii() and value.strip().isdigit() else -1
    if not 0 <= length <= _MAX_ANSWER:
        raise ValueError("its length is out of bounds")
    return int(status), length


def _fault(status: int, answer: bytes) -> str:
    """Firecracker's own words, cut; the status where it had none."""
    try:
        said = msgspec.json.decode(answer, type=_Fault).fault_message
    except msgspec.DecodeError:
        return f"status {status}"
    return " ".join(said.split())[:400] or f"status {status}"
