"""Where the data files of images may live: a directory, an HTTP(S) server, an OCI registry.

A store is asked for ranges of a blob by a name from an image's manifest. It is not trusted: whoever reads checks every
chunk against the image's own sums.
"""

from __future__ import annotations

from typing import Any, Protocol

from dsecd.config import StoreConfig as StoreConfig
from dsecd.errors import DsecError


class BlobStore(Protocol):
    """One configured store. Methods block and are called from threads of the page server."""

    name: str

    def read(self, blob: str, offset: int, size: int, timeout_s: float) -> bytes:
        """Exactly `size` bytes of a blob. DsecError `image` (infra, retryable) when they cannot be had in time:
        unreachable, redirected elsewhere, short, a wrong length. Never more, never fewer bytes."""
        ...

    def close(self) -> None:
        """Let go of connections and threads. A read under way fails or ends on its own."""
        ...


def unreadable(store: str, blob: str, why: str, **detail: Any) -> DsecError:
    """The one error of a store: the platform's fault, worth another try."""
    message = f"store {store}: {blob[:80]}: {why}"
    return DsecError("image", message, infra=True, retryable=True, detail={"store": store, **detail})


def open_store(name: str, config: StoreConfig) -> BlobStore:
    """The store of a configuration entry; `invalid` when an entry lacks what its kind needs."""
    from dsecd.erofs.stores.directory import DirectoryStore
    from dsecd.erofs.stores.http import HttpStore
    from dsecd.erofs.stores.registry import RegistryStore
    from dsecd.erofs.stores.squeezed import SqueezedStore

    store: BlobStore
    match config.kind:
        case "path":
            store = DirectoryStore(name, config)
        case "http":
            store = HttpStore(name, config)
        case "registry":
            store = RegistryStore(name, config)
    return SqueezedStore(store) if config.squeezed else store
