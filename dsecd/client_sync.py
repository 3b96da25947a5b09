"""`DSecSyncClient`: the SDK for code without an event loop. One background thread runs the asynchronous client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from dsecd.client_rollout import SyncRolloutCalls
from dsecd.client_tenants import SyncTenantCalls

if TYPE_CHECKING:
    from dsecd.client import (
        DSecContainerRunArgs,
        DSecFullVMRunArgs,
        DSecMicroVMRunArgs,
        DSecNeeds,
        ExecResult,
        Sandbox,
        SandboxFailed,
        Session,
    )
    from dsecd.client_fncall import DSecFnCallArgs
    from dsecd.trees import TreeReport
    from dsecd.wire import devices as device_wire
    from dsecd.wire import environments as env_wire
    from dsecd.wire import files, images
    from dsecd.wire import fncall as call_wire
    from dsecd.wire import jobs as job_wire
    from dsecd.wire import network as network_wire
    from dsecd.wire import sandbox as wire
    from dsecd.wire import trajectory as trajectory_wire

T = TypeVar("T")


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dsec-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the caller's thread ends the call, not the client
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class DSecSyncClient(SyncRolloutCalls, SyncTenantCalls):
    """As DSecClient, blocking. Use `with`."""

    def __init__(self, url: str | None = None, *, again_s: float | None = None, token_file: str | None = None) -> None:
        from dsecd.client import DSecClient

        self._loop = _Loop()
        self.aio = DSecClient(url, again_s=again_s, token_file=token_file)

    def open(self) -> DSecSyncClient:
        try:
            self._loop.run(self.aio.open())
        except BaseException:
            self._loop.stop()
            raise
        return self

    def close(self) -> None:
        self._loop.run(self.aio.close())
        self._loop.stop()

    def __enter__(self) -> DSecSyncClient:
        return self.open()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run any coroutine of the asynchronous client."""
        return self._loop.run(work)

    def run_container(
        self, args: DSecContainerRunArgs, *, timeout: float | None = None, request_id: str | None = None
    ) -> SyncSandbox:
        return SyncSandbox(self, self.run(self.aio.run_container(args, timeout=timeout, request_id=request_id)))

    def run_auto(
        self, args: DSecContainerRunArgs, *, timeout: float | None = None, request_id: str | None = None
    ) -> SyncSandbox:
        """`DSecClient.run` with backend "auto"."""
        made = self.run(self.aio.run(args, backend="auto", timeout=timeout, request_id=request_id))
        return SyncSandbox(self, made)

    def run_microvm(
        self, args: DSecMicroVMRunArgs, *, timeout: float | None = None, request_id: str | None = None
    ) -> SyncSandbox:
        return SyncSandbox(self, self.run(self.aio.run_microvm(args, timeout=timeout, request_id=request_id)))

    def run_fullvm(
        self, args: DSecFullVMRunArgs, *, timeout: float | None = None, request_id: str | None = None
    ) -> SyncSandbox:
        return SyncSandbox(self, self.run(self.aio.run_fullvm(args, timeout=timeout, request_id=request_id)))

    def run_containers(
        self, args: DSecContainerRunArgs | list[DSecContainerRunArgs], count: int | None = None
    ) -> list[SyncSandbox | SandboxFailed]:
        from dsecd.client import SandboxFailed

        made = self.run(self.aio.run_containers(args, count))
        return [one if isinstance(one, SandboxFailed) else SyncSandbox(self, one) for one in made]

    def choose(
        self, needs: DSecNeeds | None = None, *, image: str | None = None, devices: Iterable[str] = ()
    ) -> wire.Chosen:
        return self.run(self.aio.choose(needs, image=image, devices=devices))

    def devices(self) -> device_wire.DevicePools:
        return self.run(self.aio.devices())

    def fncall(self, args: DSecFnCallArgs, *, timeout: float | None = None) -> call_wire.Judged:
        return self.run(self.aio.fncall(args, timeout=timeout))

    def fncall_batch(
        self, args: DSecFnCallArgs, cases: list[call_wire.Case], **options: Any
    ) -> Iterator[tuple[int, call_wire.Judged]]:
        """Results as they end."""
        results = aiter(self.aio.fncall_batch(args, cases, **options))
        while (one := self.run(_next_or_none(results))) is not None:
            yield one

    def trajectory(self, ident: str, *, after: int = 0, sum: str = "") -> trajectory_wire.Entries:
        return self.run(self.aio.trajectory(ident, after=after, sum=sum))

    def jobs(self) -> list[job_wire.Job]:
        return self.run(self.aio.jobs())

    def pause_job(self, job: str, **options: Any) -> list[job_wire.Outcome]:
        return self.run(self.aio.pause_job(job, **options))

    def resume_job(self, job: str, **options: Any) -> list[job_wire.Outcome]:
        return self.run(self.aio.resume_job(job, **options))

    def stop_job(self, job: str, **options: Any) -> list[job_wire.Outcome]:
        return self.run(self.aio.stop_job(job, **options))

    def network_services(self) -> list[network_wire.Service]:
        return self.run(self.aio.network_services())

    def get(self, ident: str) -> SyncSandbox:
        return SyncSandbox(self, self.run(self.aio.get(ident)))

    def images(self) -> list[images.Image]:
        return self.run(self.aio.images())

    def list(
        self, labels: dict[str, str] | None = None, *, mine: bool = False, job: str | None = None
    ) -> list[SyncSandbox]:
        return [SyncSandbox(self, one) for one in self.run(self.aio.list(labels, mine=mine, job=job))]


