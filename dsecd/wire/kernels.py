"""Messages of `kernel.*`: what virtual machines boot."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from dsecd.wire.base import Params, Result

KernelName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-z0-9][a-z0-9._+-]*$")]
KernelPackage = Annotated[str, Meta(pattern=r"^linux-image-[a-z0-9+.-]{1,120}$")]
KernelOption = Annotated[
    str, Meta(max_length=512, pattern=r'^CONFIG_[A-Z0-9_]+=(y|n|-?[0-9]+|0x[0-9a-fA-F]+|"[^"\n\\]*")$')
]


class ImportDeb(Params):
    """`kernel.import_deb`: the kernel of a Debian package of the host's apt sources, or of the one it depends on."""

    name: KernelName = "cloud"
    package: KernelPackage = "linux-image-cloud-amd64"


class Build(Params):
    """`kernel.build`: a lean kernel from the distribution's source. options: lines of its configuration to add."""

    name: KernelName = "lean"
    options: Annotated[list[KernelOption], Meta(max_length=256)] = []


class Kernel(Result):
    """A guest kernel. kind: `deb`, `build` or `files`; source: the package; release: as `uname -r`; size in bytes.

    modules: those in its initramfs, in load order. features: `built-in`, `module` or `absent`. default: what machines
    boot that ask for none.
    """

    name: str
    kind: str
    source: str
    version: str
    release: str
    digest: str
    created: str
    size: int
    modules: list[str] = []
    features: dict[str, str] = {}
    default: bool = False


class ListKernels(Params):
    """`kernel.list`."""


class Kernels(Result):
    """Newest first."""

    kernels: list[Kernel]


class KernelByName(Params):
    name: KernelName
