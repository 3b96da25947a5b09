"""Real pressure of this host's kernel holds creates off, and their return is let in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import daemonkit
import pytest
from daemonkit import Daemon, asynchronous, started

from dsecd.errors import DsecError
from dsecd.sandbox import brake
from dsecd.wire.daemon import Info, InfoParams, Reload


@pytest.mark.skipif(not brake.measured(), reason="this kernel does not measure pressure")
@asynchronous
async def test_a_busy_host_takes_nobody_new(
    daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, watched: list[Path]
) -> None:
    """More busy tasks than cores: in most of the time some wait. The brake is there once its limit was reloaded."""
    with started(tmp_path_factory.mktemp("busy"), watched, daemon.state / "images") as one:
        async with one.client() as client:
            first = await daemonkit.launch(client, "container", cpu_cores_limit=2)
            one.config["pressure_cpu"] = 20.0
            one.write_config()
            await client.call("daemon.reload", Reload())
            busy = "for n in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; wait"
            command = asyncio.create_task(first.run_shell(busy, timeout=120))
            async with asyncio.timeout(60):
                while not (await client.call("daemon.info", InfoParams())).pressure:
                    await asyncio.sleep(0.5)
            with pytest.raises(DsecError, match="this host is busy: tasks waited for cpu") as caught:
                await daemonkit.launch(client, "container")
            assert caught.value.kind == "capacity"
            assert caught.value.detail == {"short": ["pressure"]}
            info: Info = await client.call("daemon.info", InfoParams())
            assert (info.sandboxes, info.cordoned) == (1, False)
            assert (await first.run_shell("echo still here")).stdout == "still here\n"
            one.config["pressure_cpu"] = 100.0
            one.write_config()
            await client.call("daemon.reload", Reload())
            await (await daemonkit.launch(client, "container")).stop()
            await first.stop()
            await asyncio.gather(command, return_exceptions=True)
