"""Cases 17 to 21, seen from inside a sandbox through the whole daemon: images that lie here, and images that are filled
while they are read. The image level has tests of its own.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from daemonkit import Daemon, asynchronous, launch, run, sandbox_of, started
from erofs_kit import TRICKY, Tar, expected, tar_of_directory

from dsecd.client import DSecClient, DsecError, Sandbox
from dsecd.wire import images as image_wire

pytestmark = pytest.mark.containers_only("about what images become; a guest mounts the same files")

HERE = Path(__file__).parent
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo", stat.S_IFCHR: "char"}


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1 << 18):
        yield data[start : start + (1 << 18)]


async def import_bytes(client: DSecClient, name: str, data: bytes, **params: Any) -> image_wire.Image:
    return await client.import_image(image_wire.Import(name=name, **params), pieces(data))


class Place:
    """A daemon, and where the data of its images is: `local`, or on a store that is read on demand."""

    def __init__(self, daemon: Daemon, store: str, top: Path) -> None:
        self.daemon = daemon
        self.store = store
        self.top = top
        self.lazy = store != "local"

    async def put(self, client: DSecClient, name: str, data: bytes, **params: Any) -> image_wire.Image:
        return await import_bytes(client, name, data, store=self.store, **params)

    def data(self, digest: str) -> Path:
        hexa = digest.removeprefix("sha256:")
        return self.top / (f"{hexa}.data" if self.lazy else f"{hexa}/data")


@pytest.fixture(scope="module", params=["local", "lazy"])
def place(
    request: pytest.FixtureRequest, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, watched: list[Path],
    base_tar: Path,
) -> Iterator[Place]:  # fmt: skip
    if request.param == "local":
        yield Place(daemon, "local", daemon.state / "images")
        return
    directory = tmp_path_factory.mktemp("lazy")
    far = directory / "far"
    far.mkdir()
    with started(
        directory, watched, stores={"far": {"kind": "path", "path": str(far)}}, image_read_timeout_s=2.0
    ) as one:

        async def fill() -> None:
            async with one.client() as client:
                await one.import_tar(client, base_tar, store="far")
                sandbox = await launch(client)  # the page server is there before any test looks around
                (note,) = (one.run_dir / "images").glob("*.json")
                assert json.loads(note.read_bytes())["driver"] == "fanotify"
                await sandbox.stop()

        run(fill())
        yield Place(one, "far", far)


@pytest.fixture(scope="module")
def tricky(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The tricky image, and a toolkit with the program that describes it from inside."""
    program = tmp_path_factory.mktemp("tools") / "tree"
    subprocess.run(["cc", "-static", "-O1", "-o", program, HERE / "inside_tree.c"], check=True)
    tools = Tar().dir("opt").file("opt/tree", program.read_bytes(), mode=0o755)

    async def fill() -> None:
        async with place.daemon.client() as client:
            await place.put(client, "tricky:1", tar_of_directory(TRICKY), format="oci")
            await place.put(client, "tools:1", tools.done(), kind="toolkit")

    run(fill())
    yield "tricky:1"
    for name in ("tricky:1", "tools:1"):
        place.daemon.ask("image.remove", {"ref": name})


async def described(sandbox: Sandbox) -> dict[str, Any]:
    """The tree inside, as the vectors describe one."""
    result = await sandbox.exec(["/opt/tree"])
    assert result.exit_code == 0, result.stderr
    tree: dict[str, Any] = {}
    inodes: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        key, mode, uid, gid, size, major, minor, links, inode, target, *xattrs = line.split(" ")
        path = bytes.fromhex(key)
        kind = KINDS[stat.S_IFMT(int(mode, 8))]
        entry: dict[str, Any] = {
            "path": path.decode("utf-8", "backslashreplace"), "type": kind, "mode": f"{stat.S_IMODE(int(mode, 8)):#o}",
            "uid": int(uid), "gid": int(gid),
        }  # fmt: skip
        if kind == "file":
            data = await sandbox.read_file(b"/" + path)
            assert len(data) == int(size)
            entry |= {"size": int(size), "sha256": sha256(data).hexdigest()}
        if kind == "symlink":
            entry["target"] = os.fsdecode(bytes.fromhex(target))
        if kind == "char":
            entry["rdev"] = [int(major), int(minor)]
        if xattrs:
            entry["xattrs"] = dict(item.split("=", 1) for item in xattrs)
        if kind != "dir" and int(links) > 1:
            inodes.setdefault(inode, []).append(key)
        tree[key] = entry
    return {"tree": tree, "hardlinks": sorted(sorted(group) for group in inodes.values())}


