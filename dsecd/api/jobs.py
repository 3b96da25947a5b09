"""job.*"""

from __future__ import annotations

from dsecd.sandbox.jobs import Jobs
from dsecd.wire import jobs as wire
from dsecd.wire.call import Call


class JobApi:
    """For the caller's own jobs; root's calls are for everybody's."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    async def list(self, call: Call, params: wire.ListJobs) -> wire.Jobs:
        return wire.Jobs(jobs=await self._jobs.listing(call.peer.uid))

    async def pause(self, call: Call, params: wire.ByJob) -> wire.JobDone:
        return await self._jobs.pause(params.job, call.peer.uid)

    async def resume(self, call: Call, params: wire.ByJob) -> wire.JobDone:
        return await self._jobs.resume(params.job, call.peer.uid)

    async def stop(self, call: Call, params: wire.StopJob) -> wire.JobDone:
        return await self._jobs.stop(params.job, call.peer.uid, params.reason)
