"""`make demo`: sixteen sandboxes, each with another fault in a real project, found by its own tests and mended.

The last line is JSON; the exit status is 0 when all went well, 1 when not, 130 after Ctrl-C. Nothing is left behind but
the cache in ~/.cache/dsecd.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from dsecd.client import DSecClient, DSecContainerRunArgs, DsecError, Sandbox, SandboxFailed
from dsecd.wire import images as image_wire
from tests.demo import layers
from tests.demo.faults import FAULTS
from tests.demo.repair import Repair, repair
from tests.own import CACHE, Base, OwnDaemon, chunks_of, own_daemon, stop_on_sigterm

ROOT = "workspace"
ROW = "{:<7}  {:<27}  {:<19}  {:>6}  {:>6}  {:>4}"


class Steps:
    """Says what is done and how long it took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = self._last = time.monotonic()

    def done(self, name: str, text: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._last, 3)
        print(f"{now - self._last:6.1f} s  {text}", flush=True)
        self._last = now

    def total(self) -> float:
        return round(time.monotonic() - self._started, 1)


async def demo(daemon: OwnDaemon, base: Base, work: Path, steps: Steps) -> dict[str, Any]:
    """All of it, given a daemon; returns what the last line says."""
    async with DSecClient(daemon.url) as client:
        directory = await make_images(daemon, client, base, work, steps)
        args = [
            DSecContainerRunArgs(
                container_image=base.name, workspace="workspace:demo", toolkits=["toolkit:demo"],
                memory_limit_mb=512, disk_limit_mb=512, pids_limit=128, name=f"demo-{number:02}",
            ) for number in range(len(FAULTS))
        ]  # fmt: skip
        made = await client.run_containers(args)
        sandboxes = [one for one in made if isinstance(one, Sandbox)]
        for one in made:
            if isinstance(one, SandboxFailed):
                print(f"{'':9} not made: {one.message}")
        steps.done("create", f"{len(sandboxes)} sandboxes by one create_many, from 3 layers each")
        reports = await repair_all(sandboxes, directory)
        steps.done("tests", f"{2 * len(sandboxes)} runs of the project's tests")
        await client.stop_many(sandboxes)
        steps.done("stop", f"{len(sandboxes)} sandboxes stopped")
    return {
        "ok": len(reports) == len(FAULTS) and not any(report.problem for report in reports),
        "sandboxes": len(sandboxes),
        "failed_before": sum(report.failed_before > 0 for report in reports),
        "passed_after": sum(report.passed_after > 0 and not report.problem for report in reports),
        "project": directory.rpartition("/")[2],
    }


async def make_images(daemon: OwnDaemon, client: DSecClient, base: Base, work: Path, steps: Steps) -> str:
    """Base, workspace and toolkit; returns where the project is inside."""
    cached = base.cached
    if not cached:
        print(f"{'':9} base: mmdebstrap makes it; half a minute or so, once", flush=True)
    await base.make(daemon, client)
    steps.done("base", f"base: Debian {base.suite} with Python" + (" (from the cache)" if cached else ""))

    sdist = await asyncio.to_thread(layers.sdist, work)
    await client.import_image(image_wire.Import(name="workspace:demo", kind="workspace", prefix=ROOT), chunks_of(sdist))
    steps.done("workspace", f"workspace: {sdist.name}, unmodified, from PyPI")

    probe = await client.run_container(DSecContainerRunArgs(container_image=base.name))
    status = await probe.read_file("/var/lib/dpkg/status")
    await probe.stop()
    tar, cached = await asyncio.to_thread(layers.toolkit, work, status)
    await client.import_image(image_wire.Import(name="toolkit:demo", kind="toolkit"), chunks_of(tar))
    steps.done("toolkit", "toolkit: pytest from PyPI, git from Debian" + (" (from the cache)" if cached else ""))
    return f"/{ROOT}/{sdist.name.removesuffix('.tar.gz')}"


async def repair_all(sandboxes: list[Sandbox], directory: str) -> list[Repair]:
    """As many at a time as there are cores, so that seconds mean something; a row for each as it ends."""
    limit = asyncio.Semaphore(os.cpu_count() or 1)
    print("\n" + ROW.format("sandbox", "fault", "file", "failed", "passed", "sec"), flush=True)
    print(ROW.format("", "", "", "before", "after", ""))

    async def one(sandbox: Sandbox, fault: Any) -> Repair:
        async with limit:
            report = await repair(sandbox, fault, directory)
        row = (sandbox.info.name, fault.name, fault.file, report.failed_before, report.passed_after)
        print(ROW.format(*row, f"{report.seconds:.0f}"), flush=True)
        if report.problem:
            print(f"{'':9}{report.problem}", flush=True)
        return report

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair)) for pair in zip(sandboxes, FAULTS, strict=False)]
    print()
    return [task.result() for task in tasks]


def run(what: str, demo: Callable[[OwnDaemon, Base, Path, Steps], Coroutine[Any, Any, dict[str, Any]]]) -> int:
    """A demo, from its first line to its last, which is JSON; the exit status. Nothing is left of it."""
    if os.geteuid() != 0:
        print("the demo must be root: it runs a daemon that mounts images and makes namespaces", file=sys.stderr)
        return 1
    stop_on_sigterm()
    steps, base = Steps(), layers.base()
    result: dict[str, Any] = {"ok": False}
    status = 1
    print(f"{what}. Kept for the next run: {CACHE}", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="dsecd-demo-", dir="/var/tmp") as work:
            with own_daemon("demo", base, disk_pool_mb=16384) as daemon:
                steps.done("daemon", "a daemon of our own is ready")
                result = asyncio.run(demo(daemon, base, Path(work), steps))
            steps.done("clean", "daemon stopped; no mount, loop device, control group or directory is left")
        status = 0 if result["ok"] else 1
    except KeyboardInterrupt:
        result |= {"ok": False, "error": "interrupted; everything was cleaned up"}
        status = 130
    except (DsecError, RuntimeError, OSError) as exc:
        result |= {"ok": False, "error": str(exc)}
    result["seconds"] = {**steps.seconds, "total": steps.total()}
    print(json.dumps(result))
    return status


def main() -> int:
    return run(f"{len(FAULTS)} sandboxes mend {len(FAULTS)} faults", demo)


if __name__ == "__main__":
    sys.exit(main())
