"""Projects, principals, tokens and quotas, with a real daemon: nobody sees, touches or takes what is not his."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemonkit import BASE, Daemon, asynchronous, started
from erofs_kit import Tar

from dsecd.client import DSecClient
from dsecd.errors import DsecError
from dsecd.wire import environments, execs, images, trace, trajectory
from dsecd.wire import sandbox as wire
from dsecd.wire.methods import METHODS
from dsecd.wire.tenants import Quotas

SPEC = wire.Spec(image=BASE, memory_mb=64, disk_mb=64, cpu=0.1, pids=32)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon) -> Iterator[Daemon]:
    """A daemon with tenants, which the tests of this file share."""
    with started(tmp_path_factory.mktemp("tenants"), watched, daemon.state / "images") as one:
        yield one


class Team:
    """A project with a principal of each role, whose clients it opens."""

    def __init__(self, daemon: Daemon, directory: Path, path: str) -> None:
        self.daemon, self.directory, self.path = daemon, directory, path

    async def make(self, boss: DSecClient, quotas: Quotas = Quotas()) -> Team:  # noqa: B008
        await boss.create_project(self.path, quotas)
        for role in ("viewer", "user", "admin"):
            await boss.add_principal(self.name(role), self.path, role)
            token, _ = await boss.create_token(self.name(role))
            write_token(self.file(role), token)
        return self

    def name(self, role: str) -> str:
        return f"{self.path.replace('/', '-')}-{role}"

    def file(self, role: str) -> Path:
        return self.directory / self.name(role)

    def client(self, role: str = "user") -> DSecClient:
        return DSecClient(self.daemon.url, token_file=str(self.file(role)))

    async def dissolve(self, boss: DSecClient) -> None:
        for role in ("viewer", "user", "admin"):
            await boss.remove_principal(self.name(role))
        await boss.remove_project(self.path)


def write_token(path: Path, token: str) -> None:
    path.touch(mode=0o600)
    path.write_text(token + "\n")


@contextlib.asynccontextmanager
async def teams(daemon: Daemon, directory: Path, *paths: str) -> AsyncIterator[tuple[DSecClient, list[Team]]]:
    async with daemon.client() as boss:
        made = [await Team(daemon, directory, path).make(boss) for path in paths]
        try:
            yield boss, made
        finally:
            mine = [one.id for one in await boss.list() if one.info.owner and one.info.owner.project in paths]
            if mine:  # of a test that failed
                await boss.call("sandbox.stop_many", wire.StopMany(ids=mine))
            for team in reversed(made):
                await team.dissolve(boss)


async def refused(work: Any, kind: str, match: str | None = None) -> DsecError:
    with pytest.raises(DsecError, match=match) as caught:
        await work
    assert caught.value.kind == kind, caught.value
    return caught.value


# -- quotas -----------------------------------------------------------------------------------------------------------
@asynchronous
async def test_quotas_hold_with_64_clients_racing(tenants: Daemon, tmp_path: Path) -> None:
    """Half by create, half by create_many; no more than 7 ever live, exactly 7 come to be, and all is given back."""
    async with teams(tenants, tmp_path, "root/race") as (boss, (team,)):
        await boss.set_project("root/race", Quotas(sandboxes=7, memory_mb=64 * 9))
        clients = [team.client() for _ in range(64)]
        await asyncio.gather(*(client.open() for client in clients))
        over: list[int] = []
        stop = asyncio.Event()

        async def watch() -> None:
            while not stop.is_set():
                used = (await boss.project("root/race")).used
                alive = [one for one in await boss.list() if one.info.owner and one.info.owner.project == "root/race"]
                over.append(max(used.sandboxes, len(alive)))
                await asyncio.sleep(0.01)

        async def one(number: int) -> list[str | DsecError]:
            client = clients[number]
            if number % 2:
                made = await client.call("sandbox.create_many", wire.CreateMany(spec=SPEC, count=2))
                return [r.sandbox.id if r.sandbox else r.error.kind for r in made.results]
            try:
                return [(await client.call("sandbox.create", wire.Create(spec=SPEC))).id]
            except DsecError as exc:
                assert exc.detail["quota"] == "sandboxes"
                assert exc.detail["limit"] == 7
                assert "root/race" in exc.message
                return [exc.kind]

        watcher = asyncio.ensure_future(watch())
        answers = [answer for got in await asyncio.gather(*map(one, range(64))) for answer in got]
        stop.set()
        await watcher
        made = [answer for answer in answers if "-" in str(answer)]
        assert sorted(set(map(str, answers)) - set(map(str, made))) == ["quota"]
        assert len(made) == 7
        assert max(over) == 7
        async with team.client() as client:
            assert await client.call("sandbox.stop_many", wire.StopMany(ids=list(map(str, made))))
        await asyncio.gather(*(client.close() for client in clients))
        assert (await boss.project("root/race")).used.sandboxes == 0


@asynchronous
async def test_what_is_held_survives_a_kill_in_the_middle_of_a_create(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon, tmp_path: Path
) -> None:
    """Principals, tokens, quotas are there again; what runs counts, what was being made does not."""
    with started(tmp_path_factory.mktemp("killed"), watched, daemon.state / "images") as one:
        async with one.client() as boss:
            team = await Team(one, tmp_path, "root/k").make(boss, Quotas(sandboxes=2, memory_mb=1000))
        async with team.client() as client:
            kept = await client.call("sandbox.create", wire.Create(spec=SPEC))
            began = asyncio.ensure_future(client.call("sandbox.create", wire.Create(spec=SPEC)))
            while len(await client.list()) < 2:
                await asyncio.sleep(0)
            one.kill()
            with contextlib.suppress(DsecError):
                await began
        one.start()
        async with one.client() as boss, team.client() as client:
            alive = {box.id for box in await client.list()}
            assert kept.id in alive
            project = await boss.project("root/k")
            assert project.used.sandboxes == len(alive)
            assert project.used.memory_mb == 64 * len(alive)
            assert project.quotas == Quotas(sandboxes=2, memory_mb=1000)
            for _ in range(2 - len(alive)):
                alive.add((await client.call("sandbox.create", wire.Create(spec=SPEC))).id)
            await refused(client.call("sandbox.create", wire.Create(spec=SPEC)), "quota", "2 of 2 sandboxes")
            await client.call("sandbox.stop_many", wire.StopMany(ids=list(alive)))
            audit = await boss.audit(limit=1000)
            assert {"project.create", "principal.add", "token.create"} <= {entry.method for entry in audit}


# -- who sees what ----------------------------------------------------------------------------------------------------
def arguments(params: type[Any], ident: str) -> dict[str, Any] | None:
    """Something that the method decodes, about `ident`; None when it takes none."""
    fields = {field.name: field for field in msgspec.structs.fields(params)}
    if "id" not in fields:
        return None
    found: dict[str, Any] = {"id": ident}
    sample = {"exec_id": "x1", "session_id": "s1", "path": "/etc/passwd", "to": "/tmp/b", "target": "/tmp/b",
              "port": 80,
              "name": "stolen", "argv": ["true"], "tag": "a", "signal": 9, "rows": 1, "cols": 1, "rules": {},
              "states": ["running"], "step": 1, "body": {}, "count": 1, "window": 4096, "events": []}  # fmt: skip
    for name, field in fields.items():
        if field.required and name != "id":
            found[name] = sample.get(name, "a")
    return found


@asynchronous
async def test_no_method_succeeds_on_another_tenants_sandbox(tenants: Daemon, tmp_path: Path) -> None:
    """All methods of the table that take an id, with that of another project's sandbox, by id and by name."""
    async with teams(tenants, tmp_path, "root/mine", "root/theirs") as (boss, (mine, theirs)):  # noqa: SIM117
        async with theirs.client() as they, mine.client("admin") as me:
            spec = msgspec.structs.replace(SPEC, name="precious", labels={"a": "b"}, job="theirs")
            box = await they.call("sandbox.create", wire.Create(spec=spec))
            tried = 0
            for name, method in METHODS.items():
                for ident in (box.id, "precious"):
                    args = arguments(method.params, ident)
                    if args is None:
                        continue
                    tried += 1
                    if name == "token.revoke":
                        continue
                    reply = await raw(tenants, mine.file("admin"), name, args)
                    assert reply["error"]["data"]["kind"] in ("not_found", "denied"), (name, reply)
            assert tried > 80
            assert await me.list() == []
            assert (await me.call("sandbox.stop_many", wire.StopMany(ids=[box.id]))).stopped == 0
            assert (await me.call("sandbox.stop_many", wire.StopMany(labels={"a": "b"}))).stopped == 0
            assert (await me.call("lease.renew", wire.Renew(ids=[box.id]))).gone == [box.id]
            assert await me.jobs() == []
            await refused(me.call("sandbox.create", wire.Create(spec=spec)), "conflict", "is taken on this host")
            await refused(me.project("root/theirs"), "not_found")
            await refused(me.project("root"), "not_found")
            assert [one.path for one in await me.projects()] == ["root/mine"]
            assert {one.project for one in await me.principals()} == {"root/mine"}
            assert all(one.project == "root/mine" for one in await me.audit())
            assert (await they.get(box.id)).info.state == "running"
            events = await seen_events(me)
            assert box.id not in events
            assert box.id in await seen_events(they)
            # What is above sees what is below, and the trajectory says who it was.
            assert (await boss.get(box.id)).info.owner.principal == theirs.name("user")
            await they.call("sandbox.pause", wire.ById(id=box.id))
            read = await boss.call("trajectory.read", trajectory.Read(id=box.id))
            whose = [one["who"] for one in msgspec.to_builtins(read.entries) if one.get("method") == "sandbox.pause"]
            assert [(one["principal"], one["project"]) for one in whose] == [(theirs.name("user"), "root/theirs")]
            await they.call("sandbox.stop", wire.Stop(id=box.id))


