"""The picture of the images bench: running tasks and what the disk has written, over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.bench.images_sides import Measured

COLOURS: Final = {
    "podman_pull": "#b0413e", "eager": "#d98c3f", "lazy": "#3f7fbf", "lazy_trace": "#2e9e6b", "cached": "#777777",
}  # fmt: skip


def draw(found: Mapping[str, Measured], target: Path) -> None:
    import matplotlib  # here: the other benches do without it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (running, written) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6.5), layout="constrained")
    for name, one in found.items():
        style = {"color": COLOURS[name], "label": f"{name} ({one.burst.took:.0f} s)", "linewidth": 1.8}
        changes = sorted([(at, 1) for at in one.burst.first] + [(at, -1) for at in one.burst.over])
        times, counts, now = [0.0], [0], 0
        for at, change in changes:
            now += change
            times.append(at)
            counts.append(now)
        running.step(times, counts, where="post", **style)
        written.plot([at for at, _ in one.samples], [size / 2**20 for _, size in one.samples], **style)
    running.set_ylabel("tasks running (first command done)")
    running.set_title(
        f"A burst of {len(next(iter(found.values())).burst.over)} tasks over 8 images; a line of 200 Mbit/s"
    )
    running.yaxis.get_major_locator().set_params(integer=True)
    figure.legend(*running.get_legend_handles_labels(), loc="outside lower center", ncols=len(found))
    written.set_ylabel("MiB written to disk, in all")
    written.set_xlabel("seconds since the burst began")
    for axes in (running, written):
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
