"""`dsecctl stdio`: a daemon's socket on standard input and output; for a forced command of sshd.

    command="dsecctl --token-file /home/dsec/agent7.token stdio",restrict ssh-ed25519 AAAA… agent7

So the key is the principal: it is logged in before a byte of the client's passes.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Final

from dsecctl.app import App, command, pass_app
from dsecd.client import DEFAULT_URL
from dsecd.client_tenants import read_token
from dsecd.errors import DsecError
from dsecd.wire import base

PIECE: Final = 1 << 16
LOGIN_S: Final = 30.0


@command(
    "stdio",
    examples="""
    dsecctl stdio --token-file agent7.token
    dsecctl -H 'ssh://dsec@node7?stdio' ps
    """,
)
@pass_app
def stdio(app: App) -> None:
    """Be a connection to the daemon, for a forced command.

    For `command="…"` in authorized_keys: with --token-file, whoever comes with that key is the token's principal.
    Clients come by ssh://HOST?stdio.
    """
    url = app.url or os.environ.get("DSEC_URL") or DEFAULT_URL
    if not url.startswith("unix://"):
        raise DsecError("invalid", f"stdio is for a socket of this host, not for {url}")
    file = app.token_file or os.environ.get("DSEC_TOKEN_FILE")
    token = read_token(file) if file else None
    try:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(url.removeprefix("unix://"))
        if token is not None:
            _login(sock, token)
        threading.Thread(target=_inward, args=(sock,), daemon=True).start()
        while piece := sock.recv(PIECE):
            _write(1, piece)
    except OSError as exc:
        raise DsecError("network", f"no daemon answers at {url}: {exc.strerror}") from exc


def _login(sock: socket.socket, token: str) -> None:
    """What the daemon says to it, before anything of the client is passed on. Raises what it refuses with."""
    sock.settimeout(LOGIN_S)
    request = {"jsonrpc": "2.0", "id": "stdio", "method": "session.login", "params": {"token": token}}
    sock.sendall(base.encode(request) + b"\n")
    said = b""
    while not said.endswith(b"\n"):  # it says nothing else before it is asked
        piece = sock.recv(PIECE)
        if not piece or len(said) > PIECE:
            raise DsecError("network", "the daemon closed the connection during the login")
        said += piece
    reply = base.decode_outgoing(said)
    if reply.error is not None:
        raise reply.error.data.error(reply.error.message)
    sock.settimeout(None)


def _inward(sock: socket.socket) -> None:
    """Until the client's end; the daemon then closes its own."""
    try:
        while piece := os.read(0, PIECE):
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the daemon has gone: the other direction ends, and with it all


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
