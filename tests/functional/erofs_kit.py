"""What the image tests share: tars made in memory, trees read back as the vectors describe them, imports, leftovers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import os
import socket
import stat
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from leftovers import command_lines

from dsecd.erofs import importer
from dsecd.erofs.jobs import run_import
from dsecd.erofs.model import ImportJob, Limits, Manifest, Progress
from dsecd.erofs.mount import MountTable
from dsecd.erofs.store import ImageStore
from dsecd.erofs.sys import mounts_below, umount

DATA = Path(__file__).parent.parent / "data"
TRICKY = DATA / "oci-tricky" / "oci"
EXPECTED = DATA / "oci-tricky" / "expected.json"

TYPES = {"dir": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE, "link": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE,
         "char": tarfile.CHRTYPE, "file": tarfile.REGTYPE}  # fmt: skip


class Tar:
    """`Tar().dir("etc").file("etc/x", b"...").done()` is the bytes of an archive."""

    def __init__(self, **kwargs: Any) -> None:
        self._out = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._out, mode="w", format=tarfile.PAX_FORMAT, **kwargs)  # noqa: SIM115

    def add(
        self, kind: str, name: str, data: bytes = b"", *, xattrs: dict[str, str] | None = None, **fields: Any
    ) -> Tar:
        info = tarfile.TarInfo(name)
        info.type = TYPES[kind]
        info.mode = 0o755 if kind == "dir" else 0o644
        info.size = len(data)
        info.mtime = 1_700_000_000
        info.pax_headers = {f"SCHILY.xattr.{key}": value for key, value in (xattrs or {}).items()}
        for key, value in fields.items():
            setattr(info, key, value)
        self._tar.addfile(info, io.BytesIO(data))
        return self

    def dir(self, name: str, **fields: Any) -> Tar:
        return self.add("dir", name, **fields)

    def file(self, name: str, data: bytes = b"", **fields: Any) -> Tar:
        return self.add("file", name, data, **fields)

    def symlink(self, name: str, target: str) -> Tar:
        return self.add("symlink", name, linkname=target)

    def link(self, name: str, target: str) -> Tar:
        return self.add("link", name, linkname=target)

    def done(self) -> bytes:
        self._tar.close()
        return self._out.getvalue()


def tar_of_directory(directory: Path) -> bytes:
    return subprocess.run(["tar", "-C", directory, "-cf", "-", "."], check=True, capture_output=True).stdout


def sparse_tar(work: Path) -> tuple[int, dict[int, bytes], bytes]:
    """A file `big` of more than 6 GiB, nearly all of it holes: its size, what is where, and GNU tar's archive of it."""
    source = work / "source"
    source.mkdir()
    size, marks = (6 << 30) + 1, {0: b"start", (4 << 30) - 3: b"across four gibibytes", (5 << 30) + 12345: b"end"}
    with (source / "big").open("wb") as f:
        for at, mark in marks.items():
            f.seek(at)
            f.write(mark)
        f.truncate(size)
    tar = ["tar", "-C", source, "--sparse", "-cf", "-", "."]
    return size, marks, subprocess.run(tar, check=True, capture_output=True).stdout


@contextlib.contextmanager
def input_of(data: bytes) -> Iterator[int]:
    with tempfile.TemporaryFile() as f:
        f.write(data)
        f.seek(0)
        yield f.fileno()


async def imported(
    store: ImageStore,
    data: bytes,
    *,
    name: str = "x",
    kind: str = "base",
    progress: Callable[[Progress], None] = lambda _: None,
    limits: Limits | None = None,
    **fields: Any,
) -> Manifest:
    with input_of(data) as fd:
        job = msgspec.convert({"kind": kind, "name": name} | fields, ImportJob)
        return await run_import(store, job, input_fd=fd, progress=progress, limits=limits)


def import_now(store: ImageStore, data: bytes, **fields: Any) -> Manifest:
    return asyncio.run(imported(store, data, **fields))


def quick(store: ImageStore, data: bytes, name: str, kind: str = "base", *, store_name: str = "") -> Manifest:
    """An import in this process, which keeps its rights: for tests that need many and are not about importing."""
    job = msgspec.convert({"kind": kind, "name": name, "store": store_name}, ImportJob)
    kept = mock.patch.object(importer, "drop_privileges", lambda: None)
    with kept, input_of(data) as fd, store.workspace() as work, open(os.devnull, "wb") as null:
        built = importer.run(work.path, fd, job, Limits(), importer.Reporter(null.fileno()))
        return store.commit(work, built, job)


