"""Images to a registry and back: Debian's docker-registry, and one of our own that lies."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.server
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemonkit import Daemon, container_args, run, started
from dsecctl import table
from erofs_kit import LOGIN, TRICKY, Tar, assert_clean, authfile, import_now, registry
from pages_kit import until

from dsecd.config import StoreConfig
from dsecd.envconfig import EnvConfig
from dsecd.erofs import artifact, jobs, meta
from dsecd.erofs.artifact import ARTIFACT, CONFIG, MEDIA, OCI_MANIFEST, TITLE
from dsecd.erofs.envjobs import Upper, run_pack
from dsecd.erofs.model import CHUNK, SUM, Builder, ImageConfig, Limits, Manifest, Progress, identity
from dsecd.erofs.store import ImageStore
from dsecd.erofs.stores import open_store
from dsecd.errors import DsecError

Json = dict[str, Any]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the one image of most tests, made once."""
    made = ImageStore(tmp_path_factory.mktemp("template") / "images")
    tar = Tar().dir("d").file("d/a", os.urandom(3 * CHUNK + 77), xattrs={"user.x": "y"}).link("b", "d/a")
    tar.file("c", b"c").symlink("e", "/d/a")
    import_now(made, tar.done(), name="base:1", config=ImageConfig(env={"A": "1"}))
    return made.root


@pytest.fixture
def store(tmp_path: Path, template: Path) -> Iterator[ImageStore]:
    shutil.copytree(template, tmp_path / "images")
    yield ImageStore(tmp_path / "images")
    assert_clean(tmp_path / "images", tmp_path / "run")


@pytest.fixture
def image(store: ImageStore) -> Manifest:
    return store.resolve("base:1")


def push(store: ImageStore, ref: str, reference: str, **fields: Any) -> Any:
    return asyncio.run(jobs.run_push(store, ref, reference, **fields))


def pull(store: ImageStore, reference: str, **fields: Any) -> Manifest:
    return asyncio.run(jobs.run_pull(store, reference, **fields))


def same(one: Manifest, other: Manifest) -> bool:
    return (one.digest, one.config, one.kind, one.files) == (other.digest, other.config, other.kind, other.files)


# -- docker-registry ---------------------------------------------------------------------------------------------------
def test_there_and_back(store: ImageStore, image: Manifest, tmp_path: Path) -> None:
    with registry(tmp_path) as address:
        to = f"docker://{address}/team/base:1"
        seen: list[Progress] = []
        first = push(store, "base:1", to, progress=seen.append)
        assert first.sent_bytes > image.data_size + image.meta_size
        assert {p.phase for p in seen} == {"read", "push"} and seen[-1].done == seen[-1].total == image.data_size
        again = push(store, image.digest, to)
        assert again.digest == first.digest and again.sent_bytes < 2000  # only the manifest

        other = ImageStore(tmp_path / "other")
        seen.clear()
        back = pull(other, to, progress=seen.append)
        assert same(back, image) and back.names == ("base:1",) and back.store == "local" and back.source == to
        assert [p.phase for p in seen][-2:] == ["pull", "commit"]
        other.verify(back)
        for path in (store.meta_path, store.sums_path, store.data_path):
            theirs = {store.meta_path: other.meta_path, store.sums_path: other.sums_path}.get(path, other.data_path)
            assert path(image).read_bytes() == theirs(back).read_bytes()
        assert pull(other, f"docker://{address}/team/base@{first.digest}", name="as:2").names == ("as:2", "base:1")
        with pytest.raises(DsecError) as caught:
            pull(other, f"docker://{address}/team/base:none")
        assert caught.value.kind == "not_found"
        with pytest.raises(DsecError, match="to a tag"):
            push(store, "base:1", f"docker://{address}/team/base@{first.digest}")
    assert_clean(other.root, tmp_path / "run")


