"""Counters, gauges and histograms, and how they are written: OpenMetrics text 1.0.

A family is declared once, at the top of the module that counts it, in the registry of its program. Labels have few
values that are known beforehand, never an id or a name that somebody chose. Nothing here locks:
families belong to the loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias, TypeVar

Labels: TypeAlias = tuple[str, ...]  # values, in the order of the family's label names
Type = Literal["counter", "gauge", "histogram", "info", "summary"]

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Family:
    """One name with all its label values. unit: "" or what the name ends in."""

    type: Type = "gauge"

    def __init__(self, name: str, text: str, labels: Labels, unit: str) -> None:
        assert not unit or name.endswith(f"_{unit}"), f"{name} does not end in its unit"
        self.name, self.text, self.labels, self.unit = name, text, labels, unit
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def lines(self) -> Iterator[str]:
        suffix = {"counter": "_total", "info": "_info"}.get(self.type, "")
        for values, number in self.values.items():
            yield f"{self.name}{suffix}{self._braces(values)} {_number(number)}"

    def _braces(self, values: Labels, more: str = "") -> str:
        parts = [f'{name}="{_escaped(value)}"' for name, value in zip(self.labels, values, strict=True)]
        parts += [more] if more else []
        return f"{{{','.join(parts)}}}" if parts else ""


class Gauge(Family):
    """What is now."""

    def set(self, value: float, *labels: str) -> None:
        self.values[labels] = value

    def clear(self) -> None:
        """Of a gauge with labels: none is there any more."""
        self.values.clear()


class Counter(Family):
    """What only rises. `set` is for what somebody else counts."""

    type: Type = "counter"

    def add(self, value: float, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + value

    def set(self, value: float, *labels: str) -> None:
        self.values[labels] = value


class Info(Gauge):
    """A 1 whose labels say it."""

    type: Type = "info"


class Summary(Family):
    """How many, and their sum, of what another process counts."""

    type: Type = "summary"

    def __init__(self, name: str, text: str, labels: Labels, unit: str) -> None:
        super().__init__(name, text, labels, unit)
        self._count = self._sum = 0.0

    def set(self, count: float, total: float) -> None:
        self._count, self._sum = count, total

    def lines(self) -> Iterator[str]:
        yield f"{self.name}_count {_number(self._count)}"
        yield f"{self.name}_sum {_number(self._sum)}"


class Histogram(Family):
    """How often, and how much. Bounds as in SECONDS: from what a call takes to what a long command does."""

    type: Type = "histogram"

    def __init__(self, name: str, text: str, labels: Labels, unit: str, bounds: tuple[float, ...]) -> None:
        super().__init__(name, text, labels, unit)
        self.bounds = bounds
        # Per label values: one count for each bound, one for what is above all, then the sum.
        self._counts: dict[Labels, list[float]] = {} if labels else {(): [0.0] * (len(bounds) + 2)}

    def observe(self, value: float, *labels: str) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0.0] * (len(self.bounds) + 2)
        counts[bisect_left(self.bounds, value)] += 1
        counts[-1] += value

    def lines(self) -> Iterator[str]:
        for labels, counts in self._counts.items():
            below = 0.0
            for bound, count in zip((*self.bounds, float("inf")), counts[:-1], strict=True):
                below += count
                le = "+Inf" if bound == float("inf") else repr(bound)
                braces = self._braces(labels, f'le="{le}"')
                yield f"{self.name}_bucket{braces} {_number(below)}"
            yield f"{self.name}_count{self._braces(labels)} {_number(below)}"
            yield f"{self.name}_sum{self._braces(labels)} {_number(counts[-1])}"


F = TypeVar("F", bound=Family)


class Registry:
    """All families of one program, in the order of their names when written."""

    def __init__(self) -> None:
        self.families: dict[str, Family] = {}

    def gauge(self, name: str, text: str, labels: Labels = (), unit: str = "") -> Gauge:
        return self._with(Gauge(name, text, labels, unit))

    def counter(self, name: str, text: str, labels: Labels = (), unit: str = "") -> Counter:
        """`name` is without the `_total` that its samples end in."""
        return self._with(Counter(name, text, labels, unit))

    def info(self, name: str, text: str, labels: Labels) -> Info:
        return self._with(Info(name, text, labels, ""))

    def summary(self, name: str, text: str, unit: str = "") -> Summary:
        return self._with(Summary(name, text, (), unit))

    def histogram(
        self, name: str, text: str, labels: Labels = (), unit: str = "seconds", bounds: tuple[float, ...] = SECONDS
    ) -> Histogram:
        return self._with(Histogram(name, text, labels, unit, bounds))

    def _with(self, family: F) -> F:
        assert family.name not in self.families, f"{family.name} is declared twice"
        self.families[family.name] = family
        return family

    def text(self) -> str:
        """The exposition, up to its `# EOF`."""
        out: list[str] = []
        for name, family in sorted(self.families.items()):
            out.append(f"# TYPE {name} {family.type}")
            if family.unit:
                out.append(f"# UNIT {name} {family.unit}")
            out.append(f"# HELP {name} {_escaped(family.text)}")
            out.extend(family.lines())
        out.append("# EOF\n")
        return "\n".join(out)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


DAEMON: Final = Registry()
FLEET: Final = Registry()
