"""The picture of the memory bench: what the host holds for eight machines, over time, in four configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.bench.memory_work import Series

GIB: Final = 1 << 30
PARTS: Final = (
    ("vmms", "VMMs' own (emulator)", "#c9c9c9"), ("guests", "guest RAM", "#3f7fbf"),
    ("images", "page cache of the images", "#2e9e6b"), ("disks", "page cache of the disks", "#d98c3f"),
)  # fmt: skip


def draw(found: Mapping[str, Series], target: Path, title: str) -> None:
    import matplotlib  # here: the other benches do without it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, sharex=True, sharey=True, figsize=(10, 6.5), layout="constrained")
    for plot, (name, series) in zip(axes.flat, found.items(), strict=True):
        times = [sample.at for sample in series.samples]
        layers = [[getattr(sample, part) / GIB for sample in series.samples] for part, _, _ in PARTS]
        plot.stackplot(times, layers, labels=[label for _, label, _ in PARTS], colors=[c for _, _, c in PARTS])
        for start, over in series.rounds:
            plot.axvspan(start, over, color="black", alpha=0.07, lw=0)
        plot.set_title(f"{name}: peak {series.peak / GIB:.2f}, mean {series.mean / GIB:.2f} GiB", fontsize=10)
        plot.grid(alpha=0.3)
        plot.set_xlim(0, max(one.samples[-1].at for one in found.values()))
        plot.set_ylim(bottom=0)
    for plot in axes[:, 0]:
        plot.set_ylabel("GiB on the host")
    for plot in axes[1]:
        plot.set_xlabel("seconds (shaded: the programs run)")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(title)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
