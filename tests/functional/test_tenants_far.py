"""Tenants from far: a key with a forced command behind a real sshd, and through a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from daemonkit import BASE, Daemon, asynchronous, started
from sshd_kit import Sshd

from dsecd.client import DSecClient
from dsecd.errors import DsecError
from dsecd.wire import jobs
from dsecd.wire import sandbox as wire
from dsecd.wire.daemon import StatsParams
from dsecd.wire.tenants import Quotas

SPEC = wire.Spec(image=BASE, memory_mb=64, disk_mb=64, cpu=0.1, pids=32)
DSECCTL = Path(sys.executable).with_name("dsecctl")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon) -> Iterator[list[Daemon]]:
    """Two hosts with tenants."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    tmp_path_factory.mktemp(f"far{n}"), watched, daemon.state / "images",
                    host_tag=f"f{n}",
                    id_first_slot=3900 + 40 * n, id_last_slot=3939 + 40 * n,
                )
            )
            for n in range(2)
        ]  # fmt: skip


def dsecctl(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DSECCTL, *argv], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False
    )


def good(*argv: str | Path) -> str:
    done = dsecctl(*argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_key_is_a_principal(pair: list[Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made with dsecctl alone; the key's command logs in, so that nobody who has the key is anybody else."""
    url, token = pair[0].url, tmp_path / "agent.token"
    good("-H", url, "project", "create", "root/ssh", "--sandboxes", "1")
    good("-H", url, "principal", "add", "agent", "--project", "root/ssh")
    ident = good("-H", url, "token", "create", "agent", "-o", token).strip()
    assert token.stat().st_mode & 0o777 == 0o600
    assert "root/ssh" in good("-H", url, "project", "list")
    assert "agent, user of root/ssh" in good("-H", url, "--token-file", token, "whoami")
    sshd = Sshd(tmp_path)
    monkeypatch.setenv("DSEC_SSH", sshd.command)
    try:
        key = (sshd.directory / "user.pub").read_text()
        line = f'command="{DSECCTL} -H {url} --token-file {token} stdio",restrict {key}'
        (sshd.directory / "authorized").write_text(line)
        far = f"ssh://root@127.0.0.1:{sshd.port}?stdio"
        asyncio.run(_through_the_key(far))
        assert ident in good("-H", url, "principal", "list")
        good("-H", url, "token", "revoke", ident)
        assert "nobody's on this host" in dsecctl("-H", far, "ps").stderr
        token.chmod(0o644)
        assert "chmod 600" in dsecctl("-H", far, "ps").stderr
    finally:
        sshd.stop()
        good("-H", url, "principal", "remove", "agent")
        good("-H", url, "project", "remove", "root/ssh")
    log = good("-H", url, "audit", "--limit", "1000")
    assert "token.revoke" in log


async def _through_the_key(far: str) -> None:
    async with DSecClient(far, again_s=0) as client:
        assert (await client.whoami()).principal == "agent"
        made = await client.call("sandbox.create", wire.Create(spec=SPEC))
        box = await client.get(made.id)
        assert (await box.run_shell("echo over a key")).stdout == "over a key\n"
        data = bytes(range(256)) * 20_000
        await box.write_file("/root/blob", data)
        assert await box.read_file("/root/blob") == data
        with pytest.raises(DsecError, match="1 of 1 sandboxes"):
            await client.call("sandbox.create", wire.Create(spec=SPEC))
        with pytest.raises(DsecError, match="whole host"):
            await client.call("daemon.stats", StatsParams())
        await box.stop()


@contextlib.asynccontextmanager
async def fleet_of(hosts: list[Daemon], directory: Path) -> AsyncIterator[str]:
    inventory, path = directory / "fleet.toml", directory / "fleet.sock"
    inventory.write_text("".join(f'[hosts.h{n}]\nurl = "{one.url}"\n' for n, one in enumerate(hosts)))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dsecd.fleet", "-i", str(inventory), "-s", str(path), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(60):
            while not path.exists():
                await asyncio.sleep(0.02)
        yield f"unix://{path}"
    finally:
        process.terminate()
        await process.wait()


@asynchronous
async def test_a_fleet_asks_for_its_clients(pair: list[Daemon], tmp_path: Path) -> None:
    """What changes tenants is on all hosts; a login holds on all of them; lists and jobs stay the principal's."""
    async with fleet_of(pair, tmp_path) as url, DSecClient(url) as boss:
        await boss.create_project("root/f", Quotas(sandboxes=2))
        await boss.create_project("root/other")
        for name, project in (("fay", "root/f"), ("oto", "root/other")):
            await boss.add_principal(name, project, "admin")
            token, _ = await boss.create_token(name)
            file = tmp_path / name
            file.touch(0o600)
            file.write_text(token)
        for one in pair:
            async with one.client() as client:
                assert {p.name for p in await client.principals()} >= {"fay", "oto"}
        async with (
            DSecClient(url, token_file=str(tmp_path / "fay")) as fay,
            DSecClient(url, token_file=str(tmp_path / "oto")) as oto,
        ):
            assert (await fay.whoami()).project == "root/f"
            spec = wire.Spec(image=BASE, memory_mb=64, disk_mb=64, cpu=0.1, pids=32, job="nine")
            made = await fay.call("sandbox.create_many", wire.CreateMany(spec=spec, count=8))
            ids = [one.sandbox.id for one in made.results if one.sandbox]
            assert 1 <= len(ids) <= 4, made.results  # two on each host
            assert {one.error.kind for one in made.results if one.error} == {"quota"}
            mine = await oto.call("sandbox.create", wire.Create(spec=spec))
            assert {one.id for one in await fay.list()} == set(ids)
            assert [one.id for one in await oto.list()] == [mine.id]
            assert {one.id for one in await boss.list()} == {*ids, mine.id}
            for ident in ids:
                with pytest.raises(DsecError) as caught:
                    await oto.get(ident)
                assert caught.value.kind == "not_found"
            await oto.call("job.pause", jobs.ByJob(job="nine"))
            assert {(await fay.get(one)).info.state for one in ids} == {"running"}
            assert (await fay.project("root/f")).used.sandboxes == len(ids)
            with pytest.raises(DsecError, match="in root/f"):
                await fay.project("root/other")
            reply = await _line(url, {"jsonrpc": "2.0", "id": 1, "method": "sandbox.list", "as": "fay"})
            assert b"denied" in reply
            await fay.call("sandbox.stop_many", wire.StopMany(ids=[*ids, mine.id]))
            assert (await oto.get(mine.id)).info.state == "paused"
            await oto.call("sandbox.stop_many", wire.StopMany(ids=[mine.id]))
        for name, project in (("fay", "root/f"), ("oto", "root/other")):
            await boss.remove_principal(name)
            await boss.remove_project(project)
        hosts = {one.host for one in await boss.audit(limit=1000)}
        assert hosts == {"h0", "h1"}


@asynchronous
async def test_a_fleet_cuts_who_has_no_token_any_more(pair: list[Daemon], tmp_path: Path) -> None:
    """His connection, with what he has asked on it; nobody else's, and also when the name is given again."""
    async with fleet_of(pair, tmp_path) as url, DSecClient(url) as boss:
        await boss.create_project("root/f")
        await boss.add_principal("fay", "root/f", "user")
        (revoked, ident), (kept, _) = [await boss.create_token("fay") for _ in range(2)]
        async with _logged_in(url, revoked) as first, _logged_in(url, kept) as second:
            await boss.revoke_token(ident)
            async with asyncio.timeout(10):
                await first.read()  # to its end
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await second.read()
            await boss.remove_principal("fay")
            await boss.add_principal("fay", "root/f", "admin")
            async with asyncio.timeout(10):
                await second.read()
        await boss.remove_principal("fay")
        await boss.remove_project("root/f")


@contextlib.asynccontextmanager
async def _logged_in(url: str, token: str) -> AsyncIterator[asyncio.StreamReader]:
    """With a request under way."""
    reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
    try:
        writer.write(_request(1, "session.login", {"token": token}))
        assert b"fay" in await reader.readline()
        writer.write(_request(2, "sandbox.events", {"since": 0}))
        yield reader
    finally:
        writer.close()


def _request(ident: int, method: str, params: dict[str, object]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": ident, "method": method, "params": params}).encode() + b"\n"


async def _line(url: str, message: dict[str, object]) -> bytes:
    reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
    writer.write(json.dumps(message).encode() + b"\n")
    try:
        return await reader.readline()
    finally:
        writer.close()
