"""Logs: journald with fields when stderr is the journal, else lines on stderr.

Every line of a request carries its id, every line about a sandbox that one's: as fields SANDBOX_ID and REQUEST_ID in
the journal (`journalctl SANDBOX_ID=…`), in brackets on stderr.
"""

from __future__ import annotations

import logging
import os
import sys
from contextvars import ContextVar

# The idempotency key, or else the JSON-RPC id, of the request that this task works for.
request_id: ContextVar[str] = ContextVar("request_id", default="")


class _Fields(logging.Filter):
    """Puts both ids on the record, under the names that the journal takes."""

    def filter(self, record: logging.LogRecord) -> bool:
        sandbox, request = getattr(record, "sandbox_id", ""), request_id.get()
        shown = [text for text in (sandbox, request and f"request {request}") if text]
        record.__dict__.update(SANDBOX_ID=sandbox, REQUEST_ID=request, where=f" [{', '.join(shown)}]" if shown else "")
        return True


def set_up(level: str) -> None:
    """Once, at start."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    handler = _journal() or _stderr()
    handler.addFilter(_Fields())
    root.handlers[:] = [handler]
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _stderr() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s%(where)s %(message)s"))
    return handler


def _journal() -> logging.Handler | None:
    """systemd-python's handler, when stderr is connected to the journal (systemd.exec(5), $JOURNAL_STREAM)."""
    info = os.fstat(2)
    if os.environ.get("JOURNAL_STREAM") != f"{info.st_dev}:{info.st_ino}":
        return None
    try:
        from systemd.journal import JournalHandler
    except ImportError:
        return None
    handler: logging.Handler = JournalHandler(SYSLOG_IDENTIFIER="dsecd")
    return handler
