"""images: a burst of tasks over eight images that are not there yet; on demand, against `podman pull` and whole ones.

The line is 200 Mbit/s and every request waits two milliseconds at its far end (`images_link`). Each configuration has a
disk of its own (`images_disk`), read cold. podman and `eager` pull the same compressed layers from docker-registry;
`lazy` reads ranges of squeezed data from an HTTP server; `lazy_trace` does so after another burst has shown what is
read; `cached` has all data on the local disk.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tests.bench import images_content, images_picture
from tests.bench.frame import Bench, Bound, Outcome, Stage, median, rounded, say, spread
from tests.bench.images_burst import TASKS
from tests.bench.images_link import far_end
from tests.bench.images_sides import Measured, Sides, imported
from tests.own import TREE

ROUNDS: Final = 3  # of what takes seconds; what takes minutes runs once
PICTURE: Final = TREE / "build/bench/images.png"


async def run(stage: Stage) -> Outcome:
    say("the images are made of Debian packages, ten minutes or so, once")
    registry = await asyncio.to_thread(images_content.registry)
    images = await asyncio.to_thread(imported, registry / "registry")
    sizes = images_content.sizes(registry)
    say(", ".join(f"{name} {size >> 20} MiB" for name, size in sizes.items()) + " of their own")
    found: dict[str, list[Measured]] = {}
    with far_end(registry / "registry", images / "far") as link:
        sides = Sides(stage.work, link, images)
        plan = [sides.podman_pull, sides.eager, *[sides.cached, sides.lazy, sides.lazy_trace] * ROUNDS]
        for side in plan:
            one = await side()
            found.setdefault(side.__name__, []).append(one)
            say(line_of(side.__name__, one))
    await asyncio.to_thread(images_picture.draw, {name: middle(many) for name, many in found.items()}, PICTURE)
    say(f"drawn: {PICTURE}")
    return outcome(found)


def line_of(name: str, one: Measured) -> str:
    return (
        f"{name:12} {one.burst.took:6.1f} s, first command {spread(one.burst.first)} s, "
        f"{one.line >> 20:5} MiB over the line, {one.disk >> 20:5} MiB written, load {one.load:.0f}"
    )


def middle(many: list[Measured]) -> Measured:
    """The round whose burst took the median time."""
    return sorted(many, key=lambda one: one.burst.took)[len(many) // 2]


def outcome(found: dict[str, list[Measured]]) -> Outcome:
    took = {name: median(one.burst.took for one in many) for name, many in found.items()}
    disk = {name: median(one.disk / 2**20 for one in many) for name, many in found.items()}
    line = {name: median(one.line / 2**20 for one in many) for name, many in found.items()}
    first = {name: sorted(at for one in many for at in one.burst.first) for name, many in found.items()}
    return Outcome(
        {
            "lazy_speedup_vs_podman": rounded(took["podman_pull"] / took["lazy"]),
            "lazy_write_ratio_vs_podman": rounded(disk["lazy"] / disk["podman_pull"]),
            "trace_speedup_vs_lazy": rounded(took["lazy"] / took["lazy_trace"]),
            "trace_vs_cached": rounded(took["lazy_trace"] / took["cached"]),
            "first_cmd_p95_s": rounded(percentile(first["lazy"], 95)),
        },
        {
            name: {
                "burst_s": took[name], "first_cmd_p50_s": rounded(percentile(first[name], 50)),
                "first_cmd_p95_s": rounded(percentile(first[name], 95)), "line_mib": line[name],
                "written_mib": disk[name], "rounds": len(many), "load": median(one.load for one in many),
            }
            for name, many in found.items()
        },
    )  # fmt: skip


def percentile(values: list[float], percent: int) -> float:
    """values: sorted."""
    return values[min(len(values) - 1, len(values) * percent // 100)]


BENCH: Final = Bench(
    "images", f"{TASKS} tasks over 8 images that are far away",
    (
        Bound("lazy_speedup_vs_podman", 2.5, most=False), Bound("lazy_write_ratio_vs_podman", 0.25),
        Bound("trace_speedup_vs_lazy", 1.2, most=False), Bound("trace_vs_cached", 1.3),
    ), run,
)  # fmt: skip
