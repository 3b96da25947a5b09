"""The bad input of the issue, against the real daemon: one clear error each, nothing lost, nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import leftovers
import pytest
from daemonkit import BASE, Clock, Daemon, asynchronous, container_args, sandbox_of

from dsecd.client import DsecError
from dsecd.wire import files
from dsecd.wire import images as image_wire
from dsecd.wire import sandbox as wire

pytestmark = pytest.mark.containers_only("refused before any backend")

HOST_MEMORY_MB = (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 20
HOST_CPUS = len(os.sched_getaffinity(0))


def ask(daemon: Daemon, method: str, params: Any) -> dict[str, Any]:
    """The error of a call that must fail."""
    reply = daemon.ask(method, params)
    assert "error" in reply, reply
    error: dict[str, Any] = reply["error"]
    assert len(error["message"]) < 600
    assert "\n" not in error["message"]
    return error


# -- limits -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu", 0), ("cpu", -1), ("cpu", HOST_CPUS + 1), ("cpu", 1e300),
        ("memory_mb", 0), ("memory_mb", -1), ("memory_mb", HOST_MEMORY_MB + 1), ("memory_mb", 1 << 62),
        ("memory_mb", 0.5), ("disk_mb", 0), ("disk_mb", -8), ("disk_mb", 1 << 26), ("disk_mb", 1 << 63),
        ("pids", 0), ("pids", -1), ("pids", 1 << 30), ("ttl_idle_s", 0), ("ttl_idle_s", -1), ("ttl_total_s", 1e18),
        ("lease_s", 0), ("name", ""), ("name", "../x"), ("name", "a b"), ("name", "x" * 129), ("hostname", "-x"),
        ("hostname", "x" * 64), ("workdir", ""), ("user", ""), ("image", ""), ("backend", "chroot"),
        ("on_expiry", "explode"), ("labels", {"": "x"}), ("labels", {"a": 1}),
        ("labels", {str(n): "" for n in range(65)}),
        ("toolkits", [BASE] * 33), ("toolkits", "base"), ("network_rules", {"pypi": "yes"}), ("env", {"A=B": ""}),
        ("env", {"": ""}), ("no_such_field", 1),
    ],
)  # fmt: skip
def test_limits_that_cannot_be(daemon: Daemon, field: str, value: Any) -> None:
    """Zero, negative, beyond the host, of the wrong type: `invalid`, the field is named, no sandbox is made."""
    error = ask(daemon, "sandbox.create", {"spec": {"image": BASE, field: value}})
    assert error["data"]["kind"] == "invalid"
    assert field in error["message"] or str(value) in error["message"], error


@pytest.mark.parametrize("field", ["workdir", "user", "env"])
@asynchronous
async def test_nul_and_nonsense_in_spec(daemon: Daemon, backend: str, field: str) -> None:
    """A NUL byte, a relative directory, a user that is not there: `invalid` at the latest when a command starts."""
    bad: dict[str, list[Any]] = {
        "workdir": ["/a\0b", "relative", "/" + "x" * 4090],
        "user": ["nobody-of-that-name", "a\0b", "4294967296", "-1", "0:x:y", "root:nogroupofthatname"],
        "env": [{"A": "a\0b"}],
    }
    for value in bad[field]:
        with pytest.raises(DsecError) as caught:
            async with sandbox_of(daemon, backend, **{"init_user" if field == "user" else field: value}) as sandbox:
                await sandbox.run_shell("true")
        assert caught.value.kind in ("invalid", "not_found"), (value, caught.value)
        assert not caught.value.infra, value


@asynchronous
async def test_network_is_refused_not_forgotten(daemon: Daemon) -> None:
    """A service that the configuration does not have is `invalid`, granted or denied, and no sandbox is made."""
    async with daemon.client() as client:
        with pytest.raises(DsecError, match="pypi") as caught:
            await client.run_container(container_args(network_rules={"pypi": True}, labels={"net": "none"}))
        assert caught.value.kind == "invalid"
        assert not await client.list({"net": "none"})


@asynchronous
async def test_no_room(daemon: Daemon) -> None:
    """More memory than the host promises in all: those that fit are made, the rest say `capacity` and what is short."""
    info = daemon.ask("daemon.info")["result"]
    async with daemon.client() as client:
        big = container_args(memory_limit_mb=info["memory_mb"], disk_limit_mb=16)
        made = await client.run_containers(big, 12)
        good = [one for one in made if not isinstance(one, DsecError)]
        bad = [one for one in made if isinstance(one, DsecError)]
        assert 1 <= len(good) <= 8
        for error in bad:
            assert (error.kind, error.infra, error.retryable) == ("capacity", True, True)
            assert "memory_mb" in error.message
        await client.stop_many(good)
        again = await client.run_container(big)
        await again.stop()


# -- paths ------------------------------------------------------------------------------------------------------------
PATHS: list[str | bytes] = [
    "/../etc/passwd", "/a/../../b", "/a/..", "..", "relative", "", "/nul\0byte", "/" + "x" * 10_240, "/" + "d/" * 5000,
    b"/raw/../x", b"relative\xff", "/a/../a",
]  # fmt: skip


@asynchronous
async def test_paths_that_are_refused(daemon: Daemon, backend: str) -> None:
    """`..`, NUL, relative, empty and 10 KB paths are `invalid` in every call that takes one."""
    async with sandbox_of(daemon, backend) as sandbox:
        with tempfile.TemporaryDirectory() as local:
            for path in PATHS:
                calls = {
                    "read": sandbox.read_file(path), "write": sandbox.write_file(path, b"x"),
                    "big write": sandbox.write_file(path, bytes(2 << 20)), "list": sandbox.list_dir(path),
                    "stat": sandbox.stat(path), "mkdir": sandbox.mkdir(path), "remove": sandbox.remove(path),
                    "rename": sandbox.rename(path, "/x"), "rename to": sandbox.rename("/etc/passwd", path),
                    "upload": sandbox.upload(local, path), "download": sandbox.download(path, f"{local}/d"),
                }  # fmt: skip
                for name, call in calls.items():
                    with pytest.raises(DsecError) as caught:
                        await call
                    assert caught.value.kind == "invalid", (name, path, caught.value)
        assert await sandbox.read_file("/etc/passwd")


@asynchronous
async def test_paths_that_are_not_what_the_call_needs(daemon: Daemon, backend: str, tmp_path: Path) -> None:
    """Missing, wrong type, not empty, too long a name, a loop of links: each its own kind, at once."""
    async with sandbox_of(daemon, backend) as sandbox:
        await sandbox.run_shell(
            "mkdir -p /d/e; echo x > /f; ln -s loop /loop; ln -s /loop2 /loop1; ln -s /loop1 /loop2"
        )
        for call, kind in (
            (sandbox.read_file("/none"), "not_found"), (sandbox.read_file("/d"), "invalid"),
            (sandbox.read_file("/f/x"), "invalid"), (sandbox.read_file("/loop"), "invalid"),
            (sandbox.read_file("/loop1"), "invalid"), (sandbox.list_dir("/f"), "invalid"),
            (sandbox.list_dir("/none"), "not_found"), (sandbox.write_file("/d", b"x"), "invalid"),
            (sandbox.write_file("/f/x", b"x"), "conflict"), (sandbox.write_file("/" + "n" * 256, b"x"), "invalid"),
            (sandbox.mkdir("/f", parents=False), "conflict"), (sandbox.mkdir("/no/no", parents=False), "not_found"),
            (sandbox.remove("/none"), "not_found"), (sandbox.remove("/d"), "conflict"),
            (sandbox.rename("/none", "/x"), "not_found"), (sandbox.rename("/f", "/d"), "invalid"),
            (sandbox.stat("/none"), "not_found"), (sandbox.download("/none", tmp_path / "never"), "not_found"),
        ):  # fmt: skip
            with pytest.raises(DsecError) as caught:
                await call
            assert caught.value.kind == kind, caught.value
            assert not caught.value.infra
        assert not (tmp_path / "never").exists()
        await sandbox.remove("/d", recursive=True)


# -- ids --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ident", ["nothing", "../../etc", "t0-00000000000000000000000000", "x" * 128, "a\0b", "💥"])
@asynchronous
async def test_unknown_ids(daemon: Daemon, ident: str) -> None:
    """An id that is nobody's is `not_found` in every call that takes one."""
    calls: list[tuple[str, dict[str, Any]]] = [
        ("sandbox.get", {}), ("sandbox.stop", {}), ("sandbox.pause", {}), ("sandbox.resume", {}), ("sandbox.stats", {}),
        ("sandbox.extend", {"ttl_total_s": 5}), ("sandbox.wait", {}), ("exec.run", {"shell": "true"}),
        ("exec.start", {"shell": "true"}), ("exec.wait", {"exec_id": "x1"}), ("exec.signal", {"exec_id": "x1"}),
        ("exec.stdin", {"exec_id": "x1"}), ("exec.attach", {"exec_id": "x1"}), ("exec.list", {}), ("session.open", {}),
        ("session.run", {"session_id": "s", "shell": "true"}), ("session.close", {"session_id": "s"}),
        ("file.read", {"path": "/x"}), ("file.write", {"path": "/x"}), ("file.list", {"path": "/"}),
        ("tree.download", {"path": "/"}), ("port.connect", {"port": 1}),
    ]  # fmt: skip
    for method, params in calls:
        error = ask(daemon, method, {"id": ident, **params})
        assert error["data"]["kind"] == "not_found", (method, error)
        assert error["data"]["infra"] is False
    assert daemon.ask("lease.renew", {"ids": [ident]})["result"] == {"gone": [ident]}


