"""What a rollout of the demo is made of: mini-swe-agent unmodified, the seeded project, and the worker's toolkit."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from dsecd.client import DSecClient, DSecContainerRunArgs
from dsecd.wire import images as image_wire
from tests.demo.faults import FAULTS, Fault
from tests.demo.layers import HERE, PYTHONPATH, keep, pip
from tests.own import CACHE, chunks_of  # before rolloutkit: it says where that is

from rolloutkit import INSIDE, worker_tar  # isort: skip

SCAFFOLD: Final = "/opt/scaffold/python"
COMMANDS: Final = "/var/lib/commands"  # every command of the model leaves its own line here
MARK: Final = "-- commands --"
TEST: Final = f"PYTHONPATH=src:{PYTHONPATH} python3 -m pytest -q -p no:cacheprovider"
# Without a terminal, without a price list, without the network, and as patient as a preempted trainer may be away.
MINI: Final = (
    "python3 -m minisweagent.run.mini -m openai/policy -y --agent-class default --exit-immediately -l 0"
    " -o /root/mini.json -c mini.yaml -c model.cost_tracking=ignore_errors -c model.model_kwargs.timeout=86400"
    " -c environment.timeout=600 -t "
)
ENV: Final = {
    "PYTHONPATH": SCAFFOLD, "HOME": "/root", "MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_BASE": "http://127.0.0.1:8411/v1",
}  # fmt: skip
SEED: Final = """from pathlib import Path
path, was, now = Path({path!r}), {was!r}, {now!r}
text = path.read_text()
assert text.count(was) == 1
path.write_text(text.replace(was, now))
"""


def scaffold_tar(work: Path) -> tuple[Path, bool]:
    """mini-swe-agent with what it needs, from PyPI, and whether it was made by an earlier run."""
    recipe = (HERE / "scaffold.txt").read_bytes() + SCAFFOLD.encode()
    kept = CACHE / f"scaffold-{hashlib.sha256(recipe).hexdigest()[:12]}.tar"
    if kept.exists():
        return kept, True
    tree = work / "scaffold"
    pip("install", "--only-binary", ":all:", "--target", f"{tree}{SCAFFOLD}", "-r", str(HERE / "scaffold.txt"))
    keep(tree, kept)
    return kept, False


async def import_toolkits(client: DSecClient, scaffold: Path) -> None:
    async def worker() -> AsyncIterator[bytes]:
        yield worker_tar()

    await client.import_image(image_wire.Import(name="toolkit:scaffold", kind="toolkit"), chunks_of(scaffold))
    await client.import_image(image_wire.Import(name="toolkit:worker", kind="toolkit"), worker())


def agent_args(base: str) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        container_image=base, workspace="workspace:demo", toolkits=["toolkit:demo", "toolkit:scaffold"],
        memory_limit_mb=768, disk_limit_mb=512, pids_limit=256,
    )  # fmt: skip


def worker_args(base: str) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        container_image=base, toolkits=["toolkit:worker"], env={"PYTHONPATH": f"/{INSIDE}"}, memory_limit_mb=128,
        disk_limit_mb=64, pids_limit=64,
    )  # fmt: skip


def task(number: int, directory: str) -> dict[str, Any]:
    """For dsecd.worker: seed the fault, let the scaffold mend it, see what it did, run the project's tests."""
    fault = FAULTS[number]
    return {
        "files": {"/root/seed.py": SEED.format(path=fault.path, was=fault.was, now=fault.now)},
        "setup": [
            f"python3 /root/seed.py && rm /root/seed.py && touch {COMMANDS}",
            "git init -q && git add -A && git commit -qm 'as found'",
        ],
        "scaffold": f"{MINI} '{issue(number, fault)}'",
        "diff": f"git diff; echo '{MARK}'; cat {COMMANDS}",
        "grade": TEST,
        "env": ENV,
        "cwd": directory,
    }  # fmt: skip


def issue(number: int, fault: Fault) -> str:
    return f"Task {number}: some of the tests fail. The fault is in {fault.path}."
