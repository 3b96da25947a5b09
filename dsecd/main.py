"""`dsecd`: read the configuration, build the rooms, take back what runs, serve until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import grp
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from dsecd import __version__, notify
from dsecd.agent.frames import Field, Tag
from dsecd.api.gate import Gate
from dsecd.api.metrics import Metrics
from dsecd.api.table import handlers
from dsecd.api.tenants import TenantApi
from dsecd.cgroup.bounds import bounds
from dsecd.cgroup.groups import Cgroups
from dsecd.config import DEFAULT_PATH, Config, documented, load
from dsecd.container.backend import ContainerBackend
from dsecd.container.runtime import Runtime
from dsecd.container.seccomp import caps_mask, command_filter
from dsecd.damon.host import HostDamon
from dsecd.damon.policy import Policy
from dsecd.devices.pools import DevicePools
from dsecd.disk import PoolConfig, open_pool
from dsecd.erofs.claims import host_owner
from dsecd.erofs.lazy import lazy_drivers
from dsecd.erofs.mount import MountTable
from dsecd.erofs.pages.client import Pages, pages_config
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError
from dsecd.fncall.runner import Runner
from dsecd.logs import set_up
from dsecd.net.network import Network
from dsecd.reload import Reloader, limits
from dsecd.rollout.service import Rollouts
from dsecd.sandbox.admission import Admission, Capacity
from dsecd.sandbox.brake import Brake
from dsecd.sandbox.callboxes import CallPlaces
from dsecd.sandbox.cpus import CpuChooser
from dsecd.sandbox.ids import Slots
from dsecd.sandbox.live import Rooms
from dsecd.sandbox.manager import Manager
from dsecd.sandbox.pressure import Pressure
from dsecd.sandbox.recorder import Recorder
from dsecd.sandbox.recover import recover
from dsecd.sandbox.replay import Replay
from dsecd.sandbox.store import Store
from dsecd.sandbox.trajectory import Trajectories
from dsecd.sandbox.vms import VmDirs, Vms, VmSettings
from dsecd.tenants.audit import AuditLog
from dsecd.tenants.service import Tenants
from dsecd.vmm.disks import DiskStore
from dsecd.vmm.firecracker import FirecrackerDriver
from dsecd.vmm.kernel import KernelStore
from dsecd.vmm.machine import Driver
from dsecd.vmm.qemu import QemuDriver
from dsecd.vmm.select import find_driver
from dsecd.wire import rollouts as rollout_wire
from dsecd.wire.access import AUDITED
from dsecd.wire.base import Params
from dsecd.wire.call import Call
from dsecd.wire.server import Server, bound
from dsecd.wire.trajectory import Who
from dsecd.wire.watch import Watch

log = logging.getLogger("dsecd")

GHOST_S: Final = 1.0
HEARTBEAT_S: Final = 6 * 3600.0
TRIM_S: Final = 3600.0
_HERE: Final = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped as asked, 1 could not start, 2 bad command line."""
    parser = argparse.ArgumentParser(prog="dsecd", description="The sandbox daemon of one host.")
    parser.add_argument("-c", "--config", type=Path, help=f"configuration file (default {DEFAULT_PATH}, if it exists)")
    parser.add_argument("--print-config", action="store_true", help="print all keys with their defaults, and exit")
    parser.add_argument("--check-config", action="store_true", help="check the configuration file, and exit")
    parser.add_argument("--version", action="version", version=f"dsecd {__version__}")
    args = parser.parse_args(argv)
    if args.print_config:
        sys.stdout.write(documented())
        return 0
    try:
        path = args.config or (DEFAULT_PATH if DEFAULT_PATH.exists() else None)
        config = load(path) if path else Config()
        if args.check_config:
            return 0
        set_up(config.log_level)
        if os.geteuid() != 0:
            raise DsecError("denied", "dsecd must be root: it mounts images and makes namespaces")
        asyncio.run(_run(config, path))
    except DsecError as exc:
        sys.stderr.write(f"dsecd: {exc.message}\n")
        return 1
    return 0