@asynchronous
async def test_unknown_commands_and_sessions(daemon: Daemon, backend: str) -> None:
    async with sandbox_of(daemon, backend) as sandbox:
        for exec_id in ("x0", "x999999", "y1", "1", "../x"):
            for method, params in (("exec.wait", {}), ("exec.signal", {}), ("exec.stdin", {"data": "eA=="}),
                                   ("exec.attach", {}), ("exec.resize", {"rows": 1, "cols": 1})):  # fmt: skip
                error = ask(daemon, method, {"id": sandbox.id, "exec_id": exec_id, **params})
                assert error["data"]["kind"] == "not_found"
        error = ask(daemon, "session.run", {"id": sandbox.id, "session_id": "nope", "shell": "true"})
        assert error["data"]["kind"] == "not_found"
        assert "result" in daemon.ask("session.close", {"id": sandbox.id, "session_id": "nope"})
        with pytest.raises(DsecError) as caught:
            await (await sandbox.connect_port(9)).read()
        assert caught.value.kind == "not_found", "nobody listens there"
        with pytest.raises(DsecError, match="screen") as caught:
            await (await sandbox.connect_vnc()).read()
        assert caught.value.kind == "unsupported"
        with pytest.raises(DsecError, match="argv or shell") as caught:
            await sandbox.exec([])
        assert caught.value.kind == "invalid"
        with pytest.raises(DsecError) as caught:
            await sandbox.exec(["/no/such/program"])
        assert (caught.value.kind, caught.value.infra) == ("not_found", False)
        with pytest.raises(DsecError) as caught:
            await sandbox.exec(["/etc/passwd"])
        assert caught.value.kind == "denied"
        with pytest.raises(DsecError) as caught:
            await sandbox.run_shell("true", cwd="/no/such/dir")
        assert caught.value.kind == "not_found"


