"""What the image room says about images: the manifest, the import job, its limits and its progress.

An image is two files. `meta.erofs` holds superblock, inodes, directories and xattrs and is always local; the *data*
file holds the bytes of regular files in 4 KiB blocks and may live elsewhere. The manifest names both by digest.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, Literal

import msgspec
from msgspec import Struct

from dsecd.errors import DsecError

ImageKind = Literal["base", "workspace", "toolkit", "environment"]

FORMAT: Final = 2  # of the manifest and of the layout of an image's directory
BLOCK: Final = 4096
CHUNK: Final = 1 << 20  # of a file, in EROFS's metadata; large, so that DAX maps much at once and metadata stays small
SUM: Final = 1 << 18  # of the data file, one sum each: the least that can be checked, so the least that is fetched

LOCAL: Final = "local"  # the store that is the host's own disk
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._/:-]{0,127}")
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
REFERENCE: Final = re.compile(r"docker://[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
SUITE: Final = re.compile(r"[a-z]{2,24}")
PACKAGE: Final = re.compile(r"[a-z0-9][a-z0-9+.-]{0,127}")


class ImageConfig(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the image wants its processes started."""

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()

    def overridden_by(self, other: ImageConfig) -> ImageConfig:
        """Other's variables win one by one; its other fields win where they are set."""
        return ImageConfig(
            env=self.env | other.env,
            workdir=other.workdir or self.workdir,
            user=other.user or self.user,
            entrypoint=other.entrypoint or self.entrypoint,
            cmd=other.cmd or self.cmd,
        )


class Builder(Struct, frozen=True, omit_defaults=True):
    """Who packed an environment: an account, and the label that he gave."""

    uid: int
    label: str = ""


class Manifest(Struct, frozen=True, kw_only=True):
    """An image, immutable. `names` is the store's, not the file's: a name may move to another digest.

    digest: the image's identity, see `identity`. data_digest: sha256 of the concatenated sha256 sums of the data
    file's pieces of `sum_size` bytes (`data.sums`), so that a range of it can be checked without the rest.
    store: where the data file lives: "local" (beside the metadata), or the name of a store of the config.
    blob: what it is called there; empty for our own name.
    below: digests of the layers that an environment is stacked on, topmost first; its config is the whole stack's.
    builder: of an environment.
    """

    digest: str
    kind: ImageKind
    name: str
    source: str
    created: str
    config: ImageConfig = ImageConfig()
    files: int
    meta_size: int
    meta_digest: str
    data_size: int
    data_digest: str
    chunk_size: int = CHUNK
    sum_size: int = SUM
    store: str = LOCAL
    blob: str = ""
    format: int = FORMAT
    names: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    builder: Builder | None = None

    @property
    def hex(self) -> str:
        return self.digest.removeprefix("sha256:")

    @property
    def blob_name(self) -> str:
        """What the data file is called on its store."""
        return self.blob or f"{self.hex}.data"


def identity(
    kind: ImageKind, config: ImageConfig, meta_digest: str, data_digest: str, below: tuple[str, ...] = (),
    builder: Builder | None = None,
) -> str:  # fmt: skip
    """The digest of an image: sha256 over what a sandbox can tell apart (the tree, and how it is started).

    Of an environment also over who packed it: two builders of the same never have one image between them.
    """
    what = {
        "format": FORMAT, "kind": kind, "config": msgspec.to_builtins(config), "meta": meta_digest, "data": data_digest,
    }  # fmt: skip
    if kind == "environment":
        what |= {"below": below, "builder": msgspec.to_builtins(builder)}
    return "sha256:" + hashlib.sha256(msgspec.json.encode(what, order="deterministic")).hexdigest()


