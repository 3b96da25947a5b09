"""Messages of `sandbox.*`: what a sandbox is asked to be, and what it is."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from dsecd.wire.base import Id, Labels, Name, Params, Path, Result, Seconds, Text

Backend = Literal["container", "microvm", "fullvm", "auto"]
State = Literal["creating", "running", "pausing", "paused", "resuming", "stopping", "stopped", "failed"]
ImageRef = Annotated[str, Meta(min_length=1, max_length=200)]
Env = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^=\x00]+$")], str],
                Meta(max_length=512)]  # fmt: skip
OnExpiry = Literal["stop", "pause"]


class Spec(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the caller wants. Memory and disk in MiB (2^20), CPU in cores, times in seconds.

    image: the base's reference; workspace and toolkits are stacked above it. ttl_idle_s: stops after so long without a
    running command or call. lease_s: stops when its owner's lease was not renewed for so long.
    """

    image: ImageRef
    backend: Backend = "container"
    workspace: ImageRef | None = None
    toolkits: Annotated[list[ImageRef], Meta(max_length=32)] = []
    cpu: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    memory_mb: Annotated[int, Meta(ge=16, le=1 << 24)] = 1024
    disk_mb: Annotated[int, Meta(ge=8, le=1 << 26)] = 4096
    pids: Annotated[int, Meta(ge=8, le=1 << 20)] = 512
    network_rules: Annotated[dict[Name, bool], Meta(max_length=64)] = {}
    env: Env = {}
    workdir: Path | None = None
    user: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    hostname: Annotated[str, Meta(max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$")] | None = None
    name: Name | None = None
    labels: Labels = {}
    owner: Text = ""
    ttl_idle_s: Seconds | None = None
    ttl_total_s: Seconds | None = None
    on_expiry: OnExpiry = "stop"
    lease_s: Seconds | None = None


class Owner(Struct):
    """Who asked: taken from SO_PEERCRED, but for the free-text label."""

    uid: int
    pid: int
    label: str = ""
    host: str = ""


class Sandbox(Result):
    """What a sandbox is now. Times are UNIX seconds; deadlines are None where there is none."""

    id: str
    state: State
    backend: str
    image: str
    layers: list[str] = []
    name: str | None = None
    labels: dict[str, str] = {}
    owner: Owner | None = None
    created_at: float = 0.0
    running_at: float | None = None
    ended_at: float | None = None
    idle_deadline: float | None = None
    total_deadline: float | None = None
    lease_deadline: float | None = None
    commands: int = 0
    reason: str = ""
    cpu: float = 0.0
    memory_mb: int = 0
    disk_mb: int = 0
    pids: int = 0


class Create(Params):
    """`sandbox.create`. With a name: get or create; a running one of that name is returned as it is."""

    spec: Spec


class CreateMany(Params):
    """`sandbox.create_many`: `count` sandboxes from one spec (names get `-0`, `-1`…), or one for each of `specs`."""

    spec: Spec | None = None
    count: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    specs: Annotated[list[Spec], Meta(max_length=10_000)] = []


class Failed(Struct, omit_defaults=True):
    """Why one of many could not be made."""

    kind: str
    message: str
    infra: bool = False
    retryable: bool = False


class CreateOne(Struct, omit_defaults=True):
    """One entry of create_many: exactly one of the two is set."""

    sandbox: Sandbox | None = None
    error: Failed | None = None


class Created(Result):
    results: list[CreateOne]


class ById(Params):
    """Any call that names one sandbox, by id or by name."""

    id: Id


class List(Params):
    """`sandbox.list`: labels must all match; states empty = all that are not stopped or failed."""

    labels: Labels = {}
    states: list[State] = []
    mine: bool = False


class Sandboxes(Result):
    sandboxes: list[Sandbox]


class Wait(Params):
    """`sandbox.wait`: until it reaches one of `states`."""

    id: Id
    states: list[State] = msgspec.field(default_factory=lambda: ["stopped", "failed"])


class Stop(Params):
    """`sandbox.stop`: kill and remove. Stopping a stopped one is no error."""

    id: Id
    reason: Text = "stopped by request"


class StopMany(Params):
    """`sandbox.stop_many`: by ids, or all that match labels (and are the caller's, when `mine`)."""

    ids: Annotated[list[Id], Meta(max_length=10_000)] = []
    labels: Labels = {}
    mine: bool = False


class StoppedMany(Result):
    stopped: int


class Extend(Params):
    """`sandbox.extend`: new deadlines counted from now; None leaves one as it is."""

    id: Id
    ttl_idle_s: Seconds | None = None
    ttl_total_s: Seconds | None = None


class Renew(Params):
    """`lease.renew`: the caller's process is alive: push the lease of these sandboxes to now + lease_s."""

    ids: Annotated[list[Id], Meta(max_length=10_000)]


class Renewed(Result):
    """Ids that are not there any more are listed, not errors."""

    gone: list[str] = []


class Stats(Result):
    """One sandbox's use. Bytes and microseconds."""

    id: str
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    cpu_usec: int = 0
    throttled_usec: int = 0
    pids: int = 0
    pids_limit: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    oom_kills: int = 0


class Events(Params):
    """`sandbox.events`: answers only when cancelled; each event is a `sandbox.event` notification."""

    labels: Labels = {}
    since: int | None = None


class Event(Struct, omit_defaults=True):
    """Sequence numbers rise by one within a daemon's life."""

    sub: int | str
    seq: int
    at: float
    sandbox_id: str
    event: str
    state: str = ""
    text: str = ""