def test_lazily(store: ImageStore, image: Manifest, tmp_path: Path) -> None:
    with registry(tmp_path) as address:
        to = f"docker://{address}/team/base:1"
        push(store, "base:1", to)
        config = StoreConfig(kind="registry", url=f"{address}/team/base")
        other = ImageStore(tmp_path / "other", stores={"reg": config})
        back = pull(other, to, name="lazy:1", lazy=True)
        assert same(back, image) and back.store == "reg" and back.names == ("lazy:1",)
        assert sorted(os.listdir(other.root / back.hex)) == ["data.sums", "manifest.json", "meta.erofs", "seal"]
        other.check(back)
        other.verify(back)
        with contextlib.closing(open_store("reg", config)) as there:
            data = store.data_path(image).read_bytes()
            assert there.read(back.blob_name, 4096, 10_000, 5) == data[4096:14_096]
        # What is not here can be collapsed and pushed all the same: it is read, and checked, from there.
        top = import_now(other, Tar().file("top", b"t" * 9000).done(), name="top", kind="toolkit")
        flat = asyncio.run(jobs.run_collapse(other, "flat", [top.digest, back.digest]))
        assert flat.store == "local"
        other.verify(flat)
        assert push(other, "lazy:1", f"docker://{address}/team/base:2").sent_bytes < 2000
        assert push(other, "lazy:1", f"docker://{address}/else/where:1").sent_bytes > image.data_size
        # Whole, over the lazy one: it comes here.
        whole = pull(other, to, name="lazy:2")
        assert whole.store == "local" and whole.names == ("lazy:1", "lazy:2")
        other.verify(whole)
        with pytest.raises(DsecError, match=r"no \[stores.NAME\] of kind registry") as caught:
            pull(other, f"docker://{address}/else/where:1", lazy=True)
        assert caught.value.kind == "invalid"
        other.remove(back.digest)
    assert_clean(other.root, tmp_path / "run")


def test_an_image_without_data(tmp_path: Path, store: ImageStore) -> None:
    empty = import_now(store, Tar().dir("d").file("f").done(), name="empty")
    with registry(tmp_path) as address:
        push(store, "empty", f"docker://{address}/e:1")
        config = StoreConfig(kind="registry", url=f"{address}/e")
        other = ImageStore(tmp_path / "other", stores={"reg": config})
        for lazy in (False, True):
            back = pull(other, f"docker://{address}/e:1", lazy=lazy)
            assert back.digest == empty.digest and back.store == "local"
            other.verify(back)


def test_an_environment(store: ImageStore, image: Manifest, tmp_path: Path) -> None:
    """Its own layer is the artifact: whoever pulls it must have what is below it, and is told so."""
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "new").write_text("x" * 9000)
    told = Upper(path=upper, id_base=0, below=(image.digest,), source="test")
    made, left_out = asyncio.run(run_pack(store, "env:1", told, Builder(7, "me"), EnvConfig()))
    assert (made.kind, made.below, made.builder, left_out) == ("environment", (image.digest,), Builder(7, "me"), 0)
    with registry(tmp_path) as address:
        push(store, "base:1", f"docker://{address}/base:1")
        push(store, "env:1", f"docker://{address}/env:1")
        other = ImageStore(tmp_path / "other")
        with pytest.raises(DsecError, match=f"needs {image.digest[:19]}") as caught:
            pull(other, f"docker://{address}/env:1")
        assert caught.value.kind == "image"
        pull(other, f"docker://{address}/base:1")
        back = pull(other, f"docker://{address}/env:1")
        assert same(back, made) and (back.below, back.builder) == (made.below, made.builder)
        other.verify(back)
        with pytest.raises(DsecError, match="environment env:1"):
            other.remove("base:1")
    assert_clean(other.root, tmp_path / "run")


