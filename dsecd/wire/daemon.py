"""Messages of `daemon.*`."""

from __future__ import annotations

from msgspec import Struct

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
    """What the host is and has left. MiB, cores."""

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


class StatsParams(Params):
    pass


class Counters(Result):
    """Since the daemon started, and its own size now."""

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


class DoctorParams(Params):
    pass


class Check(Struct, omit_defaults=True):
    """One thing a host can or cannot do. level: ok, warn (works without), fail. fix: what to do about it."""

    name: str
    level: str
    text: str
    fix: str = ""


class Doctor(Result):
    checks: list[Check]