@asynchronous
async def test_a_name_is_no_id(tenants: Daemon, tmp_path: Path) -> None:
    """A sandbox named as another one's id would be taken for that one."""
    async with teams(tenants, tmp_path, "root/mine", "root/theirs") as (_, (mine, theirs)):  # noqa: SIM117
        async with theirs.client() as they, mine.client() as me:
            box = await they.call("sandbox.create", wire.Create(spec=SPEC))
            shadow = msgspec.structs.replace(SPEC, name=box.id)
            await refused(me.call("sandbox.create", wire.Create(spec=shadow)), "invalid", "looks like an id")
            await they.call("sandbox.stop", wire.Stop(id=box.id))


@asynchronous
async def test_a_request_stays_with_the_sandbox_that_it_was_let_to(tenants: Daemon, tmp_path: Path) -> None:
    """The name is another project's when the request that waited gets its turn."""
    async with teams(tenants, tmp_path, "root/mine", "root/theirs") as (boss, (mine, theirs)):  # noqa: SIM117
        async with theirs.client() as they, mine.client() as me:
            spec = msgspec.structs.replace(SPEC, name="moving")
            first = await me.call("sandbox.create", wire.Create(spec=spec))
            stalled = [await _stalled_import(boss) for _ in range(2)]  # all slots there are
            pack = await me.begin("sandbox.pack_diff", environments.PackDiff(id="moving", name="base:stolen"))
            await me.whoami()
            await me.call("sandbox.stop", wire.Stop(id=first.id))
            second = await they.call("sandbox.create", wire.Create(spec=spec))
            for one in stalled:
                one.cancel()
                with contextlib.suppress(DsecError):
                    await one.finish()
            await refused(pack.finish(), "sandbox_dead")
            await they.call("sandbox.stop", wire.Stop(id=second.id))