async def _next_or_none(results: AsyncIterator[T]) -> T | None:
    return await anext(results, None)


class SyncSandbox:
    """As Sandbox, blocking."""

    def __init__(self, client: DSecSyncClient, sandbox: Sandbox) -> None:
        self._client = client
        self.aio = sandbox

    @property
    def id(self) -> str:
        return self.aio.id

    @property
    def info(self) -> wire.Sandbox:
        return self.aio.info

    def run_shell(self, command: str, **options: Any) -> ExecResult:
        return self._client.run(self.aio.run_shell(command, **options))

    def exec(self, argv: list[str], **options: Any) -> ExecResult:
        return self._client.run(self.aio.exec(argv, **options))

    def session(self, **options: Any) -> SyncSession:
        return SyncSession(self._client, self._client.run(self.aio.session(**options)))

    def read_file(self, path: str | bytes, **options: Any) -> bytes:
        return self._client.run(self.aio.read_file(path, **options))

    def write_file(self, path: str | bytes, data: bytes | str, **options: Any) -> int:
        return self._client.run(self.aio.write_file(path, data, **options))

    def list_dir(self, path: str | bytes) -> list[files.Entry]:
        return self._client.run(self.aio.list_dir(path))

    def upload(self, local: str, path: str | bytes, **options: Any) -> TreeReport:
        return self._client.run(self.aio.upload(local, path, **options))

    def download(self, path: str | bytes, local: str) -> TreeReport:
        return self._client.run(self.aio.download(path, local))

    def pause(self) -> None:
        self._client.run(self.aio.pause())

    def resume(self) -> None:
        self._client.run(self.aio.resume())

    def fork(self, count: int = 1) -> list[SyncSandbox | SandboxFailed]:
        from dsecd.client import SandboxFailed

        made = self._client.run(self.aio.fork(count))
        return [one if isinstance(one, SandboxFailed) else SyncSandbox(self._client, one) for one in made]

    def pack_diff(self, name: str, **options: Any) -> env_wire.Packed:
        return self._client.run(self.aio.pack_diff(name, **options))

    def set_network(self, rules: Mapping[str, bool], **options: Any) -> network_wire.SandboxNetwork:
        return self._client.run(self.aio.set_network(rules, **options))

    def network(self) -> network_wire.SandboxNetwork:
        return self._client.run(self.aio.network())

    def network_log(self) -> list[network_wire.Refusal]:
        return self._client.run(self.aio.network_log())

    def stats(self) -> wire.Stats:
        return self._client.run(self.aio.stats())

    def stop(self) -> None:
        self._client.run(self.aio.stop())

    def __enter__(self) -> SyncSandbox:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()


class SyncSession:
    """As Session, blocking."""

    def __init__(self, client: DSecSyncClient, session: Session) -> None:
        self._client = client
        self.aio = session

    def run(self, line: str, **options: Any) -> ExecResult:
        return self._client.run(self.aio.run(line, **options))

    def close(self) -> None:
        self._client.run(self.aio.close())
