"""`[fncall]` of the configuration: how many places of calls there are, and which languages."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dsecd.configtables import table_example, wrong_in_table


class Language(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One language: the code becomes `file`; `compile`, if any, makes `product` of it; `run` is what is judged."""

    file: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    run: Annotated[list[str], Meta(min_length=1, max_length=64)]
    compile: Annotated[list[str], Meta(max_length=64)] = []
    product: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "main"
    env: dict[str, str] = {}
    warm: bool = False  # Python: by the zygote, where the image's python3 can be one
    compile_cpu_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    compile_memory_mb: Annotated[int, Meta(ge=16, le=1 << 20)] = 1024
    processes: Annotated[int, Meta(ge=0, le=4096)] = 0  # that its runtime needs beside the program's own


class FnCallConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All keys of [fncall]."""

    image: Annotated[str, Meta(description="Image of calls that name none. Empty: each must name one.")] = ""
    boxes_min: Annotated[
        int, Meta(description="Places that a pool (an image, warm or not) keeps once it was used.", ge=0, le=256)
    ] = 1
    boxes_max: Annotated[int, Meta(description="Most places of one pool; 0: two for each CPU.", ge=0, le=256)] = 0
    recycle_after: Annotated[
        int, Meta(description="Calls after which a place is replaced, at the latest.", ge=1, le=1_000_000)
    ] = 10_000
    at_once: Annotated[
        int, Meta(description="Calls that run at once, each on a CPU of its own; 0: as many as CPUs.", ge=0, le=4096)
    ] = 0
    idle_s: Annotated[float, Meta(description="Seconds without a call after which a pool shrinks.", ge=1)] = 300.0
    memory_max_mb: Annotated[int, Meta(description="Most memory of one call, in MiB.", ge=16, le=1 << 20)] = 4096
    warm_images: Annotated[
        list[str],
        Meta(
            description="More images whose python3 may be kept warm; `image` may. It runs as the place's root, with "
            "more system calls than any command has: list those that you trust."
        ),
    ] = []
    preload: Annotated[
        list[str], Meta(description="Modules that a warm Python has loaded; those that an image lacks are left out.")
    ] = []
    languages: Annotated[
        dict[str, Language],
        Meta(description="More languages, or others: [fncall.languages.NAME], as in languages.toml."),
    ] = {}


def documented() -> str:
    """The defaults as TOML, all of it as comments: what is written below a table that is open would be its."""
    return table_example("Calls (FnCall).", "fncall", FnCallConfig(), without=("languages",))


def wrong(table: object) -> tuple[str, str] | None:
    """The first thing wrong with a parsed `fncall` table, as (key, what is wrong)."""
    return wrong_in_table("fncall", table, FnCallConfig)