async def _run(config: Config, path: Path | None) -> None:
    _adapt_process()
    state, run = Path(config.state_dir), Path(config.run_dir)
    with contextlib.ExitStack() as stack:
        _directories(state, run)
        stack.enter_context(_lock(state))
        listener = stack.enter_context(_listener(config))
        manager, store, backend = await _build(config, state, run)
        stack.callback(store.close)
        tenants, audit = Tenants(store), AuditLog(state / "audit")
        await tenants.open()
        await audit.open()
        manager.admission.allowance = tenants.ledger
        notify.status("taking back sandboxes")
        await manager.take_back()
        await asyncio.to_thread(manager.rooms.vms.tidy, manager.rooms.images)
        await backend.mounts.adopt()
        recorder = manager.rooms.recorder
        stack.callback(recorder.trajectories.close)
        rollouts = Rollouts(manager, run / "rollouts")

        async def became(method: str, params: Params, who: Who) -> Any:
            if isinstance(params, rollout_wire.Start):
                return await rollouts.recover(params, who)
            return await recover(manager, method, params, who)

        replay = Replay(store, recorder, became)
        await replay.trim()
        reloader = Reloader(path, config, manager, lambda new: _capacity(new, manager.rooms))
        await _serve(config, manager, rollouts, replay, listener, reloader, tenants, audit)
        await audit.close()
        await backend.network.close()
        await backend.mounts.close()
        await asyncio.to_thread(backend.pages.close)


async def _build(config: Config, state: Path, run: Path) -> tuple[Manager, Store, Rooms]:
    cgroups = Cgroups.detect(base=config.cgroup_base or None)
    cgroups.prepare()
    runtime = Runtime(config.runtime, _tool(config, "dsec-launch"), run / "runtime")
    obstacle = cgroups.obstacle()
    if obstacle and Path(runtime.program).name == "crun":
        raise DsecError("unsupported", obstacle)
    hello: list[Field] = [(Tag.SECCOMP, command_filter()), (Tag.CAPS, caps_mask())]
    images = ImageStore(state / "images", stores=config.stores, owner=host_owner(config.tag))
    pages = Pages(pages_config(config))
    network = Network(config.network, run / "net", config.id_first_slot)
    rooms = Rooms(
        images=images,
        mounts=MountTable(run / "images", images, linger_s=config.image_linger_s, drivers=lazy_drivers(pages)),
        pages=pages,
        pool=await asyncio.to_thread(
            open_pool, state, PoolConfig(driver=config.disk_driver, size_bytes=config.disk_pool_mb << 20)
        ),
        containers=ContainerBackend(
            runtime, _tool(config, "dsec-agent"), run / "sandboxes", cgroups, hello, _profile(config)
        ),
        vms=_vms(config, state, run, cgroups, hello, network),
        devices=DevicePools([Path(one) for one in config.cdi_dirs], config.devices),
        network=network,
        slots=Slots(config.id_first_slot, config.id_last_slot),
        cpus=CpuChooser(),
        recorder=Recorder(Trajectories(state / "trajectory"), lambda ident: manager.record(ident).id),
        environments=config.environments,
    )
    store = Store(state / "state.db")
    admission = Admission(await _capacity(config, rooms), state / "cordoned", Brake(limits(config)))
    manager = Manager(config.tag, rooms, store, admission)
    loop = asyncio.get_running_loop()

    def on_lost(digests: list[str]) -> None:
        loop.call_soon_threadsafe(manager.images_lost, digests)

    pages.on_lost = on_lost
    rooms.network.on_refused = manager.network_refused
    return manager, store, rooms


def _vms(config: Config, state: Path, run: Path, cgroups: Cgroups, hello: list[Field], network: Network) -> Vms:
    def find() -> Driver:
        driver = find_driver(config.vm_driver)
        if isinstance(driver, QemuDriver):
            driver.taps = network.open_tap
        elif isinstance(driver, FirecrackerDriver):
            driver.lend = network.lend_tap
        return driver

    settings = VmSettings(
        dirs=VmDirs(run / "sandboxes", state / "vms", Path(config.vm_memory_dir), state / "pmem"),
        kernel=config.vm_kernel,
        agent=_tool(config, "dsec-agent"),
        hello=hello,
        damon=Policy(enabled=config.vm_damon, min_age_s=config.vm_damon_min_age_s),
        host_damon=HostDamon(state / "damon.json") if config.vm_host_damon else None,
    )
    return Vms(settings, cgroups, KernelStore(state / "kernels"), DiskStore(state / "vmimages"), find)


