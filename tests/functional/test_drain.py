"""A host is emptied: idle sandboxes at once, commands by their end or by the deadline."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import daemonkit
import pytest
from daemonkit import Daemon, asynchronous, started

from dsecd.errors import DsecError
from dsecd.wire.daemon import Cordon, Drain, Drained, Info, InfoParams


@asynchronous
async def test_commands_end_or_are_cut_and_nobody_new_comes(
    daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, watched: list[Path]
) -> None:
    with started(tmp_path_factory.mktemp("drain"), watched, daemon.state / "images") as one:
        async with one.client() as client:
            _idle, quick, slow, paused = [await daemonkit.launch(client) for _ in range(4)]
            await paused.pause()
            ends = asyncio.create_task(quick.run_shell("sleep 3; echo done", timeout=60))
            never = asyncio.create_task(slow.run_shell("sleep 600", timeout=900))
            await asyncio.sleep(0.5)
            began = time.monotonic()
            drained = asyncio.create_task(client.call("daemon.drain", Drain(deadline_s=8, cordon=False)))
            while len(one.sandboxes()) > 2:
                await asyncio.sleep(0.05)
            assert time.monotonic() - began < 3, "those that do nothing go at once"
            assert set(one.sandboxes()) == {quick.id, slow.id}
            with pytest.raises(DsecError, match="takes no new sandboxes: it is being emptied") as refused:
                await daemonkit.launch(client)
            assert refused.value.kind == "capacity"
            assert (await ends).stdout == "done\n"
            with pytest.raises(DsecError) as cut:
                await never
            assert (cut.value.kind, cut.value.infra) == ("sandbox_dead", True), cut.value
            assert (await client.get(slow.id)).info.reason == "this host is being emptied"
            assert await drained == Drained(stopped=4, cut=1)
            assert 8 <= time.monotonic() - began < 60
            with pytest.raises(DsecError, match="being emptied"):  # it stays so: a shutdown is not over yet
                await daemonkit.launch(client)
        one.restart()
        async with one.client() as client:
            fresh = await daemonkit.launch(client)
            argv = [str(Path(sys.executable).parent / "dsecctl"), "-H", one.url, "drain", "--deadline", "1s"]
            done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (0, "1 sandboxes ended\n"), done.stderr
            one.restart()
        async with one.client() as client:
            assert (await client.get(fresh.id)).id == fresh.id
            info: Info = await client.call("daemon.info", InfoParams())
            assert (info.cordoned, info.sandboxes) == (True, 0)
            await client.call("daemon.cordon", Cordon(on=False))
            await (await daemonkit.launch(client)).stop()
