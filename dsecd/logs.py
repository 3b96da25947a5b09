"""Logs: journald with fields when stderr is the journal, else lines on stderr."""

from __future__ import annotations

import logging
import os
import sys


class _Lines(logging.Formatter):
    """`level logger [sandbox] text`; systemd takes the level from the prefix elsewhere."""

    def format(self, record: logging.LogRecord) -> str:
        sandbox = getattr(record, "sandbox_id", None)
        record.where = f" [{sandbox}]" if sandbox else ""
        return super().format(record)


def set_up(level: str) -> None:
    """Once, at start."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [_journal() or _stderr()]
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _stderr() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(asctime)s %(levelname)-7s %(name)s%(where)s %(message)s"))
    return handler


def _journal() -> logging.Handler | None:
    """JournalHandler turns `extra` into fields (SANDBOX_ID, REQUEST_ID)."""
    stream = os.environ.get("JOURNAL_STREAM")
    if not stream:
        return None
    info = os.fstat(2)
    if stream != f"{info.st_dev}:{info.st_ino}":
        return None
    try:
        from systemd.journal import JournalHandler
    except ImportError:
        return None
    handler: logging.Handler = JournalHandler(SYSLOG_IDENTIFIER="dsecd")
    return handler
