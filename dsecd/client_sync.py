"""`DSecSyncClient`: the SDK for code without an event loop. One background thread runs the asynchronous client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dsecd.client import DSecContainerRunArgs, ExecResult, Sandbox, SandboxFailed, Session
    from dsecd.trees import TreeReport
    from dsecd.wire import files, images
    from dsecd.wire import sandbox as wire

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


class DSecSyncClient:
    """As DSecClient, blocking. Use `with`."""

    def __init__(self, url: str | None = None) -> None:
        from dsecd.client import DSecClient

        self._loop = _Loop()
        self.aio = DSecClient(url)

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

    def run_containers(
        self, args: DSecContainerRunArgs | list[DSecContainerRunArgs], count: int | None = None
    ) -> list[SyncSandbox | SandboxFailed]:
        from dsecd.client import SandboxFailed

        made = self.run(self.aio.run_containers(args, count))
        return [one if isinstance(one, SandboxFailed) else SyncSandbox(self, one) for one in made]

    def get(self, ident: str) -> SyncSandbox:
        return SyncSandbox(self, self.run(self.aio.get(ident)))

    def images(self) -> list[images.Image]:
        return self.run(self.aio.images())

    def list(self, labels: dict[str, str] | None = None, *, mine: bool = False) -> list[SyncSandbox]:
        return [SyncSandbox(self, one) for one in self.run(self.aio.list(labels, mine=mine))]


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
