"""The SDK's calls of stateless programs: a part of `DSecClient`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from dsecd.errors import DsecError
from dsecd.wire import base
from dsecd.wire import fncall as wire
from dsecd.wire.peer import Notified, Pending

_BROKEN = ("sandbox_dead", "shutting_down", "network", "internal", "outcome_unknown")


@dataclass(kw_only=True)
class DSecFnCallArgs:
    """One stateless program. Either `language` and `code`, or `argv`; files lie beside it, executable.

    expected: what it should print (`match`: `lines` ignores white space at ends). want: files it makes that come back.
    Sizes in MiB (output: KiB of each stream), times in seconds. container_image None: the daemon's own for calls.
    devices: of pools, as `["gpu:2"]`; compiling takes place without them.
    """

    language: str | None = None
    code: str | None = None
    argv: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    stdin: bytes | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    expected: bytes | None = None
    match: wire.Match = "lines"
    want: list[str] = field(default_factory=list)
    container_image: str | None = None
    devices: list[str] = field(default_factory=list)
    cpu_s: float = 10.0
    wall_s: float | None = None
    memory_limit_mb: int = 256
    output_limit_kb: int = 1024
    processes: int = 64
    open_files: int = 256
    file_limit_mb: int = 64
    disk_limit_mb: int = 64
    stack_limit_mb: int = 64

    def limits(self) -> wire.Limits:
        return wire.Limits(
            cpu_s=self.cpu_s, wall_s=self.wall_s, memory_mb=self.memory_limit_mb, output_kb=self.output_limit_kb,
            processes=self.processes, open_files=self.open_files, file_mb=self.file_limit_mb,
            disk_mb=self.disk_limit_mb, stack_mb=self.stack_limit_mb,
        )  # fmt: skip

    def program(self) -> wire.Program:
        return wire.Program(
            language=self.language, code=self.code, argv=self.argv, files=self.files, env=self.env
        )  # fmt: skip

    def case(self) -> wire.Case:
        return wire.Case(stdin=self.stdin, args=self.args, expected=self.expected)


class FnCalls:
    """Results of a batch as they end: `async for index, result in calls`; afterwards `total` has the sum."""

    def __init__(self, client: FnCallCalls, params: wire.Batch) -> None:
        self._client = client
        self._params = params
        self.total: wire.BatchJudged | None = None

    async def __aiter__(self) -> AsyncGenerator[tuple[int, wire.Judged], None]:
        queue: asyncio.Queue[wire.CaseJudged | None] = asyncio.Queue()

        def notified(method: str, raw: msgspec.Raw) -> None:
            if method == "fncall.case":
                queue.put_nowait(msgspec.json.decode(raw, type=wire.CaseJudged))

        pending = await self._client.begin("fncall.batch", self._params, notified=notified)
        pending.future.add_done_callback(lambda _f: queue.put_nowait(None))
        try:
            while (one := await queue.get()) is not None:
                yield one.index, one.result
            self.total = cast(wire.BatchJudged, await pending.finish())
        finally:
            pending.cancel()


class FnCallCalls:
    """A daemon that goes away in the middle gives the verdict `infra`: a call without state is simply made again."""

    if TYPE_CHECKING:

        async def begin(
            self, method: str, params: base.Params, *, window: int = 0, notified: Notified | None = None
        ) -> Pending: ...
        async def call(self, method: str, params: base.Params) -> Any: ...

    async def fncall(self, args: DSecFnCallArgs, *, timeout: float | None = None) -> wire.Judged:
        """Run one program and judge it. Raises only for what is wrong with the request."""
        params = wire.Run(
            program=args.program(), image=args.container_image, limits=args.limits(), match=args.match,
            devices=args.devices,
            case=args.case(), want=args.want, timeout_s=timeout,
        )  # fmt: skip
        try:
            return cast(wire.Judged, await self.call("fncall.run", params))
        except DsecError as exc:
            if exc.kind in _BROKEN:
                return wire.Judged(verdict="infra", detail=exc.message)
            raise

    def fncall_batch(
        self, args: DSecFnCallArgs, cases: list[wire.Case], *, stop_at_first: bool = False,
        checker: wire.Checker | None = None, timeout: float | None = None,
    ) -> FnCalls:  # fmt: skip
        """Compile once, judge many cases (those of `args` itself do not count): results stream as they end."""
        params = wire.Batch(
            program=args.program(), image=args.container_image, limits=args.limits(), match=args.match,
            devices=args.devices, cases=cases,
            stop_at_first=stop_at_first, checker=checker, timeout_s=timeout,
        )  # fmt: skip
        return FnCalls(self, params)
