"""What a pack may hold and what is left out of it: globs over paths, patterns over small files. Pure, and no I/O.

Paths and contents are a tenant's: they are bytes, and what is said of them is escaped and bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from dsecd.envconfig import EnvConfig
from dsecd.errors import DsecError

ANSWERS_MAX: Final = 256
TEXT_HEAD: Final = 8000
_STARS: Final = 2  # `**` in one glob: each one more multiplies what a hostile path costs


def compile_globs(globs: Iterable[str]) -> re.Pattern[bytes] | None:
    """Matches paths without their leading slash, and all that is below what matches. None: no glob, no match."""
    parts = [_regex(glob) for glob in globs]
    return re.compile(b"(?:" + b"|".join(parts) + rb")(?:/.*)?\Z", re.DOTALL) if parts else None


def _regex(glob: str) -> bytes:
    raw = glob.encode("utf-8", "surrogateescape")
    if not raw.startswith(b"/") or raw.strip(b"/") == b"" or b".." in raw.split(b"/") or raw.count(b"**") > _STARS:
        raise DsecError("invalid", f"{glob[:100]!r} is no absolute path, perhaps with `*`, `?` and at most two `**`")
    out = b""
    for part in re.split(rb"(\*\*/|\*\*|\*|\?)", raw.strip(b"/")):
        out += {b"**/": b"(?:.*/)?", b"**": b".+", b"*": b"[^/]*", b"?": b"[^/]"}.get(part) or re.escape(part)
    return out


class Checker:
    """Holds one pack against the rules, name by name. Raises `denied` with the rule and the path."""

    def __init__(self, rules: EnvConfig) -> None:
        self._rules = rules
        self._forbidden = [(glob, compile_globs([glob])) for glob in rules.forbidden]
        self._any_forbidden = compile_globs(rules.forbidden)
        self._secrets = [(name, re.compile(pattern.encode())) for name, pattern in rules.secrets.items()]
        self._scrub = compile_globs(rules.scrub)
        self._files = self._bytes = 0
        self.search_below = rules.secrets_max_kb << 10 if rules.secrets else 0

    def residue(self, path: bytes) -> bool:
        """Whether a builder's leftovers match."""
        return self._scrub is not None and self._scrub.match(path) is not None

    def count(self, path: bytes) -> None:
        """One more name."""
        self._files += 1
        if self._files > self._rules.max_files:
            raise _denied("max_files", path, f"more than {self._rules.max_files} files")

    def name(self, path: bytes) -> None:
        """One more name, of something that will be seen."""
        self.count(path)
        if self._any_forbidden is not None and self._any_forbidden.match(path) is not None:
            glob = next(glob for glob, one in self._forbidden if one is not None and one.match(path))
            raise _denied("forbidden", path, f"{shown(path)} is forbidden by {glob!r}")

    def size(self, path: bytes, stored: int, whole: int) -> None:
        """One more file. stored: bytes; whole: with its holes, which take metadata (8 bytes for each MiB)."""
        self._bytes += stored + (whole >> 8)
        if self._bytes > self._rules.max_mb << 20:
            raise _denied("max_mb", path, f"more than {self._rules.max_mb} MiB of data")

    def content(self, path: bytes, data: bytes) -> None:
        """Of a file that is smaller than `search_below`.

        What has a NUL near its beginning is no text, as git has it: to search that would take longer than all else.
        """
        if b"\0" in data[:TEXT_HEAD]:
            return
        for name, pattern in self._secrets:
            if pattern.search(data) is not None:
                raise _denied(f"secrets.{name}", path, f"{shown(path)} holds what looks like a {name}")


def shown(path: bytes) -> str:
    """For a sentence: never raw, never long."""
    return "/" + repr(path[:200])[2:-1] + ("..." if len(path) > 200 else "")


def _denied(rule: str, path: bytes, what: str) -> DsecError:
    message = f"rule environments.{rule}: {what}; remove it, or change the daemon's configuration"
    return DsecError("denied", message, detail={"rule": rule, "path": shown(path)})
