"""Layout of tables and of values for people. Pure functions."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Sequence
from typing import Final

GAP: Final = "  "
LEAST: Final = 4  # a column is never cut below this


def printable(text: str) -> str:
    """On one line, and nothing that a terminal would obey: what a sandbox or an image says is not trusted."""
    return "".join(c if c.isprintable() else "·" for c in text.replace("\n", " "))


def width_of(text: str) -> int:
    """Columns a terminal gives it."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """At most `width` columns, with an ellipsis where something is missing."""
    if width_of(text) <= width:
        return text
    while width_of(text) > width - 1:
        text = text[:-1]
    return text + "…"


def layout(head: Sequence[str], rows: Sequence[Sequence[str]], shrink: Sequence[int], width: int) -> list[str]:
    """Lines of a table; width 0: as wide as it wants."""
    cells = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(width_of(row[n]) for row in cells) for n in range(len(head))]
    while width and sum(widths) + len(GAP) * (len(head) - 1) > width:
        n = max(shrink, key=lambda n: widths[n], default=None)
        if n is None or widths[n] <= LEAST:
            break
        widths[n] -= 1
    lines = []
    for row in cells:
        fitted = [cut(cell, widths[n]) for n, cell in enumerate(row)]
        padded = [cell + " " * (widths[n] - width_of(cell)) for n, cell in enumerate(fitted)]
        line = GAP.join(padded).rstrip()
        lines.append(cut(line, width) if width else line)
    return lines


def size(count: float) -> str:
    """Bytes in binary units: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def span(seconds: float) -> str:
    """A time in its one or two largest units: `90s`, `5m`, `3h12m`, `2d4h`."""
    seconds = max(0, int(seconds))
    if seconds < 100:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m"
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    if hours < 24:
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    return f"{hours // 24}d{hours % 24}h" if hours % 24 else f"{hours // 24}d"


def since(at: float | None) -> str:
    return span(time.time() - at) if at else "-"


def until(at: float | None) -> str:
    return span(at - time.time()) if at else "-"


def moment(at: float | None) -> str:
    """Local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "-"
