"""systemd's side of the process: readiness, status, watchdog, inherited sockets. All of it optional.

The protocol is one datagram to $NOTIFY_SOCKET (sd_notify(3)), so no library is needed for it.
"""

from __future__ import annotations

import asyncio
import os
import socket


def _notify(text: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.sendall(text.encode())


def ready(text: str) -> None:
    _notify(f"READY=1\nSTATUS={text}")


def status(text: str) -> None:
    _notify(f"STATUS={text}")


def stopping() -> None:
    _notify("STOPPING=1")


async def watchdog() -> None:
    """Pat the watchdog at half its interval, from the loop itself: a loop that hangs is what it is there for."""
    usec = int(os.environ.get("WATCHDOG_USEC", "0"))
    if not usec or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        _notify("WATCHDOG=1")
        await asyncio.sleep(usec / 2e6)


def listen_fd() -> int | None:
    """The socket that systemd listens on for us, if it does (sd_listen_fds(3))."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS", "0") == "0":
        return None
    os.set_inheritable(3, False)
    return 3