@asynchronous
async def test_cases_17_to_20_tricky_tree_inside(place: Place, backend: str, tricky: str) -> None:
    """Inside a sandbox every entry, hard link, mode, owner, xattr and name of the image is as umoci unpacks it."""
    async with sandbox_of(place.daemon, backend, container_image=tricky, toolkits=["tools:1"]) as sandbox:
        found, want = await described(sandbox), expected()
        assert found["tree"].keys() == want["tree"].keys()
        for key, entry in want["tree"].items():
            assert found["tree"][key] == entry
        assert found["hardlinks"] == want["hardlinks"]


@asynchronous
async def test_case_17_hard_links_stay_links_when_written(place: Place, backend: str) -> None:
    """Links of one layer share their inode; git's own check passes on a repository that came in an image."""
    data = Tar().dir("w").file("w/a", b"one").link("w/b", "w/a").done()
    async with place.daemon.client() as client:
        await place.put(client, "links:1", data, kind="workspace")
        sandbox = await launch(client, backend, workspace="links:1")
        try:
            result = await sandbox.run_shell("stat -c '%i %h' /w/a /w/b")
            first, second = result.stdout.splitlines()
            assert first == second
            assert first.split()[1] == "2"
        finally:
            await sandbox.stop()
        place.daemon.ask("image.remove", {"ref": "links:1"})


@asynchronous
async def test_case_18_setuid_works_for_the_sandboxes_own_users(place: Place, backend: str) -> None:
    """A setuid-root program of the image makes uid 1000 root inside; a file capability is honoured there too."""
    async with sandbox_of(place.daemon, backend) as sandbox:
        made = await sandbox.run_shell("cp /usr/bin/id /usr/bin/suid-id && chmod 4755 /usr/bin/suid-id")
        assert made.exit_code == 0, made.stderr
        assert (await sandbox.exec(["suid-id", "-u"], user="1000")).stdout == "0\n"
        assert (await sandbox.exec(["id", "-u"], user="1000")).stdout == "1000\n"
        passwd = await sandbox.run_shell("stat -c %a /usr/bin/passwd")
        assert passwd.stdout == "4755\n", "the image's own"


@asynchronous
async def test_case_20_image_without_a_shell(place: Place, backend: str, tricky: str) -> None:
    """No /bin/sh, no /tmp, an empty /etc/hosts: it starts, and a shell line says that /bin/sh is missing."""
    async with sandbox_of(place.daemon, backend, container_image=tricky, toolkits=["tools:1"]) as sandbox:
        assert sandbox.info.state == "running"
        with pytest.raises(DsecError, match=r"/bin/sh: cannot execute: No such file") as caught:
            await sandbox.run_shell("true")
        assert (caught.value.kind, caught.value.infra) == ("not_found", False)
        assert (await sandbox.exec(["/opt/tree"])).exit_code == 0
        await sandbox.write_file("/tmp/new", b"made with its parents")
        assert await sandbox.read_file("/tmp/new") == b"made with its parents"
        assert await sandbox.read_file("/etc/hosts") == b""
        assert (await sandbox.stat("/bigid")).uid == 197609


@asynchronous
async def test_case_20_empty_image(place: Place, backend: str) -> None:
    """An image of one empty file: no directory to mount /proc on, and still it starts; files work."""
    async with place.daemon.client() as client:
        await place.put(client, "empty:1", Tar().file("only").done())
        sandbox = await launch(client, backend, container_image="empty:1")
        try:
            assert await sandbox.read_file("/only") == b""
            await sandbox.write_file("/dir/file", b"x")
            with pytest.raises(DsecError) as caught:
                await sandbox.exec(["/nothing"])
            assert caught.value.kind == "not_found"
        finally:
            await sandbox.stop()
        place.daemon.ask("image.remove", {"ref": "empty:1"})


@asynchronous
async def test_case_20_etc_is_links(place: Place, backend: str) -> None:
    """/etc, /proc and /dev of an image that are links or files: started, or refused with a reason."""
    async with place.daemon.client() as client:
        for number, data in enumerate((
            Tar().symlink("etc", "/nowhere").file("x").done(),
            Tar().symlink("proc", "/tmp").dir("tmp").done(),
            Tar().symlink("dev", "../../../../dev").done(),
            Tar().file("dev", b"a file").done(),
            Tar().file("proc", b"a file").done(),
        )):  # fmt: skip
            name = f"odd:{number}"
            await place.put(client, name, data)
            try:
                sandbox = await launch(client, backend, container_image=name)
            except DsecError as error:
                assert len(error.message) > 20, error
            else:
                await sandbox.stop()
            place.daemon.ask("image.remove", {"ref": name})


