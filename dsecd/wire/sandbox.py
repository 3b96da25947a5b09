"""Messages of `sandbox.*`: what a sandbox is asked to be, and what it is."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from dsecd.errors import DsecError
from dsecd.wire.access import ROOT
from dsecd.wire.base import Id, Labels, Name, Params, Path, RequestKey, Result, Seconds, Text

Backend = Literal["container", "microvm", "fullvm", "auto"]
State = Literal["creating", "running", "pausing", "paused", "resuming", "stopping", "stopped", "failed"]
ImageRef = Annotated[str, Meta(min_length=1, max_length=200)]
Env = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^=\x00]+$")], str],
                Meta(max_length=512)]  # fmt: skip
OnExpiry = Literal["stop", "pause"]
PausedClock = Literal["stopped", "running"]
Root = Literal["pmem", "blk"]
Profile = Literal["server", "desktop", "android"]
DeviceAsk = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}(:[1-9][0-9]{0,2})?\Z")]
Devices = Annotated[list[DeviceAsk], Meta(max_length=16)]
Rule = Annotated[str, Meta(min_length=1, max_length=300, pattern=r"^[A-Za-z0-9_*\[][A-Za-z0-9_.:*/\[\]-]*\Z")]
Rules = Annotated[dict[Rule, bool], Meta(max_length=64)]
Held = dict[str, tuple[str, ...]]  # device pool -> CDI names of what is leased of it


class Needs(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """What a task declares about itself, for `backend: "auto"`.

    stateless: one call that leaves nothing behind. kernel: a kernel of its own. system: a whole system as root: an init
    with services, Docker inside, mounts, kernel modules. gui: a screen. os: what it runs on; `other` is anything that
    brings its own kernel. trust: `hostile` code must never share the host's kernel. life_s: how long it will live.
    """

    stateless: bool = False
    kernel: bool = False
    system: bool = False
    gui: bool = False
    os: Literal["linux", "other"] = "linux"
    trust: Literal["normal", "hostile"] = "normal"
    life_s: Seconds | None = None


class Choice(Struct):
    """What `auto` became, and why, in a sentence."""

    backend: str
    reason: str


class Spec(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the caller wants. Memory and disk in MiB (2^20), CPU in cores, times in seconds.

    backend: `auto` takes the lightest that fits `needs`; another one is taken as it is, and refused when it does not
    fit them. image: the base's reference; workspace and toolkits are stacked above it. ttl_idle_s: stops after so long
    without a running command or call. lease_s: stops when its owner's lease was not renewed for so long. job: all
    sandboxes of one job can be listed, paused, resumed and stopped together. paused_clock: whether total TTL and lease
    go on while it is paused; by default they stand still. root: how a
    microVM gets its layers: pmem (DAX: all guests share the host's page cache) or blk (each caches for itself).
    profile: of a full VM, in place of its image's: `server` has no screen, `desktop` and `android` have one. devices:
    pools of the daemon's configuration, `gpu` or `gpu:2`, for containers; waited for at most `device_wait_s`.
    network_rules: what it may reach, by service, host or network; nothing else (docs/network.md).
    """

    image: ImageRef
    backend: Backend = "container"
    needs: Needs | None = None
    workspace: ImageRef | None = None
    toolkits: Annotated[list[ImageRef], Meta(max_length=32)] = []
    cpu: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    memory_mb: Annotated[int, Meta(ge=16, le=1 << 24)] = 1024
    disk_mb: Annotated[int, Meta(ge=8, le=1 << 26)] = 4096
    pids: Annotated[int, Meta(ge=8, le=1 << 20)] = 512
    network_rules: Rules = {}
    env: Env = {}
    workdir: Path | None = None
    user: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    root: Root = "pmem"
    profile: Profile | None = None
    hostname: Annotated[str, Meta(max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$")] | None = None
    name: Name | None = None
    job: Name | None = None
    labels: Labels = {}
    owner: Text = ""
    ttl_idle_s: Seconds | None = None
    ttl_total_s: Seconds | None = None
    on_expiry: OnExpiry = "stop"
    paused_clock: PausedClock = "stopped"
    lease_s: Seconds | None = None
    devices: Devices = []
    device_wait_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0


class Owner(Struct):
    """Who asked: taken from SO_PEERCRED or the token, but for the free-text label. uid: of a principal its number."""

    uid: int
    pid: int
    label: str = ""
    host: str = ""
    principal: str = ""
    project: str = ROOT


class Sandbox(Result):
    """What a sandbox is now. Times are UNIX seconds; deadlines are None where there is none.

    Deadlines that stand still while it is paused are as if it went on now.
    devices: what it has leased. choice: of `backend: "auto"` only.
    """

    id: str
    state: State
    backend: str
    image: str
    layers: list[str] = []
    name: str | None = None
    job: str | None = None
    labels: dict[str, str] = {}
    owner: Owner | None = None
    created_at: float = 0.0
    running_at: float | None = None
    paused_at: float | None = None
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
    devices: Held = {}
    choice: Choice | None = None


class Create(Params):
    """`sandbox.create`. With a name: get or create; a running one of that name is returned as it is."""

    spec: Spec


class CreateMany(Params):
    """`sandbox.create_many`: `count` sandboxes from one spec (names get `-0`, `-1`…), or one for each of `specs`."""

    spec: Spec | None = None
    count: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    specs: Annotated[list[Spec], Meta(max_length=10_000)] = []

    def expanded(self) -> list[Spec]:
        """One for each; `invalid` when that is not said in one way."""
        if (self.spec is None) == (not self.specs):
            raise DsecError("invalid", "create_many takes either spec with count, or specs")
        if self.spec is None:
            return self.specs
        spec, count = self.spec, self.count or 1
        if spec.name is None:
            return [spec] * count
        return [msgspec.structs.replace(spec, name=f"{spec.name}-{n}") for n in range(count)]


class Failed(Struct, omit_defaults=True):
    """Why one of many could not be made."""

    kind: str
    message: str
    infra: bool = False
    retryable: bool = False

    @classmethod
    def of(cls, exc: DsecError) -> Failed:
        return cls(exc.kind, exc.message, exc.infra, exc.retryable)


class CreateOne(Struct, omit_defaults=True):
    """One entry of create_many: exactly one of the two is set."""

    sandbox: Sandbox | None = None
    error: Failed | None = None


class Created(Result):
    results: list[CreateOne]


class Choose(Params):
    """`sandbox.choose`: what `auto` would take, and why; starts nothing. image: without one, any kind of image."""

    needs: Needs = Needs()
    image: ImageRef | None = None
    devices: Devices = []


class Considered(Struct):
    """One backend. why: what is against it; "" nothing is."""

    backend: str
    why: str


class Change(Struct):
    """What would lead to another backend ("": to none)."""

    what: str
    backend: str


class Chosen(Result):
    """backend "": none fits, and `reason` says what is missing. considered: from the lightest to the heaviest."""

    backend: str
    reason: str
    considered: list[Considered] = []
    changes: list[Change] = []


class ById(Params):
    """Any call that names one sandbox, by id or by name."""

    id: Id


class Fork(Params):
    """`sandbox.fork`: `count` copies of a container or a microVM, copy-on-write; answers as create_many.

    Of a container: of its files alone, as they are at one instant. No process is carried over, nor what is in /dev/shm
    or in memory; a paused one stays paused. Of a microVM: of its memory and disk. Commands that run in it run on in
    each copy, but nobody waits for them there. Copies differ in id, user ids, host name, clock and entropy.
    """

    id: Id
    count: Annotated[int, Meta(ge=1, le=1000)] = 1


class List(Params):
    """`sandbox.list`: labels must all match; states empty = all that are not stopped or failed. job None: any.

    request: made by the `sandbox.create` with this request_id.
    """

    labels: Labels = {}
    job: Name | None = None
    states: list[State] = []
    mine: bool = False
    request: RequestKey | None = None


class Sandboxes(Result):
    """missing: hosts of a fleet that did not answer."""

    sandboxes: list[Sandbox]
    missing: list[str] = []


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
    """One sandbox's use. Bytes and microseconds.

    reclaimed_bytes: what its last pause gave back to the host. swapped_bytes: what of it is in swap now. network_*:
    since it has one; refused are packets.
    """

    id: str
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    reclaimed_bytes: int = 0
    swapped_bytes: int = 0
    cpu_usec: int = 0
    throttled_usec: int = 0
    pids: int = 0
    pids_limit: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    oom_kills: int = 0
    devices: Held = {}
    network_out_bytes: int = 0
    network_out_packets: int = 0
    network_in_bytes: int = 0
    network_in_packets: int = 0
    network_refused: int = 0


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