async def _capacity(config: Config, rooms: Rooms) -> Capacity:
    cgroups = rooms.containers.cgroups
    set_by_slice = bounds(cgroups.root, cgroups.unified)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory_mb = min(memory, set_by_slice.memory or memory) >> 20
    _, disk = await asyncio.to_thread(rooms.pool.free)
    cores = float(len(os.sched_getaffinity(0)))
    cpus = min(cores, set_by_slice.cpu or cores)
    return Capacity(
        sandboxes=min(config.max_sandboxes, config.id_last_slot - config.id_first_slot + 1),
        cpu=cpus * config.cpu_overcommit,
        memory_mb=int(memory_mb * config.memory_overcommit),
        disk_mb=int((disk >> 20) * config.disk_overcommit),
        cpu_each=cpus,
        memory_each_mb=memory_mb,
    )


async def _serve(
    config: Config, manager: Manager, rollouts: Rollouts, replay: Replay, listener: socket.socket, reloader: Reloader,
    tenants: Tenants, audit: AuditLog,
) -> None:  # fmt: skip
    async def kept(call: Call, params: Params, invoke: Any) -> Any:
        if call.name in AUDITED:
            return await audit.around(call.name, params, call.peer, invoke)
        who = call.peer.who
        if params.request_id is None or not call.method.once:
            return await manager.rooms.recorder.record(call.name, params, who, invoke)
        try:
            return await replay.once(call.name, params, who, invoke, call.upload(params))
        except asyncio.CancelledError:
            if call.cancelled:
                replay.cancel(params, call.peer.uid)
            raise

    places = CallPlaces(config.tag, manager.rooms, config.fncall.memory_max_mb << 20, _profile(config))
    runner = Runner(config.fncall, places)
    watch = Watch(config.metrics.traces, config.tag)
    table, daemon = handlers(config, manager, runner, rollouts, TenantApi(tenants, audit), reloader, watch)
    gate = Gate(manager, rollouts, audit)
    table = gate.guarded(table)
    server = daemon.server = Server(table, kept, None, tenants.greet, tenants.assume, gate.check)
    server.watch = watch
    tenants.on_change = lambda: server.renew(tenants.renewed, tenants.gone)
    pressure = Pressure(manager.running_vms)
    metrics = Metrics(config, manager, runner, daemon, pressure)
    await rollouts.open(table, kept)
    await metrics.open(_group(config.socket_group))
    await server.serve(listener)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reloader.hangup)
    log.info("ready: %d sandboxes taken back", manager.admission.count)
    watchdog = loop.create_task(notify.watchdog())
    beats = loop.create_task(_say_alive(manager.rooms.images))
    trimming = loop.create_task(_trim(config, manager))
    squeezing = loop.create_task(pressure.run())
    lag = loop.create_task(metrics.process.watch_lag())
    tending = loop.create_task(runner.tend())
    networks = loop.create_task(manager.rooms.network.tend())
    notify.ready(f"{manager.admission.count} sandboxes")
    await stop.wait()
    notify.stopping()
    log.info("stopping; sandboxes go on")
    watchdog.cancel()
    beats.cancel()
    trimming.cancel()
    squeezing.cancel()
    tending.cancel()
    networks.cancel()
    lag.cancel()
    await metrics.close()
    manager.detach()
    await replay.close()
    await runner.close()
    await rollouts.close()
    await server.close()
    await manager.close()


async def _say_alive(images: ImageStore) -> None:
    """Claims on shared stores run out when nobody renews them (dsecd.erofs.claims)."""
    while True:
        await asyncio.to_thread(images.heartbeat)
        await asyncio.sleep(HEARTBEAT_S)


