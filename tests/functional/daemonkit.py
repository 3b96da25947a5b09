"""A real dsecd for tests: its own process, directories, socket, control groups and user ids."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import leftovers

from dsecd.client import DSecClient, DSecContainerRunArgs, DSecMicroVMRunArgs, Sandbox
from dsecd.erofs import fetch
from dsecd.vmm import kernel_jobs
from dsecd.vmm.kernel import KernelStore
from dsecd.wire import images as image_wire
from dsecd.wire.kernels import ImportDeb

T = TypeVar("T")

PACKAGES = ("procps", "python3-minimal")
BASE = "base:test"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsecd"
CGROUP_BASE = f"/dsecd-test-{os.getpid()}"
_numbers = iter(range(10_000))
running: list[Daemon] = []


def run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, for tests that read better so."""
    return asyncio.run(work)


# -- the base image ---------------------------------------------------------------------------------------------------
def host_suite() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise RuntimeError("this host is not Debian")


def base_tar() -> Path:
    """A small Debian with Python, made once and kept: the recipe is in its name."""
    suite = host_suite()
    key = sha256(repr((suite, PACKAGES, 1)).encode()).hexdigest()[:12]
    target = CACHE / f"test-base-{suite}-{key}.tar"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "test-base.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            bootstrap(suite, target, PACKAGES)
    return target


def bootstrap(suite: str, target: Path, packages: tuple[str, ...]) -> None:
    """A Debian with these packages, as a tar that appears whole."""
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        command = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--format=tar"]
        command += ["--include=" + ",".join(packages), suite, f"{work}/tar", *fetch.apt_sources(suite, Path(work))]
        # Namespaces of its own: its mounts end with it.
        subprocess.run(["unshare", "--mount", "--propagation=private", *command], check=True)
        os.rename(f"{work}/tar", target)


async def chunks_of(path: Path) -> AsyncIterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


KERNELS = CACHE / f"test-kernels-{host_suite()}"


