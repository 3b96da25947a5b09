"""What the daemon and the page server say to each other: one JSON object per line over a Unix socket."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from dsecd.erofs.pages.fscache import DATA
from dsecd.erofs.stores import StoreConfig

SOCKET: Final = "sock"  # in the run directory
GROUP_NAME: Final = "fanotify"  # in systemd's FD store


class PagesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the page server is told at its start.

    run_dir: socket, journal, maps of this boot. cache_dir: must be on ext4, xfs or btrfs. cache_bytes: what the cache
    is brought back to; what was read in the last `settle_s` seconds stays beyond it (see `evict`). deadline_s: how
    long a reader waits for a store before it gets EIO.
    """

    run_dir: str
    cache_dir: str
    cache_bytes: int = 64 << 30
    deadline_s: float = 30.0
    settle_s: float = 60.0
    workers: int = 8
    stores: dict[str, StoreConfig] = {}

    @property
    def run(self) -> Path:
        return Path(self.run_dir)

    @property
    def cache(self) -> Path:
        return Path(self.cache_dir)


class Watched(Struct, frozen=True, kw_only=True):
    """An image to be filled on demand: whose data, of what size and sums, from where, and where its trace is kept.

    metadata: the path of the image's metadata, when it is to be mounted through fscache.
    """

    image: str
    data_digest: str
    data_size: int
    sums: str
    store: str
    blob: str
    trace: str = ""
    metadata: str = ""

    @property
    def hex(self) -> str:
        return self.data_digest.removeprefix("sha256:")

    @property
    def key(self) -> str:
        """Of its file in the server's table: the same data may be there both ways."""
        return f"{DATA}{self.hex}" if self.metadata else self.hex


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """op `hello` is answered with copies of the fanotify group and, once it is open, the cachefiles device.

    `watch`: mark the cache file; mount it after the reply. `resume`: the same for a mount that is there already;
    refused when readers may have seen holes meanwhile. `mounted`: the mount has opened the file. `unwatch`: the mount
    is gone. `retain`: unwatch all but `images`. `stop`: end, unless something is watched.
    """

    op: Literal["hello", "ping", "watch", "resume", "mounted", "unwatch", "retain", "stats", "stop"]
    image: str = ""
    watched: Watched | None = None
    images: tuple[str, ...] = ()


class Trouble(Struct, frozen=True):
    """Reads of an image that were refused since the server started, and why the last one was."""

    denied: int
    kind: str
    why: str
    at: float


class ImageStats(Struct, frozen=True, kw_only=True):
    """One watched image. `lost`: its readers may have seen holes; whoever uses the mount must end."""

    image: str
    data_size: int
    cached_bytes: int
    waiting: int
    complete: bool
    lost: bool
    trouble: Trouble | None = None


class Stats(Struct, frozen=True, kw_only=True):
    """Counters since the server started, and the cache as it is now. event_us: what answering one costs, on average.

    waited, waited_s: reads that had to wait and were answered, and how long in all.
    device: it has /dev/cachefiles.
    """

    pid: int
    generation: str
    inherited: bool
    events: int
    hits: int
    waits: int
    denied: int
    requests: int
    fetched_bytes: int
    shared_bytes: int
    evicted_bytes: int
    event_us: float
    cached_bytes: int
    cache_bytes: int
    images: tuple[ImageStats, ...] = ()
    device: bool = False
    waited: int = 0
    waited_s: float = 0.0


class Reply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """error: a kind; with `errno` when a driver may want to try another way."""

    error: str = ""
    message: str = ""
    errno: int = 0
    path: str = ""
    busy: bool = False
    stats: Stats | None = None
