"""Runs one import, or what is like one, in a process of its own and commits what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dsecd.aio import uninterrupted
from dsecd.erofs import artifact
from dsecd.erofs.collapse import CollapseJob, Layer, check_layers
from dsecd.erofs.compose import stack_of
from dsecd.erofs.model import LOCAL, ImageConfig, ImportJob, Limits, Manifest, Progress, Pushed, Report
from dsecd.erofs.remote import Reference
from dsecd.erofs.store import ImageStore, Work
from dsecd.erofs.transfer import TransferJob
from dsecd.errors import DsecError, Kind

log: Final = logging.getLogger(__name__)

MAX_LINE: Final = 1 << 20
COLLAPSE_BYTES: Final = 3 << 30
_REPO: Final = Path(__file__).resolve().parents[2]
_ENVIRONMENT: Final = (
    "PATH", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)  # fmt: skip


async def run_import(
    store: ImageStore,
    job: ImportJob,
    *,
    input_fd: int | None,
    progress: Callable[[Progress], None] = lambda _: None,
    limits: Limits | None = None,
) -> Manifest:
    """The image that came of it. Cancelling kills the importer and all that it started; nothing half-made stays.

    input_fd: for a job of origin `stream`: a pipe, socket or file, read from where it stands; it stays the caller's
    (close it after, and your copy of the write end before: the importer reads to end of file).
    """
    limits = limits or Limits()
    job.check()
    if (job.origin == "stream") != (input_fd is not None):
        needs = "needs an" if input_fd is None else "has no"
        raise DsecError("invalid", f"an import of origin {job.origin} {needs} input")

    async def child(work: Work) -> Report:
        given = [] if input_fd is None else [input_fd]
        told = [str(-1 if input_fd is None else input_fd), *(msgspec.json.encode(x).decode() for x in (job, limits))]
        return await run_child(work, "dsecd.erofs.importer", told, given, progress)

    store.writable(job.store or LOCAL)
    return await made_by_child(store, job, child, progress, limits)


async def run_collapse(
    store: ImageStore, name: str, refs: Sequence[str], *, max_bytes: int = COLLAPSE_BYTES, put_on: str = "",
    progress: Callable[[Progress], None] = lambda _: None, limits: Limits | None = None,
) -> Manifest:  # fmt: skip
    """One image called `name` of consecutive layers, topmost first; they stay. max_bytes: of their data together.

    An environment stands for itself and what is below it.
    """
    layers = await asyncio.to_thread(lambda: [layer for ref in refs for layer in stack_of(store, ref)])
    check_layers([layer.kind for layer in layers])
    if len({layer.digest for layer in layers}) != len(layers):
        raise DsecError("invalid", "the same layer is named twice")
    if (size := sum(layer.data_size for layer in layers)) > max_bytes:
        raise DsecError("invalid", f"the layers hold {size} bytes, and a collapse is of {max_bytes} at most")
    config = ImageConfig()
    for layer in reversed(layers):
        config = config.overridden_by(layer.config)
    bottom = layers[-1].kind
    source = "collapse of " + " ".join(layer.name or layer.hex[:12] for layer in layers)
    job = ImportJob(kind=bottom, name=name, source=source[:4096], store=put_on)
    job.check()
    store.writable(job.store or LOCAL)
    told = CollapseJob(
        layers=tuple(layer_of(store, layer) for layer in layers),
        base=bottom == "base",
        config=config,
        source=job.source,
    )

    async def child(work: Work) -> Report:
        return await run_child(work, "dsecd.erofs.collapse", [msgspec.json.encode(told).decode()], [], progress)

    return await made_by_child(store, job, child, progress, limits or Limits())


async def run_push(
    store: ImageStore, ref: str, reference: str, *, progress: Callable[[Progress], None] = lambda _: None,
    limits: Limits | None = None,
) -> Pushed:  # fmt: skip
    """Make the image an artifact of a registry's repository. What the registry has already is not sent again."""
    found = Reference.parse(reference)
    limits = _as_store(store, found, limits or Limits())
    if found.digest:
        raise DsecError("invalid", "an image is pushed to a tag, and not to a digest")
    image = await asyncio.to_thread(store.resolve, ref)
    await asyncio.to_thread(store.check, image)
    job = TransferJob(
        action="push", reference=reference, layer=layer_of(store, image), described=artifact.describe(image)
    )
    workspace = store.workspace()
    work = await asyncio.to_thread(workspace.__enter__)
    try:
        async with asyncio.timeout(limits.deadline_s):
            pushed = (await _transfer(work, job, limits, progress)).pushed
    except TimeoutError as e:
        raise DsecError("timeout", f"the push was not done within {limits.deadline_s:g} s", infra=True) from e
    finally:
        await uninterrupted(asyncio.to_thread(workspace.__exit__, None, None, None))
    assert pushed is not None
    return pushed


