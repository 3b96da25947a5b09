"""Messages of `daemon.*`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dsecd.wire.base import Params, Result


class Hello(Params):
    """`daemon.hello`: first call of a client. protocol: the highest it speaks."""

    protocol: int = 1
    client: str = ""


class Welcome(Result):
    protocol: int
    version: str
    host: str
    uid: int
    pid: int


class InfoParams(Params):
    pass


class Info(Result):
    """What the host is and has left. MiB, cores.

    load1: processes that run or wait, averaged over a minute. waits: of cpu, memory and io, the part of the last ten
    seconds (per cent) in which some task waited for it; without what the kernel does not tell. Of a fleet the worst.
    pressure: why it takes no new sandboxes for the moment.
    """

    version: str
    host: str
    started_at: float
    backends: list[str]
    runtime: str = ""
    cgroups: str = ""
    cpus: int = 0
    memory_mb: int = 0
    memory_free_mb: int = 0
    cpu_committed: float = 0.0
    memory_committed_mb: int = 0
    disk_free_mb: int = 0
    disk_total_mb: int = 0
    sandboxes: int = 0
    sandboxes_max: int = 0
    cpu_max: float = 0.0
    memory_max_mb: int = 0
    cordoned: bool = False
    pressure: str = ""
    load1: float = 0.0
    waits: dict[str, float] = {}


class Cordon(Params):
    """`daemon.cordon`: new sandboxes are refused (`capacity`) until it is taken back; also after a restart."""

    on: bool = True


class Drain(Params):
    """`daemon.drain`: empty this host. Commands may run on for deadline_s; then all end, as `sandbox_dead`. cordon: it
    takes no new sandboxes after a restart either; else only this daemon takes none."""

    deadline_s: Annotated[float, Meta(ge=0, le=7 * 86400)] = 60.0
    cordon: bool = True


class Drained(Result):
    """stopped: sandboxes that ended; cut: those of them with a command that still ran."""

    stopped: int
    cut: int = 0


class Reload(Params):
    """`daemon.reload`: read the configuration file again; for root alone."""


class Reloaded(Result):
    """Keys (`key` or `table.key`). changed: in force now. needs_restart: differ from what is in force, and wait."""

    changed: list[str]
    needs_restart: list[str] = []


class StatsParams(Params):
    pass


class Counters(Result):
    """Since the daemon started, and its own size now.

    pmem_*: files that running microVMs map as pmem devices, each counted once however many map it: how many, their
    bytes, and how many of those the host has in its page cache. call_places: that wait for calls or run one.
    """

    uptime_s: float
    rss_bytes: int
    open_fds: int
    tasks: int
    connections: int
    sandboxes: dict[str, int]
    created: int = 0
    failed: int = 0
    stopped: int = 0
    commands: int = 0
    requests: int = 0
    calls: int = 0
    call_places: int = 0
    pmem_files: int = 0
    pmem_bytes: int = 0
    pmem_cached_bytes: int = 0


class DoctorParams(Params):
    pass


class Check(Struct, omit_defaults=True):
    """One thing a host can or cannot do. level: ok, warn (works without), fail. fix: what to do about it."""

    name: str
    level: str
    text: str
    fix: str = ""


class Fix(Params):
    """`daemon.fix`: change the host, as one of `daemon.doctor`'s checks proposes; for root alone. zram: make swap."""

    what: Literal["zram"]


class Fixed(Result):
    text: str


class Doctor(Result):
    checks: list[Check]
