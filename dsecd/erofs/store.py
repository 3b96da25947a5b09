"""The image store: what is on disk, who may touch it, and how it survives being killed at any instant."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from dsecd.erofs import files
from dsecd.erofs.catalog import Catalog, Manifests, Strings
from dsecd.erofs.claims import LEASE_S, Gone
from dsecd.erofs.files import Alive
from dsecd.erofs.imagefiles import ImageFiles, short
from dsecd.erofs.model import LOCAL, NAME, Built, GcReport, ImportJob, Manifest, identity
from dsecd.erofs.names import taken
from dsecd.erofs.shared import PATIENCE_S, Shared, Turn
from dsecd.erofs.stores import StoreConfig
from dsecd.erofs.tar import bad
from dsecd.errors import DsecError

log: Final = logging.getLogger(__name__)

Goners = list[Gone]  # inside the class, `list` is a method


class ImageStore:
    """Images on disk, by digest, and names that point at them.

        <root>/
            lock                     held (flock) while anything below changes its name; never over a store
            lock-<store>             held (flock) while data on that store changes its name
            names.json               {name: digest}, replaced by rename of names.json.new
            <64 hex>/                one image, immutable; it is there whole or not at all
                manifest.json
                meta.erofs           superblock, inodes, directories, xattrs
                data                 bytes of files; where the manifest names another store it may be absent
                data.sums            sha256 of each 256 KiB of data
                trace                what runs read of it, as far as it was filled on demand; may be absent
                seal                 inode, size and mtime of both files when their bytes were last known to be right
            tmp-<random>/            an import; its maker and the importer hold a flock on the directory
            trash-<random>/          being removed
        <store>/…                    data of images that live on a directory of the config, see `claims`

    Rules:
      * An image appears by one rename of its `tmp-` directory, after its files and the directory are on disk. Data on
        another store is claimed and renamed there first: a crash in between leaves an orphan for `gc`, and never an
        image without data.
      * An image goes by one rename to `trash-`; what follows may be interrupted and is finished by `gc`.
      * An image whose data is elsewhere becomes a local one by one rename of `data` into its directory. The manifest
        stays: what has it mounted goes on reading from there.
      * A store may hang. So the lock is not held while one is touched; a store's own lock is taken before it, and
        keeps a commit and a removal of the same image apart.
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
        owner: str = "host", lease_s: float = LEASE_S, patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        """stores: of the config; a path alone is one of kind `path`. owner: this host, unlike any other's name.

        patience_s: how long a store may show no sign of life.
        """
        self.root = root
        self.configs = {
            name: StoreConfig(kind="path", path=str(one)) if isinstance(one, Path) else one
            for name, one in (stores or {}).items()
        }
        self._shared = {
            name: Shared(name, Path(one.path), owner, root / f"lock-{name}", lease_s=lease_s, patience_s=patience_s)
            for name, one in self.configs.items() if one.kind == "path"
        }  # fmt: skip
        self._data_store = self.writable(data_store)
        self._catalog = Catalog(root)
        self._mutex = threading.RLock()
        self._depth = 0
        self._pinned: set[str] = set()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    # -- reading -------------------------------------------------------------------------------------------------

    def list(self) -> Manifests:
        """Every image whose manifest can be read, newest first."""
        return self._catalog.list()

    def resolve(self, ref: str) -> Manifest:
        """By name, digest, or a digest's unique prefix of at least 8 hex digits (with `sha256:` or without)."""
        return self._catalog.resolve(ref)

    def as_stored(self, manifest: Manifest) -> Manifest:
        """With the store that its data came from, for a mount from before the data was brought here."""
        return self._catalog.stored(manifest.hex) or manifest

    def meta_path(self, manifest: Manifest) -> Path:
        return self.root / manifest.hex / "meta.erofs"

    def sums_path(self, manifest: Manifest) -> Path:
        return self.root / manifest.hex / "data.sums"

    def trace_path(self, manifest: Manifest) -> Path:
        """What its runs read, if it was filled on demand (dsecd.erofs.pages.trace)."""
        return self.root / manifest.hex / "trace"

    def data_path(self, manifest: Manifest) -> Path:
        """DsecError `image`: the data is on no directory that this host knows."""
        if manifest.store == LOCAL:
            return self.root / manifest.hex / "data"
        shared = self._shared.get(manifest.store)
        if shared is None:
            config = self.configs.get(manifest.store)
            why = "is not in the config" if config is None else f"is of kind {config.kind} and no directory"
            raise bad(f"image {short(manifest)}: its data is on store {manifest.store!r}, which {why}")
        return shared.path / manifest.blob_name

    def is_remote(self, manifest: Manifest) -> bool:
        """Its data is on a store that is asked for ranges: there is no path to it."""
        return manifest.store in self.remotes

    @property
    def remotes(self) -> frozenset[str]:
        return frozenset(self.configs) - self._shared.keys()

    def writable(self, store: str) -> str:
        """The name of a store that data can be put on; DsecError `invalid` for any other."""
        if store != LOCAL and store not in self._shared:
            known = ", ".join([LOCAL, *sorted(self._shared)])
            raise DsecError("invalid", f"image store {store[:64]!r} is none that takes data (there are: {known})")
        return store

    def check(self, manifest: Manifest, *, data: bool = True) -> None:
        """Files, sizes, superblock, and samples of data on a shared store. DsecError `image` says what is wrong.

        data: the data file is there too, whole; not so for an image that is filled on demand.
        """
        self._files(manifest, data=data).check()

    def verify(self, manifest: Manifest) -> int:
        """`check`, and then read and compare every byte; how many of data. Of data on a remote store, none: its readers
        do that."""
        found = self._files(manifest)
        found.check()
        found.compare()
        return 0 if self.is_remote(manifest) else manifest.data_size

    def trust(self, manifest: Manifest) -> None:
        """What a mount needs: `check`, and `verify` when a file was touched since its bytes were last compared.

        That is about the files of this host. Data on a store is the driver's: it checks as it reads, or does not.
        """
        self._files(manifest, data=manifest.store == LOCAL).trust()

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
            files.remove_all(path)
            os.close(fd)

    def commit(self, work: Work, built: Built, job: ImportJob, *, new_name: bool = False) -> Manifest:
        """Make an image of what the importer left in its directory. The same content twice is one image.

        new_name: `denied` when the name is another image's, from which it would go.

        Without a data file of its own it is an image whose data stays on `job.store`. Data that comes to this host's
        disk makes a local image of one whose data is on a remote store, or wherever `job.store` says `local`.
        """
        store = job.store or self._data_store
        manifest = Manifest(
            digest=identity(
                job.kind, built.config, built.meta_digest, built.data_digest, built.below, built.builder
            ), kind=job.kind, below=built.below, builder=built.builder,
            name=job.name, source=built.source, created=_now(), config=built.config, files=built.files,
            meta_size=built.meta_size, meta_digest=built.meta_digest, data_size=built.data_size,
            data_digest=built.data_digest, store=self.writable(store) if built.data_file else store, blob=built.blob,
        )  # fmt: skip
        shared = self._shared.get(store)
        brings = bool(built.data_file) and store == LOCAL
        try:
            ready = self._prepare(work, built, manifest, shared)
            with shared.turn() if shared is not None else contextlib.nullcontext() as turn:
                elsewhere = self._enter(
                    ready, manifest, turn, wanted_here=job.store == LOCAL, brings=brings, new_name=new_name
                )
        finally:
            if shared is not None and not shared.hangs:
                coming = shared.coming(work.word)
                with self._reaching(store):
                    shared.do(lambda _: coming.unlink(missing_ok=True))
        self._release(manifest.hex, elsewhere)
        return self.resolve(manifest.digest)

    def set_name(self, name: str, ref: str) -> Manifest:
        """Point a name at an image, wherever it pointed before."""
        if not NAME.fullmatch(name):
            raise DsecError("invalid", f"image name {name[:160]!r} is not [a-z0-9][a-z0-9._/:-]* of at most 128")
        names = self._catalog.names
        with self._locked():
            manifest = self.resolve(ref)
            names.write(names.read() | {name: manifest.digest})
        return self.resolve(manifest.digest)

    def remove(self, ref: str, in_use: Collection[str] = ()) -> str:
        """Remove an image; by a name that is not its only one, that name only. `in_use`: digests. Its digest."""
        with self._locked():
            hexa = self._catalog.find(ref)
            digest, names = f"sha256:{hexa}", self._catalog.names.read()
            if names.get(ref) == digest and sum(d == digest for d in names.values()) > 1:
                self._catalog.names.write({k: v for k, v in names.items() if k != ref})
                return digest
            if digest in in_use:
                raise DsecError("conflict", f"image {ref[:160]!r} is in use")
            if (above := next((m for m in self.list() if digest in m.below), None)) is not None:
                raise DsecError(
                    "conflict", f"image {ref[:160]!r} is needed by environment {short(above)}: remove that first"
                )
            self._catalog.names.write({k: v for k, v in names.items() if v != digest})
            stores = self._claimed_on(hexa)
            trash = self._to_trash(hexa)
        files.empty(trash)
        self._release(hexa, stores)
        return digest

    @contextlib.contextmanager
    def pinned(self, digests: Collection[str]) -> Iterator[None]:
        """While inside, `gc` spares these: they have no name yet, and what needs them is still to come."""
        mine = set(digests) - self._pinned
        self._pinned |= mine
        try:
            yield
        finally:
            self._pinned -= mine

    def heartbeat(self) -> None:
        """Renew this host's claims on shared stores. Now and then, far more often than the lease is long."""
        for name, shared in self._shared.items():
            with self._reaching(name), shared.turn() as turn:
                for hexa in self._catalog.on_store(name)[0]:
                    turn.do(lambda _, shared=shared, hexa=hexa: shared.claims.claim(hexa))  # type: ignore[misc]

    def gc(self, in_use: Collection[str] = (), min_age_s: float = 0.0) -> GcReport:
        """Remove unnamed images that nobody uses and no environment needs, what dead imports left, and data without an
        image.

        min_age_s spares what is younger, so that an image just imported may still be named or used.
        """
        oldest = time.time() - min_age_s
        with self._locked():
            named = set(self._catalog.names.read().values())
            images, kept = self.list(), named | set(in_use) | self._pinned
            kept |= {m.digest for m in images if self._made(m.hex) > oldest}
            kept |= {digest for m in images if m.digest in kept for digest in m.below}
            doomed = [m for m in images if m.digest not in kept]
            self._catalog.names.clear_half_written()
            leftovers = [*self._dead_leftovers()]
            claimed = {m.hex: self._claimed_on(m.hex) for m in doomed}
            trash = [self._to_trash(m.hex) for m in doomed]
        freed = sum(map(files.size_below, [*trash, *leftovers]))
        freed += sum(self._release(hexa, stores) for hexa, stores in claimed.items())
        orphans = [gone for name in self._shared for gone in self._swept(name)]
        for path in [*trash, *leftovers]:
            files.empty(path)
        return GcReport(
            images=tuple(m.digest for m in doomed), leftovers=tuple(p.name for p in leftovers),
            orphans=tuple(gone.name for gone in orphans), freed_bytes=freed + sum(gone.size for gone in orphans),
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

    def _files(self, manifest: Manifest, *, data: bool = True) -> ImageFiles:
        path = self.data_path(manifest) if data and not self.is_remote(manifest) else None
        return ImageFiles(manifest, self.root / manifest.hex, path, self._shared.get(manifest.store))

    def _prepare(self, work: Work, built: Built, manifest: Manifest, shared: Shared | None) -> Path:
        """Everything slow about a commit, before any lock: the final files, on disk, in a directory of their own."""
        ready = work.path / "image"
        ready.mkdir(mode=0o755)
        for name in ("meta.erofs", "data.sums"):
            (work.path / name).rename(ready / name)
        data = work.path / built.data_file
        if not built.data_file:
            pass  # it stays where it is
        elif shared is None:
            data.rename(ready / "data")
        else:
            shared.put(data, work.word)
        for path in ready.iterdir():
            path.chmod(0o444)
            if os.geteuid() == 0:
                os.chown(path, 0, 0)
        files.write_durably(ready / "manifest.json", msgspec.json.encode(manifest))
        return ready

    def _enter(
        self, ready: Path, manifest: Manifest, turn: Turn | None, *, wanted_here: bool, brings: bool, new_name: bool
    ) -> Strings:
        """The image and its name, in one step for whoever looks. Stores that a damaged one before it was claimed on.

        What is there already is judged before the lock is taken, since its data may be on a store that hangs; if it is
        another one by then, it is judged again.
        """
        hexa, top, names = manifest.hex, self.root / manifest.hex, self._catalog.names
        published = False
        while True:
            judged = _inode(top)
            good, filled = self._judged(hexa, wanted_here=wanted_here, brings=brings)
            if not good and turn is not None and not published:
                word, shared = ready.parent.name.removeprefix("tmp-"), turn.shared
                turn.do(lambda _, shared=shared, word=word: shared.publish(hexa, word))  # type: ignore[misc]
                published = True
            with self._locked():
                if _inode(top) != judged:
                    continue
                self._require_below(manifest)
                if new_name and names.read().get(manifest.name, manifest.digest) != manifest.digest:
                    raise taken(manifest.name)
                elsewhere: Strings = []
                trash: Path | None = None
                if filled:
                    (ready / "data").rename(top / "data")
                    files.fsync(top)
                elif not good:
                    if judged is not None:
                        elsewhere = [name for name in self._claimed_on(hexa) if name != manifest.store]
                        trash = self._to_trash(hexa)
                    ready.rename(top)
                    files.fsync(self.root)
                if filled or not good:  # whoever made it has just summed it
                    here = self._catalog.load(hexa) or manifest
                    self._files(here, data=here.store == LOCAL).seal()
                if manifest.name:
                    names.write(names.read() | {manifest.name: manifest.digest})
            if trash is not None:
                files.empty(trash)
            return elsewhere

    def _require_below(self, manifest: Manifest) -> None:
        """Under the lock, so that nobody removes them in between."""
        for digest in manifest.below:
            if self._catalog.load(digest.removeprefix("sha256:")) is None:
                raise bad(f"the environment needs {digest[:19]}, which is not here: import or pull that image first")

    def _judged(self, hexa: str, *, wanted_here: bool, brings: bool) -> tuple[bool, bool]:
        """Of what is there already: (whether it stays, whether its data is to come to this host). A damaged one is in
        the way of a good one."""
        try:
            found = self._catalog.load(hexa)
            if found is None:
                return False, False
            self.check(found, data=False)
        except DsecError:
            return False, False
        may = brings and found.store != LOCAL
        try:
            self.check(found)
        except DsecError:
            return may, may
        return True, may and (wanted_here or self.is_remote(found))

    def _to_trash(self, hexa: str) -> Path:
        trash = self.root / f"trash-{secrets.token_hex(8)}"
        (self.root / hexa).rename(trash)
        self._catalog.forget(hexa)
        return trash

    def _claimed_on(self, hexa: str) -> Strings:
        """Shared stores with a claim of ours to an image; any may have one, of an image that cannot be read."""
        try:
            manifest = self._catalog.stored(hexa)
        except DsecError:
            return [*self._shared]
        return [manifest.store] if manifest is not None and manifest.store in self._shared else []

    def _release(self, hexa: str, stores: Collection[str]) -> int:
        """Give up claims to an image that has gone, unless it is here again; bytes that this frees."""
        freed = 0
        for name in stores:
            shared = self._shared[name]
            with self._reaching(name), shared.turn() as turn:
                if name in self._claimed_on(hexa):
                    continue
                gone = turn.do(lambda _, shared=shared: shared.claims.release(hexa))  # type: ignore[misc]
                freed += gone.size if gone is not None else 0
        return freed

    @contextlib.contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        """A store that is away keeps no image from going here; what stays there is swept when it is back."""
        try:
            yield
        except OSError as e:
            log.warning("store %s: %s, ignoring", name, e.strerror)
        except DsecError as e:
            log.warning("%s, ignoring", e.message)

    def _dead_leftovers(self) -> Iterator[Path]:
        for path in self.root.iterdir():
            if path.name.startswith("trash-") or (path.name.startswith("tmp-") and not files.is_locked(path)):
                yield path

    def _swept(self, name: str) -> Goners:
        """Data on a shared store that this host put there and that no image of it needs (others' are theirs)."""
        shared = self._shared[name]

        def making(word: str) -> bool | None:
            maker = self.root / f"tmp-{word}"
            return files.is_locked(maker) if maker.exists() else None

        found: Goners = []
        with self._reaching(name), shared.turn() as turn:
            ours, damaged = self._catalog.on_store(name)  # a damaged image's data is not for others to judge

            def sweep(alive: Alive) -> None:
                for gone in shared.claims.sweep(ours, [*ours, *damaged], making):
                    found.append(gone)
                    alive()

            turn.do(sweep)
        return found

    def _made(self, hexa: str) -> float:
        return files.mtime(self.root / hexa / "manifest.json")


class Work:
    """An import's directory and the descriptor that locks it; a child that inherits it keeps the lock."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd

    @property
    def word(self) -> str:
        """Its random one."""
        return self.path.name.removeprefix("tmp-")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
