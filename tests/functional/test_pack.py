"""Environments: a container's files packed, started, stacked, and held against the rules."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemonkit import (
    BASE,
    Daemon,
    asynchronous,
    chunks_of,
    container_args,
    guest_kernels,
    launch,
    sandbox_of,
    started,
)
from packkit import MESS, differences, tree
from test_restart import nothing_but

from dsecd.client import DSecClient, DsecError, DSecSyncClient, Sandbox
from dsecd.client_sync import SyncSandbox
from dsecd.wire import base
from dsecd.wire import images as image_wire

DSECCTL = Path(sys.executable).parent / "dsecctl"


async def forget(client: DSecClient, *names: str) -> None:
    for name in names:
        await client.call("image.remove", image_wire.ByRef(ref=name))


async def refused(box: Sandbox, name: str = "env:refused", **options: object) -> DsecError:
    with pytest.raises(DsecError) as caught:
        await box.pack_diff(name, **options)
    return caught.value


@asynchronous
async def test_the_tree_is_the_sources(daemon: Daemon) -> None:
    """Content, modes, owners, times, xattrs, links, whiteouts, opaque directories: pack, start, the same tree."""
    async with sandbox_of(daemon) as box:
        made = await box.run_shell(MESS)
        assert made.exit_code == 0, made.stderr
        before = await tree(box)
        packed = await box.pack_diff("env:mess")
        assert differences(before, await tree(box)) == [], "packing changes nothing in the sandbox"
        client = box._client
        try:
            image = packed.image
            assert (image.kind, image.name, image.below) == ("environment", "env:mess", box.info.layers)
            assert image.builder is not None and image.builder.uid == os.getuid()
            async with sandbox_of(daemon, container_image="env:mess") as copy:
                assert copy.info.layers == [image.digest, *box.info.layers]
                assert differences(before, await tree(copy)) == []
                assert (
                    await copy.run_shell("/work/setuid && getfattr -d /work/big 2>/dev/null; cat /work/linked")
                ).stdout
        finally:
            await forget(client, "env:mess")


@asynchronous
async def test_nothing_of_overlayfs_is_left(daemon: Daemon, tmp_path: Path) -> None:
    """Of its xattrs the layer has only what makes whiteouts and opaque directories; a tenant's user.overlay.* goes."""
    from dsecd.erofs import read

    async with sandbox_of(daemon) as box:
        await box.run_shell(MESS)
        ask = "import os, sys; [os.setxattr('/work/deep', name, b'y') for name in sys.argv[1:]]"
        await box.exec(["python3", "-c", ask, "user.overlay.opaque", "user.ok"])
        packed = await box.pack_diff("env:x")
        digest = packed.image.digest.removeprefix("sha256:")
        found = read.read((daemon.state / "images" / digest / "meta.erofs").read_bytes())
        names = {(name, value) for node in found.nodes() for name, value in (node.xattrs or {}).items()}
        overlay = {one for one in names if b"overlay" in one[0]}
        assert overlay <= {(b"trusted.overlay.opaque", b"y"), (b"trusted.overlay.origin", b"")}, overlay
        assert (b"user.ok", b"y") in names
        assert max(node.uid for node in found.nodes()) == 197609, "ids are the sandbox's own"
        await forget(box._client, "env:x")


@asynchronous
async def test_stacked_again_and_again(daemon: Daemon) -> None:
    """A pack of a sandbox that was started from an environment: each layer holds its own changes, whiteouts hide lower
    ones; it collapses into one base that looks the same."""
    async with daemon.client() as client:
        names: list[str] = []
        image = BASE
        try:
            for step in range(4):
                box = await launch(client, container_image=image)
                await box.run_shell(
                    f"echo {step} > /step{step}; rm -f /step{step - 2}; mkdir -p /d{step}; rm -rf /d{step - 1}"
                )
                image = f"env:s{step}"
                await box.pack_diff(image)
                names.append(image)
                last = await tree(box)
                await box.stop()
            box = await launch(client, container_image=image)
            assert len(box.info.layers) == 5
            assert (await box.run_shell("ls -d /step* /d[0-9]")).stdout.split() == ["/d3", "/step2", "/step3"]
            assert differences(last, await tree(box)) == []
            await box.stop()
            await client.collapse_images(image_wire.Collapse(name="flat:1", layers=[image]))
            box = await launch(client, container_image="flat:1")
            assert len(box.info.layers) == 1
            assert differences(last, await tree(box)) == []
            await box.stop()
        finally:
            await forget(client, *reversed(names), "flat:1")