def test_onto_a_path_store(store: ImageStore, image: Manifest, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    other = ImageStore(tmp_path / "other", stores={"nfs": tmp_path / "shared"}, owner="me")
    with registry(tmp_path) as address:
        push(store, "base:1", f"docker://{address}/e:1")
        back = pull(other, f"docker://{address}/e:1", put_on="nfs")
        assert back.store == "nfs"
        assert sorted(os.listdir(tmp_path / "shared")) == [f"{back.hex}.by-me", f"{back.hex}.data"]
        other.verify(back)
        push(other, back.digest, f"docker://{address}/f:1")


@pytest.mark.parametrize("bad", ["docker://host", "host/x:1", "docker://127.0.0.1:5000/UP:1", "docker://h:1/a:b c",
                                 "docker://h:1/../a:1", "docker://h:1/a@sha256:12"])  # fmt: skip
def test_references(store: ImageStore, image: Manifest, bad: str) -> None:
    for do in (lambda: pull(store, bad), lambda: push(store, "base:1", bad)):
        with pytest.raises(DsecError) as caught:
            do()
        assert caught.value.kind == "invalid"


def test_nobody_there(store: ImageStore, image: Manifest) -> None:
    for do in (
        lambda: pull(store, "docker://127.0.0.1:1/x:1"),
        lambda: push(store, "base:1", "docker://127.0.0.1:1/x:1"),
    ):
        with pytest.raises(DsecError) as caught:
            do()
        assert caught.value.kind == "network" and caught.value.retryable


def test_damage_is_not_pushed(store: ImageStore, image: Manifest, tmp_path: Path) -> None:
    path = store.data_path(image)
    path.chmod(0o644)
    with path.open("r+b") as f:
        f.seek(CHUNK + 5)
        f.write(b"\0\1\2\3")
    with registry(tmp_path) as address, pytest.raises(DsecError, match="its data is altered") as caught:
        push(store, "base:1", f"docker://{address}/x:1")
    assert caught.value.kind == "image"


# -- a registry of our own ---------------------------------------------------------------------------------------------
class Fake(http.server.ThreadingHTTPServer):
    """Blobs and manifests by path, and what it does wrong."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.things: dict[str, bytes] = {}
        self.secret = ""
        self.short = 0
        self.redirect = ""
        self.leaked = False
        self.hang = threading.Event()
        self.block = ""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are the point."""

    def put(self, data: bytes) -> Json:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.things[f"/v2/x/blobs/{digest}"] = data
        return {"digest": digest, "size": len(data)}

    def offer(self, store: ImageStore, image: Manifest, change: Callable[[Json, Json], None] | None = None) -> None:
        """The image as a push would leave it, after `change(manifest, config)`."""
        config = json.loads(artifact_config(image))
        layers = [self.put(path(image).read_bytes()) | {"mediaType": MEDIA[name], "annotations": {TITLE: name}}
                  for name, path in (("meta.erofs", store.meta_path), ("data.sums", store.sums_path),
                                     ("data", store.data_path))]  # fmt: skip
        manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": ARTIFACT, "layers": layers,
                    "config": {"mediaType": CONFIG}}  # fmt: skip
        if change is not None:
            change(manifest, config)
        if "digest" not in manifest["config"]:
            manifest["config"] |= self.put(json.dumps(config).encode())
        self.things["/v2/x/manifests/1"] = json.dumps(manifest).encode()


