"""nftables through its own library, libnftables: text in, one transaction, no process.

The library rather than the program `nft` because a process that has changed rules waits at its exit until the kernel
has freed the old ones, 10 ms and more; a context that stays does not. Where a context works, it was made (its socket is
of that network namespace).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import threading
from typing import Any, Final

import msgspec

from dsecd.errors import DsecError

LIBRARY: Final = "libnftables.so.1"
_JSON: Final = 1 << 4
_TERSE: Final = 1 << 11  # sets without their elements


def library() -> ctypes.CDLL | None:
    """None where it is not installed."""
    try:
        lib = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    lib.nft_ctx_new.restype = ctypes.c_void_p
    lib.nft_ctx_new.argtypes = [ctypes.c_uint32]
    lib.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    lib.nft_ctx_output_set_flags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    lib.nft_ctx_output_set_flags.restype = None
    lib.nft_ctx_free.restype = None
    for name in ("nft_ctx_free", "nft_ctx_buffer_output", "nft_ctx_buffer_error"):
        getattr(lib, name).argtypes = [ctypes.c_void_p]
    for name in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
        getattr(lib, name).argtypes = [ctypes.c_void_p]
        getattr(lib, name).restype = ctypes.c_char_p
    return lib


class Nft:
    """One context. Its calls block for about a millisecond: in threads, one at a time."""

    def __init__(self) -> None:
        found = library()
        if found is None:
            raise DsecError("unsupported", f"no {LIBRARY} on this host: apt-get install nftables")
        self._lib = found
        self._lock = threading.Lock()
        self._context: int | None = found.nft_ctx_new(0)
        if self._context is None:
            raise DsecError("network", "nftables: no context could be made")
        found.nft_ctx_buffer_output(self._context)
        found.nft_ctx_buffer_error(self._context)

    def close(self) -> None:
        with self._lock:
            context, self._context = self._context, None
            if context is not None:
                self._lib.nft_ctx_free(context)

    def apply(self, text: str) -> None:
        """All of it or nothing; `network` with what the kernel says."""
        self._run(text, 0)

    def listing(self, what: str) -> list[dict[str, Any]]:
        """What `nft -j list …` prints."""
        found: list[dict[str, Any]] = msgspec.json.decode(self._run(f"list {what}", _JSON | _TERSE))["nftables"]
        return found

    def _run(self, text: str, flags: int) -> bytes:
        with self._lock:
            if self._context is None:
                raise DsecError("network", "the sandboxes' router is gone")
            self._lib.nft_ctx_output_set_flags(self._context, flags)
            failed = self._lib.nft_run_cmd_from_buffer(self._context, text.encode())
            said = bytes(self._lib.nft_ctx_get_output_buffer(self._context) or b"")
            error = bytes(self._lib.nft_ctx_get_error_buffer(self._context) or b"")
        if failed:
            first = error.decode("utf-8", "replace").strip().splitlines() or ["refused"]
            raise DsecError("network", f"nftables: {first[0][:300]}")
        return said