# -- images -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def store(daemon: Daemon) -> Iterator[list[str]]:
    """Nothing half-made stays in the store, and no image is there that was not before."""
    before = sorted(os.listdir(daemon.state / "images"))
    yield before
    assert sorted(os.listdir(daemon.state / "images")) == before


async def stream_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize(
    ("data", "form"),
    [(b"", "oci"), (b"hello", "tar"), (b"\0" * 100, "tar"), (os.urandom(4096), "tar"),
     (b"\x1f\x8b" + b"x" * 500, "tar"), (b"{}", "docker"), (b"PK\3\4" + b"x" * 500, "oci")],
    ids=["empty", "text", "cut zeros", "random", "not gzip", "json", "zip"],
)  # fmt: skip
@asynchronous
async def test_not_an_image(daemon: Daemon, store: list[str], data: bytes, form: Any) -> None:
    async with daemon.client() as client:
        with pytest.raises(DsecError) as caught:
            await client.import_image(image_wire.Import(name="bad:1", format=form), stream_of(data))
        assert caught.value.kind == "image"
        with pytest.raises(DsecError) as caught:
            await client.run_container(container_args(container_image="bad:1"))
        assert caught.value.kind == "not_found"


@asynchronous
async def test_import_that_breaks_off(daemon: Daemon, store: list[str], base_tar: Path) -> None:
    """A client that leaves in the middle of an import leaves nothing; the daemon serves on."""
    with open(base_tar, "rb") as file:
        head = file.read(8 << 20)
    async with daemon.client() as client:
        pending = await client.begin("image.import", image_wire.Import(name="half:1"))
        assert pending.outflow is not None
        await pending.outflow.write(head)
    async with asyncio.timeout(10):
        while sorted(os.listdir(daemon.state / "images")) != store:
            await asyncio.sleep(0.05)
    async with daemon.client() as client:
        assert "half:1" not in [image.name for image in await client.images()]


