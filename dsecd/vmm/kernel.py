"""The store of guest kernels: what is on disk, and how it survives being killed at any instant."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import secrets
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from dsecd.erofs.store import Work
from dsecd.errors import DsecError
from dsecd.vmm.features import MICROVM, How, features_of, need
from dsecd.vmm.initramfs import write_initramfs
from dsecd.vmm.shelf import Shelf

Kind = Literal["deb", "build", "files"]


class Kernel(Struct, frozen=True, kw_only=True):
    """One kernel. source: the package it came from; release: as `uname -r` says it; digest: of vmlinux and modules.

    modules: files of its directory in load order, relative to it; empty: everything is built in. Sizes in bytes.
    recipe: digest of all that decides what it becomes, so that the same is not made twice; empty: unknown.
    """

    name: str
    kind: Kind
    source: str
    version: str
    release: str
    digest: str
    created: str
    size: int
    modules: tuple[str, ...] = ()
    features: dict[str, How] = {}
    recipe: str = ""

    def need(self, *features: str) -> None:
        """DsecError `vmm`, one sentence, when it cannot start a microVM or lacks one of these (dsecd.vmm.features)."""
        need(self.name, self.features, (*MICROVM, *features))


class KernelStore(Shelf):
    """Kernels by name.

        <root>/                   a `Shelf`
            apt/                  package lists (dsecd.vmm.apt); may be removed at any time
            <name>/               one kernel, immutable but for its initramfs files
                kernel.json       `Kernel`
                vmlinux           uncompressed, entered by PVH
                config
                modules/NNN-<name>.ko
                initrd-<16 hex>   one per agent: the sha256 of agent and modules; made when it is first asked for

    Machines that run do not read these files any more.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root, "kernel", ["apt"])

    def list(self) -> tuple[Kernel, ...]:
        """Every kernel that can be read, newest first."""
        found = []
        for name in self.names():
            with contextlib.suppress(DsecError):  # a damaged one is refused by name, and can be replaced
                found.append(self.get(name))
        return tuple(sorted(found, key=lambda kernel: (kernel.created, kernel.name), reverse=True))

    def get(self, name: str) -> Kernel:
        """By name. `not_found`, or `vmm` when it is damaged."""
        self.check_name(name)
        try:
            kernel = msgspec.json.decode((self.root / name / "kernel.json").read_bytes(), type=Kernel)
            size = (self.root / name / "vmlinux").stat().st_size
        except FileNotFoundError as exc:
            if exc.filename and Path(exc.filename).name == "vmlinux":
                raise DsecError("vmm", f"the kernel {name!r} has lost its vmlinux: import it again") from exc
            raise DsecError("not_found", f"there is no kernel {name!r}: see `dsecctl kernel list`") from exc
        except (msgspec.ValidationError, msgspec.DecodeError) as exc:
            raise DsecError("vmm", f"the kernel {name!r} is damaged: import it again") from exc
        if size != kernel.size:
            raise DsecError("vmm", f"the kernel {name!r} is {size} bytes and should be {kernel.size}: import it again")
        return msgspec.structs.replace(kernel, name=name)

    def default(self, name: str = "", *features: str) -> Kernel:
        """That one, or with no name the newest one that can start microVMs and has these features too.

        `vmm` when there is none, or it lacks something.
        """
        found = (self.get(name),) if name else self.list()
        for kernel in found:
            if all(kernel.features.get(feature, "absent") != "absent" for feature in (*MICROVM, *features)):
                return kernel
        for kernel in found:
            kernel.need(*features)
        raise DsecError("vmm", "there is no guest kernel yet: get one with `dsecctl kernel import-deb`")

    def vmlinux(self, kernel: Kernel) -> Path:
        return self.root / kernel.name / "vmlinux"

    def initrd(self, kernel: Kernel, agent: Path) -> Path:
        """The initramfs with this agent and the kernel's modules; made on first use, which takes milliseconds."""
        directory = self.root / kernel.name
        modules = [directory / one for one in kernel.modules]
        digest = hashlib.sha256(agent.read_bytes() + kernel.digest.encode()).hexdigest()
        target = directory / f"initrd-{digest[:16]}"
        if target.exists():
            return target
        fresh = directory / f".initrd-{secrets.token_hex(4)}"
        try:
            with fresh.open("xb") as out:
                write_initramfs(out, agent, modules)
                out.flush()
                os.fsync(out.fileno())
            fresh.rename(target)
        except FileNotFoundError as exc:
            raise DsecError("vmm", f"the kernel {kernel.name!r} is gone or damaged: import it again") from exc
        finally:
            fresh.unlink(missing_ok=True)
        return target

    def commit(self, work: Work, name: str) -> Kernel:
        """Make what `describe` described in the workspace's directory `kernel` the kernel of that name."""
        self.put(work.path / "kernel", name)
        return self.get(name)


def describe(directory: Path, *, kind: Kind, source: str, version: str, release: str, recipe: str = "") -> Kernel:
    """Write kernel.json for `vmlinux`, `config` and `modules/` of that directory; what a commit needs."""
    vmlinux = (directory / "vmlinux").read_bytes()
    modules = sorted((directory / "modules").glob("*.ko"))
    digest = hashlib.sha256(vmlinux)
    for module in modules:
        digest.update(hashlib.sha256(module.read_bytes()).digest())
    loadable = {module.stem.partition("-")[2] for module in modules}
    kernel = Kernel(
        name="", kind=kind, source=source, version=version, release=release, digest="sha256:" + digest.hexdigest(),
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), size=len(vmlinux), recipe=recipe,
        modules=tuple(f"modules/{module.name}" for module in modules),
        features=features_of((directory / "config").read_text(), loadable),
    )  # fmt: skip
    (directory / "kernel.json").write_bytes(msgspec.json.encode(kernel))
    return kernel