async def _stalled_import(client: DSecClient) -> Any:
    """One whose stream never ends."""
    return await client.begin("image.import", images.Import(name="base:stalled", kind="base"))


@asynchronous
async def test_images_are_made_under_names_that_are_free_when_they_are_made(tenants: Daemon, tmp_path: Path) -> None:
    async def stream(data: bytes, go: asyncio.Event | None = None) -> AsyncIterator[bytes]:
        yield data[:512]
        if go is not None:
            await go.wait()
        yield data[512:]

    disk, layer = bytes(1 << 20), Tar().file("f", b"tenant").done()
    async with teams(tenants, tmp_path, "root/mine") as (boss, (mine,)), mine.client() as me:
        await boss.import_image(images.Import(name="appliance", kind="vm"), stream(disk))
        for kind in ("vm", "base"):
            work = me.import_image(images.Import(name="appliance", kind=kind), stream(disk))
            await refused(work, "denied", "the name appliance is taken")
        for name, kind, data, other, error in (
            ("base:late", "base", layer, Tar().file("f", b"admin").done(), ("denied", "the name base:late is taken")),
            ("late", "vm", disk, disk, ("conflict", "not yours to replace")),
        ):
            go = asyncio.Event()
            late = asyncio.create_task(me.import_image(images.Import(name=name, kind=kind), stream(data, go)))
            await asyncio.sleep(0.3)
            made = await boss.import_image(images.Import(name=name, kind=kind), stream(other))
            assert not late.done()
            go.set()
            await refused(late, *error)
            assert (await boss.call("image.get", images.ByRef(ref=name))).digest == made.digest
            await boss.call("image.remove", images.ByRef(ref=name))
        await boss.call("image.remove", images.ByRef(ref="appliance"))


