"""The peers: bare crun and podman, on an overlay of the very EROFS mount that our sandboxes have as their base."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from dsecd.client import Sandbox
from tests.bench.frame import Stage

INIT: Final = "/busybox-peer"  # static, so no peer waits for a dynamic linker; the name must begin with busybox
BUSYBOX: Final = "/usr/bin/busybox"


def run(argv: list[str], **more: Any) -> None:
    """As a user would, from fork to exit; RuntimeError with its last words."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    if done.returncode != 0:
        said = done.stdout.decode("utf-8", "replace").strip().splitlines()[-3:]
        raise RuntimeError(f"{' '.join(argv[:6])}… failed: {' / '.join(said)}")


def quick(argv: list[str]) -> None:
    """The same with nothing read: what a peer is timed with. A container it leaves running holds none of our pipes."""
    if subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        run(argv)


def base_mount(stage: Stage, sandbox: Sandbox) -> Path:
    """Where the daemon has the lowest layer of a running sandbox mounted."""
    digest = sandbox.info.layers[-1].removeprefix("sha256:")
    mounts: list[Path] = list((stage.daemon.run_dir / "images").iterdir())
    found = [path for path in mounts if path.is_dir() and digest.startswith(path.name)]
    if len(found) != 1:
        raise RuntimeError(f"the base of {sandbox.id} is not mounted below {stage.daemon.run_dir}")
    return found[0]


@contextlib.contextmanager
def overlay(lower: Path, where: Path) -> Iterator[Path]:
    """A writable root file system above `lower`, with INIT in it."""
    for name in ("upper", "work", "root"):
        (where / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, where / "upper" / INIT.lstrip("/"))
    options = f"lowerdir={lower},upperdir={where}/upper,workdir={where}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", str(where / "root")], check=True)
    try:
        yield where / "root"
    finally:
        subprocess.run(["umount", "-l", str(where / "root")], check=True)
        shutil.rmtree(where)


class Crun:
    """Bare crun with the defaults of `crun spec`, its state in a directory of its own."""

    def __init__(self, work: Path) -> None:
        self.group = f"/dsecd-peer-{os.getpid()}"
        self.command = ["crun", "--root", str(work / "crun"), "--cgroup-manager=cgroupfs"]

    def bundle(self, where: Path, root: Path, name: str, args: list[str]) -> Path:
        where.mkdir(parents=True)
        subprocess.run(["crun", "spec"], cwd=where, check=True)
        config = json.loads((where / "config.json").read_text())
        config["root"] = {"path": str(root)}
        config["process"] |= {"terminal": False, "args": args}
        config["process"].pop("rlimits", None)  # not every test host may raise them
        config["linux"]["cgroupsPath"] = f"{self.group}/{name}"
        (where / "config.json").write_text(json.dumps(config))
        return where

    @contextlib.contextmanager
    def running(self, bundle: Path, name: str) -> Iterator[str]:
        self.create(bundle, name)
        try:
            quick([*self.command, "start", name])
            yield name
        finally:
            self.delete(name)

    def create(self, bundle: Path, name: str) -> None:
        quick([*self.command, "create", "--bundle", str(bundle), name])

    def start(self, name: str) -> None:
        quick([*self.command, "start", name])

    def delete(self, name: str) -> None:
        quick([*self.command, "delete", "--force", name])

    def exec(self, name: str, *argv: str) -> None:
        quick([*self.command, "exec", name, *argv])

    def close(self) -> None:
        """crun removes each container's control group and not their parent."""
        for group in groups_named(self.group.lstrip("/")):
            with contextlib.suppress(OSError):
                group.rmdir()


def remove_groups(groups: set[Path]) -> None:
    """With what is below; conmon takes a moment to end. Somebody else's podman may be in it by now: that stays."""
    for _ in range(40):
        for group in groups:
            for directory, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
        if not any(group.exists() for group in groups):
            return
        time.sleep(0.05)


def groups_named(name: str) -> set[Path]:
    """Control groups of that name at the top of every hierarchy."""
    found = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        group = Path(left.split()[4], name)
        if right.split()[0] in ("cgroup", "cgroup2") and group.is_dir():
            found.add(group)
    return found


@contextlib.contextmanager
def crun(work: Path) -> Iterator[Crun]:
    peer = Crun(work)
    try:
        yield peer
    finally:
        peer.close()


class Podman:
    """podman with storage of its own, and what a host without systemd and without CAP_SYS_RESOURCE needs."""

    def __init__(self, work: Path) -> None:
        self.command = [
            "podman", "--root", f"{work}/podman", "--runroot", f"{work}/podman-run", "--tmpdir", f"{work}/podman-tmp",
            "--storage-driver=vfs", "--cgroup-manager=cgroupfs", "--events-backend=none", "--runtime=crun",
        ]  # fmt: skip
        self.limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000", "--network=none"]

    @contextlib.contextmanager
    def running(self, root: Path, name: str) -> Iterator[str]:
        before = groups_named("libpod_parent")
        run([*self.command, "run", "-d", "--name", name, *self.limits, "--rootfs", str(root), INIT, "sleep", "999999"])
        try:
            yield name
        finally:
            run([*self.command, "rm", "-f", "-t", "0", name])
            remove_groups(groups_named("libpod_parent") - before)

    def exec(self, name: str, *argv: str) -> None:
        quick([*self.command, "exec", name, *argv])


def has_podman() -> bool:
    return shutil.which("podman") is not None