def tree_of(top: Path) -> dict[str, Any]:
    """A mounted tree in the form of the vectors' expected.json."""
    tree: dict[str, Any] = {}
    inodes: dict[int, list[str]] = {}
    for where, dirs, files in os.walk(os.fsencode(top)):
        for name in dirs + files:
            path = os.path.join(where, name)
            key = os.path.relpath(path, os.fsencode(top))
            tree[key.hex()] = _described(path, key)
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) and found.st_nlink > 1:
                inodes.setdefault(found.st_ino, []).append(key.hex())
    return {"tree": tree, "hardlinks": sorted(sorted(group) for group in inodes.values())}


def _described(path: bytes, key: bytes) -> dict[str, Any]:
    found = os.lstat(path)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo",
             stat.S_IFCHR: "char", stat.S_IFBLK: "block"}  # fmt: skip
    kind = kinds[stat.S_IFMT(found.st_mode)]
    entry: dict[str, Any] = {
        "path": key.decode("utf-8", "backslashreplace"), "type": kind, "mode": f"{stat.S_IMODE(found.st_mode):#o}",
        "uid": found.st_uid, "gid": found.st_gid,
    }  # fmt: skip
    if kind == "file":
        with open(path, "rb") as f:
            entry |= {"size": found.st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}
    if kind == "symlink":
        entry["target"] = os.fsdecode(os.readlink(path))
    if kind in ("char", "block"):
        entry["rdev"] = [os.major(found.st_rdev), os.minor(found.st_rdev)]
    xattrs = {n: os.getxattr(path, n, follow_symlinks=False).hex() for n in os.listxattr(path, follow_symlinks=False)}
    if xattrs:
        entry["xattrs"] = xattrs
    return entry


def expected() -> dict[str, Any]:
    document = json.loads(EXPECTED.read_text())
    return {"tree": document["tree"], "hardlinks": sorted(sorted(group) for group in document["hardlinks"])}


async def mounted_tree(store: ImageStore, run_dir: Path, manifest: Manifest, **table_fields: Any) -> dict[str, Any]:
    table = MountTable(run_dir, store, linger_s=0, **table_fields)
    try:
        async with table.hold(manifest.digest) as path:
            return await asyncio.to_thread(tree_of, path)
    finally:
        await table.close()


LOGIN = "imager:sesame"


def authfile(path: Path, address: str, login: str = LOGIN) -> Path:
    """As containers-auth.json(5) says."""
    path.write_text(json.dumps({"auths": {address: {"auth": base64.b64encode(login.encode()).decode()}}}))
    return path


@contextlib.contextmanager
def registry(tmp_path: Path, *, closed: bool = False) -> Iterator[str]:
    """docker-registry on a loopback port of its own. closed: to all but LOGIN."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    config = tmp_path / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/registry}}}}\nhttp: {{addr: '{address}'}}\n"
    )
    if closed:
        name, _, password = LOGIN.partition(":")
        bcrypt = ["perl", "-e", "print crypt($ARGV[0], '$2y$05$' . 'abcdefghijklmnopqrstuu')", password]
        hashed = subprocess.run(bcrypt, check=True, capture_output=True, text=True).stdout
        (tmp_path / "htpasswd").write_text(f"{name}:{hashed}\n")
        with config.open("a") as f:
            f.write(f"auth: {{htpasswd: {{realm: tests, path: {tmp_path}/htpasswd}}}}\n")
    process = subprocess.Popen(
        ["docker-registry", "serve", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        host, port = address.split(":")
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                break
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait()


def leftovers(store: Path, run_dir: Path) -> list[str]:
    """Mounts, loop devices, directories and processes that a test of ours left."""
    left = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(run_dir) in line]
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if (name := backing.read_text().strip()).startswith(str(store)):
                left.append(f"{backing}: {name}")
    left += [str(p) for p in store.glob("tmp-*")] + [str(p) for p in store.glob("trash-*")]
    left += [str(p) for p in run_dir.iterdir()] if run_dir.exists() else []
    return left + [f"process {pid}: {command[:200]!r}" for pid, command in processes(store)]


def assert_clean(store: Path, run_dir: Path) -> None:
    """Nothing is left; and if something is, only this test hears of it."""
    left = leftovers(store, run_dir)
    for mounted in reversed(mounts_below(run_dir)):
        umount(mounted.target)
    assert left == []


def importers(store: Path) -> list[int]:
    """Process ids of importers that work in this store."""
    return [pid for pid, command in processes(store) if b"dsecd.erofs.importer" in command]


def processes(store: Path) -> list[tuple[int, bytes]]:
    """(pid, command line) of whatever has the store's path in its arguments."""
    return [(pid, command) for pid, command in command_lines().items() if os.fsencode(store) in command]
