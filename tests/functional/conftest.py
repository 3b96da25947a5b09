"""Fixtures of functional tests, a ladder: base_tar → daemon (base imported) → sandbox (running). Root, this host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import daemonkit
import leftovers
import pytest
from daemonkit import BASE, Daemon, run, started
from erofs_kit import assert_clean
from netkit import DNS4, SERVICES, World, nothing_more

from dsecd.client import DSecSyncClient
from dsecd.client_sync import SyncSandbox
from dsecd.erofs.store import ImageStore

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture(scope="session")
def base_tar() -> Path:
    """A small Debian with Python, as a tar."""
    return daemonkit.base_tar()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What a container can do, a microVM does the same: tests that take `backend` run on both, unless they say not."""
    if "backend" in metafunc.fixturenames:
        alone = metafunc.definition.get_closest_marker("containers_only") is not None
        metafunc.parametrize("backend", ["container"] if alone else ["container", "microvm"], indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The backends that cases run on."""
    if request.param == "microvm":
        daemonkit.guest_kernels()
        for one in daemonkit.running:
            one.link_kernels()
    return str(request.param)


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory, watched: list[Path], base_tar: Path) -> Iterator[Daemon]:
    """The daemon that most tests share. Do not stop it."""
    with started(tmp_path_factory.mktemp("daemon"), watched) as one:

        async def fill() -> None:
            async with one.client() as client:
                await one.import_tar(client, base_tar)

        run(fill())
        yield one


@pytest.fixture
def fresh_daemon(tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon) -> Iterator[Daemon]:
    """One for this test alone, with the same images: stop it, kill it, start it again."""
    with started(tmp_path_factory.mktemp("fresh"), watched, daemon.state / "images") as one:
        yield one


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A host's network and what lies beyond it."""
    made = World(tmp_path_factory.mktemp("world"))
    try:
        made.open()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def net_daemon(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon, world: World
) -> Iterator[Daemon]:
    """A daemon on that host: its sandboxes can have networks."""
    config = {"network": {"resolvers": [DNS4]}, "services": SERVICES, "netns": world.host}
    config |= {"id_first_slot": 4000, "id_last_slot": 4094}  # daemons of single tests on that host have others
    with started(tmp_path_factory.mktemp("net"), watched, daemon.state / "images", **config) as one:
        yield one


@pytest.fixture
def far(world: World, net_daemon: Daemon) -> Iterator[World]:
    """What was seen on the far side since the test began; and of the test's networks nothing is left."""
    world.forget()
    with nothing_more(world, net_daemon):
        yield world


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """For mounts of `store`."""
    return tmp_path / "run"


@pytest.fixture
def store(tmp_path: Path, run_dir: Path) -> Iterator[ImageStore]:
    """An image store without a daemon; nothing half-made may stay in it."""
    yield ImageStore(tmp_path / "images")
    assert_clean(tmp_path / "images", run_dir)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[DSecSyncClient]:
    """The blocking SDK."""
    with DSecSyncClient(daemon.url) as client:
        yield client


@pytest.fixture
def sandbox(client: DSecSyncClient) -> Iterator[SyncSandbox]:
    """One running container."""
    with client.run_container(daemonkit.container_args(container_image=BASE)) as sandbox:
        yield sandbox


@pytest.fixture(autouse=True)
def daemon_is_clean(nothing_left: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """A test ends its sandboxes, and the shared daemon keeps no descriptor and no zombie of it."""
    shared: Daemon | None = request.getfixturevalue("daemon") if "daemon" in request.fixturenames else None
    if shared is None:
        yield
        return
    before, open_before = shared.sandboxes(), _kinds(shared.pid)
    yield
    if shared.process is None or shared.process.poll() is not None:
        pytest.fail(f"the shared daemon is gone:\n{shared.tail()}", pytrace=False)
    left = [f"sandbox {ident} ({state})" for ident, state in shared.sandboxes().items() if ident not in before]
    for ident in shared.sandboxes().keys() - before.keys():
        shared.ask("sandbox.stop", {"id": ident})
    left += _grown(shared, open_before) + leftovers.left(set(), lambda: set(shared.zombies()))
    if left:
        pytest.fail("left in the daemon:\n  " + "\n  ".join(left), pytrace=False)


def _kinds(pid: int) -> dict[str, int]:
    """How many descriptors of each kind: `socket`, `anon_inode:[pidfd]`, or a path."""
    counts: dict[str, int] = {}
    for item in leftovers.descriptors(pid):
        kind = item.split(" ", 2)[2].split(":[", 1)[0] if ":[" in item else item.split(" ", 2)[2]
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _grown(daemon: Daemon, before: dict[str, int]) -> list[str]:
    deadline = time.monotonic() + 3
    while True:
        grown = {kind: n - before.get(kind, 0) for kind, n in _kinds(daemon.pid).items() if n > before.get(kind, 0)}
        if not grown or time.monotonic() > deadline:
            return [f"{n} more descriptors of the daemon: {kind}" for kind, n in grown.items()]
        time.sleep(0.02)


def pytest_runtest_setup() -> None:
    for daemon in daemonkit.running:
        daemon.seen = daemon.log_size()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failure shows what every daemon that runs has logged since the test began."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        for daemon in daemonkit.running:
            report.sections.append((f"dsecd's log ({daemon.directory.name})", daemon.tail(60, since=daemon.seen)))