@pytest.mark.parametrize("reference", ["docker://127.0.0.1:9/none:latest", "oci:/etc", "dir:/root", "docker://", "-x"])
@asynchronous
async def test_references_that_are_none(daemon: Daemon, store: list[str], reference: str) -> None:
    """A registry that does not answer is `network`; other transports, which would read host files, are `invalid`."""
    async with daemon.client() as client:
        with pytest.raises(DsecError) as caught:
            await client.import_image(image_wire.Import(name="bad:1", format="registry", reference=reference))
        assert caught.value.kind == ("network" if "127.0.0.1" in reference else "invalid"), caught.value


@asynchronous
async def test_images_in_use_and_unknown(daemon: Daemon, backend: str, store: list[str]) -> None:
    async with sandbox_of(daemon, backend):
        assert ask(daemon, "image.remove", {"ref": BASE})["data"]["kind"] == "conflict"
    for ref in ("nothing:1", "sha256:" + "0" * 64, "../../etc/passwd", "0" * 8):
        for method in ("image.get", "image.remove"):
            assert ask(daemon, method, {"ref": ref})["data"]["kind"] == "not_found", (method, ref)
        assert ask(daemon, "sandbox.create", {"spec": {"image": ref}})["data"]["kind"] == "not_found"


# -- the wire, on the real daemon -------------------------------------------------------------------------------------
@asynchronous
async def test_client_that_never_reads_a_file(daemon: Daemon, backend: str) -> None:
    """A 100 MB download nobody reads costs the daemon no memory, and others are served meanwhile."""
    async with sandbox_of(daemon, backend) as sandbox:
        await sandbox.run_shell("head -c 100000000 /dev/zero > /big; head -c 1000 /big > /small")
        before = daemon.ask("daemon.stats")["result"]["rss_bytes"]
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            params = {"id": sandbox.id, "path": "/big", "stream": True, "window": 8 << 20}
            sock.sendall(
                json.dumps({"jsonrpc": "2.0", "id": 1, "method": "file.read", "params": params}).encode() + b"\n"
            )
            sock.sendall(b'{"jsonrpc":"2.0","method":"stream.credit","params":{"sub":1,"limit":1000000000}}\n')
            await asyncio.sleep(1)
            with Clock() as clock:
                assert len(await sandbox.read_file("/small")) == 1000
            assert clock.took < 1
            assert daemon.ask("daemon.stats")["result"]["rss_bytes"] - before < 40 << 20
        async with asyncio.timeout(5):  # once it is gone, what was read for it is dropped
            while daemon.ask("daemon.stats")["result"]["connections"] > 2:
                await asyncio.sleep(0.05)


@asynchronous
async def test_upload_that_lies_about_its_offsets(daemon: Daemon, backend: str) -> None:
    """Stream data out of order fails the call, and no half of the file appears."""
    async with sandbox_of(daemon, backend) as sandbox:
        async with daemon.client() as client:
            pending = await client.begin("file.write", files.Write(id=sandbox.id, path="/f", stream=True))
            assert pending.outflow is not None
            await pending.outflow.write(b"x" * 1000)
            pending.outflow.sent += 5
            await pending.outflow.write(b"y" * 1000)
            pending.end_upload()
            with pytest.raises(DsecError) as caught:
                await pending.finish()
            assert caught.value.kind == "invalid"
        names = [entry.name for entry in await sandbox.list_dir("/")]
        assert not [name for name in names if name.startswith(("f", ".f", ".dsec"))], names


@asynchronous
async def test_garbage_on_many_connections(daemon: Daemon) -> None:
    """200 connections that send rubbish and leave: the daemon has no descriptor or task more than before."""
    before = daemon.ask("daemon.stats")["result"]
    for _ in range(200):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            sock.sendall(os.urandom(500) + b"\n" + b'{"jsonrpc":"2.0","id":1,"method":"sandbox.wait","params":{}}\n{')
    async with asyncio.timeout(5):
        while (after := daemon.ask("daemon.stats")["result"])["connections"] > before["connections"]:
            await asyncio.sleep(0.02)
    assert after["tasks"] <= before["tasks"] + 1
    assert after["open_fds"] <= before["open_fds"] + 1


