"""files: 100 MB up and down, and a tree of 2,000 files up, against `crun exec` with a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from pathlib import Path
from typing import Final

from tests.bench import peers
from tests.bench.frame import Bench, Bound, Outcome, Stage, clock, median, rounded, say, spread

SIZE: Final = 100_000_000
FILES: Final = 2000
ROUNDS: Final = 5


async def run(stage: Stage) -> Outcome:
    sandbox = await stage.client.run_container(stage.args(disk_limit_mb=2048, memory_limit_mb=1024))
    data = os.urandom(SIZE)
    tree = make_tree(stage.work / "tree")
    times: dict[str, list[float]] = {name: [] for name in ("up", "down", "tree", "crun_up", "crun_down", "crun_tree")}
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(peers.crun(stage.work))
        root = stack.enter_context(peers.overlay(peers.base_mount(stage, sandbox), stage.work / "crun-root"))
        bundle = bare.bundle(stage.work / "bundle", root, "files", [peers.INIT, "sleep", "999999"])
        stack.enter_context(bare.running(bundle, "files"))
        for number in range(ROUNDS):
            with clock(times["up"]):
                await sandbox.write_file("/var/big", data)
            with clock(times["down"]):
                back = await sandbox.read_file("/var/big")
            assert back == data, "what came back is not what was sent"
            with clock(times["tree"]):
                report = await sandbox.upload(tree, f"/var/tree-{number}")
            assert not report.issues, report.issues[:3]
            await asyncio.to_thread(through_a_pipe, bare, data, tree, number, times)
        count = await sandbox.run_shell(f"find /var/tree-{ROUNDS - 1} -type f | wc -l")
        assert int(count.stdout) == FILES, f"{count.stdout.strip()} files arrived"
    await sandbox.stop()
    figures = {
        "up_mb_s": rounded(SIZE / 1000 / median(times["up"])),
        "down_mb_s": rounded(SIZE / 1000 / median(times["down"])),
        "tree_2000_s": median(t / 1000 for t in times["tree"]),
    }
    for name in times:
        say(f"{name:10} {spread(times[name])} ms")
    return Outcome(
        figures,
        {
            "crun_up_mb_s": rounded(SIZE / 1000 / median(times["crun_up"])),
            "crun_down_mb_s": rounded(SIZE / 1000 / median(times["crun_down"])),
            "crun_tree_2000_s": median(t / 1000 for t in times["crun_tree"]),
        },
    )


def make_tree(top: Path) -> Path:
    """2,000 files of 1 to 16 KiB in 100 directories: a project of some size."""
    for number in range(FILES):
        path = top / f"package_{number % 100:02}/module_{number:04}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(1024 + number * 7919 % 15360))
    return top


def through_a_pipe(bare: peers.Crun, data: bytes, tree: Path, number: int, times: dict[str, list[float]]) -> None:
    """The same through `crun exec`: cat for a file, tar for a tree."""
    command = [*bare.command, "exec", "files", "sh", "-c"]
    with clock(times["crun_up"]):
        subprocess.run([*command, "cat > /var/big"], input=data, check=True)
    with clock(times["crun_down"]):
        back = subprocess.run([*command, "cat /var/big"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    assert len(back.stdout) == SIZE
    with (
        clock(times["crun_tree"]),
        subprocess.Popen(["tar", "-C", str(tree), "-c", "."], stdout=subprocess.PIPE) as tar,
    ):
        line = f"mkdir -p /var/tree-{number} && tar -C /var/tree-{number} -x"
        subprocess.run([*command, line], stdin=tar.stdout, check=True)


BENCH: Final = Bench(
    "files", "bytes and trees into a sandbox and out of it",
    (Bound("up_mb_s", 250, most=False), Bound("down_mb_s", 250, most=False), Bound("tree_2000_s", 1.0)), run,
)  # fmt: skip
