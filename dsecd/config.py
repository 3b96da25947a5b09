"""The daemon's configuration: one TOML file, every key typed, bounded and documented here.

`dsecd --print-config` prints these defaults with their documentation. A bad value is refused with file, line and the
accepted range; an unknown key with its nearest neighbour.
"""

from __future__ import annotations

import re
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from dsecd import deviceconfig, envconfig, fncallconfig, metricsconfig, networkconfig, storeconfig
from dsecd.configtables import did_you_mean, line_of, reason
from dsecd.deviceconfig import DevicePool as DevicePool
from dsecd.envconfig import EnvConfig
from dsecd.errors import DsecError
from dsecd.fncallconfig import FnCallConfig
from dsecd.metricsconfig import MetricsConfig
from dsecd.networkconfig import NetworkConfig
from dsecd.storeconfig import StoreConfig as StoreConfig

VmDriver = Literal["auto", "firecracker", "qemu"]
Level = Literal["debug", "info", "warning", "error"]
DiskDriver = Literal["auto", "btrfs", "prjquota", "loop-btrfs"]
DEFAULT_PATH: Final = Path("/etc/dsecd/dsecd.toml")


def doc(text: str, **bounds: Any) -> Meta:
    """A key's documentation and bounds."""
    return Meta(description=text, **bounds)


class Config(Struct, kw_only=True, forbid_unknown_fields=True):
    """All keys, with their defaults."""

    host_tag: Annotated[
        str,
        doc(
            "First part of every sandbox id, unique in a fleet. Empty: from the host name.", pattern=r"^[a-z0-9]{0,16}$"
        ),
    ] = ""
    socket: Annotated[str, doc("API socket. Ignored under socket activation.")] = "/run/dsecd/dsecd.sock"
    socket_group: Annotated[str, doc("Group that may use the API socket.")] = "dsec"
    state_dir: Annotated[str, doc("Durable state: registry, images, writable disks.")] = "/var/lib/dsecd"
    run_dir: Annotated[str, doc("State of this boot: agent sockets, image mounts.")] = "/run/dsecd"
    lib_dir: Annotated[str, doc("Where dsec-agent and dsec-launch are. Empty: look in the usual places.")] = ""
    log_level: Annotated[Level, doc("Least level that is logged.")] = "info"

    runtime: Annotated[str, doc("OCI runtime: a name on PATH or a path (crun, runc, runsc).")] = "crun"
    cgroup_base: Annotated[
        str, doc("Parent cgroup of sandboxes. Empty: that of dsecd-sandboxes.service under systemd, else /dsecd.")
    ] = ""
    apparmor_profile: Annotated[
        str, doc("AppArmor profile of commands. `auto`: dsec-sandbox where it is loaded. Empty: none.")
    ] = "auto"
    id_first_slot: Annotated[int, doc("First user id range; range n begins at n times 2^20.", ge=1, le=4000)] = 1
    id_last_slot: Annotated[int, doc("Last user id range.", ge=1, le=4094)] = 4094

    disk_driver: Annotated[DiskDriver, doc("How writable space is limited.")] = "auto"
    disk_pool_mb: Annotated[
        int, doc("Size of the loop-btrfs pool in MiB; 0: 80 % of the free space at first start.", ge=0, le=1 << 30)
    ] = 0
    image_linger_s: Annotated[float, doc("Seconds an unused image stays mounted.", ge=0, le=86400)] = 30.0
    image_max_mb: Annotated[int, doc("Largest image, unpacked, in MiB.", ge=1, le=1 << 26)] = 65_536
    image_cache_mb: Annotated[
        int, doc("Local cache of images that are filled on demand, in MiB; what was just read may exceed it.", ge=64)
    ] = 65_536
    image_read_timeout_s: Annotated[
        float, doc("Seconds a read waits for an image's store before it fails with EIO.", ge=1, le=3600)
    ] = 30.0
    stores: Annotated[
        dict[str, StoreConfig],
        doc("Where images' data may live besides the local disk: [stores.NAME], see `dsecd.storeconfig`."),
    ] = {}
    trajectory_keep_days: Annotated[
        float, doc("Days for which the trajectory of a sandbox that is over is kept.", gt=0, le=36500)
    ] = 30.0
    trajectory_max_mb: Annotated[
        int, doc("MiB of trajectories in all; beyond that the oldest of sandboxes that are over go.", ge=1)
    ] = 16_384
    insecure_registries: Annotated[
        list[str], doc("Registries (host:port) reached over plain HTTP; loopback ones always may be.")
    ] = []
    registry_authfile: Annotated[
        str,
        doc(
            "A containers-auth.json(5) file with logins to registries, for imports, pushes, pulls, and stores without "
            "one of their own. Whoever may use the API may pull with them. Empty: none.",
            pattern=r"^(/[^\0]*)?$",
        ),
    ] = ""

    vm_driver: Annotated[VmDriver, doc("VMM of microVMs. `auto`: Firecracker where it works, else QEMU.")] = "auto"
    vm_kernel: Annotated[str, doc("Guest kernel by name (dsecctl kernel list). Empty: the newest that fits.")] = ""
    vm_damon: Annotated[bool, doc("Let DAMON drop cold file pages in guests; the host gets their memory.")] = True
    vm_damon_min_age_s: Annotated[float, doc("Seconds without an access after which a page is cold.", ge=1)] = 30.0
    vm_host_damon: Annotated[
        bool, doc("Let the host's DAMON page out cold memory of VMMs; needs swap, and nobody else's kdamond.")
    ] = False
    vm_memory_dir: Annotated[str, doc("Where QEMU guests' RAM lies; must be on tmpfs.")] = "/dev/shm/dsecd"

    cdi_dirs: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^/[^\0]*$")], ...],
        doc("Where CDI files say what devices need; of two that name one device, that of the later directory counts."),
    ] = ("/etc/cdi", "/run/cdi")
    devices: Annotated[
        dict[str, DevicePool],
        doc("Devices that containers may ask for: [devices.NAME], see `dsecd.deviceconfig`."),
    ] = {}

    max_sandboxes: Annotated[int, doc("Most sandboxes alive at once.", ge=1, le=4094)] = 4000
    cpu_overcommit: Annotated[
        float, doc("Cores promised for each real one; most sandboxes idle most of the time.", gt=0, le=1000)
    ] = 64.0
    memory_overcommit: Annotated[float, doc("Memory promised for each real byte.", gt=0, le=100)] = 8.0
    disk_overcommit: Annotated[float, doc("Disk promised for each byte of the pool.", gt=0, le=100)] = 8.0
    pressure_memory: Annotated[
        float,
        doc("Percent of 10 s in which all waited for memory, above which no sandbox is made; 100: any.", gt=0, le=100),
    ] = 20.0
    pressure_io: Annotated[
        float, doc("The same for disks. A burst that reads images has much of it, and ends.", gt=0, le=100)
    ] = 100.0
    pressure_cpu: Annotated[
        float, doc("The same for cores, in which some waited. A full host has much of it.", gt=0, le=100)
    ] = 100.0

    network: Annotated[NetworkConfig, doc("Networks: [network], see `dsecd.networkconfig`.")] = NetworkConfig()
    fncall: Annotated[FnCallConfig, doc("Calls: [fncall], see `dsecd.fncallconfig`.")] = FnCallConfig()
    metrics: Annotated[MetricsConfig, doc("Metrics and traces: [metrics], see `dsecd.metricsconfig`.")] = (
        MetricsConfig()
    )
    environments: Annotated[EnvConfig, doc("Packed sandboxes: [environments], see `dsecd.envconfig`.")] = EnvConfig()

    @property
    def tag(self) -> str:
        """host_tag, or one made from the host name."""
        name = re.sub(r"[^a-z0-9]", "", socket.gethostname().lower().partition(".")[0])
        return self.host_tag or name[:16] or "host"