def test_socket_is_for_its_group_alone(daemon: Daemon) -> None:
    """Nobody else may connect; the state directory shows nothing to others."""
    assert daemon.socket.stat().st_mode & 0o007 == 0
    code = f"import socket; socket.socket(socket.AF_UNIX).connect({str(daemon.socket)!r})"
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run([*nobody, "/usr/bin/python3", "-c", code], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr
    for path in (daemon.state, daemon.state / "images"):
        assert path.stat().st_mode & 0o077 == 0, f"{path} can be read by others"


# -- the daemon's own host --------------------------------------------------------------------------------------------
def refuses_to_start(tmp_path: Path, **config: Any) -> str:
    """Its one line on stderr; exit status 1."""
    daemon = Daemon(tmp_path / "d", **config)
    try:
        process = daemon.spawn()
        assert process.wait(20) == 1, daemon.tail()
        lines = [line for line in daemon.tail().splitlines() if line.startswith("dsecd: ")]
        assert len(lines) == 1, daemon.tail()
        assert "Traceback" not in daemon.tail()
        return lines[0]
    finally:
        daemon.destroy()


def test_start_without_what_it_needs(tmp_path: Path) -> None:
    """No runtime, no agent, a directory that cannot be, a typo: one line and status 1 each."""
    assert "no OCI runtime 'crunch'" in refuses_to_start(tmp_path, runtime="crunch")
    assert "cannot listen on" in refuses_to_start(tmp_path, socket="/nonexistent/dir/sock")
    assert "cannot make" in refuses_to_start(tmp_path, state_dir="/proc/nothing")
    assert "state_dri" in refuses_to_start(tmp_path, state_dri="/x")
    assert "[" not in refuses_to_start(tmp_path, socket="/tmp/" + "x" * 200)


def test_state_of_another_version(tmp_path: Path) -> None:
    """A registry of a later format, or a damaged one, is left as it is and named."""
    for content in ("later", "damaged"):
        daemon = Daemon(tmp_path / content)
        daemon.state.mkdir()
        path = daemon.state / "state.db"
        if content == "later":
            with sqlite3.connect(path) as db:
                db.execute("PRAGMA user_version=99")
            db.close()
        else:
            path.write_bytes(b"this is no database" * 1000)
        before = path.read_bytes()
        try:
            assert daemon.spawn().wait(20) == 1
            assert "state.db" in daemon.tail()
            assert "Traceback" not in daemon.tail()
            assert path.read_bytes() == before
        finally:
            daemon.destroy()


@asynchronous
async def test_full_state_disk(tmp_path: Path, base_tar: Path, watched: list[Path]) -> None:
    """No space under the state directory: it refuses to start in one line, or imports say `disk_full`."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=711", "small", place], check=True)
    daemon = Daemon(place, disk_pool_mb=0, disk_driver="auto")
    daemon.log = tmp_path / "log"
    watched.append(daemon.run_dir)
    leftovers.tolerated.append(daemon.tolerates)
    try:
        try:
            daemon.start()
        except RuntimeError:
            assert "dsecd: " in daemon.tail(), "it may refuse so small a disk, in one line"
            assert "Traceback" not in daemon.tail()
            return
        async with daemon.client() as client:
            with pytest.raises(DsecError) as caught:
                await daemon.import_tar(client, base_tar)
            assert caught.value.kind == "disk_full"
            assert await client.images() == []
    finally:
        daemon.destroy()  # the small disk is unmounted with all that is below
        leftovers.tolerated.remove(daemon.tolerates)


@asynchronous
async def test_wait_for_a_state_that_never_comes(daemon: Daemon, backend: str) -> None:
    """A wait ends with `timeout` at its deadline, and at once for a sandbox that is over."""
    async with daemon.client() as client, sandbox_of(daemon, backend) as sandbox:
        with pytest.raises(DsecError) as caught:
            await client.call("sandbox.wait", wire.Wait(id=sandbox.id, states=["paused"], timeout_s=0.2))
        assert caught.value.kind == "timeout"
        waiting = asyncio.create_task(client.call("sandbox.wait", wire.Wait(id=sandbox.id, states=["paused"])))
        await sandbox.stop()
        assert (await asyncio.wait_for(waiting, 2)).state == "stopped"
