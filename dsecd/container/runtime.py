"""The OCI runtime as a command: run through dsec-launch, delete, version.

Any runtime that keeps to the OCI command line will do (crun, runc, runsc); which one is configuration.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dsecd import proc
from dsecd.container.bundle import AGENT_FDS, ID_COUNT, Plan
from dsecd.errors import DsecError

START_S: Final = 30.0
DELETE_S: Final = 20.0
LAUNCH_FAILED: Final = 120  # dsec-launch's own status


class Runtime:
    """Paths of the launcher and the runtime, and the runtime's state directory."""

    def __init__(self, program: str, launcher: Path, state: Path) -> None:
        found = shutil.which(program)
        if found is None:
            raise DsecError("unsupported", f"no OCI runtime {program!r} on this host: apt-get install crun")
        self.program = found
        self._launcher = str(launcher)
        self._state = str(state)
        # crun asks systemd by default; runc and runsc use the file system unless told otherwise
        manager = ["--cgroup-manager=cgroupfs"] if Path(found).name == "crun" else []
        self._command = [found, "--root", self._state, *manager]

    async def run(self, plan: Plan, run_dir: Path, fds: Mapping[int, int]) -> int:
        """Mount the root file system, create and start the container; returns its init's pid.

        run_dir holds config.json and an empty `stage`; fds: 3 and 4 of the agent. `internal` with the runtime's words
        when it fails.
        """
        argv = [self._launcher, "--stage", f"{run_dir}/stage", "--scratch", plan.scratch]
        argv += ["--ids", f"{plan.id_base}:{ID_COUNT}"]
        for lower in plan.lowers:
            argv += ["--lower", lower]
        for node in plan.devices.nodes:
            numbers = f"{node.major}:{node.minor}:{node.mode:o}:{plan.id_base + node.uid}:{plan.id_base + node.gid}"
            argv += ["--node", f"{node.type}:{numbers}"]
        pid_file = run_dir / "pid"
        argv += ["--", *self._command, "run", "--detach"]
        argv += ["--bundle", str(run_dir), "--preserve-fds", str(AGENT_FDS), "--pid-file", str(pid_file), plan.id]
        # The container inherits stdout and stderr: a file, because a pipe would stay open as long as it lives.
        log = os.open(run_dir / "launch.log", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            status = await proc.wait(proc.spawn(argv, {1: log, 2: log, **fds}), START_S)
            if status != 0:
                said = os.pread(log, 2000, 0).decode("utf-8", "replace").strip() or f"status {status}"
                raise DsecError("internal", f"the container did not start: {said.splitlines()[-1]}")
        except TimeoutError as exc:
            raise DsecError("internal", f"the container did not start within {START_S:g} s") from exc
        finally:
            os.close(log)
        return int(pid_file.read_text())

    async def delete(self, ident: str) -> None:
        """Remove what the runtime knows of a container, killing what is left of it. Unknown is fine."""
        if not Path(self._state, ident).exists():
            return
        argv = [*self._command, "delete", "--force", ident]
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            status = await proc.wait(proc.spawn(argv, {1: null, 2: null}), DELETE_S)
        except TimeoutError as exc:
            raise DsecError("internal", f"the runtime did not delete {ident} within {DELETE_S:g} s") from exc
        finally:
            os.close(null)
        if status != 0:
            shutil.rmtree(Path(self._state, ident), ignore_errors=True)

    def known(self) -> list[str]:
        """Ids the runtime keeps state of."""
        try:
            return os.listdir(self._state)
        except FileNotFoundError:
            return []
