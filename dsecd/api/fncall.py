"""fncall.*."""

from __future__ import annotations

from dsecd.fncall.runner import Runner
from dsecd.wire import fncall as wire
from dsecd.wire.call import Call


class FnCallApi:
    """Calls. They have no record and no request_id: a program without state may run again."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    async def run(self, call: Call, params: wire.Run) -> wire.Judged:
        return await self._runner.run(params, call.received)

    async def batch(self, call: Call, params: wire.Batch) -> wire.BatchJudged:
        total = wire.BatchJudged(verdict="ok")
        worst = len(params.cases)
        async for number, judged in self._runner.batch(params, call.received):
            total.compile_ms, total.compiler = judged.compile_ms, judged.compiler
            if number < 0:
                total.verdict, total.detail = judged.verdict, judged.detail
                return total
            total.done += 1
            total.passed += judged.verdict == "ok"
            if judged.verdict != "ok" and number < worst:
                worst, total.verdict, total.detail = number, judged.verdict, f"case {number}: {judged.detail}"
            judged.compile_ms, judged.compiler = 0.0, ""
            await call.notify_bounded("fncall.case", wire.CaseJudged(call.id, number, judged))
        return total
