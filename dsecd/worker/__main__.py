"""`python3 -m dsecd.worker`: get the task, drive the scaffold, deliver the result."""

from __future__ import annotations

import asyncio
import sys

from dsecd.errors import DsecError
from dsecd.worker.link import Link
from dsecd.worker.scaffold import drive


async def main() -> int:
    """Exit status 1, and the reason on stderr, when there is no result: the daemon passes that on."""
    async with Link() as link:
        try:
            await drive(link)
        except DsecError as exc:
            sys.stderr.write(f"{exc}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
