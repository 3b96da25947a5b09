"""The image store: what is on disk, who may touch it, and how it survives being killed at any instant."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from dsecd.erofs import meta
from dsecd.erofs.claims import LEASE_S, Claims
from dsecd.erofs.model import BLOCK, CHUNK, DIGEST, FORMAT, NAME, Built, GcReport, ImportJob, Manifest, identity
from dsecd.erofs.stores import StoreConfig, unreadable
from dsecd.erofs.tar import bad
from dsecd.errors import DsecError

log: Final = logging.getLogger(__name__)

LOCAL: Final = "local"
Manifests = list[Manifest]  # inside the class, `list` is a method
Paths = list[Path]
Strings = list[str]
_HEX: Final = frozenset("0123456789abcdef")


class ImageStore:
    """Images on disk, by digest, and names that point at them.

        <root>/
            lock                     held (flock) while anything below changes its name
            names.json               {name: digest}, replaced by rename of names.json.new
            <64 hex>/                one image, immutable; it is there whole or not at all
                manifest.json
                meta.erofs           superblock, inodes, directories, xattrs
                data                 bytes of files; absent where the manifest names another store
                data.sums            sha256 of each 1 MiB of data
                seal                 inode, size and mtime of both files when their bytes were last known to be right
            tmp-<random>/            an import; its maker and the importer hold a flock on the directory
            trash-<random>/          being removed
        <store>/…                    data of images that live on a directory of the config, see `claims`

    Rules:
      * An image appears by one rename of its `tmp-` directory, after its files and the directory are on disk. Data on
        another store is claimed and renamed there first: a crash in between leaves an orphan for `gc`, and never an
        image without data.
      * An image goes by one rename to `trash-`; what follows may be interrupted and is finished by `gc`.
      * `names.json` is written after the image appears and before it goes: a name may be missing after a crash, and
        never points at nothing.
      * `tmp-` directories that nobody locks are dead. Locks are the kernel's, so a dead process holds none.
      * Manifests never change, so they are read once; `names.json` is read each time.
      * An image that is damaged is left out of `list`, refused by name in `resolve` and `check`, replaced by importing
        it again, and can be removed.

    Methods block (they do file I/O): call them from a thread where that matters. All are safe to call from several.
    """

    def __init__(
        self, root: Path, *, stores: Mapping[str, Path | StoreConfig] | None = None, data_store: str = LOCAL,
        owner: str = "host", lease_s: float = LEASE_S,
    ) -> None:  # fmt: skip
        """stores: of the config; a path alone is one of kind `path`. owner: this host, unlike any other's name."""
        self.root = root
        self.configs = {
            name: StoreConfig(kind="path", path=str(one)) if isinstance(one, Path) else one
            for name, one in (stores or {}).items()
        }
        self._stores = {name: Path(one.path) for name, one in self.configs.items() if one.kind == "path"}
        self._claims = {name: Claims(path, owner, lease_s=lease_s) for name, path in self._stores.items()}
        self._data_store = self.writable(data_store)
        self._manifests: dict[str, Manifest] = {}
        self._mutex = threading.RLock()
        self._depth = 0
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    # -- reading -------------------------------------------------------------------------------------------------

    def list(self) -> Manifests:
        """Every image whose manifest can be read, newest first."""
        names = self._names_by_digest()
        found = []
        for hexa in self._hexes():
            try:
                found.append(self._named(hexa, names))
            except DsecError as e:
                log.warning("%s, ignoring", e.message)
        return sorted((m for m in found if m is not None), key=lambda m: (m.created, m.digest), reverse=True)

    def resolve(self, ref: str) -> Manifest:
        """By name, digest, or a digest's unique prefix of at least 8 hex digits (with `sha256:` or without)."""
        manifest = self._named(self._find(ref), self._names_by_digest())
        if manifest is None:
            raise _not_found(ref)
        return manifest

    def meta_path(self, manifest: Manifest) -> Path:
        return self.root / manifest.hex / "meta.erofs"

    def sums_path(self, manifest: Manifest) -> Path:
        return self.root / manifest.hex / "data.sums"

    def data_path(self, manifest: Manifest) -> Path:
        """DsecError `image`: the data is on no directory that this host knows."""
        if manifest.store == LOCAL:
            return self.root / manifest.hex / "data"
        store = self._stores.get(manifest.store)
        if store is None:
            config = self.configs.get(manifest.store)
            why = "is not in the config" if config is None else f"is of kind {config.kind} and no directory"
            raise bad(f"image {_short(manifest)}: its data is on store {manifest.store!r}, which {why}")
        return store / manifest.blob_name

    def is_remote(self, manifest: Manifest) -> bool:
        """Its data is on a store that is asked for ranges: there is no path to it."""
        return manifest.store in self.remotes

    @property
    def remotes(self) -> frozenset[str]:
        return frozenset(self.configs) - self._stores.keys()

    def writable(self, store: str) -> str:
        """The name of a store that data can be put on; DsecError `invalid` for any other."""
        if store != LOCAL and store not in self._stores:
            known = ", ".join([LOCAL, *sorted(self._stores)])
            raise DsecError("invalid", f"image store {store[:64]!r} is none that takes data (there are: {known})")
        return store

    def check(self, manifest: Manifest, *, data: bool = True) -> None:
        """Files, sizes and superblock, without reading the data. DsecError `image` says what is wrong.

        data: the data file is there too, whole; not so for an image that is filled on demand.
        """
        what = f"image {_short(manifest)}"
        head = _read_head(self.meta_path(manifest), manifest.meta_size, f"{what}: its metadata")
        if data and not self.is_remote(manifest):
            _read_head(self.data_path(manifest), manifest.data_size, f"{what}: its data")
        try:
            found = meta.Superblock(head)
        except DsecError as e:
            raise bad(f"{what}: {e.message}") from e
        if found.blocks * BLOCK != manifest.meta_size or found.data_digest != manifest.data_digest:
            raise bad(f"{what}: its metadata is another image's")

    def verify(self, manifest: Manifest) -> None:
        """`check`, and then read and compare every byte; of data on a remote store, none: its readers do that."""
        self.check(manifest)
        self._compare(manifest, data=not self.is_remote(manifest))

    def _compare(self, manifest: Manifest, *, data: bool) -> None:
        what = f"image {_short(manifest)}"
        if identity(manifest.kind, manifest.config, manifest.meta_digest, manifest.data_digest) != manifest.digest:
            raise bad(f"{what}: its manifest is altered")
        if _sha256(self.meta_path(manifest)) != manifest.meta_digest:
            raise bad(f"{what}: its metadata is altered")
        sums = self.sums_path(manifest).read_bytes()
        if "sha256:" + hashlib.sha256(sums).hexdigest() != manifest.data_digest:
            raise bad(f"{what}: its list of sums is altered")
        if data and (at := _altered_at(self.data_path(manifest), sums)) is not None:
            raise bad(f"{what}: its data is altered (in the mebibyte at {at})")

    def trust(self, manifest: Manifest) -> None:
        """What a mount needs: `check`, and `verify` when a file was touched since its bytes were last compared.

        That is about the files of this host. Data on a store is the driver's: it checks as it reads, or does not.
        """
        here = manifest.store == LOCAL
        self.check(manifest, data=here)
        if self._stamp(manifest) != self._sealed(manifest):
            self._compare(manifest, data=here)
            self._seal(manifest)

    def _stamp(self, manifest: Manifest) -> bytes:
        paths = [self.meta_path(manifest)]
        if manifest.store == LOCAL:
            paths.append(self.data_path(manifest))
        found = [path.stat() for path in paths]
        return msgspec.json.encode([(st.st_ino, st.st_size, st.st_mtime_ns) for st in found])

    def _sealed(self, manifest: Manifest) -> bytes:
        try:
            return (self.root / manifest.hex / "seal").read_bytes()
        except FileNotFoundError:
            return b""

    def _seal(self, manifest: Manifest) -> None:
        (self.root / manifest.hex / "seal").write_bytes(self._stamp(manifest))  # torn, it only costs a verify

    # -- changing ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Work]:
        """A locked `tmp-` directory for one import; gone at the end, committed or not."""
        path = self.root / f"tmp-{secrets.token_hex(8)}"
        with self._locked():  # gc must not see the directory before its lock
            path.mkdir(mode=0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield Work(path, fd)
        finally:
            _remove_all(path)
            os.close(fd)

    def commit(self, work: Work, built: Built, job: ImportJob) -> Manifest:
        """Make an image of what the importer left in its directory. The same content twice is one image.

        Without a data file of its own it is an image whose data stays on `job.store`.
        """
        store = (job.store or self._data_store) if not built.data_file else self.writable(job.store or self._data_store)
        digest = identity(job.kind, built.config, built.meta_digest, built.data_digest)
        manifest = Manifest(
            digest=digest, kind=job.kind, name=job.name, source=built.source, created=_now(), config=built.config,
            files=built.files, meta_size=built.meta_size, meta_digest=built.meta_digest, data_size=built.data_size,
            data_digest=built.data_digest, store=store, blob=built.blob,
        )  # fmt: skip
        try:
            ready = self._prepare(work, built, manifest)
            with self._locked():
                if not self._is_sound(manifest):
                    self._publish(ready, manifest)
                    self._seal(manifest)  # the importer has just summed what it wrote
                self._write_names(self._read_names() | {job.name: digest})
        finally:
            if store in self._stores:
                with self._reaching(store):
                    (self._stores[store] / f"{work.path.name}.data").unlink(missing_ok=True)
        return self.resolve(digest)

    def set_name(self, name: str, ref: str) -> Manifest:
        """Point a name at an image, wherever it pointed before."""
        if not NAME.fullmatch(name):
            raise DsecError("invalid", f"image name {name[:160]!r} is not [a-z0-9][a-z0-9._/:-]* of at most 128")
        with self._locked():
            manifest = self.resolve(ref)
            self._write_names(self._read_names() | {name: manifest.digest})
        return self.resolve(manifest.digest)

    def remove(self, ref: str, in_use: Collection[str] = ()) -> str:
        """Remove an image; by a name that is not its only one, that name only. `in_use`: digests. Its digest."""
        with self._locked():
            hexa = self._find(ref)
            digest, names = f"sha256:{hexa}", self._read_names()
            if names.get(ref) == digest and sum(d == digest for d in names.values()) > 1:
                self._write_names({k: v for k, v in names.items() if k != ref})
                return digest
            if digest in in_use:
                raise DsecError("conflict", f"image {ref[:160]!r} is in use")
            self._write_names({k: v for k, v in names.items() if v != digest})
            trash = self._to_trash(hexa)
        _empty(trash)
        return digest

    def heartbeat(self) -> None:
        """Renew this host's claims on shared stores. Now and then, far more often than the lease is long.

        Without the lock, because a store that hangs must not hold up the others; a claim that comes too late for an
        image that goes just then is swept.
        """
        for name, hexes in self._stored().items():
            with self._reaching(name):
                for hexa in hexes:
                    self._claims[name].claim(hexa)

    def gc(self, in_use: Collection[str] = (), min_age_s: float = 0.0) -> GcReport:
        """Remove unnamed images that nobody uses, what dead imports left, and data without an image.

        min_age_s spares what is younger, so that an image just imported may still be named or used.
        """
        oldest = time.time() - min_age_s
        with self._locked():
            named = set(self._read_names().values())
            doomed = [
                m for m in self.list()
                if m.digest not in named and m.digest not in in_use and self._made(m.hex) <= oldest
            ]  # fmt: skip
            (self.root / "names.json.new").unlink(missing_ok=True)  # its writer held the lock, and is dead
            leftovers = [*self._dead_leftovers()]
            trash = [self._to_trash(m.hex) for m in doomed]
            orphans = [*self._orphans()]
        freed = sum(map(_size_below, [*trash, *leftovers]))
        for path in [*trash, *leftovers]:
            _empty(path)
        return GcReport(
            images=tuple(m.digest for m in doomed), leftovers=tuple(p.name for p in leftovers),
            orphans=tuple(orphans), freed_bytes=freed,
        )  # fmt: skip

    # -- inside --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The store's lock, against other threads and other processes; a method that holds it may call another."""
        with self._mutex, (self.root / "lock").open("a") as lock:
            if self._depth == 0:
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def _find(self, ref: str) -> str:
        """The one image that a reference means, as hex; it may be damaged."""
        digest = self._read_names().get(ref)
        if digest is not None:
            return digest.removeprefix("sha256:")
        found = self._matching(ref.removeprefix("sha256:"))
        if len(found) > 1:
            raise DsecError("not_found", f"{len(found)} images begin with {ref[:80]!r}: give more of the digest")
        if not found:
            raise _not_found(ref)
        return found[0]

    def _hexes(self) -> Strings:
        return [p.name for p in self.root.iterdir() if len(p.name) == 64 and _HEX.issuperset(p.name)]

    def _matching(self, hexa: str) -> Strings:
        if not 8 <= len(hexa) <= 64 or not _HEX.issuperset(hexa):
            return []
        return [h for h in self._hexes() if h.startswith(hexa)]

    def _load(self, hexa: str) -> Manifest | None:
        """None: there is no such image (any more). A manifest that cannot be read is an image that cannot be used."""
        path = self.root / hexa / "manifest.json"
        known = self._manifests.get(hexa)
        try:
            if known is not None and path.exists():
                return known
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as e:
            raise bad(f"image {hexa[:12]}: its manifest is altered ({e})") from e
        if manifest.digest != f"sha256:{hexa}" or manifest.format != FORMAT or not DIGEST.fullmatch(manifest.digest):
            raise bad(f"image {hexa[:12]}: its manifest is another image's, or of a later version")
        self._manifests[hexa] = manifest
        return manifest

    def _named(self, hexa: str, names: dict[str, tuple[str, ...]]) -> Manifest | None:
        manifest = self._load(hexa)
        if manifest is None:
            return None
        current = names.get(manifest.digest, ())
        shown = manifest.name if manifest.name in current else (current[0] if current else "")
        return msgspec.structs.replace(manifest, name=shown, names=current)

    def _read_names(self) -> dict[str, str]:
        try:
            return msgspec.json.decode((self.root / "names.json").read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as e:
            raise DsecError("internal", f"{self.root / 'names.json'} is not the store's own: {e}") from e

    def _names_by_digest(self) -> dict[str, tuple[str, ...]]:
        by_digest: dict[str, tuple[str, ...]] = {}
        for name, digest in sorted(self._read_names().items()):
            by_digest[digest] = (*by_digest.get(digest, ()), name)
        return by_digest

    def _write_names(self, names: dict[str, str]) -> None:
        _write_durably(self.root / "names.json", msgspec.json.encode(names, order="sorted"))

    def _prepare(self, work: Work, built: Built, manifest: Manifest) -> Path:
        """Everything slow about a commit, before the lock: the final files, on disk, in a directory of their own."""
        ready = work.path / "image"
        ready.mkdir(mode=0o755)
        for name in ("meta.erofs", "data.sums"):
            (work.path / name).rename(ready / name)
        data = work.path / built.data_file
        if not built.data_file:
            pass  # it stays where it is
        elif manifest.store == LOCAL:
            data.rename(ready / "data")
        else:
            self._put(data, manifest.store, f"{work.path.name}.data")
        for path in ready.iterdir():
            path.chmod(0o444)
            if os.geteuid() == 0:
                os.chown(path, 0, 0)
        _write_durably(ready / "manifest.json", msgspec.json.encode(manifest))
        return ready

    def _is_sound(self, manifest: Manifest) -> bool:
        """The image is there and looks well. A damaged one is in the way of a good one: out with it."""
        try:
            found = self._load(manifest.hex)
            if found is not None:
                self.check(found)
            return found is not None
        except DsecError:
            _empty(self._to_trash(manifest.hex))
            return False

    def _publish(self, ready: Path, manifest: Manifest) -> None:
        if manifest.store in self._stores:
            store = self._stores[manifest.store]
            self._claims[manifest.store].claim(manifest.hex)
            (store / f"{ready.parent.name}.data").rename(store / f"{manifest.hex}.data")
            _fsync(store)
        ready.rename(self.root / manifest.hex)
        _fsync(self.root)

    def _to_trash(self, hexa: str) -> Path:
        trash = self.root / f"trash-{secrets.token_hex(8)}"
        (self.root / hexa).rename(trash)
        self._manifests.pop(hexa, None)
        for name in self._stores:
            with self._reaching(name):
                self._claims[name].release(hexa)
        return trash

    def _put(self, data: Path, name: str, target: str) -> None:
        """Copy a data file to a store, under a name that says it is not committed."""
        path = self._stores[name] / target
        try:
            _copy_durably(data, path)
        except OSError as e:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DsecError("disk_full", f"no space left for the image on store {name}") from e
            raise unreadable(name, target, e.strerror or str(e)) from e

    @contextlib.contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        """A store that is away keeps no image from going here; what stays there is swept when it is back."""
        try:
            yield
        except OSError as e:
            log.warning("store %s: %s, ignoring", name, e.strerror)

    def _dead_leftovers(self) -> Iterator[Path]:
        for path in self.root.iterdir():
            if path.name.startswith("trash-") or (path.name.startswith("tmp-") and not _is_locked(path)):
                yield path

    def _orphans(self) -> Iterator[str]:
        """Data on shared directories that this host put there and that no image of it needs (others' are theirs)."""

        def making(word: str) -> bool | None:
            maker = self.root / f"tmp-{word}"
            return _is_locked(maker) if maker.exists() else None

        here = set(self._hexes())  # a damaged image's data is not for others to judge
        for name, hexes in self._stored().items():
            with self._reaching(name):
                yield from self._claims[name].sweep(hexes, here, making)

    def _stored(self) -> dict[str, Strings]:
        """Images of this host by the shared store that has their data."""
        stored: dict[str, Strings] = {name: [] for name in self._stores}
        for manifest in self.list():
            if manifest.store in stored:
                stored[manifest.store].append(manifest.hex)
        return stored

    def _made(self, hexa: str) -> float:
        return _mtime(self.root / hexa / "manifest.json")


class Work:
    """An import's directory and the descriptor that locks it; a child that inherits it keeps the lock."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd


def _not_found(ref: str) -> DsecError:
    return DsecError("not_found", f"there is no image {ref[:160]!r}")


def _short(manifest: Manifest) -> str:
    return f"{manifest.name} ({manifest.hex[:12]})" if manifest.name else manifest.hex[:12]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _size_below(path: Path) -> int:
    paths = path.rglob("*") if path.is_dir() else [path]
    return sum(p.lstat().st_blocks * 512 for p in paths if p.is_file())


def _remove_all(path: Path) -> None:
    """Also while what was just killed is still dying, and writes a last file. What stays after that is gc's."""
    for _ in range(100):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.05)
    log.warning("cannot remove %s now, ignoring", path)


def _empty(trash: Path) -> None:
    shutil.rmtree(trash, ignore_errors=True)


def _read_head(path: Path, size: int, what: str) -> bytes:
    try:
        with path.open("rb") as f:
            found = os.fstat(f.fileno()).st_size
            if found != size:
                raise bad(f"{what} is truncated or altered: {found} bytes, and {size} in the manifest")
            return f.read(BLOCK)
    except FileNotFoundError as e:
        raise bad(f"{what} is not there any more ({path})") from e
    except OSError as e:
        raise bad(f"{what} cannot be read: {e.strerror}") from e


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return "sha256:" + hashlib.file_digest(f, "sha256").hexdigest()


def _altered_at(data: Path, sums: bytes) -> int | None:
    """Where the first altered chunk begins."""
    with data.open("rb") as f:
        for number in range(len(sums) // 32):
            if hashlib.sha256(f.read(CHUNK)).digest() != sums[number * 32 : number * 32 + 32]:
                return number * CHUNK
    return None


def _write_durably(path: Path, data: bytes) -> None:
    """All of it or what was there before, even if the power goes."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _fsync(path.parent)


def _copy_durably(source: Path, target: Path) -> None:
    with source.open("rb") as a, target.open("xb") as b:
        shutil.copyfileobj(a, b, 1 << 20)
        b.flush()
        os.fsync(b.fileno())


def _fsync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