def identity_of(manifest: Manifest) -> str:
    """What its digest must be."""
    return identity(
        manifest.kind, manifest.config, manifest.meta_digest, manifest.data_digest, manifest.below, manifest.builder
    )


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one import; all come from the config, but for new_name.

    max_bytes: unpacked, and also what a compressed stream may grow to. max_entries: of all layers together.
    max_names_bytes: of names, link targets and xattrs, which the importer keeps in memory.
    authfile: registry credentials; without it none are used, root's own included.
    insecure_registries: hosts reached over plain HTTP besides the loopback ones.
    new_name: the name must be nobody's yet when the image gets it, else it moves.
    """

    max_bytes: int = 64 << 30
    max_entries: int = 1_000_000
    max_names_bytes: int = 512 << 20
    deadline_s: float = 3600.0
    authfile: str = ""
    insecure_registries: tuple[str, ...] = ()
    new_name: bool = False


class ImportJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to import.

    origin: `stream` reads the inherited descriptor; `registry` fetches `reference` with skopeo; `bootstrap` runs
    mmdebstrap for `suite` with `packages`. format: of a stream; `auto` tells an OCI layout or a docker archive from a
    plain tar by its members. tag: which image of an archive that holds several. prefix: a directory of the layer that
    a plain tar is put below. config: laid over the one that the image brings. store: where the data goes; empty: where
    the store puts it by itself. unnamed: it gets no name.
    """

    kind: ImageKind
    name: str
    origin: Literal["stream", "registry", "bootstrap"] = "stream"
    format: Literal["auto", "tar", "oci", "docker"] = "auto"
    reference: str = ""
    tag: str = ""
    prefix: str = ""
    suite: str = ""
    packages: tuple[str, ...] = ()
    source: str = ""
    store: str = ""
    config: ImageConfig = ImageConfig()
    unnamed: bool = False

    def check(self) -> None:
        """Refuse what no import can be asked for; called before anything is started."""
        _require(
            self.unnamed or NAME.fullmatch(self.name),
            f"image name {self.name!r} is not [a-z0-9][a-z0-9._/:-]* of at most 128",
        )
        _require(len(self.source) <= 4096, "source is longer than 4096 characters")
        _require(self.prefix == "" or self.format in ("auto", "tar"), "prefix is for plain tars only")
        if self.origin == "registry":
            _require(REFERENCE.fullmatch(self.reference), f"reference {self.reference[:128]!r} is not docker://NAME")
        if self.origin == "bootstrap":
            _require(self.kind == "base", "bootstrap makes images of kind base only")
            _require(SUITE.fullmatch(self.suite), f"suite {self.suite[:64]!r} is not a Debian suite's name")
            for package in self.packages:
                _require(PACKAGE.fullmatch(package), f"package {package[:128]!r} is not a Debian package's name")
            _require(len(self.packages) <= 256, "more than 256 packages")


def _require(ok: object, message: str) -> None:
    if not ok:
        raise DsecError("invalid", message)


class Progress(Struct, frozen=True, omit_defaults=True):
    """Where an import stands, in bytes (`build`: in steps). total is None while nobody knows it."""

    phase: Literal[
        "fetch",
        "bootstrap",
        "receive",
        "unpack",
        "collapse",
        "read",
        "push",
        "pull",
        "write",
        "build",
        "commit",
        "snapshot",
        "scan",
        "pack",
    ]
    done: int
    total: int | None = None


class Built(Struct, frozen=True, kw_only=True):
    """What the importer process hands back; the daemon makes the manifest of it and commits.

    data_file: empty: the data stays where it is, on a store, and is called `blob` there.
    kind, name, below, builder: of a pulled image, as it was pushed; of an environment. left_out: entries that a
    pack does not have: what a builder left behind, and answers.
    """

    config: ImageConfig
    files: int
    meta_size: int
    meta_digest: str
    data_size: int
    data_digest: str
    data_file: str
    source: str
    blob: str = ""
    kind: ImageKind | None = None
    name: str = ""
    below: tuple[str, ...] = ()
    builder: Builder | None = None
    left_out: int = 0


class Pushed(Struct, frozen=True, kw_only=True):
    """What a push came to: the artifact's digest, and how many bytes the registry did not have yet. (Of an export: the
    image's digest, and all bytes.)"""

    digest: str
    sent_bytes: int


class Listed(Struct, frozen=True, kw_only=True):
    """What is in an exported environment: digests of images, topmost first, and what the first one is called."""

    digests: tuple[str, ...]
    name: str


class Failed(Struct, frozen=True, kw_only=True):
    """How the importer process says that it failed."""

    kind: str
    message: str
    detail: dict[str, str | int] = {}


class Report(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the importer's standard output: exactly one field is set."""

    progress: Progress | None = None
    built: Built | None = None
    pushed: Pushed | None = None
    listed: Listed | None = None
    failed: Failed | None = None


class GcReport(Struct, frozen=True, kw_only=True):
    """What `gc` removed: digests, names of half-made directories, names of data files, and bytes in all."""

    images: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    freed_bytes: int = 0