def artifact_config(image: Manifest) -> bytes:
    return msgspec.json.encode(artifact.describe(image))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _refused(self) -> bool:
        login = self.headers.get("Authorization")
        if not self.server.secret or login == f"Bearer {self.server.secret}":
            return False
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(401)
        realm = f"http://{self.server.address}/token"
        self.send_header("WWW-Authenticate", f'Bearer realm="{realm}",service="s",scope="ignored"')
        self._end(b"")
        return True

    def _end(self, body: bytes, *, head: bool = False) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def do_GET(self, *, head: bool = False) -> None:
        path, _, query = self.path.partition("?")
        if path == "/token":
            scope = urllib.parse.parse_qs(query)["scope"][0]
            self.send_response(200)
            body = json.dumps({"token": self.server.secret if scope.startswith("repository:x:pull") else "no"})
            return self._end(body.encode())
        if path.startswith("/elsewhere"):
            self.server.leaked |= "Authorization" in self.headers
            path = path.removeprefix("/elsewhere")
        elif self._refused():
            return None
        elif self.server.redirect and "/blobs/" in path:
            self.send_response(307)
            self.send_header("Location", self.server.redirect + path)
            return self._end(b"")
        body = self.server.things.get(path)
        self.send_response(200 if body is not None else 404)
        if self.server.block and self.server.block in path and not head:
            self.server.hang.wait(30)
        if self.server.short and not head and "/blobs/" in path and body is not None and len(body) > CHUNK:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: -self.server.short])
            self.close_connection = True
            return None
        return self._end(body or b"", head=head)

    def do_HEAD(self) -> None:
        self.do_GET(head=True)

    def do_POST(self) -> None:
        if not self._refused():
            self.send_response(202)
            self.send_header("Location", "/v2/x/blobs/uploads/7?state=s")
            self._end(b"")

    def do_PUT(self) -> None:
        if self._refused():
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path, _, query = self.path.partition("?")
        if "/uploads/" in path:
            asked = urllib.parse.parse_qs(query)
            assert asked["state"] == ["s"]
            assert asked["digest"] == [self.server.put(body)["digest"]]
        else:
            self.server.things[path] = body
        self.send_response(201)
        self._end(b"")


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.hang.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def other(tmp_path: Path, fake: Fake) -> Iterator[ImageStore]:
    made = ImageStore(tmp_path / "other", stores={"reg": StoreConfig(kind="registry", url=f"{fake.address}/x")})
    yield made
    assert_clean(made.root, tmp_path / "run")


def refused(other: ImageStore, fake: Fake, words: str, kind: str = "image", **fields: Any) -> None:
    """One clear error, and nothing half made."""
    with pytest.raises(DsecError, match=words) as caught:
        pull(other, f"docker://{fake.address}/x:1", **fields)
    assert caught.value.kind == kind
    assert other.list() == [] and set(os.listdir(other.root)) <= {"lock", "names.json"}


def set_layer(number: int, key: str, value: object) -> Callable[[Json, Json], None]:
    return lambda manifest, config: manifest["layers"][number].update({key: value})


def set_config(**values: object) -> Callable[[Json, Json], None]:
    return lambda manifest, config: config.update(values)


CHANGES: dict[str, tuple[Callable[[Json, Json], None], str]] = {
    "not an artifact": (lambda m, c: m.update(artifactType="application/vnd.else"), "type 'application/vnd.else'"),
    "a container image": (lambda m, c: m.pop("artifactType"), "not an image that was pushed"),
    "an index": (lambda m, c: m.update(mediaType="application/vnd.oci.image.index.v1+json"), "not an image"),
    "no layers": (lambda m, c: m.pop("layers"), "missing required field `layers`"),
    "a config of another type": (lambda m, c: m["config"].update(mediaType="x/y"), "config is of unknown type 'x/y'"),
    "..": (set_layer(0, "annotations", {TITLE: "../../meta.erofs"}), "a file '../../meta.erofs', which no image has"),
    "absolute": (set_layer(2, "annotations", {TITLE: "/etc/shadow"}), "a file '/etc/shadow', which no image has"),
    "no name": (set_layer(2, "annotations", {}), "a file '', which no image has"),
    "twice": (set_layer(1, "annotations", {TITLE: "meta.erofs"}), "'meta.erofs', which no image has twice"),
    "another media type": (set_layer(0, "mediaType", "text/plain"), "of unknown type 'text/plain'"),
    "a digest with ..": (set_layer(2, "digest", "sha256:../../x"), "which is no blob"),
    "a negative size": (set_layer(2, "size", -1), "which is no blob"),
    "a size beyond ints": (set_layer(2, "size", 1 << 70), "has 1180591620717411303424 bytes"),
    "data missing": (lambda m, c: m["layers"].pop(), "the artifact lacks data"),
    "metadata missing": (lambda m, c: m["layers"].pop(0), "the artifact lacks meta.erofs"),
    "chunk size 0": (set_config(chunk_size=0), "chunks of 0 bytes, and an image's are 1048576"),
    "sum size 0": (set_config(sum_size=0), "sums of 0 bytes each, and an image's are of 262144"),
    "a later format": (set_config(format=3), "format 3, and 2 is known"),
    "a wrong name": (set_config(name="../up"), "name '../up' is none"),
    "a wrong kind": (set_config(kind="vm"), "config is not what an image has there"),
    "a huge image": (set_config(data_size=1 << 50), "larger than"),
    "another data size": (set_config(data_size=CHUNK), "has .* bytes, and its config says"),
    "an odd data size": (set_config(data_size=5), "not whole blocks"),
    "another start": (set_config(config={"user": "root"}), "its digest is another image's"),
    "another digest": (set_config(meta_digest="sha256:" + "0" * 64), "of two images"),
    "sums of a wrong length": (set_layer(1, "size", 33), "data.sums has 33 bytes, and its config says 416"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_bad_artifacts(store: ImageStore, image: Manifest, fake: Fake, other: ImageStore, what: str) -> None:
    change, words = CHANGES[what]
    fake.offer(store, image, change)
    refused(other, fake, words)


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"\xff" * 100, b"[" * 100_000, b" " * (5 << 20)])
def test_garbage_for_a_manifest(fake: Fake, other: ImageStore, garbage: bytes) -> None:
    fake.things["/v2/x/manifests/1"] = garbage
    refused(other, fake, "artifact's manifest")