# -- the guest kernel -------------------------------------------------------------------------------------------------
def guest_kernels() -> Path:
    """A kernel store with the distribution's cloud kernel, imported once and kept."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "test-kernels.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store = KernelStore(KERNELS)
        if not store.list():
            asyncio.run(kernel_jobs.import_deb(store, "cloud", ImportDeb().package))
    return KERNELS


# -- the daemon -------------------------------------------------------------------------------------------------------
class Daemon:
    """One state directory and the daemon on it. `start` and `stop` as often as a test likes; `destroy` at the end."""

    def __init__(
        self, directory: Path, stores: dict[str, dict[str, Any]] | None = None,
        devices: dict[str, dict[str, Any]] | None = None, services: dict[str, dict[str, Any]] | None = None,
        netns: Path | None = None, **config: Any,
    ) -> None:  # fmt: skip
        number = next(_numbers)
        self.directory = directory
        # A socket path is at most 107 bytes, and pytest's directories are long.
        self._short = Path(tempfile.mkdtemp(prefix="dsecd-t", dir="/tmp"))
        self._short.chmod(0o711)  # sandboxes walk to their root file systems through it
        self.state, self.run_dir = directory / "state", self._short / "run"
        self.socket = self._short / "sock"
        self.log = directory / "dsecd.log"
        self.cgroup_base = f"{CGROUP_BASE}-{number}"
        first = 1000 if number == 0 else 2000 + 1000 * (number % 2)
        self.config = {
            "host_tag": f"t{number}", "socket": str(self.socket), "state_dir": str(self.state),
            "run_dir": str(self.run_dir), "cgroup_base": self.cgroup_base, "log_level": "debug", "disk_pool_mb": 8192,
            # The shared daemon and each other one have ids of their own; a host's own most likely has lower ones.
            "id_first_slot": first, "id_last_slot": first + 999,
            "vm_memory_dir": f"/dev/shm/dsecd-t{os.getpid()}-{number}",
            **config,
        }  # fmt: skip
        self.stores, self.devices, self.services = stores or {}, devices or {}, services or {}
        self.netns = netns  # a host's network of its own
        self.process: subprocess.Popen[bytes] | None = None
        self.pids: list[int] = []
        self.seen = 0  # of its log, when the test began
        directory.mkdir(parents=True, exist_ok=True)
        self.write_config()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def own_pid(self) -> int:
        """As it knows itself."""
        return self.pid

    def write_config(self) -> Path:
        path = self.directory / "dsecd.toml"
        plain = {key: value for key, value in self.config.items() if not isinstance(value, dict)}
        inner = {f"[{key}]\n": value for key, value in self.config.items() if isinstance(value, dict)}
        tables = {"": plain} | inner | {f"[stores.{name}]\n": store for name, store in self.stores.items()}
        tables |= {f"[devices.{name}]\n": pool for name, pool in self.devices.items()}
        tables |= {f"[network.services.{name}]\n": service for name, service in self.services.items()}
        lines = (head + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
                 for head, table in tables.items())  # fmt: skip
        path.write_text("".join(lines))
        return path

    @property
    def enter(self) -> list[str]:
        """What its command line begins with."""
        return [] if self.netns is None else ["nsenter", f"--net={self.netns}", "--"]

    # -- life ---------------------------------------------------------------------------------------------------------
    def spawn(self) -> subprocess.Popen[bytes]:
        """The process alone, not waited for."""
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [*self.enter, sys.executable, "-m", "dsecd.main", "-c", str(self.write_config())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            )  # fmt: skip

    def link_kernels(self) -> None:
        """Give it the guest kernels that were imported for the tests, if they were."""
        target = self.state / "kernels"
        for path in KERNELS.glob("*/kernel.json"):
            if not (target / path.parent.name).exists():
                target.mkdir(mode=0o700, parents=True, exist_ok=True)
                subprocess.run(["cp", "-al", path.parent, target], check=True)

    def start(self, timeout: float = 30.0) -> Daemon:
        """Start it and wait until it answers."""
        assert self.process is None
        self.process = self.spawn()
        self.pids.append(self.pid)
        deadline = time.monotonic() + timeout
        while True:
            # Its own answer: a child of a killed one may hold the old socket until it comes to its exec.
            with contextlib.suppress(OSError, ValueError):
                if self.ask("daemon.hello", timeout=timeout)["result"]["pid"] == self.own_pid:
                    break
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dsecd did not start (status {self.process.poll()}):\n{self.tail()}")
            time.sleep(0.01)
        running.append(self)
        return self

    def stop(self, timeout: float = 20.0) -> int:
        """SIGTERM; returns its exit status."""
        return self._end(signal.SIGTERM, timeout)

    def kill(self) -> int:
        """SIGKILL."""
        return self._end(signal.SIGKILL, 10)

    def restart(self, *, politely: bool = True) -> Daemon:
        if politely:
            status = self.stop()
            assert status == 0, f"dsecd ended with {status}:\n{self.tail()}"
        else:
            self.kill()
        return self.start()

    def _end(self, number: int, timeout: float) -> int:
        process, self.process = self.process, None
        assert process is not None
        if self in running:
            running.remove(self)
        process.send_signal(number)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(f"dsecd did not stop within {timeout} s:\n{self.tail()}") from None

    def destroy(self) -> list[str]:
        """Stop all sandboxes, then the daemon; take the pool away. Returns what dsecd itself left behind."""
        if self.process is not None:
            with contextlib.suppress(OSError, ValueError):
                if alive := list(self.sandboxes()):
                    self.ask("sandbox.stop_many", {"ids": alive})
            self.stop()
        found = leftovers.mounts_below([self.run_dir]) | {
            item for item in leftovers.cgroups_named(os.getpid()) if re.search(re.escape(self.cgroup_base) + "/.", item)
        }
        memory = Path(str(self.config["vm_memory_dir"]))
        if memory.exists():
            found |= {f"guest RAM {path}" for path in memory.iterdir()}
            shutil.rmtree(memory)
        self._clear()
        return sorted(found)

    def _clear(self) -> None:
        for top in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
            with contextlib.suppress(OSError):  # what a daemon that failed its test did not end
                (top / self.cgroup_base.lstrip("/") / "cgroup.kill").write_text("1")
        for item in sorted(leftovers.mounts_below([self.directory, self._short]), reverse=True):
            subprocess.run(["umount", "-l", item.removeprefix("mount ")], check=False)
        # Deepest first; on a hybrid host every hierarchy has its own.
        for item in sorted(leftovers.cgroups_named(os.getpid()), key=len, reverse=True):
            path = Path(item.removeprefix("cgroup "))
            if f"{self.cgroup_base}/" in f"{path}/":
                with contextlib.suppress(OSError):
                    path.rmdir()
        shutil.rmtree(self._short, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    # -- looking ------------------------------------------------------------------------------------------------------
    def tail(self, lines: int = 80, *, since: int = 0) -> str:
        return "\n".join(self.log_since(since).splitlines()[-lines:]) if self.log.exists() else ""

    def log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def log_since(self, size: int) -> str:
        with open(self.log, "rb") as file:
            file.seek(size)
            return file.read().decode(errors="replace")

    def client(self) -> DSecClient:
        return DSecClient(self.url)

    def ask(self, method: str, params: dict[str, Any] | None = None, *, timeout: float = 60) -> dict[str, Any]:
        """One call without the SDK, for fixtures."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout)
            sock.connect(str(self.socket))
            request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
            sock.sendall(json.dumps(request).encode() + b"\n")
            with sock.makefile("rb") as reader:
                reply: dict[str, Any] = json.loads(reader.readline())
        return reply

    def sandboxes(self) -> dict[str, str]:
        """Id and state of all that are not over."""
        return {one["id"]: one["state"] for one in self.ask("sandbox.list")["result"]["sandboxes"]}

    def zombies(self) -> list[str]:
        """Children of the daemon that ended and were not waited for."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{entry}/stat").read_text()
                    state, parent = text.rpartition(")")[2].split()[:2]
                    if state == "Z" and int(parent) in self.pids:
                        found.append(f"zombie {text.partition(' (')[0]} of the daemon")
        return found

    def tolerates(self, item: str) -> bool:
        """Things of a running daemon that come by themselves and stay: mounted images, the parent groups."""
        return item.startswith((f"mount {self.run_dir}/images/", f"mount {self.run_dir}/net/router")) or (
            item.startswith("cgroup ") and item.endswith(self.cgroup_base)
        )

    # -- shortcuts ----------------------------------------------------------------------------------------------------
    async def import_tar(self, client: DSecClient, path: Path, name: str = BASE, **params: Any) -> image_wire.Image:
        return await client.import_image(image_wire.Import(name=name, **params), chunks_of(path))


@contextlib.contextmanager
def started(directory: Path, watched: list[Path], images: Path | None = None, **config: Any) -> Iterator[Daemon]:
    """A daemon for a fixture: gone at the end, and nothing is left of it. images: of another one, to begin with."""
    one = Daemon(directory, **config)
    watched += [one.directory, one.run_dir]
    leftovers.tolerated.append(one.tolerates)
    try:
        if images is not None:  # immutable, so links will do
            one.state.mkdir()
            subprocess.run(["cp", "-al", images, one.state / "images"], check=True)
        one.link_kernels()
        yield one.start()
    finally:
        left = one.destroy()
        leftovers.tolerated.remove(one.tolerates)
    assert not left, f"dsecd left behind: {left}"


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test written as a coroutine."""

    @functools.wraps(test)
    def plain(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return plain


def container_values(args: dict[str, Any]) -> dict[str, Any]:
    """Small ones from the test base."""
    return {"container_image": BASE, "memory_limit_mb": 256, "disk_limit_mb": 512, **args}


def container_args(**args: Any) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(**container_values(args))


async def launch(client: DSecClient, backend: str = "container", **args: Any) -> Sandbox:
    """A sandbox of that backend."""
    if backend == "microvm":
        return await client.run_microvm(DSecMicroVMRunArgs(**container_values(args)), timeout=180)
    return await client.run_container(container_args(**args), timeout=60)


@contextlib.asynccontextmanager
async def sandbox_of(daemon: Daemon, backend: str = "container", **args: Any) -> AsyncIterator[Sandbox]:
    """A client of its own and one running sandbox; both are over at the end."""
    async with daemon.client() as client:
        sandbox = await launch(client, backend, **args)
        try:
            yield sandbox
        finally:
            await sandbox.stop()


def patience(backend: str) -> int:
    """By what a bound on time is multiplied: guests without KVM run emulated, and all of a test host's at once."""
    return 1 if backend == "container" else 20


class Clock:
    """How long a block took."""

    def __enter__(self) -> Clock:
        self.began = time.monotonic()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.took = time.monotonic() - self.began


async def names_running(sandbox: Sandbox) -> list[str]:
    """Names of all processes inside that a command of the sandbox can see, itself left out."""
    out = (await sandbox.exec(["ps", "-eo", "comm="])).stdout.split()
    out.remove("ps")
    return out


def init_pid(daemon: Daemon, sandbox: Sandbox) -> int:
    """The host's pid of the sandbox's init, or of its VMM."""
    directory = daemon.run_dir / "sandboxes" / sandbox.id
    vmm = directory / "vmm.pid"
    return int((vmm if vmm.exists() else directory / "pid").read_text().split()[0])
