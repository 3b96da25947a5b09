"""CDI files (Container Device Interface): read strictly, each for itself.

JSON always; YAML, which vendors' tools write by default, where PyYAML is installed (it is no dependency of the daemon,
since JSON does on every host). A file is the operator's word on what of the host a tenant may have, so one that others
than root could have written is refused, and so is all that we do not know: half an edit is a device that fails later.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from dsecd.errors import DsecError

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?"
_VENDOR: Final = r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
_CLASS: Final = r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?"

Text = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00]*\Z")]
Variable = Annotated[str, Meta(max_length=4096, pattern=r"^[^=\x00]+=[^\x00]*\Z")]
Number = Annotated[int, Meta(ge=0, lt=1 << 32)]
Mode = Annotated[int, Meta(ge=0, le=0o777)]


class _Part(Struct, rename="camel", frozen=True, forbid_unknown_fields=True):
    """Names as CDI writes them; an unknown one is refused."""


class NodeEdit(_Part, frozen=True, kw_only=True):
    path: Text
    host_path: Text = ""
    type: Text = ""
    major: Number | None = None
    minor: Number | None = None
    file_mode: Mode | None = None
    permissions: Annotated[str, Meta(pattern=r"^[rwm]*[rw][rwm]*\Z")] = "rwm"
    uid: Number | None = None
    gid: Number | None = None


class MountEdit(_Part, frozen=True, kw_only=True):
    host_path: Text
    container_path: Text
    options: Annotated[tuple[Text, ...], Meta(max_length=32)] = ()
    type: Text = ""


class HookEdit(_Part, frozen=True, kw_only=True):
    hook_name: Text
    path: Text
    args: Annotated[tuple[Text, ...], Meta(max_length=256)] = ()
    env: Annotated[tuple[Text, ...], Meta(max_length=256)] = ()
    timeout: Annotated[int, Meta(ge=1, le=3600)] | None = None


class Edits(_Part, frozen=True, kw_only=True):
    """The last two: what CDI has and dsecd does not do; kept only to say so."""

    env: Annotated[tuple[Variable, ...], Meta(max_length=256)] = ()
    device_nodes: Annotated[tuple[NodeEdit, ...], Meta(max_length=128)] = ()
    mounts: Annotated[tuple[MountEdit, ...], Meta(max_length=512)] = ()
    hooks: Annotated[tuple[HookEdit, ...], Meta(max_length=64)] = ()
    additional_gids: Annotated[tuple[Number, ...], Meta(max_length=64)] = ()
    intel_rdt: Any = None
    net_devices: tuple[Any, ...] = ()


class DeviceEdit(_Part, frozen=True, kw_only=True):
    name: Annotated[str, Meta(max_length=128, pattern=rf"^{_NAME}\Z")]
    annotations: dict[str, str] = {}
    container_edits: Edits


class File(_Part, frozen=True, kw_only=True):
    """One CDI file."""

    cdi_version: Annotated[str, Meta(pattern=r"^(0\.\d+|1\.\d+)\.\d+\Z")]
    kind: Annotated[str, Meta(max_length=256, pattern=rf"^{_VENDOR}/{_CLASS}\Z")]
    annotations: dict[str, str] = {}
    devices: Annotated[tuple[DeviceEdit, ...], Meta(max_length=1024)]
    container_edits: Edits = Edits()


def read(path: Path) -> File:
    """One file. `invalid` for what it says wrong, `denied` for whose it is, `unsupported` where YAML cannot be read."""
    text = _bytes(path)
    try:
        if path.suffix == ".json":
            found = msgspec.json.decode(text, type=File)
        else:
            found = msgspec.convert(_yaml(path, text), File)
    except (msgspec.DecodeError, ValueError) as exc:
        raise DsecError("invalid", f"{path} is no CDI file: {' '.join(str(exc).split())[:200]}") from exc
    names = [device.name for device in found.devices]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DsecError("invalid", f"{path} has {found.kind}={twice[0]} twice")
    return found


def _bytes(path: Path) -> bytes:
    try:
        # Not blocking, because a FIFO of that name would hold the daemon up.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise DsecError("invalid", f"{path} cannot be read: {exc.strerror}") from exc
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise DsecError("invalid", f"{path} is no regular file of at most {MAX_BYTES >> 20} MiB")
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise DsecError("denied", f"{path} can be written by others than root, and says what of the host is shared")
        text = os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(text) != status.st_size:
        raise DsecError("invalid", f"{path} changes while it is read")
    return text


def _yaml(path: Path, text: bytes) -> Any:
    try:
        import yaml
    except ImportError as exc:
        raise DsecError(
            "unsupported", f"{path} is YAML and PyYAML is not installed: write it as JSON, or pip install 'dsecd[yaml]'"
        ) from exc
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        # A page of references to references is a billion strings, and one of brackets takes minutes. No vendor's tool
        # writes either.
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
                raise DsecError("invalid", f"{path} is no CDI file: references and {MAX_DEPTH} levels are not read")
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as exc:
        raise DsecError("invalid", f"{path} is no YAML: {' '.join(str(exc).split())[:200]}") from exc