@pytest.mark.parametrize("what", ["meta", "sums", "config"])
def test_blobs_that_lie(store: ImageStore, image: Manifest, fake: Fake, other: ImageStore, what: str) -> None:
    """Lazily or not, what is small is checked at once."""
    fake.offer(store, image)
    manifest = json.loads(fake.things["/v2/x/manifests/1"])
    digest = {"meta": manifest["layers"][0], "sums": manifest["layers"][1], "config": manifest["config"]}[what][
        "digest"
    ]
    path = f"/v2/x/blobs/{digest}"
    good = fake.things[path]
    fake.things[path] = good[:-1] + bytes([good[-1] ^ 1])
    for lazy in (False, True):
        refused(other, fake, "is altered: its sha256 is another", lazy=lazy)
    fake.things[path] = good[:-1]
    refused(other, fake, f"has {len(good) - 1} bytes, and {len(good)} in the manifest")
    fake.things[path] = good + b"x"
    refused(other, fake, f"has {len(good) + 1} bytes, and {len(good)} in the manifest")


def test_data_that_lies(store: ImageStore, image: Manifest, fake: Fake, other: ImageStore) -> None:
    fake.offer(store, image)
    digest = json.loads(fake.things["/v2/x/manifests/1"])["layers"][2]["digest"]
    path, to = f"/v2/x/blobs/{digest}", f"docker://{fake.address}/x:1"
    good = fake.things[path]
    fake.things[path] = good[: 3 * SUM + 9] + b"\0\1\2" + good[3 * SUM + 12 :]
    with pytest.raises(DsecError, match=r"data is altered \(in the piece at 786432\)") as caught:
        pull(other, to)
    assert caught.value.kind == "image" and other.list() == []
    fake.things[path] = good
    fake.short = 10
    with pytest.raises(DsecError, match=r"too soon|IncompleteRead") as caught:
        pull(other, to)
    assert caught.value.kind == "network" and other.list() == []
    del fake.things[path]
    with pytest.raises(DsecError, match=r"data, blob .* is not there"):
        pull(other, to, lazy=True)
    fake.short = 0
    fake.things[path] = good
    assert pull(other, to).digest == image.digest


def forged(content: bytes, where: int, value: bytes) -> bytes:
    """Metadata with something else in it and a good checksum."""
    out = bytearray(content)
    out[where : where + len(value)] = value
    struct.pack_into("<I", out, meta.SUPERBLOCK + 4, 0)
    struct.pack_into("<I", out, meta.SUPERBLOCK + 4, meta.crc32c(out[meta.SUPERBLOCK : meta.BLOCK]))
    return bytes(out)


