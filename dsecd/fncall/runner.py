"""`fncall.run` and `fncall.batch`: compile what must be, run each case in a place, judge it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from msgspec import Struct

from dsecd.agent.calls import ARGUMENTS_MAX, PRODUCED_MAX, CallLimits, CallPlan
from dsecd.errors import DsecError
from dsecd.fncall.box import Outcome, Places, Where, zygote_command
from dsecd.fncall.cpus import CallCpus
from dsecd.fncall.languages import find, languages
from dsecd.fncall.pool import Pool
from dsecd.fncall.verdict import Ending, verdict_of, wall_s
from dsecd.fncallconfig import FnCallConfig, Language
from dsecd.wire import fncall as wire

log = logging.getLogger("dsecd.fncall")

MIB: Final = 1 << 20
PATH: Final = "/usr/local/bin:/usr/bin:/bin"
COMPILER_OUTPUT: Final = 256 << 10
COMPILER_TASKS: Final = 128
SHRINK_S: Final = 2.0
REPLY_MAX: Final = 11 * MIB  # of all that goes into one reply: as base64 it must fit a frame
POOLS_MAX: Final = 64
# What a call is given beside its own files and limit: directories of an empty work place.
SPACE_EXTRA: Final = 256 << 10


class Ready(Struct, frozen=True):
    """A program that only has to be run: its command, its files, and what compiling it took."""

    argv: tuple[str, ...]
    files: dict[str, bytes]
    env: dict[str, str]
    processes: int = 0
    warm: bool = False
    compile_ms: float = 0.0
    compiler: str = ""


class NotCompiledError(Exception):
    """The compiler's verdict on the code."""

    def __init__(self, judged: wire.Judged) -> None:
        super().__init__(judged.detail)
        self.judged = judged