@asynchronous
async def test_a_request_ends_with_its_principal(tenants: Daemon, tmp_path: Path) -> None:
    """Also one that somebody asked for him, on a connection that stays."""
    async with teams(tenants, tmp_path, "root/mine") as (boss, (mine,)):
        await boss.add_principal("gone", "root/mine", "user")
        box = await boss.call("sandbox.create", wire.Create(spec=SPEC))
        reader, writer = await asyncio.open_unix_connection(str(tenants.socket))
        ask = {"jsonrpc": "2.0", "id": 1, "method": "sandbox.events", "params": {"since": 0}, "as": "gone"}
        writer.write(msgspec.json.encode(ask) + b"\n")
        await boss.remove_principal("gone")
        async with asyncio.timeout(10):
            while (reply := msgspec.json.decode(await reader.readline())).get("id") != 1:
                pass
        assert reply["error"]["data"]["kind"] == "denied"
        assert "gone is no principal any more" in reply["error"]["message"]
        ask |= {"id": 2, "method": "session.whoami", "params": {}}
        del ask["as"]
        writer.write(msgspec.json.encode(ask) + b"\n")
        assert msgspec.json.decode(await reader.readline())["result"]["project"] == "root"
        writer.close()
        assert mine.path == "root/mine"
        await boss.call("sandbox.stop", wire.Stop(id=box.id))


async def seen_events(client: DSecClient) -> set[str]:
    found: set[str] = set()

    def notified(_method: str, raw_event: msgspec.Raw) -> None:
        found.add(msgspec.json.decode(raw_event, type=wire.Event).sandbox_id)

    pending = await client.begin("sandbox.events", wire.Events(since=0), notified=notified)
    await asyncio.sleep(0)
    await client.whoami()
    await asyncio.sleep(0.2)
    pending.cancel()
    with contextlib.suppress(DsecError):
        await pending.finish()
    return found