async def _trim(config: Config, manager: Manager) -> None:
    """Old trajectories go, of sandboxes that are over."""
    while True:
        await asyncio.sleep(TRIM_S)
        live = {record.id for record in manager.all((), {}, None)}
        keep_s, keep_bytes = config.trajectory_keep_days * 86400.0, config.trajectory_max_mb << 20
        if gone := await manager.trajectory.trim(live, keep_s, keep_bytes):
            log.info("removed %d trajectories", len(gone))


# -- the process ------------------------------------------------------------------------------------------------------
def _adapt_process() -> None:
    """A daemon of thousands of descriptors. Containers' init processes are the host's init's, which reaps them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0o022)
    _keep_heap_small()


def _keep_heap_small() -> None:
    """glibc puts buffers of megabytes into its heap once one was freed, and the heap does not shrink again: after forty
    answers of 8 MB the daemon had 62 MiB, with this 41, and 36 to begin with. mallopt(3)."""
    trim_threshold, mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library may have none
    if mallopt is not None:
        mallopt(trim_threshold, 1 << 20)
        mallopt(mmap_threshold, 1 << 19)


def _directories(state: Path, run: Path) -> None:
    try:
        # Root's alone: images hold setuid programs of whoever imported them, and disks hold tenants' files. Only the
        # way to a sandbox's own root must be walked by somebody else (the runtime, as that sandbox's root).
        for path, mode in ((state, 0o700), (run, 0o755), (run / "sandboxes", 0o711), (run / "images", 0o700)):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(mode)
    except OSError as exc:
        raise DsecError("invalid", f"cannot make {exc.filename}: {exc.strerror}") from exc


@contextlib.contextmanager
def _lock(state: Path) -> Iterator[None]:
    """One daemon for one state directory."""
    fd = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _stays(lambda: _locked(fd)):
            raise DsecError("conflict", f"another dsecd runs on {state}")
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its queue is full of clients that wait: somebody holds it
            return True
        except OSError:
            return False
    return True


def _stays(taken: Callable[[], bool]) -> bool:
    """Whether it is taken, and still is after a moment.

    A daemon killed while it started a child leaves that child with all its descriptors, the lock and the socket among
    them, until the child comes to its exec.
    """
    deadline = time.monotonic() + GHOST_S
    while taken():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def _listener(config: Config) -> Iterator[socket.socket]:
    """The API socket: systemd's, or bound here. A stale socket is replaced, a live one refused."""
    inherited = notify.listen_fd()
    if inherited is not None:
        with socket.socket(fileno=inherited) as sock:
            sock.setblocking(False)
            yield sock
        return
    path = Path(config.socket)
    if path.exists() or path.is_symlink():
        if not path.is_socket():
            raise DsecError("conflict", f"{path} exists and is not a socket")
        if _stays(lambda: _answers(path)):
            raise DsecError("conflict", f"another daemon listens on {path}")
        path.unlink()
    with bound(path, 0o177) as sock:
        _share(path, config.socket_group)
        yield sock
    path.unlink(missing_ok=True)


def _share(path: Path, group: str) -> None:
    if (gid := _group(group)) is None:
        log.warning("no group %s: only root can use %s, ignoring", group, path)
        return
    os.chown(path, 0, gid)
    path.chmod(0o660)


def _group(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def _tool(config: Config, name: str) -> Path:
    """One of our own programs: where the configuration says, installed, or just built."""
    places = [Path(config.lib_dir)] if config.lib_dir else []
    places += [
        _HERE / "build/native",
        Path(sys.prefix) / "lib/dsecd",
        Path("/usr/lib/dsecd"),
        Path("/usr/local/lib/dsecd"),
    ]
    for place in places:
        if os.access(place / name, os.X_OK):
            return place / name
    raise DsecError("unsupported", f"{name} is not installed: run `make setup`")


def _profile(config: Config) -> str:
    if config.apparmor_profile != "auto":
        return config.apparmor_profile
    try:
        loaded = Path("/sys/kernel/security/apparmor/profiles").read_text()
    except OSError:
        return ""
    return "dsec-sandbox" if any(line.startswith("dsec-sandbox ") for line in loaded.splitlines()) else ""


if __name__ == "__main__":
    sys.exit(main())