@pytest.fixture
def unchanged(place: Place) -> Iterator[None]:
    """Nothing half-made may stay in the daemon's image store, nor where the data is."""

    def look() -> set[Path]:
        return {*(place.daemon.state / "images").iterdir(), *place.top.iterdir()}

    before = look()
    yield
    assert look() == before


def altered(layout: Path, how: str) -> None:
    """Damage the largest blob of an OCI layout."""
    blob = max((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    if how == "truncated":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    blob.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "altered"])
@asynchronous
async def test_case_21_bad_layer_at_import(place: Place, unchanged: None, tmp_path: Path, how: str) -> None:
    """A truncated or altered layer is refused at import with `image`; the store is as before."""
    subprocess.run(["cp", "-r", TRICKY, tmp_path / "oci"], check=True)
    altered(tmp_path / "oci", how)
    async with place.daemon.client() as client:
        names = [image.name for image in await client.images()]
        with pytest.raises(DsecError) as caught:
            await place.put(client, "bad:1", tar_of_directory(tmp_path / "oci"), format="oci")
        assert (caught.value.kind, caught.value.infra) == ("image", True)
        with pytest.raises(DsecError) as caught:
            await place.put(client, "bad:2", b"not a tar at all" * 100)
        assert caught.value.kind == "image"
        assert [image.name for image in await client.images()] == names


@pytest.mark.parametrize("how", ["truncated", "missing", "altered"])
@asynchronous
async def test_case_21_bad_data_at_mount(place: Place, backend: str, how: str) -> None:
    """Data that was truncated, removed or altered is refused with `image` when a sandbox asks for it.

    A sandbox on demand starts all the same: it gets EIO where it reads what is not right, and the truth once it is.
    """
    content = os.urandom(3 << 20)
    async with place.daemon.client() as client:
        image = await place.put(client, "hurt:1", Tar().dir("w").file("w/a", content).done(), kind="workspace")
        data = place.data(image.digest)
        good = data.read_bytes()
        try:
            if how == "missing":
                data.unlink()
            elif how == "truncated":
                os.truncate(data, 1 << 20)
            else:
                data.write_bytes(good[: 2 << 20] + bytes([good[2 << 20] ^ 1]) + good[(2 << 20) + 1 :])
            if place.lazy:
                async with sandbox_of(place.daemon, backend, workspace="hurt:1") as sandbox:
                    done = await sandbox.run_shell("cat /w/a >/dev/null")
                    assert done.exit_code == 1 and "Input/output error" in done.stderr
                    assert "image_error" in place.daemon.log_since(place.daemon.seen)
                    data.write_bytes(good)
                    assert await sandbox.read_file("/w/a") == content
            else:
                with pytest.raises(DsecError) as caught:
                    async with sandbox_of(place.daemon, backend, workspace="hurt:1"):
                        pass
                assert (caught.value.kind, caught.value.infra) == ("image", True)
        finally:
            assert "result" in place.daemon.ask("image.remove", {"ref": "hurt:1"})


@asynchronous
async def test_layer_that_is_gone(place: Place, backend: str) -> None:
    """A sandbox of a layer that was removed, or never was, is refused and names it."""
    async with place.daemon.client() as client:
        with pytest.raises(DsecError, match="never:1") as caught:
            await launch(client, backend, toolkits=["never:1"])
        assert caught.value.kind == "not_found"
        await place.put(client, "soon:gone", Tar().file("x").done(), kind="toolkit")
        sandbox = await launch(client, backend, toolkits=["soon:gone"])
        reply = place.daemon.ask("image.remove", {"ref": "soon:gone"})
        assert reply["error"]["data"]["kind"] == "conflict", "it is in use"
        assert (await sandbox.exec(["ls", "/x"])).exit_code == 0
        await sandbox.stop()
        assert "result" in place.daemon.ask("image.remove", {"ref": "soon:gone"})
        with pytest.raises(DsecError, match="soon:gone") as caught:
            await launch(client, backend, toolkits=["soon:gone"])
        assert caught.value.kind == "not_found"
