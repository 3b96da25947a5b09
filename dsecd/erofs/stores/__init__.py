"""Where the data files of images may live: a directory, an HTTP(S) server, an OCI registry.

A store is asked for ranges of a blob by a name from an image's manifest. It is not trusted: whoever reads checks every
chunk against the image's own sums.
"""

from __future__ import annotations

from typing import Protocol


class BlobStore(Protocol):
    """One configured store. Methods block and are called from threads of the page server."""

    name: str

    def read(self, blob: str, offset: int, size: int, timeout_s: float) -> bytes:
        """Exactly `size` bytes of a blob. DsecError `image` (infra, retryable) when they cannot be had in time:
        unreachable, redirected elsewhere, short, a wrong length. Never more, never fewer bytes."""
        ...
