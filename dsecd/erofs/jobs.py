"""Runs one import in a process of its own and commits what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from dsecd.erofs.aio import uninterrupted
from dsecd.erofs.model import Built, Failed, ImportJob, Limits, Manifest, Progress, Report
from dsecd.erofs.store import ImageStore, Work
from dsecd.errors import DsecError, Kind

log: Final = logging.getLogger(__name__)

MAX_LINE: Final = 1 << 20
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
    try:
        async with asyncio.timeout(limits.deadline_s):
            return await _import(store, job, input_fd, progress, limits)
    except TimeoutError as e:
        raise DsecError("timeout", f"the import was not done within {limits.deadline_s:g} s", infra=True) from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DsecError("disk_full", "no space left for the image in the store") from e
        raise


async def _import(
    store: ImageStore, job: ImportJob, input_fd: int | None, progress: Callable[[Progress], None], limits: Limits
) -> Manifest:
    workspace = store.workspace()
    work = await asyncio.to_thread(workspace.__enter__)
    try:
        built = await _run(work, job, input_fd, progress, limits)
        progress(Progress("commit", built.data_size, built.data_size))
        # A commit takes milliseconds once begun, and a thread cannot be interrupted: cancellation waits for it.
        return await uninterrupted(asyncio.to_thread(store.commit, work, built, job))
    finally:
        await uninterrupted(asyncio.to_thread(workspace.__exit__, None, None, None))


async def _run(
    work: Work, job: ImportJob, input_fd: int | None, progress: Callable[[Progress], None], limits: Limits
) -> Built:
    given = [] if input_fd is None else [input_fd]
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "dsecd.erofs.importer", str(work.path), str(-1 if input_fd is None else input_fd),
        msgspec.json.encode(job).decode(), msgspec.json.encode(limits).decode(),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        pass_fds=[work.lock_fd, *given], start_new_session=True, limit=MAX_LINE,
        env=environment | {"PYTHONPATH": str(_REPO), "LANG": "C.UTF-8"},
    )  # fmt: skip
    try:
        ended, noise = await asyncio.gather(_reports(process, progress), _noise(process))
        await process.wait()
    finally:
        await uninterrupted(_kill(process))
    if isinstance(ended, Built):
        return ended
    if isinstance(ended, Failed):
        raise DsecError(msgspec.convert(ended.kind, Kind), ended.message, detail=dict(ended.detail))
    log.debug("importer ended with status %s: %s", process.returncode, noise)
    raise DsecError("internal", f"the importer died (status {process.returncode})", detail={"stderr": noise[-2000:]})


async def _reports(process: asyncio.subprocess.Process, progress: Callable[[Progress], None]) -> Built | Failed | None:
    assert process.stdout is not None
    ended: Built | Failed | None = None
    async for line in process.stdout:
        report = msgspec.json.decode(line, type=Report)
        if report.progress is not None:
            progress(report.progress)
        ended = report.built or report.failed or ended
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
