"""Where an agent is reached from the host, and how."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct


class AgentAddress(Struct, frozen=True):
    """Connect to the Unix socket at `path`.

    vsock_port: say `CONNECT <port>` first (Firecracker's hybrid vsock). serial: the stream is a serial port, which
    outlives connections and needs `dsecd.agent.serial`.
    """

    path: Path
    vsock_port: int | None = None
    serial: bool = False
