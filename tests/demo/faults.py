"""Sixteen small faults of the kind that slips in while editing: one operator, constant or condition each.

Each `was` occurs exactly once in its file, and click's own tests catch each one; the demo checks both every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Fault:
    """In `file` (below src/click) the text `was` becomes `now`."""

    name: str
    file: str
    was: str
    now: str

    @property
    def path(self) -> str:
        return f"src/click/{self.file}"

    def seed(self, source: str) -> str:
        return _swap(source, self.was, self.now)

    def fix(self, source: str) -> str:
        return _swap(source, self.now, self.was)


def _swap(source: str, old: str, new: str) -> str:
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times, not once")
    return source.replace(old, new)


FAULTS: Final = (
    Fault("count: + to -", "parser.py", "state.opts.get(self.dest, 0) + 1", "state.opts.get(self.dest, 0) - 1"),
    Fault("nargs: < to <=", "parser.py", "if len(state.rargs) < nargs:", "if len(state.rargs) <= nargs:"),
    Fault("variadic slice: off by one", "parser.py", "rv[spos + 1 :] = reversed(", "rv[spos:] = reversed("),
    Fault("`--` not the end of options", "parser.py", 'if arg == "--":', 'if arg == "---":'),
    Fault("open minimum: le to lt", "types.py", "operator.le if self.min_open else operator.lt",
          "operator.lt if self.min_open else operator.lt"),
    Fault("clamp: lower to upper", "types.py", "return self._clamp(self.min, 1,", "return self._clamp(self.max, 1,"),
    Fault("boolean: lost `yes`", "types.py", '{"1", "true", "t", "yes", "y", "on"}', '{"1", "true", "t", "y", "on"}'),
    Fault("choice: case not folded", "types.py", "normed_value = normed_value.casefold()",
          "normed_value = normed_value"),
    Fault("first column: min to max", "formatting.py", "first_col = min(widths[0]", "first_col = max(widths[0]"),
    Fault("usage: >= to <", "formatting.py", "if text_width >= (term_len(", "if text_width < (term_len("),
    Fault("short help: > to >=", "utils.py", "if total_length > max_length:", "if total_length >= max_length:"),
    Fault("usage error: exit 2 to 3", "exceptions.py", "exit_code = 2", "exit_code = 3"),
    Fault("context stack: -1 to 0", "globals.py", "_local.stack[-1])", "_local.stack[0])"),
    Fault("colours: reset lost", "termui.py", "bits.append(_ansi_reset_all)", "bits.append('')"),
    Fault("completion: or to and", "shell_completion.py", "if param.is_flag or param.count:",
          "if param.is_flag and param.count:"),
    Fault("flag: lost `not`", "core.py", "flag_value = not self.default", "flag_value = self.default"),
)  # fmt: skip
