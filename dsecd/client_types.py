"""What callers of the SDK give and get: the arguments of a sandbox, the result of a command."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsecd.wire import execs
from dsecd.wire import sandbox as wire

DSecNeeds = wire.Needs


@dataclass(kw_only=True)
class _RunArgs:
    """What every kind of sandbox has; DSecContainerRunArgs says what it means."""

    memory_limit_mb: int
    cpu_cores_limit: float = 1.0
    disk_limit_mb: int = 4096
    ttl_running_stop: float | None = None
    ttl_total: float | None = None
    lease_s: float | None = None
    network_rules: dict[str, bool] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str | None = None
    name: str | None = None
    job: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    owner: str = ""
    on_expiry: wire.OnExpiry = "stop"
    paused_clock: wire.PausedClock = "stopped"

    def _spec(self, image: str) -> wire.Spec:
        return wire.Spec(
            image=image, cpu=self.cpu_cores_limit, memory_mb=self.memory_limit_mb, disk_mb=self.disk_limit_mb,
            network_rules=self.network_rules, env=self.env, workdir=self.workdir, name=self.name, job=self.job,
            labels=self.labels, owner=self.owner, ttl_idle_s=self.ttl_running_stop, ttl_total_s=self.ttl_total,
            lease_s=self.lease_s, on_expiry=self.on_expiry, paused_clock=self.paused_clock,
        )  # fmt: skip


@dataclass(kw_only=True)
class DSecContainerRunArgs(_RunArgs):
    """What `run_container` starts. Sizes in MiB, times in seconds.

    container_image: base image; workspace and toolkits are layers above it. ttl_running_stop: stop after so long
    without a running command. lease_s: stop when this process is gone for so long (the SDK renews it). devices: pools
    of the host's configuration, `gpu` or `gpu:2`, waited for at most `device_wait_s`. needs: what the task declares; it
    decides with `run(args, backend="auto")`, where container_image may be a VM's disk too. job: `pause_job` and its
    like act on all of one. paused_clock: whether ttl_total and lease_s go on while it is paused.
    """

    container_image: str
    workspace: str | None = None
    toolkits: list[str] = field(default_factory=list)
    memory_limit_mb: int = 1024
    pids_limit: int = 512
    init_user: str | None = None
    hostname: str | None = None
    devices: list[str] = field(default_factory=list)
    device_wait_s: float = 60.0
    needs: DSecNeeds | None = None

    def spec(self) -> wire.Spec:
        """As the wire has it."""
        spec = self._spec(self.container_image)
        spec.workspace, spec.toolkits, spec.pids = self.workspace, self.toolkits, self.pids_limit
        spec.user, spec.hostname, spec.needs = self.init_user, self.hostname, self.needs
        spec.devices, spec.device_wait_s = self.devices, self.device_wait_s
        return spec


@dataclass(kw_only=True)
class DSecMicroVMRunArgs(DSecContainerRunArgs):
    """What `run_microvm` starts: the same, as a virtual machine with a kernel of its own.

    root: how its layers reach it: `pmem` (DAX: all guests share the host's page cache) or `blk` (each has its own).
    """

    root: wire.Root = "pmem"

    def spec(self) -> wire.Spec:
        spec = super().spec()
        spec.backend, spec.root = "microvm", self.root
        return spec


@dataclass(kw_only=True)
class DSecFullVMRunArgs(_RunArgs):
    """What `run_fullvm` starts: a whole operating system from a disk image (`dsecctl image list` shows kind vm)."""

    vm_image: str
    memory_limit_mb: int = 2048
    profile: wire.Profile | None = None

    def spec(self) -> wire.Spec:
        """As the wire has it."""
        spec = self._spec(self.vm_image)
        spec.backend, spec.profile = "fullvm", self.profile
        return spec


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """How a command ended. `stdout` and `stderr` are text that never fails to decode; `*_bytes` are exact.

    exit_code is 128+n when signal n ended it. truncated: output went over the cap, `*_dropped` bytes are missing behind
    the first `*_head`, and `*_dropped_sha256` is their digest. oom, pids_limit, disk_full: the sandbox hit that limit
    meanwhile.
    """

    exit_code: int
    stdout_bytes: bytes
    stderr_bytes: bytes
    timed_out: bool
    oom: bool
    pids_limit: bool
    disk_full: bool
    stdout_dropped: int
    stderr_dropped: int
    stdout_head: int
    stderr_head: int
    stdout_dropped_sha256: str
    stderr_dropped_sha256: str
    queued_ms: float
    ran_ms: float
    cpu_ms: float
    replayed: bool
    exec_id: str

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def truncated(self) -> bool:
        return bool(self.stdout_dropped or self.stderr_dropped)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


def result_of(ran: execs.Ran) -> ExecResult:
    return ExecResult(
        exit_code=ran.exit_code, stdout_bytes=ran.stdout, stderr_bytes=ran.stderr, timed_out=ran.timed_out,
        oom=ran.oom, pids_limit=ran.pids_limit, disk_full=ran.disk_full, stdout_dropped=ran.stdout_dropped,
        stderr_dropped=ran.stderr_dropped, stdout_head=ran.stdout_head, stderr_head=ran.stderr_head,
        stdout_dropped_sha256=ran.stdout_dropped_sha256, stderr_dropped_sha256=ran.stderr_dropped_sha256,
        queued_ms=ran.queued_ms, ran_ms=ran.ran_ms, cpu_ms=ran.cpu_ms, replayed=ran.replayed, exec_id=ran.exec_id,
    )  # fmt: skip
