"""The daemon's configuration: one TOML file, every key typed, bounded and documented here.

`dsecd --print-config` prints these defaults with their documentation. A bad value is refused with file, line and the
accepted range; an unknown key with its nearest neighbour.
"""

from __future__ import annotations

import difflib
import re
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from dsecd import storeconfig
from dsecd.errors import DsecError
from dsecd.storeconfig import StoreConfig as StoreConfig

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
    insecure_registries: Annotated[
        list[str], doc("Registries (host:port) reached over plain HTTP; loopback ones always may be.")
    ] = []

    max_sandboxes: Annotated[int, doc("Most sandboxes alive at once.", ge=1, le=4094)] = 4000
    cpu_overcommit: Annotated[
        float, doc("Cores promised for each real one; most sandboxes idle most of the time.", gt=0, le=1000)
    ] = 64.0
    memory_overcommit: Annotated[float, doc("Memory promised for each real byte.", gt=0, le=100)] = 8.0
    disk_overcommit: Annotated[float, doc("Disk promised for each byte of the pool.", gt=0, le=100)] = 8.0

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
            near = difflib.get_close_matches(key, Config.__struct_fields__, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DsecError("invalid", f"{path}:{_line(text, key)}: unknown key {key!r}{hint}")
    if (wrong := storeconfig.wrong(raw.get("stores", {}))) is not None:
        name, key, what = wrong
        raise DsecError("invalid", f"{path}:{storeconfig.line_of(text, name, key)}: {what}")
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as exc:
        key = str(exc).rpartition("$.")[2].rstrip("`").partition("[")[0]
        reason = str(exc).partition(" - at")[0]
        raise DsecError("invalid", f"{path}:{_line(text, key)}: {key} = {raw.get(key)!r}: {reason}") from exc
    if config.id_first_slot > config.id_last_slot:
        line = _line(text, "id_first_slot")
        raise DsecError("invalid", f"{path}:{line}: id_first_slot is above id_last_slot ({config.id_last_slot})")
    return config


def documented() -> str:
    """The default configuration as TOML with comments."""
    out = ["# dsecd.toml: every key, with its default.\n"]
    for name, hint in get_type_hints(Config, include_extras=True).items():
        if name == "stores":
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
    return "\n".join([*out, storeconfig.documented()])


def _line(text: str, key: str) -> int:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf'\s*"?{re.escape(key)}"?\s*[.=]', line):
            return number
    return 1
