"""The one exception of the project and the closed list of error kinds.

Everything that can go wrong for a reason a caller may care about is a `DsecError` with one of `KINDS`. The wire turns
it into one reply; the SDK turns the reply back into the same class. Anything else that reaches the top is a bug and is
reported as `internal`.
"""

from __future__ import annotations

import errno
from typing import Any, Final, Literal, get_args

Kind = Literal[
    "invalid", "not_found", "conflict", "capacity", "quota", "timeout", "denied", "unsupported", "image", "oom",
    "disk_full", "pids", "sandbox_dead", "outcome_unknown", "vmm", "network", "shutting_down", "internal",
]  # fmt: skip
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

# Faults of the platform, which a trainer must not count against the model (docs/protocol.md).
INFRA_KINDS: Final[frozenset[str]] = frozenset(
    {"capacity", "image", "sandbox_dead", "outcome_unknown", "vmm", "network", "shutting_down", "internal"}
)
RETRYABLE_KINDS: Final[frozenset[str]] = frozenset({"capacity", "quota", "shutting_down", "network"})

# JSON-RPC wants a number too. -32602 and friends are the standard's; ours count down from -32000.
CODES: Final[dict[str, int]] = {"invalid": -32602, "internal": -32603} | {
    kind: -32000 - i for i, kind in enumerate(KINDS) if kind not in ("invalid", "internal")
}


class DsecError(Exception):
    """One sentence for people, a stable kind for programs.

    `infra` and `retryable` default by kind; `detail` is a small JSON object (say which limit, which layer).
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        infra: bool | None = None,
        retryable: bool | None = None,
        sandbox_id: str | None = None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message
        self.infra = kind in INFRA_KINDS if infra is None else infra
        self.retryable = kind in RETRYABLE_KINDS if retryable is None else retryable
        self.sandbox_id = sandbox_id
        self.detail = detail or {}

    def __str__(self) -> str:
        return f"{self.message} [{self.kind}]"


_BY_ERRNO: Final[dict[int, Kind]] = {
    errno.ENOENT: "not_found", errno.EEXIST: "conflict", errno.ENOTEMPTY: "conflict", errno.EBUSY: "conflict",
    errno.EACCES: "denied", errno.EPERM: "denied", errno.EROFS: "denied", errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full", errno.ENOTDIR: "invalid", errno.EISDIR: "invalid", errno.EINVAL: "invalid",
    errno.ENAMETOOLONG: "invalid", errno.ELOOP: "invalid", errno.EFBIG: "invalid", errno.EXDEV: "invalid",
    errno.E2BIG: "invalid", errno.ENOEXEC: "invalid", errno.ENXIO: "invalid", errno.ENOMEM: "oom",
    errno.EAGAIN: "pids", errno.EIO: "image", errno.ECONNREFUSED: "not_found",
}  # fmt: skip


def kind_of_errno(number: int) -> Kind:
    """The kind for an errno that came from a tenant's file system or process (never from our own bookkeeping)."""
    return _BY_ERRNO.get(number, "internal")