def load(path: Path) -> Config:
    """Read and check a configuration file. `invalid` with file and line for anything wrong in it."""
    try:
        text = path.read_text()
    except OSError as exc:
        raise DsecError("invalid", f"{path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise DsecError("invalid", f"{path}: not UTF-8 at byte {exc.start}") from exc
    try:
        raw = tomllib.loads(text + "\n")  # so that a fault in the last line has a number, too
    except tomllib.TOMLDecodeError as exc:
        raise DsecError("invalid", f"{path}: {exc}") from exc
    for key in raw:
        if key not in Config.__struct_fields__:
            what = f"unknown key {key!r}{did_you_mean(key, Config)}"
            raise DsecError("invalid", f"{path}:{_line(text, key)}: {what}")
    for table, check in (("stores", storeconfig.wrong), ("devices", deviceconfig.wrong)):
        if (wrong := check(raw.get(table, {}))) is not None:
            name, key, what = wrong
            raise DsecError("invalid", f"{path}:{line_of(text, table, name, key)}: {what}")
    for table, wrong_in in (
        ("fncall", fncallconfig.wrong),
        ("environments", envconfig.wrong),
        ("network", networkconfig.wrong),
        ("metrics", metricsconfig.wrong),
    ):
        if (bad := wrong_in(raw.get(table, {}))) is not None:
            raise DsecError("invalid", f"{path}:{_line(text, bad[0])}: {bad[1]}")
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as exc:
        key = str(exc).rpartition("$.")[2].rstrip("`").partition("[")[0]
        what = f"{key} = {raw.get(key)!r}: {reason(exc)}"
        raise DsecError("invalid", f"{path}:{_line(text, key)}: {what}") from exc
    config.stores = {name: storeconfig.with_login(one, config.registry_authfile) for name, one in config.stores.items()}
    if config.id_first_slot > config.id_last_slot:
        line = _line(text, "id_first_slot")
        raise DsecError("invalid", f"{path}:{line}: id_first_slot is above id_last_slot ({config.id_last_slot})")
    return config


def documented() -> str:
    """The default configuration as TOML with comments."""
    out = ["# dsecd.toml: every key, with its default.\n"]
    for name, hint in get_type_hints(Config, include_extras=True).items():
        if name in ("stores", "devices", "fncall", "environments", "network", "metrics"):
            continue  # tables come after all plain keys
        meta = next(m for m in get_args(hint) if isinstance(m, Meta))
        bounds = [f"{word} {value}" for word, value in (("at least", meta.ge), ("above", meta.gt), ("at most", meta.le))
                  if value is not None]  # fmt: skip
        inner = get_args(hint)[0]
        if get_args(inner) and all(isinstance(a, str) for a in get_args(inner)):
            bounds.append("one of " + ", ".join(get_args(inner)))
        out.append(f"# {meta.description}" + (f" ({', '.join(bounds)})" if bounds else ""))
        default = getattr(Config(), name)
        out.append(f"{name} = {msgspec.json.encode(default).decode()}\n")
    tables = (envconfig, fncallconfig, metricsconfig, networkconfig, deviceconfig, storeconfig)
    return "\n".join([*out, *(table.documented() for table in tables)])


def _line(text: str, key: str) -> int:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf'\s*"?{re.escape(key)}"?\s*[.=]', line):
            return number
    return 1
