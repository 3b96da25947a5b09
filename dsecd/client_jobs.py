"""The SDK's calls of jobs: a part of `DSecClient`. A job is all sandboxes that were started with the same `job`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsecd.wire import base
from dsecd.wire import jobs as wire


class JobCalls:
    """Each acts on all of the caller's sandboxes of one job, side by side, and says what became of each."""

    if TYPE_CHECKING:

        async def call(self, method: str, params: base.Params) -> Any: ...

    async def jobs(self) -> list[wire.Job]:
        """Those that have a sandbox which is not over."""
        found: wire.Jobs = await self.call("job.list", wire.ListJobs())
        return found.jobs

    async def pause_job(self, job: str, *, request_id: str | None = None) -> list[wire.Outcome]:
        """Freeze all of it, and give its memory back to the host. The next call to any of them resumes that one."""
        return await self._all("job.pause", wire.ByJob(job=job, request_id=request_id))

    async def resume_job(self, job: str, *, request_id: str | None = None) -> list[wire.Outcome]:
        return await self._all("job.resume", wire.ByJob(job=job, request_id=request_id))

    async def stop_job(self, job: str, *, request_id: str | None = None) -> list[wire.Outcome]:
        """Kill and remove all of it. Of a job whose sandboxes are all over: nothing."""
        return await self._all("job.stop", wire.StopJob(job=job, request_id=request_id))

    async def _all(self, method: str, params: base.Params) -> list[wire.Outcome]:
        done: wire.JobDone = await self.call(method, params)
        return done.results