@pytest.mark.parametrize("seed", range(6))
def test_forged_metadata(store: ImageStore, image: Manifest, fake: Fake, other: ImageStore, seed: int) -> None:
    """All digests agree, and the tree is one that no import writes: the kernel never sees it."""
    content = store.meta_path(image).read_bytes()
    root = struct.unpack_from("<H", content, meta.SUPERBLOCK + 14)[0] * 32
    where, value = [
        (root + 4, struct.pack("<H", 0o100755)),  # the root is a file
        (root, struct.pack("<H", 0xFFFF)),  # an unknown form
        (root + 8, struct.pack("<Q", 1 << 40)),  # a directory longer than the file
        (root + 44, b"\xff" * 4),  # a link count of nobody's
        (content.index(b"\1\1\1\0xy") + 1, b"\4"),  # trusted.x
        (root + 2, struct.pack("<H", 60000)),  # xattrs to the moon
    ][seed]
    new = forged(content, where, value)

    def change(manifest: Json, config: Json) -> None:
        blob = fake.put(new)
        manifest["layers"][0].update(blob)
        config["meta_digest"] = blob["digest"]
        config["digest"] = identity("base", image.config, blob["digest"], image.data_digest)

    fake.offer(store, image, change)
    refused(other, fake, "the metadata")


def test_a_login_and_a_redirect(store: ImageStore, image: Manifest, fake: Fake, other: ImageStore) -> None:
    fake.secret = "sesame"
    to = f"docker://{fake.address}/x:1"
    push(store, "base:1", to)
    fake.redirect = "http://localhost:" + fake.address.split(":")[1] + "/elsewhere"
    assert pull(other, to).digest == image.digest
    assert not fake.leaked
    other.remove("base:1")
    fake.redirect = "http://192.0.2.1"
    refused(other, fake, "which has no TLS", "network")
    fake.redirect, fake.secret = "", "no\n"
    refused(other, fake, "no token", "denied")