async def run_pull(
    store: ImageStore, reference: str, *, name: str = "", lazy: bool = False, put_on: str = "",
    progress: Callable[[Progress], None] = lambda _: None, limits: Limits | None = None,
) -> Manifest:  # fmt: skip
    """The image that was pushed there. name: empty: as it was pushed. lazy: its data stays there, on the store of the
    config that is this repository; else all of it is fetched and checked."""
    found = Reference.parse(reference)
    limits = _as_store(store, found, limits or Limits())
    if lazy:
        stores = [one for one, config in store.configs.items() if (config.kind, config.url) == ("registry", found.url)]
        if put_on or not stores:
            raise DsecError("invalid", f"no [stores.NAME] of kind registry has url {found.url!r}, which lazy pulls need"
                            if not put_on else "a lazy pull leaves the data where it is")  # fmt: skip
        put_on = stores[0]
    else:
        store.writable(put_on or LOCAL)
    job = ImportJob(kind="base", name=name, source=reference, store=put_on)
    if name:
        job.check()

    async def child(work: Work) -> Report:
        return await _transfer(work, TransferJob(action="pull", reference=reference, lazy=lazy), limits, progress)

    return await made_by_child(store, job, child, progress, limits)


def _as_store(store: ImageStore, found: Reference, limits: Limits) -> Limits:
    """With the login and the trust that the config gives to a store that is this repository."""
    for config in store.configs.values():
        if (config.kind, config.url) == ("registry", found.url):
            insecure = (found.host,) if config.insecure else ()
            limits = msgspec.structs.replace(
                limits, authfile=config.authfile or limits.authfile,
                insecure_registries=(*limits.insecure_registries, *insecure),
            )  # fmt: skip
    return limits


async def _transfer(work: Work, job: TransferJob, limits: Limits, progress: Callable[[Progress], None]) -> Report:
    told = [msgspec.json.encode(one).decode() for one in (job, limits)]
    return await run_child(work, "dsecd.erofs.transfer", told, [], progress)


def layer_of(store: ImageStore, image: Manifest) -> Layer:
    """Where its files are, for a child that reads them."""
    remote = store.is_remote(image)
    return Layer(
        shown=image.name or image.hex[:12], meta=str(store.meta_path(image)), meta_digest=image.meta_digest,
        sums=str(store.sums_path(image)), data_digest=image.data_digest, data_size=image.data_size,
        data="" if remote else str(store.data_path(image)), store=image.store, blob=image.blob_name,
        config=store.configs[image.store] if remote else None,
    )  # fmt: skip


async def made_by_child(
    store: ImageStore, job: ImportJob, child: Callable[[Work], Awaitable[Report]], progress: Callable[[Progress], None],
    limits: Limits,
) -> Manifest:  # fmt: skip
    """The image that a child of ours makes in a workspace."""
    try:
        async with asyncio.timeout(limits.deadline_s):
            return await _committed(store, job, child, progress, limits.new_name)
    except TimeoutError as e:
        raise DsecError("timeout", f"the import was not done within {limits.deadline_s:g} s", infra=True) from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DsecError("disk_full", "no space left for the image in the store") from e
        raise


async def _committed(
    store: ImageStore, job: ImportJob, child: Callable[[Work], Awaitable[Report]], progress: Callable[[Progress], None],
    new_name: bool,
) -> Manifest:  # fmt: skip
    workspace = store.workspace()
    work = await asyncio.to_thread(workspace.__enter__)
    try:
        built = (await child(work)).built
        assert built is not None
        if built.kind is not None:  # a pulled image says what it is
            put_on = "" if built.data_file and job.store in store.remotes else job.store
            name = "" if job.unnamed else job.name or built.name
            job = msgspec.structs.replace(job, kind=built.kind, name=name, store=put_on)
            job.check()
        progress(Progress("commit", built.data_size, built.data_size))
        # A commit takes milliseconds once begun, and a thread cannot be interrupted: cancellation waits for it.
        return await uninterrupted(asyncio.to_thread(store.commit, work, built, job, new_name=new_name))
    finally:
        await uninterrupted(asyncio.to_thread(workspace.__exit__, None, None, None))


async def run_child(
    work: Work, module: str, arguments: Sequence[str], given: Sequence[int], progress: Callable[[Progress], None]
) -> Report:
    """How a child in that module ended: its last report, which is no failure."""
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", module, str(work.path), *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        pass_fds=[work.lock_fd, *given], start_new_session=True, limit=MAX_LINE,
        env=environment | {"PYTHONPATH": str(_REPO), "LANG": "C.UTF-8"},
    )  # fmt: skip
    try:
        ended, noise = await asyncio.gather(_reports(process, progress), _noise(process))
        await process.wait()
    finally:
        await uninterrupted(_kill(process))
    if ended is not None and ended.failed is None:
        return ended
    if ended is not None and ended.failed is not None:
        failed = ended.failed
        raise DsecError(msgspec.convert(failed.kind, Kind), failed.message, detail=dict(failed.detail))
    log.debug("%s ended with status %s: %s", module, process.returncode, noise)
    raise DsecError("internal", f"the importer died (status {process.returncode})", detail={"stderr": noise[-2000:]})


async def _reports(process: asyncio.subprocess.Process, progress: Callable[[Progress], None]) -> Report | None:
    assert process.stdout is not None
    ended: Report | None = None
    async for line in process.stdout:
        report = msgspec.json.decode(line, type=Report)
        if report.progress is not None:
            progress(report.progress)
        else:
            ended = report
    return ended


async def _noise(process: asyncio.subprocess.Process) -> str:
    """The end of what the importer printed, for the log."""
    assert process.stderr is not None
    kept = b""
    while data := await process.stderr.read(1 << 16):
        kept = (kept + data)[-8192:]
    return kept.decode("utf-8", "replace")


async def _kill(process: asyncio.subprocess.Process) -> None:
    """The whole session, also after the importer itself is gone: what it started may not be."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
