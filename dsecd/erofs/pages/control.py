"""The page server's socket: requests in lines of JSON, one after the other on a connection, several connections."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Final

import msgspec

from dsecd.erofs.pages.model import Reply, Request
from dsecd.erofs.pages.server import PageServer
from dsecd.errors import DsecError

log: Final = logging.getLogger(__name__)

MAX_LINE: Final = 1 << 20


class Control:
    """Serves until `stop` is asked for and nothing is watched. Root only: the socket's directory is."""

    def __init__(self, path: Path, server: PageServer) -> None:
        self._path = path
        self._server = server
        self._ended = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        path.unlink(missing_ok=True)  # the lock of the run directory is ours, so whoever bound it is dead
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(64)

    def serve(self) -> None:
        threading.Thread(target=self._accept, name="control", daemon=True).start()
        self._ended.wait()
        self._path.unlink(missing_ok=True)
        self._socket.close()

    def end(self) -> None:
        self._ended.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._socket.accept()
                threading.Thread(target=self._talk, args=(peer,), name="peer", daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as lines, contextlib.suppress(OSError):
            while line := lines.readline(MAX_LINE):
                try:
                    request = msgspec.json.decode(line, type=Request)
                except msgspec.DecodeError as exc:
                    peer.sendall(msgspec.json.encode(Reply(error="invalid", message=str(exc))) + b"\n")
                    return
                reply = msgspec.json.encode(self._reply(request)) + b"\n"
                if request.op == "hello":
                    device = self._server.fscache.device
                    socket.send_fds(peer, [reply], [self._server.group, *([] if device is None else [device])])
                else:
                    peer.sendall(reply)
                if request.op == "stop" and self._ended.is_set():
                    return

    def _reply(self, request: Request) -> Reply:
        try:
            return self._handle(request)
        except DsecError as exc:
            return Reply(error=exc.kind, message=exc.message)
        except OSError as exc:
            number = exc.errno or errno.EIO
            return Reply(error="image", message=exc.strerror or str(exc), errno=number)
        except Exception as exc:  # a request must not end the server
            log.exception("request %s failed", request.op)
            return Reply(error="internal", message=repr(exc))

    def _handle(self, request: Request) -> Reply:
        server = self._server
        match request.op:
            case "watch" | "resume" if request.watched is not None:
                return Reply(path=os.fspath(server.watch(request.watched, resume=request.op == "resume")))
            case "mounted":
                server.mounted(request.image)
            case "unwatch":
                return Reply(busy=not server.unwatch(request.image))
            case "retain":
                server.retain(frozenset(request.images))
            case "stats" | "hello":
                return Reply(stats=server.stats())
            case "stop":
                if not server.idle():
                    return Reply(busy=True)
                self._ended.set()
            case "ping":
                pass
            case _:
                raise DsecError("invalid", f"{request.op} says nothing of an image")
        return Reply()
