"""`[environments]` of the configuration: what may be packed, what is left out of it, and who may start it."""

from __future__ import annotations

import re
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from dsecd.configtables import table_example, wrong_in_table

Glob = Annotated[str, Meta(pattern=r"^/[^\0]*$", max_length=1024)]

# Globs are absolute paths inside; `*` and `?` stay within a name, `**` goes through directories. What matches, matches
# with all that is below it.
_FORBIDDEN: Final = (
    "/root/.ssh/id_*", "/home/*/.ssh/id_*", "/root/.aws/credentials", "/home/*/.aws/credentials",
    "/root/.netrc", "/home/*/.netrc", "/root/.git-credentials", "/home/*/.git-credentials",
    "/root/.docker/config.json", "/home/*/.docker/config.json", "/root/.kube/config", "/home/*/.kube/config",
    "/core", "/core.*",
)  # fmt: skip
_SECRETS: Final = {
    "private-key": "-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----",
    "aws-key": "AKIA[0-9A-Z]{16}",
    "github-token": "gh[pousr]_[A-Za-z0-9]{36}",
    "gitlab-token": "glpat-[A-Za-z0-9_-]{20}",
    "slack-token": "xox[abprs]-[A-Za-z0-9-]{10,}",
    "model-key": "sk-[A-Za-z0-9_-]{40,}",
}
_SCRUB: Final = (
    "/tmp/**", "/var/tmp/**", "/run/**", "/var/log/**", "/var/lib/apt/lists/**", "/var/cache/apt/**",
    "/root/.cache/**", "/home/*/.cache/**", "/root/.npm/_*/**", "/home/*/.npm/_*/**",
    "/root/.*_history", "/home/*/.*_history", "/root/.*hst*", "/home/*/.*hst*", "/root/.viminfo", "/home/*/.viminfo",
)  # fmt: skip


class EnvConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All keys of [environments]."""

    max_mb: Annotated[int, Meta(description="Most data of one pack, in MiB.", ge=1, le=1 << 24)] = 8192
    max_files: Annotated[int, Meta(description="Most files of one pack.", ge=1, le=50_000_000)] = 500_000
    forbidden: Annotated[
        tuple[Glob, ...],
        Meta(
            description="Paths that keep a pack from being made. `*` and `?` stay within a name, `**` goes through "
            "directories; what matches, matches with all that is below it."
        ),
    ] = _FORBIDDEN
    secrets: Annotated[
        dict[Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")], Annotated[str, Meta(max_length=1024)]],
        Meta(description="Regular expressions (Python's); a text file that has one keeps a pack from being made."),
    ] = field(default_factory=_SECRETS.copy)
    secrets_max_kb: Annotated[int, Meta(description="Larger files are not searched.", ge=0, le=1 << 20)] = 256
    scrub: Annotated[
        tuple[Glob, ...],
        Meta(description="What a builder leaves behind and no pack has; what lower layers have there shows again."),
    ] = _SCRUB
    separate_accounts: Annotated[
        bool, Meta(description="Whoever (by uid) packed an environment, or one below it, may not start it.")
    ] = False


def documented() -> str:
    """The defaults as TOML comments."""
    return table_example("Environments: packed sandboxes.", "environments", EnvConfig())


def wrong(table: object) -> tuple[str, str] | None:
    """The first thing wrong with a parsed `environments` table, as (key, what is wrong)."""
    if (found := wrong_in_table("environments", table, EnvConfig)) is not None:
        return found
    assert isinstance(table, dict)
    for name, pattern in table.get("secrets", {}).items():
        try:
            re.compile(pattern.encode())
        except re.error as exc:
            return name, f"environments.secrets.{name} = {pattern!r}: not a regular expression ({exc})"
    return None
