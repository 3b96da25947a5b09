"""The daemon's end of the page server: starts it, talks to it, keeps its fanotify group alive, starts it again.

While any copy of the group lives, readers wait for answers; when the last one goes, they are given holes as zeros. So
the daemon keeps a copy (and systemd's FD store another), and the server that follows inherits it. The server is not
the daemon's to end: it serves mounts that outlive the daemon, and is stopped only when nothing is watched.

Blocking; called from threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from dsecd.erofs.pages.model import SOCKET, PagesConfig, Reply, Request, Stats, Watched
from dsecd.errors import DsecError, Kind

if TYPE_CHECKING:
    from dsecd.config import Config

log: Final = logging.getLogger(__name__)

START_S: Final = 15.0
ANSWER_S: Final = 60.0
UNIT: Final = "dsecd-images.service"
PEEK_S: Final = 0.5
SYSTEMD_S: Final = 3.0  # how long its unit has to come back before we start a server ourselves
COMING_S: Final = 20.0  # the same while systemd says that it is coming: only that server gets what the FD store keeps
ASK_S: Final = 5.0
_REPO: Final = Path(__file__).resolve().parents[3]


def pages_config(config: Config) -> PagesConfig:
    """The page server's part of the daemon's configuration."""
    return PagesConfig(
        run_dir=str(Path(config.run_dir) / "pages"),
        cache_dir=str(Path(config.state_dir) / "cache"),
        cache_bytes=config.image_cache_mb << 20,
        deadline_s=config.image_read_timeout_s,
        stores=dict(config.stores),
    )


class Pages:
    """One page server, whichever process it is just now.

    program: how to start it, for tests. on_lost: told, from any thread, of mounted images (digests) whose readers may
    have seen holes: their sandboxes must end.
    """

    def __init__(
        self,
        config: PagesConfig,
        program: Sequence[str] = (),
        *,
        on_lost: Callable[[list[str]], None] | None = None,
    ) -> None:
        self.on_lost = on_lost
        self.config = config
        self._program = tuple(program) or (sys.executable, "-P", "-m", "dsecd.erofs.pages")
        self._lock = threading.RLock()
        self._talk: socket.socket | None = None
        self._group: int | None = None
        self._device: int | None = None
        self._generation = ""
        self._orphans: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._watch: socket.socket | None = None
        self._closed = False

    # -- what the daemon asks ------------------------------------------------------------------------------------

    def watch(self, watched: Watched) -> Path:
        """The file to mount. OSError: try another driver. DsecError: the image cannot be used."""
        path = Path(self._ask(Request(op="watch", watched=watched)).path)
        self._share(watched)
        return path

    def resume(self, watched: Watched) -> None:
        """Go on with a mount that is there. DsecError `image`: readers may have seen holes; end them, unmount."""
        self._ask(Request(op="resume", watched=watched))
        self._share(watched)

    def mounted(self, image: str) -> None:
        self._ask(Request(op="mounted", image=image))

    def unwatch(self, image: str) -> None:
        self._ask(Request(op="unwatch", image=image))

    def retain(self, images: Sequence[str]) -> None:
        """After a restart: what is mounted. Everything else is unwatched."""
        self._ask(Request(op="retain", images=tuple(images)))

    def stats(self) -> Stats:
        stats = self._ask(Request(op="stats")).stats
        assert stats is not None
        return stats

    def peek(self) -> Stats | None:
        """The same where the server is up and nobody is waiting for it: for those who will not wait."""
        if not self._lock.acquire(timeout=PEEK_S):
            return None
        try:
            if self._talk is not None:
                with contextlib.suppress(OSError, EOFError):
                    return self._once(Request(op="stats")).stats
            return None
        finally:
            self._lock.release()

    def running(self) -> bool:
        """Without starting it."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(str(self.config.run / SOCKET))
            return True
        return False

    def close(self) -> None:
        """Let go; the server ends when it has nothing to do, and goes on for mounts that stay."""
        self._closed = True  # before the lock: whoever has it may be waiting for systemd
        with self._lock:
            stopped = False
            if self._talk is not None:
                with contextlib.suppress(OSError, EOFError, DsecError):
                    stopped = not self._once(Request(op="stop")).busy
                self._talk.close()
                self._talk = None
            for fd in [*self._orphans, self._group, self._device]:
                if fd is not None:
                    os.close(fd)
            self._orphans, self._group, self._device = [], None, None
            if self._watch is not None:
                with contextlib.suppress(OSError):
                    self._watch.shutdown(socket.SHUT_RDWR)
        if stopped and self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(START_S)
        if self._keeper is not None:
            self._keeper.join(START_S)
        if self._process is not None:
            self._process.returncode = self._process.poll() or 0  # it may live on: no warning, and init reaps it

    # -- inside --------------------------------------------------------------------------------------------------

    def _ask(self, request: Request) -> Reply:
        """Once more with the next server when this one dies: all requests may be repeated."""
        with self._lock:
            until = time.monotonic() + ANSWER_S
            while True:
                try:
                    self._connect()
                    reply = self._once(request)
                    break
                except (ConnectionError, EOFError) as exc:
                    self._drop()
                    if time.monotonic() > until:
                        raise DsecError("image", "the page server does not stay up") from exc
                    time.sleep(0.05)
                except TimeoutError as exc:
                    self._drop()
                    raise DsecError("image", "the page server does not answer") from exc
        if reply.errno:
            raise OSError(reply.errno, reply.message)
        if reply.error:
            raise DsecError(msgspec.convert(reply.error, Kind), reply.message)
        return reply

    def _once(self, request: Request) -> Reply:
        assert self._talk is not None
        self._talk.sendall(msgspec.json.encode(request) + b"\n")
        return msgspec.json.decode(_line(self._talk), type=Reply)

    def _connect(self) -> None:
        """A connection to a server, which is started where there is none, and a copy of its group."""
        self._check_open()
        if self._talk is not None:
            return
        talk = self._reach() or self._start()
        try:
            talk.settimeout(ANSWER_S)
            self._hello(talk)
        except (OSError, EOFError):
            talk.close()
            raise
        self._talk = talk
        self._watch = self._reach()
        self._keeper = threading.Thread(target=self._keep, args=(talk, self._watch), name="pages", daemon=True)
        self._keeper.start()

    def _hello(self, talk: socket.socket) -> None:
        talk.sendall(msgspec.json.encode(Request(op="hello")) + b"\n")
        first, fds, _, _ = socket.recv_fds(talk, 1 << 16, 2, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            raise EOFError
        if not first.endswith(b"\n"):
            first += _line(talk)
        # The device is the one that the server has. Of another, which it lost, we must let go: its readers would hang.
        if self._device is not None:
            os.close(self._device)
        self._device = fds[1] if len(fds) > 1 else None
        self._take_group(fds[0], msgspec.json.decode(first, type=Reply).stats)

    def _share(self, watched: Watched) -> None:
        """Have a copy of the cachefiles device, too: it is opened with the first image that needs it."""
        with self._lock:
            if watched.metadata and self._device is None and self._talk is not None:
                try:
                    self._hello(self._talk)
                except (OSError, EOFError):  # it died; the next one brings what it has
                    self._drop()

    def _take_group(self, fd: int, stats: Stats | None) -> None:
        """Another generation is another group: the last server's was lost on the way, though we have it still.

        It is kept: whoever waits for it would be given holes. Those images' users must end.
        """
        assert stats is not None
        if self._group is not None:
            if stats.generation == self._generation:
                os.close(self._group)
            else:
                self._orphans.append(self._group)
        self._group, self._generation = fd, stats.generation
        lost = [image.image for image in stats.images if image.lost]
        if lost and self.on_lost is not None:
            self.on_lost(lost)

    def _reach(self) -> socket.socket | None:
        talk = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            talk.connect(str(self.config.run / SOCKET))
        except OSError:
            talk.close()
            return None
        return talk

    def _start(self) -> socket.socket:
        if _systemd_runs_it():
            if (talk := self._await_unit()) is not None:
                return talk
            self._check_open()
            # Ours ends with our own unit, and sandboxes that read from it must then end too.
            log.warning("%s does not run: starting a page server that lives no longer than this service", UNIT)
        until = time.monotonic() + START_S
        self.config.run.mkdir(parents=True, exist_ok=True, mode=0o700)
        told = self.config.run / "config.json"
        told.write_bytes(msgspec.json.encode(self.config))
        told.chmod(0o600)
        given = {"group": self._group, "device": self._device}
        kept = {name: fd for name, fd in given.items() if fd is not None}
        if self._process is not None:
            self._process.wait(START_S)
        with (self.config.run / "log").open("ab") as noise:
            process = self._process = subprocess.Popen(
                [*self._program, str(told), *(f"--{name}-fd={fd}" for name, fd in kept.items())],
                stdin=subprocess.DEVNULL, stdout=noise, stderr=noise, pass_fds=tuple(kept.values()),
                start_new_session=True, env=_environment(),
            )  # fmt: skip
        while time.monotonic() < until:
            if (talk := self._reach()) is not None:
                return talk
            if process.poll() is not None:
                break
            time.sleep(0.01)
        said = (self.config.run / "log").read_bytes()[-500:].decode("utf-8", "replace").strip()
        raise DsecError("unsupported", f"the page server did not start: {said.splitlines()[-1] if said else 'no word'}")

    def _check_open(self) -> None:
        if self._closed:
            raise DsecError("shutting_down", "the daemon is stopping")

    def _await_unit(self) -> socket.socket | None:
        """Its server, unless it does not run and systemd does not mean to start it."""
        began = time.monotonic()
        patience = SYSTEMD_S
        while not self._closed:
            if (talk := self._reach()) is not None:
                return talk
            if time.monotonic() > began + patience:
                if patience == COMING_S or not _systemd_is_at_it():
                    break
                patience = min(patience + SYSTEMD_S, COMING_S)
            time.sleep(0.05)
        return None

    def _keep(self, mine: socket.socket, watch: socket.socket | None) -> None:
        """Sits on a connection of its own, and brings the server back when that breaks."""
        if watch is not None:
            with watch, contextlib.suppress(OSError):
                watch.recv(1)
        while True:
            with self._lock:
                if self._closed or self._talk not in (mine, None):
                    return  # somebody who asked was quicker, and has a keeper of its own
                self._drop()
                try:
                    self._connect()
                except (DsecError, OSError, EOFError) as exc:
                    log.error("the page server is down, and readers of images wait: %s; trying again", exc)
                else:
                    log.warning("the page server ended and was started again")
                    return
            time.sleep(1.0)

    def _drop(self) -> None:
        if self._talk is not None:
            self._talk.close()
            self._talk = None


def _line(talk: socket.socket) -> bytes:
    parts: list[bytes] = []
    while not (parts and parts[-1].endswith(b"\n")):
        data = talk.recv(1 << 16)
        if not data:
            raise EOFError
        parts.append(data)
    return b"".join(parts)


def _systemd_runs_it() -> bool:
    """Whether its unit is installed: then it comes (back) by itself, after a crash within a tenth of a second."""
    if not Path("/run/systemd/system").exists():
        return False
    return any((Path(top) / "systemd/system" / UNIT).exists() for top in ("/etc", "/usr/local/lib", "/usr/lib", "/lib"))


def _systemd_is_at_it() -> bool:
    """Whether the unit runs, or is being started (again). A systemd that does not answer is thought to be at it.

    Only a daemon that is a service itself is served by it: one started by hand has directories of its own.
    """
    if "NOTIFY_SOCKET" not in os.environ:
        return False
    try:
        told = subprocess.run(["systemctl", "is-active", UNIT], capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False
    return told.stdout.strip() in ("active", "activating", "reloading", "deactivating")


def _environment() -> dict[str, str]:
    """Ours, without what systemd told us alone."""
    ours = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PYTHONPATH": str(_REPO), "PYTHONUNBUFFERED": "1"}
