"""The configuration is read again while the daemon runs: what changes at once, what waits, and what changes nothing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import daemonkit
import pytest
from daemonkit import Daemon, asynchronous, run, started
from netkit import CONNECT, DNS4, GOOD4, OTHER4, SERVICES, World

from dsecd import reload
from dsecd.client import DSecClient, Sandbox
from dsecd.config import Config
from dsecd.errors import DsecError
from dsecd.wire.daemon import Info, InfoParams, Reload, Reloaded


@pytest.fixture
def one(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon, world: World
) -> Iterator[Daemon]:
    config = {"network": {"resolvers": [DNS4]}, "services": dict(SERVICES), "netns": world.host}
    with started(tmp_path_factory.mktemp("reload"), watched, daemon.state / "images", **config) as made:
        yield made


async def again(client: DSecClient) -> Reloaded:
    done: Reloaded = await client.call("daemon.reload", Reload())
    return done


async def reaches(sandbox: Sandbox, host: str) -> bool:
    done = await sandbox.exec(["python3", "-c", CONNECT, host, "80", "5"])
    return done.stdout.strip() == "far:hello"


def test_every_live_key_is_one() -> None:
    names = {f"{table}.{key}" for table in ("network",) for key in getattr(Config(), table).__struct_fields__}
    assert names.union(Config.__struct_fields__) >= reload.LIVE


@asynchronous
async def test_what_can_change_does_and_the_rest_is_named(one: Daemon) -> None:
    async with one.client() as client:
        assert await again(client) == Reloaded(changed=[], needs_restart=[])
        one.config |= {"max_sandboxes": 1, "trajectory_keep_days": 2.0, "runtime": "runc", "pressure_memory": 50.0}
        one.write_config()
        expected = Reloaded(
            changed=["max_sandboxes", "pressure_memory", "trajectory_keep_days"], needs_restart=["runtime"]
        )
        assert await again(client) == expected
        assert await again(client) == Reloaded(changed=[], needs_restart=["runtime"]), "it still waits"
        info: Info = await client.call("daemon.info", InfoParams())
        assert info.sandboxes_max == 1
        sandbox = await daemonkit.launch(client)
        with pytest.raises(DsecError, match="short of sandboxes"):
            await daemonkit.launch(client)
        one.config["max_sandboxes"] = 10
        one.write_config()
        assert one.process is not None
        one.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(20):
            while (await client.call("daemon.info", InfoParams())).sandboxes_max != 10:
                await asyncio.sleep(0.05)
        await (await daemonkit.launch(client)).stop()
        await sandbox.stop()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max_sandboxes = 0", r"dsecd.toml:\d+: max_sandboxes = 0: "),
        ("max_sandboxen = 1", r"unknown key 'max_sandboxen'; did you mean max_sandboxes\?"),
        ("max_sandboxes = [", r"dsecd.toml: "),
    ],
)
def test_a_file_that_is_wrong_changes_nothing(one: Daemon, line: str, said: str) -> None:
    path = one.write_config()
    text = "\n".join(one for one in path.read_text().splitlines() if not one.startswith("max_sandboxes"))
    path.write_text(f"pressure_io = 5\n{line}\n{text}\n")

    async def work() -> None:
        async with one.client() as client:
            before = await client.call("daemon.info", InfoParams())
            with pytest.raises(DsecError, match=said) as caught:
                await again(client)
            assert caught.value.kind == "invalid"
            assert (await client.call("daemon.info", InfoParams())).sandboxes_max == before.sandboxes_max
            one.write_config()
            assert await again(client) == Reloaded(changed=[], needs_restart=[])

    run(work())


@asynchronous
async def test_services_change_for_those_who_have_them(one: Daemon) -> None:
    async with one.client() as client:
        sandbox = await daemonkit.launch(client, network_rules={"npm": True, "pypi": True})
        assert await reaches(sandbox, "other.example.org")
        one.services = {"npm": {"hosts": [GOOD4]}, "new": {"hosts": [f"{OTHER4}/32"]}}
        one.write_config()
        assert (await again(client)).changed == ["network.services"]
        assert not await reaches(sandbox, OTHER4), "its service is another now"
        assert await reaches(sandbox, GOOD4)
        await sandbox.set_network({"new": True})
        assert await reaches(sandbox, OTHER4)
        with pytest.raises(DsecError, match="no network service 'pypi'"):
            await sandbox.set_network({"pypi": True})
        one.services = {"bad": {"hosts": ["127.0.0.1"]}}
        one.write_config()
        with pytest.raises(DsecError, match="never reachable") as caught:
            await again(client)
        assert caught.value.kind == "invalid"
        await sandbox.set_network({"new": True})
        await sandbox.stop()