async def raw(daemon: Daemon, token_file: Path, method: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One request behind a login, in one go: the login counts for what is right behind it."""
    reader, writer = await asyncio.open_unix_connection(str(daemon.socket), limit=1 << 24)
    login = {"jsonrpc": "2.0", "id": 1, "method": "session.login", "params": {"token": token_file.read_text().strip()}}
    ask = {"jsonrpc": "2.0", "id": 2, "method": method, "params": params, **more}
    writer.write(msgspec.json.encode(login) + b"\n" + msgspec.json.encode(ask) + b"\n")
    try:
        while True:
            async with asyncio.timeout(60):
                reply: dict[str, Any] = msgspec.json.decode(await reader.readline())
            if reply.get("id") == 2:
                return reply
    finally:
        writer.close()


@asynchronous
async def test_traces_are_of_ones_own_project_and_below(tenants: Daemon, tmp_path: Path) -> None:
    async with teams(tenants, tmp_path, "root/seen", "root/seen/below", "root/other") as (boss, (team, below, other)):
        async with below.client() as client:
            box: wire.Sandbox = await client.call("sandbox.create", wire.Create(spec=SPEC, request_id="whose-trace"))
            await client.call("sandbox.stop", wire.Stop(id=box.id))
        get, last = trace.Get(trace="whose-trace"), trace.ListTraces(limit=1000)
        async with team.client("viewer") as above, below.client("viewer") as own, other.client("admin") as far:
            for client, sees in ((boss, True), (above, True), (own, True), (far, False)):
                found: trace.Traces = await client.call("trace.get", get)
                assert [one.sandbox or one.method for one in found.traces] == ["sandbox.create"] * sees
                listed: trace.Traces = await client.call("trace.list", last)
                assert ("whose-trace" in {one.key for one in listed.traces}) is sees


@asynchronous
async def test_roles_and_delegation(tenants: Daemon, tmp_path: Path) -> None:
    """A viewer reads, a user makes, an admin hands on what it holds and no more; hosts' calls are root's."""
    async with teams(tenants, tmp_path, "root/t") as (boss, (team,)):
        await boss.set_project("root/t", Quotas(sandboxes=3, cpu=2))
        async with team.client("viewer") as viewer, team.client("user") as user, team.client("admin") as admin:
            me = await viewer.whoami()
            assert (me.principal, me.project, me.role) == (team.name("viewer"), "root/t", "viewer")
            await refused(viewer.call("sandbox.create", wire.Create(spec=SPEC)), "denied", "role user")
            await refused(user.create_project("root/t/x"), "denied", "role admin")
            await refused(admin.create_project("root/t/x", Quotas(sandboxes=4)), "denied", "3 of root/t")
            await refused(admin.create_project("root/x"), "denied", "not below root/t")
            await refused(admin.set_project("root/t", Quotas(sandboxes=9)), "denied", "your own project")
            await refused(admin.add_principal("evil", "root", "admin"), "not_found")
            await refused(
                admin.add_principal("evil", "root/t", "admin", uid=1234), "denied", "only an admin of the root"
            )
            for method, args in (("daemon.cordon", {"on": True}), ("image.gc", {}), ("daemon.fix", {"what": "zram"})):
                await refused(admin.call(method, METHODS[method].params(**args)), "denied", "whole host")
            sub = await admin.create_project("root/t/agent7", Quotas(sandboxes=1))
            assert sub.limits == Quotas(sandboxes=1, cpu=2)
            await admin.add_principal("agent7", "root/t/agent7", "user")
            token, ident = await admin.create_token("agent7")
            write_token(tmp_path / "agent7", token)
            async with DSecClient(tenants.url, token_file=str(tmp_path / "agent7")) as agent:
                box = await agent.call("sandbox.create", wire.Create(spec=SPEC))
                error = await refused(
                    agent.call("sandbox.create", wire.Create(spec=SPEC)), "quota", "dsecctl project set"
                )
                assert error.detail == {
                    "project": "root/t/agent7", "quota": "sandboxes", "used": 1, "limit": 1, "asked": 1,
                }  # fmt: skip
                assert [one.id for one in await user.list()] == [box.id]  # the team sees its agents' sandboxes
                assert (await user.project("root/t")).used.sandboxes == 1
                copies = (await user.call("sandbox.fork", wire.Fork(id=box.id, count=3))).results
                assert sorted(one.error.kind if one.error else "made" for one in copies) == ["made", "made", "quota"]
                assert (await user.project("root/t")).used.sandboxes == 3
                ran = await refused(user.call("exec.run", execs.Run(id=box.id, argv=["true"], fresh=True)), "quota")
                assert ran.detail["project"] == "root/t"
                made = [one.sandbox.id for one in copies if one.sandbox]
                assert (await user.call("sandbox.stop_many", wire.StopMany(ids=made))).stopped == 2
                await refused(agent.call("image.bootstrap", images.Bootstrap(name=BASE)), "denied", "is taken")
                await refused(admin.remove_project("root/t/agent7"), "conflict", "still has")
                await user.call("sandbox.stop", wire.Stop(id=box.id))
                await admin.revoke_token(ident)
                async with asyncio.timeout(20):
                    while agent.alive:
                        await asyncio.sleep(0.05)
            with pytest.raises(DsecError, match="nobody's") as caught:
                await DSecClient(tenants.url, token_file=str(tmp_path / "agent7")).open()
            assert caught.value.kind == "denied"
            await admin.remove_principal("agent7")
            await admin.remove_project("root/t/agent7")
            said = await admin.audit(limit=1000)
            assert ("refused", "project.create", "denied") in {(e.event, e.method, e.outcome) for e in said}
            assert ("done", "token.revoke", "ok") in {(e.event, e.method, e.outcome) for e in said}
            assert token not in str(said)
            await refused(viewer.audit(), "denied")


@asynchronous
async def test_a_user_id_is_a_principal(tenants: Daemon, tmp_path: Path) -> None:
    """Once there is a principal, a uid that is none may only log in; one that is has its role. Asked for by `as`."""
    async with teams(tenants, tmp_path, "root/u") as (boss, (team,)):
        await boss.add_principal("worker", "root/u", "viewer", uid=34567)
        sock = {"as": "uid:34567"}
        assert (await asked(tenants, "session.whoami", {}, **sock))["result"]["principal"] == "worker"
        assert whoami_of(tenants, 34567) == ("worker", "root/u", "viewer")
        assert whoami_of(tenants, 34568) == ("uid:34568", "root", "nobody")
        nobody = await asked(tenants, "sandbox.list", {}, **{"as": "uid:34568"})
        assert nobody["error"]["data"]["kind"] == "denied"
        assert "dsecctl principal add NAME --uid 34568" in nobody["error"]["message"]
        assert (await asked(tenants, "session.whoami", {}, **{"as": "nosuch"}))["error"]["data"]["kind"] == "denied"
        denied = await raw(tenants, team.file("admin"), "session.whoami", {}, **{"as": "worker"})
        assert denied["error"]["data"]["kind"] == "denied"
        await boss.remove_principal("worker")


def whoami_of(daemon: Daemon, uid: int) -> tuple[str, str, str]:
    """As the kernel says who connects."""
    daemon.socket.parent.chmod(0o711)
    daemon.socket.chmod(0o666)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        os.seteuid(uid)
        try:
            sock.connect(str(daemon.socket))
        finally:
            os.seteuid(0)
            daemon.socket.chmod(0o600)
        sock.sendall(b'{"jsonrpc":"2.0","id":1,"method":"session.whoami"}\n')
        said = msgspec.json.decode(sock.makefile("rb").readline())["result"]
    return said["principal"], said["project"], said["role"]


async def asked(daemon: Daemon, method: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(daemon.socket))
    writer.write(msgspec.json.encode({"jsonrpc": "2.0", "id": 1, "method": method, "params": params, **more}) + b"\n")
    try:
        reply: dict[str, Any] = msgspec.json.decode(await reader.readline())
        return reply
    finally:
        writer.close()


# -- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mode", "text", "kind", "match"),
    [
        (0o644, "dsec_" + "x" * 43, "denied", "chmod 600"),
        (0o640, "dsec_" + "x" * 43, "denied", "chmod 600"),
        (0o600, "short", "invalid", "holds no token"),
        (0o600, "dsec_" + "x" * 43, "denied", "nobody's"),
        (0o600, "ünglaublich" * 5, "invalid", "holds no token"),
        (None, "", "invalid", "cannot be read"),
    ],
)
def test_token_files(tenants: Daemon, tmp_path: Path, mode: int | None, text: str, kind: str, match: str) -> None:
    path = tmp_path / "token"
    if mode is not None:
        path.write_text(text)
        path.chmod(mode)

    async def open_() -> None:
        async with DSecClient(tenants.url, token_file=str(path)):
            pass

    with pytest.raises(DsecError, match=match) as caught:
        asyncio.run(open_())
    assert caught.value.kind == kind
