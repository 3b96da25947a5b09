"""Takes out of a copied space all that is not below some paths: what lower layers have there shows again.

The tree is a tenant's. Paths are walked name by name through descriptors that follow no symlink, and nothing is
removed: it is moved aside by renames, which take no longer for a tree of any size or depth, and goes with the space.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_OPAQUE: Final = "trusted.overlay.opaque"
_ASIDE: Final = "aside"

Wanted = dict[str, "Wanted | None"]  # by name; None: with all that is below it


def keep_only(space: Path, paths: Sequence[str]) -> None:
    """`space` holds `upper`. paths: absolute, inside, without `..`."""
    wanted: Wanted = {}
    for path in paths:
        _want(wanted, [part for part in path.split("/") if part not in ("", ".")])
    (space / _ASIDE).mkdir(mode=0o700)
    with _directory(space / _ASIDE) as aside, _directory(space / "upper") as upper:
        _prune(upper, wanted, aside, 0)


def _want(wanted: Wanted, parts: list[str]) -> None:
    *parents, name = parts
    for part in parents:
        below = wanted.setdefault(part, {})
        if below is None:
            return
        wanted = below
    wanted[name] = None


def _prune(fd: int, wanted: Wanted, aside: int, count: int) -> int:
    """As deep as the paths are. count: of names that were moved so far."""
    for name in os.listdir(fd):
        if name in wanted and (below := wanted[name]) is None:
            continue
        if name in wanted and below is not None and stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode):
            with _directory(name, fd) as inner:
                _see_through(inner)
                count = _prune(inner, below, aside, count)
            continue
        os.rename(name, str(count), src_dir_fd=fd, dst_dir_fd=aside)
        count += 1
    return count


def _see_through(fd: int) -> None:
    """A directory that hid what is below it, and of which only a part is kept."""
    try:
        os.removexattr(fd, _OPAQUE)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise


@contextmanager
def _directory(path: Path | str, above: int | None = None) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        yield fd
    finally:
        os.close(fd)