@asynchronous
async def test_a_paused_one_and_what_runs_meanwhile(daemon: Daemon) -> None:
    """A paused one stays paused. Of a writer that runs, the pack has one instant: all of a rename, or nothing."""
    async with sandbox_of(daemon) as box:
        writer = "i=0; while :; do i=$((i+1)); echo $i > /a.new; echo $i > /b.new; mv /a.new /a; mv /b.new /b; done"
        await box.start(["sh", "-c", writer])
        await asyncio.sleep(0.3)
        await box.pack_diff("env:live")
        await box.pause()
        await box.pack_diff("env:paused")
        assert (await box.refresh()).state == "paused"
        frozen = None
        for name in ("env:live", "env:paused"):
            async with sandbox_of(daemon, container_image=name) as copy:
                a, b = (int(word) for word in (await copy.run_shell("cat /a /b")).stdout.split())
                assert a - b in (0, 1)
                frozen = a
        assert int(await box.read_file("/a")) >= (frozen or 0)
        await forget(box._client, "env:live", "env:paused")


@asynchronous
async def test_residue_goes_and_answers_are_hidden(daemon: Daemon) -> None:
    """Caches, histories, logs and temporary files are not packed; the caller's answers are hidden in every layer."""
    async with sandbox_of(daemon) as box:
        client = box._client
        await box.run_shell(
            "mkdir -p /root/.cache/pip /task/sub; echo x | tee /root/.cache/pip/x /tmp/x /var/tmp/x /var/log/mine "
            "/root/.bash_history /task/code.py /task/answer.py /task/sub/answer.py /task/hidden /root/kept > /dev/null"
        )
        await box.pack_diff("env:with")
        async with sandbox_of(daemon, container_image="env:with") as inner:
            left = "ls -A /root/.cache /tmp /var/tmp; ls -d /var/log/mine /root/.bash_history"
            assert (await inner.run_shell(left)).stdout.split() == ["/root/.cache:", "/tmp:", "/var/tmp:"]
            assert await inner.read_file("/task/answer.py") == b"x\n"
            await inner.run_shell("echo new > /task/sub/more")
            packed = await inner.pack_diff("env:task", leave_out=["/**/answer.*", "/task/hidden", "/nowhere/at/all"])
            assert packed.left_out == 3
            assert await inner.read_file("/task/answer.py") == b"x\n", "the sandbox keeps them"
        async with sandbox_of(daemon, container_image="env:task") as solver:
            assert (await solver.run_shell("cd /task; find . -type f | sort")).stdout.split() == [
                "./code.py",
                "./sub/more",
            ]
            assert await solver.read_file("/root/kept") == b"x\n"
            assert (await solver.run_shell("ls /var/lib/dpkg/status")).exit_code == 0
        for bad in ("relative", "/", "/a/../b", "/**/**/**/x"):
            assert (await refused(box, leave_out=[bad])).kind == "invalid"
        await forget(client, "env:task", "env:with")


@asynchronous
async def test_rules(daemon: Daemon) -> None:
    """A forbidden path, a secret, too much, too many: `denied` with rule and path, escaped; nothing is kept of it."""
    async with daemon.client() as client:
        before = {one.digest for one in await client.images()}
        box = await launch(client)
        key = "-----BEGIN RSA " + "PRIVATE KEY-----"
        cases = [
            ("mkdir -p /root/.ssh; echo x > /root/.ssh/id_ed25519", "forbidden", "/root/.ssh/id_ed25519"),
            (f"rm -r /root/.ssh; printf '%s' '{key}' > '/we\nird'", "secrets.private-key", r"/we\nird"),
        ]
        for command, rule, path in cases:
            assert (await box.run_shell(command)).exit_code == 0
            error = await refused(box)
            assert (error.kind, error.detail["rule"], error.detail["path"]) == ("denied", rule, path)
            assert "\n" not in error.message and path in error.message
        await box.run_shell("rm /we*; echo fine > /fine")
        assert (await box.pack_diff("env:ok")).image.name == "env:ok"
        await forget(client, "env:ok")
        await box.stop()
        assert {one.digest for one in await client.images()} == before
        rules = {(rule.rule, rule.value) for rule in await client.environment_rules()}
        assert ("forbidden", "/root/.ssh/id_*") in rules and ("max_mb", "8192") in rules


@pytest.fixture
def strict(tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon) -> Iterator[Daemon]:
    """A daemon with small limits and separate accounts."""
    table = {"max_mb": 2, "max_files": 50, "separate_accounts": True, "scrub": []}
    directory = tmp_path_factory.mktemp("strict")
    with started(directory, watched, daemon.state / "images", environments=table) as one:
        yield one