def test_a_cancelled_pull_leaves_nothing(store: ImageStore, image: Manifest, fake: Fake, other: ImageStore) -> None:
    fake.offer(store, image)
    fake.block = json.loads(fake.things["/v2/x/manifests/1"])["layers"][2]["digest"]

    async def go() -> None:
        task = asyncio.create_task(jobs.run_pull(other, f"docker://{fake.address}/x:1"))
        await asyncio.sleep(1.0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert other.list() == []
    with pytest.raises(DsecError) as caught:
        pull(other, f"docker://{fake.address}/x:1", limits=Limits(deadline_s=1.0))
    assert caught.value.kind == "timeout"


# -- through the daemon ------------------------------------------------------------------------------------------------
@pytest.fixture
def one_daemon(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, watched: list[Path]) -> Iterator[Daemon]:
    """With a registry that wants a login and a shared directory in its configuration."""
    directory = tmp_path_factory.mktemp("stores")
    shared = directory / "shared"
    shared.mkdir()
    with registry(tmp_path, closed=True) as address:
        logins = authfile(directory / "auth.json", address)
        reg = {"kind": "registry", "url": f"{address}/team/base"}
        nfs = {"kind": "path", "path": str(shared), "direct": True}
        stores = {"reg": reg, "nfs": nfs}
        with started(directory, watched, stores=stores, registry_authfile=str(logins)) as one:
            yield one


def dsecctl(daemon: Daemon, *words: str | Path) -> str:
    done = _dsecctl(daemon, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def failing(daemon: Daemon, *words: str | Path) -> str:
    """What it says then."""
    done = _dsecctl(daemon, *words)
    assert done.returncode == 1 and done.stdout == "", done
    return done.stderr


def _dsecctl(daemon: Daemon, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "dsecctl", "-H", daemon.url, "image", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def reads_of(daemon: Daemon, ref: str) -> Json:
    found: Json = daemon.ask("image.get", {"ref": ref})["result"].get("reads", {})
    return found


def test_the_whole_way(one_daemon: Daemon, base_tar: Path, tmp_path: Path) -> None:
    """Import onto a shared store, collapse, push, remove, pull lazily, and run a sandbox on it."""
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "hello").write_text("from the toolkit\n")
    url = one_daemon.stores["reg"]["url"]
    there = f"docker://{url}:1"
    shared = one_daemon.directory / "shared"

    base = dsecctl(one_daemon, "import", "--store", "nfs", base_tar, "base:1")
    assert [p.suffix for p in sorted(shared.iterdir())][1:] == [".data"]
    dsecctl(one_daemon, "import", "--kind", "toolkit", "--prefix", "opt", tmp_path / "tool", "tool:1")
    flat = dsecctl(one_daemon, "collapse", "--into", "flat:1", "tool:1", "base:1")
    assert flat != base
    dsecctl(one_daemon, "push", "flat:1", there)
    dsecctl(one_daemon, "rm", "flat:1", "base:1")
    assert list(shared.iterdir()) == []
    assert dsecctl(one_daemon, "pull", "--lazy", "--name", "lazy:1", there) == flat
    shown = one_daemon.ask("image.get", {"ref": "lazy:1"})["result"]
    assert shown["store"] == "reg" and shown["digest"] == flat and "reads" not in shown

    async def go() -> None:
        async with one_daemon.client() as client:
            sandbox = await client.run_container(container_args(container_image="lazy:1"), timeout=60)
            result = await sandbox.run_shell("cat /opt/hello")
            assert result.exit_code == 0, result
            assert result.stdout == "from the toolkit\n"
            await sandbox.stop()

    run(go())
    until(lambda: "runs" in reads_of(one_daemon, "lazy:1"), "the trace is written")
    reads: Json = {}
    while reads != reads_of(one_daemon, "lazy:1"):  # written every few seconds, the last reads once more
        reads = reads_of(one_daemon, "lazy:1")
        lines = dsecctl(one_daemon, "show", "lazy:1").splitlines()
        printed = json.loads(dsecctl(one_daemon, "show", "--json", "lazy:1"))["reads"]
    assert reads["runs"] == 1 and 0 < reads["touched_bytes"] <= reads["cached_bytes"] < shown["data_size"]
    assert reads["touched_percent"] == round(100 * reads["touched_bytes"] / shown["data_size"], 2)
    assert 0 < reads["hit_rate"] < 1
    assert f"{reads['touched_percent']:.1f} % of the data" in next(x for x in lines if x.startswith("touched "))
    assert f"  {100 * reads['hit_rate']:.1f} % of reads" in next(x for x in lines if x.startswith("hit rate "))
    assert printed == {"denied": 0, "why": "", **reads}
    dsecctl(one_daemon, "pull", "--name", "lazy:1", there)
    assert one_daemon.ask("image.get", {"ref": "lazy:1"})["result"].get("store", "local") == "local"
    assert dsecctl(one_daemon, "verify", "lazy:1") == f"{flat} is sound; {table.size(shown['data_size'])} of data read"
    assert "touched" not in dsecctl(one_daemon, "show", "tool:1"), "it was never filled on demand"
    refused = one_daemon.ask("image.pull", {"reference": f"docker://{url}/no/such:1"})
    assert refused["error"]["data"]["kind"] == "not_found"

    # A container image of that registry, by skopeo.
    skopeo = ["skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false", f"--dest-creds={LOGIN}"]
    subprocess.run([*skopeo, f"oci:{TRICKY}", f"docker://{url}/tricky:1"], check=True)
    assert dsecctl(one_daemon, "import", f"docker://{url}/tricky:1", "tricky:1").startswith("sha256:")

    # Logins that are wrong, and none: each says so.
    address = url.partition("/")[0]
    logins = one_daemon.directory / "auth.json"
    authfile(logins, address, "imager:wrong")
    asked = (("import", f"docker://{url}/tricky:1", "t"), ("pull", there))
    for words in asked:
        assert "[denied]" in failing(one_daemon, *words)
    logins.unlink()
    for words in asked:
        said = failing(one_daemon, *words)
        assert "auth.json cannot be read" in said and "[denied]" in said
