"""`dsecctl devices`: what devices there are, and who has them."""

from __future__ import annotations

from typing import Final

from dsecctl import output
from dsecctl.app import App, command, pass_app
from dsecd.wire import devices as wire

HEAD: Final = ("POOL", "DEVICE", "USED", "BY")


@command(
    "devices",
    examples="""
    dsecctl devices
    dsecctl devices --json | jq '.pools[] | {name, waiting}'
    """,
)
@pass_app
async def devices(app: App) -> None:
    """List device pools, their devices, and who has them.

    Pools are the daemon's configuration, their devices those of the host's CDI files. A device or a file that cannot be
    used stands below the table with the reason; requests that wait are counted there too.
    """
    async with app.client() as client:
        found = await client.devices()
    if app.json:
        output.emit(found)
        return
    output.table(HEAD, [_row(pool, one) for pool in found.pools for one in pool.devices], shrink=(3, 1))
    for pool in found.pools:
        if pool.waiting:
            output.wrapped(f"{pool.name}: ", f"{pool.waiting} requests wait")
        if not pool.devices:
            output.wrapped(f"{pool.name}: ", "no device of this host is in it")
        for one in pool.devices:
            if one.problem:
                output.wrapped("not usable: ", one.problem)
    for problem in found.problems:
        output.wrapped("not usable: ", problem.text)


def _row(pool: wire.DevicePool, one: wire.Device) -> tuple[str, ...]:
    used = "broken" if one.problem else f"{len(one.sandboxes)}/{pool.share}"
    return pool.name, one.name, used, ", ".join(one.sandboxes) or "-"
