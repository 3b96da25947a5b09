"""Calls on device pools: compiled without, run with them, by whoever's turn it is; and given back when idle."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemonkit import Daemon, asynchronous, container_args
from fnkit import IMAGE, c, judging, python
from test_devices_daemon import box, put, refused

from dsecd.client import DSecClient, DSecFnCallArgs

READS = (
    '#include <stdio.h>\n#include <stdlib.h>\nint main(){FILE*f=fopen("/dev/thing","r");if(!f)return 2;int c=fgetc(f);'
    'printf("%d %s\\n",c,getenv("THING"));}'
)


@contextlib.contextmanager
def one_device(directory: Path, watched: list[Path]) -> Iterator[Daemon]:
    node = {"path": "/dev/thing", "hostPath": "/dev/zero", "fileMode": 0o666}
    put(directory, "thing", {"0": {"deviceNodes": [node], "env": ["THING=yes"]}})
    pools = {"thing": {"match": ["example.org/thing=*"]}}
    config = {"devices": pools, "cdi_dirs": [str(directory)]}
    with judging(directory / "daemon", watched, config) as one:
        yield one


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, watched: list[Path]) -> Iterator[Daemon]:
    with one_device(tmp_path_factory.mktemp("fndevices"), watched) as one:
        yield one


@pytest.fixture
def fresh_host(tmp_path: Path, watched: list[Path]) -> Iterator[Daemon]:
    with one_device(tmp_path, watched) as one:
        yield one


def with_thing(args: DSecFnCallArgs) -> DSecFnCallArgs:
    args.devices = ["thing"]
    return args


@asynchronous
async def test_compiled_without_run_with(host: Daemon) -> None:
    async with host.client() as client:
        got = await client.fncall(with_thing(c(READS, expected=b"0 yes\n")))
        assert (got.verdict, got.stdout) == ("ok", b"0 yes\n"), got
        warm = 'import os; print(open("/dev/thing","rb").read(1)[0], os.environ["THING"])'
        assert (await client.fncall(with_thing(python(warm, expected=b"0 yes\n")))).verdict == "ok"
        assert (await client.fncall(c(READS))).exit_code == 2  # other calls see nothing of it


@asynchronous
async def test_many_calls_take_turns_on_one_device(host: Daemon) -> None:
    async with host.client() as client:
        got = await asyncio.gather(*(client.fncall(with_thing(c(READS, expected=b"0 yes\n"))) for _ in range(12)))
        assert [one.verdict for one in got] == ["ok"] * 12


@asynchronous
async def test_a_sandbox_and_calls_share_fairly(host: Daemon) -> None:
    """The sandbox gets it when the calls' place is idle; a call that waits gets it when the sandbox ends."""
    async with host.client() as client:
        assert (await client.fncall(with_thing(c(READS)))).verdict == "ok"
        async with box(client, "thing", container_image=IMAGE) as sandbox:
            assert (await sandbox.run_shell("echo $THING")).stdout == "yes\n"
            call = asyncio.ensure_future(client.fncall(with_thing(c(READS))))
            await asyncio.sleep(1)
            assert not call.done()
        assert (await call).verdict == "ok"


@asynchronous
async def test_refusals(host: Daemon) -> None:
    async with host.client() as client:
        for devices, kind in ((["none"], "not_found"), (["thing:2"], "not_found"), (["thing:0"], "invalid")):
            args = c(READS)
            args.devices = devices
            await refused(client.fncall(args), kind)


def test_a_call_that_waits_for_a_device_does_not_hold_up_the_end(fresh_host: Daemon) -> None:
    async def begin() -> None:
        async with fresh_host.client() as client, asyncio.timeout(60):
            sandbox = await client.run_container(container_args(devices=["thing"], container_image=IMAGE))
            call = asyncio.ensure_future(client.fncall(with_thing(c(READS))))
            await asyncio.sleep(1)
            began = time.monotonic()
            await asyncio.to_thread(fresh_host.restart)
            assert time.monotonic() - began < 30
            assert (await call).verdict == "infra"
            await end(fresh_host.client(), sandbox.id)

    async def end(again: DSecClient, ident: str) -> None:
        async with again as client:
            await (await client.get(ident)).stop()

    asyncio.run(begin())