class Runner:
    """All pools of one daemon."""

    def __init__(self, config: FnCallConfig, places: Places) -> None:
        self.config = config
        self.languages = languages(config.languages)
        self._places = places
        self._cpus = CallCpus(config.at_once)
        self._pools: dict[tuple[Where, bool], Pool] = {}
        self._cold: dict[str, str] = {}  # images whose python3 can be no zygote, and why
        self._closed = False
        self.calls = 0

    # -- the two methods ----------------------------------------------------------------------------------------------
    async def run(self, params: wire.Run, received: float) -> wire.Judged:
        """One call. received: when it was asked for, by the monotonic clock."""
        where = self._where(params)
        try:
            ready = await self._prepare(params.program, params.limits, where.image)
        except NotCompiledError as exc:
            return exc.judged
        except DsecError as exc:
            return _infra(exc)
        return await self._judge(ready, params, params.case, where, received, tuple(params.want))

    async def batch(self, params: wire.Batch, received: float) -> AsyncIterator[tuple[int, wire.Judged]]:
        """Each case's result when it is there, compiled once; ends early on `stop_at_first`. A program that does not
        compile gives one result, with number -1."""
        where = self._where(params)
        try:
            ready = await self._prepare(params.program, params.limits, where.image)
            checker = None
            if params.checker is not None:
                checker = await self._prepare(params.checker, params.checker.limits, where.image)
        except NotCompiledError as exc:
            yield -1, exc.judged
            return
        except DsecError as exc:
            yield -1, _infra(exc)
            return
        cases = iter(enumerate(params.cases))
        running: dict[asyncio.Task[wire.Judged], int] = {}
        try:
            while True:
                while len(running) < self._cpus.count and (case := next(cases, None)) is not None:
                    work = self._case(ready, checker, params, case[1], where, received)
                    running[asyncio.ensure_future(work)] = case[0]
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=running.__getitem__):
                    number, judged = running.pop(task), task.result()
                    yield number, judged
                    if params.stop_at_first and judged.verdict != "ok":
                        return
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    async def _case(
        self, ready: Ready, checker: Ready | None, params: wire.Batch, case: wire.Case, where: Where, received: float
    ) -> wire.Judged:
        if checker is None or params.checker is None:
            return await self._judge(ready, params, case, where, received)
        alone = msgspec.structs.replace(case, expected=None)
        judged = await self._judge(ready, params, alone, where, received)
        if judged.verdict != "ok":
            return judged
        return await self._check(checker, params.checker.limits, case, judged, where.image)

    async def _check(
        self, checker: Ready, limits: wire.Limits, case: wire.Case, judged: wire.Judged, image: str
    ) -> wire.Judged:
        """Ask the checker, a program like any other: only its exit status and a line of its output are believed."""
        names = ("input", "output", "expected")
        files = dict(zip(names, (case.stdin or b"", judged.stdout, case.expected or b""), strict=True))
        # Each has its own names: a checker's file of one of them would be ambiguous.
        program = msgspec.structs.replace(checker, files={**checker.files, **files})
        outcome, _, _ = await self._execute(program, limits, Where(image), stdin=None, args=names)
        verdict, detail = verdict_of(Ending(outcome.end, outcome.figures, limits), None, "lines")
        said = outcome.end.stdout[:500].decode("utf-8", "replace").strip()
        if verdict == "runtime_error" and outcome.end.code == 1 and outcome.end.signal == 0:
            judged.verdict, judged.detail = "wrong_answer", said
        elif verdict != "ok":
            judged.verdict, judged.detail = "infra", f"the checker failed: {verdict}, {detail}"
        else:
            judged.detail = said
        return judged

    # -- one program --------------------------------------------------------------------------------------------------
    async def _prepare(self, program: wire.Program, limits: wire.Limits, image: str) -> Ready:
        """Refuse what cannot be run; compile what must be. NotCompiledError: the verdict is there already."""
        self._check_limits(limits)
        size = sum(map(len, program.files.values())) + len(program.code or "")
        if size > 12 * MIB:
            raise DsecError("invalid", f"{size} bytes of code and files: at most {12 * MIB}")
        for name in program.files:
            if name in (".", ".."):
                raise DsecError("invalid", f"not the name of a file: {name!r}")
        if program.language is None:
            if program.code is not None or not program.argv:
                raise DsecError("invalid", "a program is either a language with code, or an argv")
            return Ready(tuple(program.argv), dict(program.files), program.env)
        if program.argv:
            raise DsecError("invalid", "a language has its own command: give either a language or an argv")
        if not program.code:
            raise DsecError("invalid", "the code is empty")
        language = find(self.languages, program.language)
        files = {**program.files, language.file: program.code.encode("utf-8", "surrogatepass")}
        env = {**language.env, **program.env}
        ready = Ready(tuple(language.run), files, env, language.processes, language.warm)
        return await self._compile(language, ready, image) if language.compile else ready

    async def _compile(self, language: Language, ready: Ready, image: str) -> Ready:
        limits = wire.Limits(
            cpu_s=language.compile_cpu_s, memory_mb=language.compile_memory_mb, processes=COMPILER_TASKS,
            disk_mb=256, file_mb=256,
        )  # fmt: skip
        compiler = Ready(tuple(language.compile), ready.files, ready.env)
        outcome, ran_ms, _ = await self._execute(compiler, limits, Where(image), want=(language.product,))
        verdict, detail = verdict_of(Ending(outcome.end, outcome.figures, limits), None, "lines")
        said = (outcome.end.stdout + outcome.end.stderr)[:COMPILER_OUTPUT].decode("utf-8", "replace")
        if outcome.end.not_started:
            raise DsecError("unsupported", f"image {image!r} has no {language.compile[0]}: {detail}")
        product = outcome.end.files.get(language.product)
        if verdict == "ok" and product is None:
            number = outcome.end.refused.get(language.product, 0)
            verdict, detail = "compile_error", f"the compiler made no {language.product}: {os.strerror(number)}"
        if verdict != "ok":
            raise NotCompiledError(
                wire.Judged(
                    verdict="compile_error",
                    detail=f"the compiler: {detail}",
                    compiler=said,
                    compile_ms=ran_ms,
                    exit_code=outcome.end.code,
                    signal=outcome.end.signal,
                )
            )
        assert product is not None
        files = {name: data for name, data in ready.files.items() if name != language.file}
        return msgspec.structs.replace(
            ready, files={**files, language.product: product}, compile_ms=ran_ms, compiler=said
        )

    async def _judge(
        self,
        ready: Ready,
        params: wire.Call,
        case: wire.Case,
        where: Where,
        received: float,
        want: tuple[str, ...] = (),
    ) -> wire.Judged:
        output = params.limits.output_kb << 10
        try:
            outcome, ran_ms, started = await self._execute(
                ready, params.limits, where, case.stdin, tuple(case.args), want, REPLY_MAX - 2 * output
            )
        except DsecError as exc:
            return _infra(exc, ready.compile_ms)
        end, figures = outcome.end, outcome.figures
        verdict, detail = verdict_of(Ending(end, figures, params.limits), case.expected, params.match)
        return wire.Judged(
            verdict=verdict, detail=detail, stdout=end.stdout, stderr=end.stderr, exit_code=end.code,
            signal=end.signal, truncated=end.truncated, cpu_ms=end.cpu_us / 1000, wall_ms=end.ran_us / 1000,
            memory_kb=figures.peak >> 10, queued_ms=max((started - received) * 1000 - ready.compile_ms, 0.0),
            ran_ms=ran_ms, compile_ms=ready.compile_ms, compiler=ready.compiler, files=end.files,
            warm=self._is_warm(ready, where.image),
        )  # fmt: skip

    async def _execute(
        self, ready: Ready, limits: wire.Limits, where: Where, stdin: bytes | None = None, args: tuple[str, ...] = (),
        want: tuple[str, ...] = (), produced: int = PRODUCED_MAX,
    ) -> tuple[Outcome, float, float]:  # fmt: skip
        """Run it in a place of its own: how it went, the milliseconds it took, and when it began."""
        warm = self._is_warm(ready, where.image)
        argv = (*(ready.argv[1:] if warm else ready.argv), *args)
        env = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **ready.env}
        given = sum(map(len, ready.files.values())) + len(stdin or b"")
        agreed = CallLimits(
            cpu_ms=max(round(limits.cpu_s * 1000), 1),
            wall_ms=max(round(wall_s(limits) * 1000), 1),
            output=limits.output_kb << 10,
            open_files=limits.open_files,
            file=limits.file_mb * MIB,
            # Whole pages; files are in memory, but what was brought along is not the program's doing.
            space=limits.disk_mb * MIB + given + SPACE_EXTRA + 4096 * (len(ready.files) + 1),
            stack=limits.stack_mb * MIB,
            produced=produced if want else 0,
        )
        try:
            pool = await self._pool(where, warm)
            async with pool.box() as box, self._cpus.one() as cpus:
                self.calls += 1
                env |= box.env
                _check_size(argv, env)
                plan = CallPlan(argv, agreed, env, ready.files, stdin, want, cpus)
                started = time.monotonic()
                # Its first process is there already.
                tasks = limits.processes + ready.processes - 1
                outcome = await box.run(plan, limits.memory_mb * MIB + given, tasks)
        except DsecError as exc:
            if not warm or exc.kind != "unsupported":
                raise
            log.warning("Python is cold on %s: %s", where.image, exc.message)
            self._cold[where.image] = exc.message
            return await self._execute(ready, limits, where, stdin, args, want, produced)
        return outcome, outcome.end.ran_us / 1000, started

    def _is_warm(self, ready: Ready, image: str) -> bool:
        trusted = image == self.config.image or image in self.config.warm_images
        return ready.warm and trusted and image not in self._cold

    def _check_limits(self, limits: wire.Limits) -> None:
        if limits.memory_mb > self.config.memory_max_mb:
            raise DsecError("invalid", f"memory_mb {limits.memory_mb} is over this host's {self.config.memory_max_mb}")
        if wall_s(limits) < 0.001:
            raise DsecError("invalid", "wall_s is less than a millisecond")

    def _where(self, params: wire.Call) -> Where:
        image = params.image or self.config.image
        if not image:
            raise DsecError("invalid", "the call names no image, and the configuration has none (fncall.image)")
        return Where(image, tuple(sorted(params.devices)))

    # -- pools --------------------------------------------------------------------------------------------------------
    async def _pool(self, where: Where, warm: bool) -> Pool:
        if self._closed:
            raise DsecError("shutting_down", "the daemon is stopping")
        pool = self._pools.get((where, warm))
        if pool is None:
            self._places.check(where)  # a name that is nothing's must not take the place of another pool
            if len(self._pools) >= POOLS_MAX:
                await self._drop_oldest()
            zygote = zygote_command(self._places.apparmor, self.config.preload) if warm else ()
            most = self.config.boxes_max or 2 * self._cpus.count
            pool = self._pools.setdefault((where, warm), Pool(self._places, where, zygote, self.config, most))
        return pool

    async def _drop_oldest(self) -> None:
        """Of those that have no call: others' calls go on."""
        quiet = [key for key, pool in self._pools.items() if pool.is_quiet]
        if not quiet:
            raise DsecError("capacity", f"calls of {POOLS_MAX} images are under way, and more are not held at once")
        await self._pools.pop(min(quiet, key=lambda one: self._pools[one].used)).close()

    def sizes(self) -> dict[str, int]:
        """Places by image, for statistics."""
        out: dict[str, int] = {}
        for (where, _), pool in self._pools.items():
            out[where.image] = out.get(where.image, 0) + pool.size
        return out

    def occupancy(self) -> tuple[int, int, int, int]:
        """Of all pools: places that are idle, that run a call, that are being made; calls that wait for one."""
        found = [pool.occupancy() for pool in self._pools.values()]
        idle, busy, starting, waiting = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0, 0, 0)
        return idle, busy, starting, waiting

    async def tend(self) -> None:
        """Shrink pools that are not used, for ever."""
        while True:
            await asyncio.sleep(SHRINK_S)
            for pool in list(self._pools.values()):
                await pool.shrink()

    async def close(self) -> None:
        """End all places; calls that run are `infra`."""
        self._closed = True
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))


def _check_size(argv: tuple[str, ...], env: dict[str, str]) -> None:
    strings = [*argv, *(f"{name}={value}" for name, value in env.items())]
    if sum(len(one.encode("utf-8", "surrogateescape")) + 1 for one in strings) > ARGUMENTS_MAX:
        raise DsecError("invalid", f"arguments and environment are over {ARGUMENTS_MAX} bytes together")


def _infra(exc: DsecError, compile_ms: float = 0.0) -> wire.Judged:
    """The verdict when a place went away under a call; what is wrong with the request itself is raised."""
    if exc.kind not in ("sandbox_dead", "shutting_down", "internal"):
        raise exc
    return wire.Judged(verdict="infra", detail=exc.message, compile_ms=compile_ms)
