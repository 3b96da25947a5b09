"""Makes environments: packs a container's files in a process of its own, and carries environments between hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from dsecd.aio import uninterrupted
from dsecd.envconfig import EnvConfig
from dsecd.erofs.artifact import describe
from dsecd.erofs.compose import MAX_LOWERS, stack_of
from dsecd.erofs.jobs import layer_of, made_by_child, run_child
from dsecd.erofs.layout import Exported, ExportJob
from dsecd.erofs.model import LOCAL, Builder, ImageConfig, ImportJob, Limits, Manifest, Progress, Pushed, Report
from dsecd.erofs.pack import Lower, PackJob
from dsecd.erofs.packrules import ANSWERS_MAX, compile_globs
from dsecd.erofs.store import ImageStore, Work
from dsecd.errors import DsecError


class Upper(Struct, frozen=True, kw_only=True):
    """What a sandbox wrote: a directory that nobody writes to meanwhile, with the host's id of its root; or a
    descriptor that gives it as the agent's tar, the caller's to close. below: the digests of the layers, topmost first.
    """

    path: Path | None = None
    id_base: int = 0
    stream: int = -1
    below: tuple[str, ...]
    source: str


async def run_pack(
    store: ImageStore, name: str, upper: Upper, builder: Builder, rules: EnvConfig, *, answers: Sequence[str] = (),
    progress: Callable[[Progress], None] = lambda _: None, limits: Limits | None = None,
) -> tuple[Manifest, int]:  # fmt: skip
    """An environment called `name`, and how many entries were left out. answers: globs of what it may not show."""
    check_answers(answers)
    job = ImportJob(kind="environment", name=name, source=upper.source[:4096], store=LOCAL)
    job.check()
    layers = await asyncio.to_thread(lambda: [store.resolve(digest) for digest in upper.below])
    if len(layers) >= MAX_LOWERS:
        raise DsecError(
            "invalid",
            f"it has {len(layers)} layers, and a sandbox has at most {MAX_LOWERS}: `image collapse` some first",
        )
    config = ImageConfig()
    for layer in reversed(layers):
        config = config.overridden_by(layer.config)
    lowers = tuple(
        Lower(shown=layer.name or layer.hex[:12], meta=str(store.meta_path(layer)), meta_digest=layer.meta_digest)
        for layer in layers
    )
    told = PackJob(
        upper=str(upper.path or ""), stream=upper.stream, id_base=upper.id_base, rules=rules, answers=tuple(answers),
        lowers=lowers, config=config, source=job.source,
    )  # fmt: skip
    given = [] if upper.stream < 0 else [upper.stream]
    left_out = 0

    async def child(work: Work) -> Report:
        nonlocal left_out
        built = (await run_child(work, "dsecd.erofs.pack", [msgspec.json.encode(told).decode()], given, progress)).built
        assert built is not None
        left_out = built.left_out
        return Report(built=msgspec.structs.replace(built, below=upper.below, builder=builder))

    return await made_by_child(store, job, child, progress, limits or Limits()), left_out


async def run_export(
    store: ImageStore, ref: str, output_fd: int, *, progress: Callable[[Progress], None] = lambda _: None,
    limits: Limits | None = None,
) -> Pushed:  # fmt: skip
    """Write an image with all layers below it to a descriptor, as a tar of an OCI layout; it stays the caller's."""
    images = await asyncio.to_thread(stack_of, store, ref)
    for image in images:
        await asyncio.to_thread(store.check, image)
    job = ExportJob(images=tuple(Exported(layer=layer_of(store, one), described=describe(one)) for one in images))
    async with _workspace(store, limits or Limits()) as work:
        told = ["export", str(output_fd), msgspec.json.encode(job).decode()]
        pushed = (await run_child(work, "dsecd.erofs.layout", told, [output_fd], progress)).pushed
    assert pushed is not None
    return pushed


async def run_load(
    store: ImageStore, input_fd: int, *, name: str = "", progress: Callable[[Progress], None] = lambda _: None,
    limits: Limits | None = None,
) -> Manifest:  # fmt: skip
    """The environment that was exported. Layers that are here stay as they are; those that come get no name."""
    limits = limits or Limits()
    told = [msgspec.json.encode(limits).decode()]
    async with _workspace(store, limits) as work:
        listed = (
            await run_child(work, "dsecd.erofs.layout", ["list", str(input_fd), *told], [input_fd], progress)
        ).listed
        assert listed is not None
        spool = os.open(work.path / "spool", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with store.pinned(listed.digests):
                for number in reversed(range(len(listed.digests))):
                    job = ImportJob(kind="base", name=name or listed.name, store=LOCAL)
                    if number:
                        if await asyncio.to_thread(_is_here, store, listed.digests[number]):
                            continue
                        job = msgspec.structs.replace(job, name="", unnamed=True)
                    job.check()

                    async def child(place: Work, number: int = number) -> Report:
                        return await run_child(
                            place, "dsecd.erofs.layout", ["load", str(spool), *told, str(number)], [spool], progress
                        )

                    made = await made_by_child(store, job, child, progress, limits)
                return made
        finally:
            os.close(spool)


def _is_here(store: ImageStore, digest: str) -> bool:
    try:
        store.check(store.resolve(digest))
    except DsecError:
        return False
    return True


@contextlib.asynccontextmanager
async def _workspace(store: ImageStore, limits: Limits) -> AsyncIterator[Work]:
    """For what must be done within the limits' deadline."""
    workspace = store.workspace()
    work = await asyncio.to_thread(workspace.__enter__)
    try:
        async with asyncio.timeout(limits.deadline_s):
            yield work
    except TimeoutError as e:
        raise DsecError("timeout", f"it was not done within {limits.deadline_s:g} s", infra=True) from e
    finally:
        await uninterrupted(asyncio.to_thread(workspace.__exit__, None, None, None))


def check_answers(answers: Sequence[str]) -> None:
    """`invalid` before anything is started."""
    if len(answers) > ANSWERS_MAX:
        raise DsecError("invalid", f"{len(answers)} paths to leave out, and at most {ANSWERS_MAX} are taken")
    compile_globs(answers)