@asynchronous
async def test_limits_and_separate_accounts(strict: Daemon) -> None:
    """Small limits hold, sparse files of terabytes too; whoever packed an environment may not start it, others may."""
    async with strict.client() as client:
        box = await launch(client)
        await box.run_shell("head -c 3000000 /dev/urandom > /big")
        assert (await refused(box)).detail["rule"] == "max_mb"
        await box.run_shell("rm /big; truncate -s 8T /big")
        assert (await refused(box)).detail["rule"] == "max_mb"
        await box.run_shell("rm /big; mkdir /many; cd /many; for i in $(seq 60); do : > $i; done")
        assert (await refused(box)).detail["rule"] == "max_files"
        await box.run_shell("rm -r /many; echo x > /x")
        await box.pack_diff("env:mine", label="builder-7")
        with pytest.raises(DsecError, match="another account") as caught:
            await launch(client, container_image="env:mine")
        assert caught.value.kind == "denied"
        image = await client.call("image.get", image_wire.ByRef(ref="env:mine"))
        assert image.builder.label == "builder-7"
        await box.stop()
    # Another account: the socket is root's alone here, so it is opened before the change.
    os.chmod(strict.socket, 0o666)
    script = (
        "import os, sys; os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "from dsecd.client import DSecSyncClient, DSecContainerRunArgs as A\n"
        "args = A(container_image='env:mine', memory_limit_mb=64)\n"
        "with DSecSyncClient(sys.argv[1]) as client, client.run_container(args) as box:\n"
        "    print(box.run_shell('cat /x').stdout)\n"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", script, strict.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "x\n\n", done.stderr


@asynchronous
async def test_images_that_environments_need_stay(fresh_daemon: Daemon) -> None:
    """`remove` of a layer below says which environment needs it; `gc` keeps it without a name, and takes it with the
    last environment."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        box = await launch(client)
        await box.write_file("/one", "1")
        first = (await box.pack_diff("env:one")).image
        await box.stop()
        box = await launch(client, container_image="env:one")
        await box.write_file("/two", "2")
        second = (await box.pack_diff("env:two")).image
        await box.stop()
        assert second.below == [first.digest, *first.below]
        for ref in (BASE, "env:one"):
            with pytest.raises(DsecError, match=r"env:two|env:one") as caught:
                await client.call("image.remove", image_wire.ByRef(ref=ref))
            assert caught.value.kind == "conflict"
        # A name that moves away leaves the first without one; it stays for the second's sake.
        box = await launch(client)
        await box.write_file("/other", "x")
        await box.pack_diff("env:one")
        await box.stop()
        await client.call("image.gc", image_wire.Gc())
        assert first.digest in {one.digest for one in await client.images()}
        box = await launch(client, container_image="env:two")
        assert await box.read_file("/one") == b"1"
        await box.stop()
        await forget(client, "env:two")
        await asyncio.sleep(0)
        daemon.restart()  # images linger mounted
    async with daemon.client() as client:
        await client.call("image.gc", image_wire.Gc())
        left = {one.digest for one in await client.images()}
        assert first.digest not in left and second.digest not in left


@asynchronous
async def test_progress_replay_and_bad_input(daemon: Daemon) -> None:
    """Progress says what goes on; the same request_id packs once; what cannot be packed says why."""
    async with sandbox_of(daemon) as box:
        client = box._client
        await box.run_shell("head -c 20000000 /dev/urandom > /big")
        seen: list[base.Progress] = []
        one = await box.pack_diff("env:p", request_id="pack-1", progress=seen.append)
        assert {at.phase for at in seen} >= {"snapshot", "scan", "pack", "commit"}
        await box.write_file("/later", "x")
        assert (await box.pack_diff("env:p", request_id="pack-1")).image.digest == one.image.digest
        assert (await refused(box, "Not A Name")).kind == "invalid"
        with pytest.raises(DsecError) as caught:
            await client.pack_diff("t0-nobody", "env:q")
        assert caught.value.kind == "not_found"
        await forget(client, "env:p")


@asynchronous
async def test_killed_in_the_middle_of_a_pack(fresh_daemon: Daemon) -> None:
    """SIGKILL while it packs: the source runs on, no snapshot, no half-made image, no worker is left."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        box = await launch(client, memory_limit_mb=1024, disk_limit_mb=2048)
        await box.run_shell("head -c 300000000 /dev/urandom > /big")
        work = asyncio.create_task(box.pack_diff("env:killed"))
        await asyncio.sleep(0.4)
        daemon.kill()
        with pytest.raises(DsecError):
            await work
    daemon.start()
    async with daemon.client() as client:
        again = await client.get(box.id)
        assert (await again.run_shell("stat -c %s /big")).stdout == "300000000\n"
        await nothing_but(daemon, {box.id})
        await client.call("image.gc", image_wire.Gc())
        assert "env:killed" not in {one.name for one in await client.images()}
        assert not [
            path.name for path in (daemon.state / "images").iterdir() if path.name.startswith(("tmp-", "trash-"))
        ]
        await again.stop()


@asynchronous
async def test_hostile_files(daemon: Daemon) -> None:
    """Symlinks to host paths are packed as symlinks; sockets are left out; names of any bytes and deep trees hold."""
    async with sandbox_of(daemon) as box:
        await box.exec(["python3", "-c", """
import os, socket
os.mkdir("/h"); os.chdir("/h")
for target in ("/etc/shadow", "../../../../etc/shadow", "/proc/1/root", "/var/lib/dsecd"):
    os.symlink(target, "l" + str(len(os.listdir("."))))
os.symlink("/etc", "dir"); socket.socket(socket.AF_UNIX).bind("sock")
os.mkdir(b"\\xff" * 255); open("-rf", "w").close()
os.makedirs("/h/" + "/".join(["d" * 100] * 35))
for i in range(3000): open("/h/n%d" % i, "w").write(str(i))
"""])  # fmt: skip
        before = await tree(box)
        await box.pack_diff("env:hostile")
        async with sandbox_of(daemon, container_image="env:hostile") as copy:
            assert differences(before, await tree(copy)) == []
            assert (await copy.run_shell("test -e /h/sock")).exit_code == 1
        deep = "import os\nfor i in range(60): os.mkdir('e'*100); os.chdir('e'*100)"
        await box.exec(["python3", "-c", deep], cwd="/h")
        error = await refused(box)
        assert error.kind == "image" and "longer than 4095" in error.message
        await forget(box._client, "env:hostile")


@asynchronous
async def test_cancelled_in_the_middle(daemon: Daemon) -> None:
    """A caller who gives up ends the worker; the container runs on, and no image and no snapshot is left."""
    async with sandbox_of(daemon, disk_limit_mb=2048) as box:
        await box.run_shell("head -c 200000000 /dev/urandom > /big")
        phases: list[str] = []
        work = asyncio.create_task(box.pack_diff("env:c", progress=lambda at: phases.append(at.phase)))
        while "pack" not in phases:
            await asyncio.sleep(0.005)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert (await box.run_shell("echo on")).stdout == "on\n"
        async with asyncio.timeout(10):
            while [name for name in os.listdir(daemon.state / "pool") if name.startswith(f"{box.id}.")]:
                await asyncio.sleep(0.05)
        assert "env:c" not in {one.name for one in await box._client.images()}


def test_the_blocking_sdk(daemon: Daemon) -> None:
    with DSecSyncClient(daemon.url) as client, client.run_container(container_args()) as box:
        box.write_file("/x", "1")
        packed = box.pack_diff("env:sync")
        (copy,) = box.fork()
        assert isinstance(copy, SyncSandbox) and copy.read_file("/x") == b"1"
        copy.stop()
        client.run(client.aio.call("image.remove", image_wire.ByRef(ref=packed.image.digest)))


@asynchronous
async def test_a_microvm_from_it(daemon: Daemon) -> None:
    """What a container wrote is what a microVM starts with."""
    guest_kernels()
    daemon.link_kernels()
    async with sandbox_of(daemon) as box:
        assert (await box.run_shell(MESS)).exit_code == 0
        before = await tree(box)
        await box.pack_diff("env:vm")
    async with sandbox_of(daemon, "microvm", container_image="env:vm") as guest:
        assert differences(before, await tree(guest)) == []
    async with daemon.client() as client:
        await forget(client, "env:vm")


# -- one file ----------------------------------------------------------------------------------------------------------
async def exported(client: DSecClient, ref: str, path: Path) -> None:
    with open(path, "wb") as file:

        async def write(data: bytes) -> None:
            file.write(data)

        done = await client.export_environment(ref, write)
    assert done.size == path.stat().st_size


@pytest.fixture
def empty_daemon(tmp_path_factory: pytest.TempPathFactory, watched: list[Path]) -> Iterator[Daemon]:
    """Another host: it has no image."""
    with started(tmp_path_factory.mktemp("far"), watched) as one:
        yield one


@asynchronous
async def test_exported_and_imported(daemon: Daemon, empty_daemon: Daemon, tmp_path: Path) -> None:
    """One file with all layers: on a host that has none of them it starts with the same tree, and digests are the same.
    A second import makes nothing anew; skopeo reads the file as the OCI layout that it is."""
    path = tmp_path / "env.tar"
    async with sandbox_of(daemon) as box:
        assert (await box.run_shell(MESS)).exit_code == 0
        before = await tree(box)
        first = (await box.pack_diff("env:first")).image
        async with sandbox_of(daemon, container_image="env:first") as inner:
            await inner.write_file("/top", "x" * 3_000_000)
            second = (await inner.pack_diff("env:second", label="me")).image
        await exported(box._client, "env:second", path)
        await forget(box._client, "env:second", "env:first")
    async with empty_daemon.client() as client:
        made = await client.import_environment(chunks_of(path))
        assert (made.digest, made.name, made.below) == (second.digest, "env:second", [first.digest, *first.below])
        assert made.builder == second.builder and made.builder is not None and made.builder.label == "me"
        assert {one.name for one in await client.images()} == {"env:second", ""}
        again = await client.import_environment(chunks_of(path), name="env:copy")
        assert again.digest == second.digest and set(again.names) == {"env:second", "env:copy"}
        for one in await client.images():
            await client.call("image.verify", image_wire.ByRef(ref=one.digest))
    async with sandbox_of(empty_daemon, container_image="env:copy") as box:
        assert await box.read_file("/top") == b"x" * 3_000_000
        await box.run_shell("rm /top")
        assert differences(before, await tree(box)) == []
    tags = subprocess.run(["tar", "-tf", path], capture_output=True, text=True, check=True).stdout.split()
    assert tags[0] == "oci-layout" and tags[-1] == "index.json"


@pytest.mark.slow
@asynchronous
async def test_what_is_no_exported_environment(daemon: Daemon, tmp_path: Path) -> None:
    """Cut, altered in any part, or something else: `image`, and nothing of it is kept."""
    path = tmp_path / "env.tar"
    async with sandbox_of(daemon) as box:
        await box.run_shell("head -c 600000 /dev/urandom > /data")
        await box.pack_diff("env:e")
        await exported(box._client, "env:e", path)
        client = box._client
        await forget(client, "env:e")
        before = {one.digest for one in await client.images()}
        whole = path.read_bytes()
        index = whole.rindex(b'"manifests"')
        own = whole.index(b"oci-layout") + 2048  # the first blob: the environment's own data
        bad = {
            "cut": whole[: len(whole) // 2],
            "empty": b"",
            "noise": os.urandom(4096),
            "a plain tar": b"\0" * 10240,
            "data altered": whole[: own + 5000] + b"\x5a" + whole[own + 5001 :],
            "index altered": whole[:index] + b'"manifest_"' + whole[index + 11 :],
        }
        for what, content in bad.items():
            altered = tmp_path / "bad.tar"
            altered.write_bytes(content)
            with pytest.raises(DsecError) as caught:
                await client.import_environment(chunks_of(altered))
            assert caught.value.kind == "image", (what, caught.value)
            assert {one.digest for one in await client.images()} == before, what
        with pytest.raises(DsecError) as caught:
            await exported(client, "env:nothing", path)
        assert caught.value.kind == "not_found"


@pytest.mark.slow
@asynchronous
async def test_the_command_line(daemon: Daemon, tmp_path: Path) -> None:
    """pack, env list, show, export, import, rules, rm; a failure leaves no half-written file."""

    def ctl(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [DSECCTL, "-H", daemon.url, *words],
            capture_output=True,
            text=True,
            check=False,
        )

    async with sandbox_of(daemon, name="packbox") as box:
        await box.run_shell("echo 1 > /one; echo 2 > /tmp/two")
        made = await asyncio.to_thread(ctl, "pack", "--label", "me", "packbox", "env:cli")
        assert made.returncode == 0 and made.stdout.startswith("sha256:"), made.stderr
        assert "1 entries were left out" in made.stderr
        table = ctl("env", "list").stdout
        assert "env:cli" in table and max(map(len, table.splitlines())) <= 80
        assert "layer 1" in ctl("env", "show", "env:cli").stdout
        target = tmp_path / "out.tar"
        assert ctl("env", "export", "env:cli", "-o", str(target)).returncode == 0
        assert ctl("env", "rm", "env:cli").returncode == 0
        back = ctl("env", "import", str(target))
        assert back.stdout == made.stdout, back.stderr
        assert ctl("env", "export", "env:no", "-o", str(tmp_path / "no.tar")).returncode == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.tar"]
        rules = ctl("env", "rules").stdout
        assert "/root/.ssh/id_*" in rules and max(map(len, rules.splitlines())) <= 80
        assert ctl("exec", "--fresh", "packbox", "cat", "/one").stdout == "1\n"
        assert ctl("env", "rm", "env:cli").returncode == 0
