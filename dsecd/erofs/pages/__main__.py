"""The page server's process.

    python -m dsecd.erofs.pages CONFIG [--group-fd N] [--device-fd N]

CONFIG: what the daemon wrote for it (JSON), or the daemon's own configuration (`*.toml`), under systemd. --group-fd,
--device-fd: copies of an earlier server's fanotify group and cachefiles device; systemd hands them over from its FD
store instead.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from dsecd.erofs.pages import fan
from dsecd.erofs.pages.control import Control
from dsecd.erofs.pages.fscache import DEVICE_NAME
from dsecd.erofs.pages.model import GROUP_NAME, SOCKET, PagesConfig
from dsecd.erofs.pages.server import PageServer
from dsecd.erofs.stores import BlobStore, open_store
from dsecd.errors import DsecError

log: Final = logging.getLogger("dsecd.pages")

LOCK_WAIT_S: Final = 10.0  # for a server that was just killed to be gone


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dsecd-images", description="The page server of dsecd.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--group-fd", type=int, default=None)
    parser.add_argument("--device-fd", type=int, default=None)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        config = read_config(args.config)
        run(config, {name: open_store(name, one) for name, one in config.stores.items()}, args.group_fd, args.device_fd)
    except DsecError as exc:
        sys.stderr.write(f"dsecd-images: {exc.message}\n")
        return 1
    return 0


def read_config(path: Path) -> PagesConfig:
    if path.suffix == ".toml":
        from dsecd.config import Config, load
        from dsecd.erofs.pages.client import pages_config

        return pages_config(load(path) if path.exists() else Config())
    try:
        return msgspec.json.decode(path.read_bytes(), type=PagesConfig)
    except (OSError, msgspec.DecodeError) as exc:
        raise DsecError("invalid", f"{path}: {exc}") from exc


def run(config: PagesConfig, stores: Mapping[str, BlobStore], group: int | None, device: int | None = None) -> None:
    """Serve until asked to stop."""
    _adapt_process()
    for path in (config.run, config.cache):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _lock(config.run / "lock"):
        try:
            server = PageServer(
                config,
                stores,
                group if group is not None else inherited(),
                device if device is not None else inherited(DEVICE_NAME),
                lambda fd: tell_systemd(f"FDSTORE=1\nFDNAME={DEVICE_NAME}\nFDPOLL=0", [fd]),
            )
        except OSError as exc:
            raise DsecError("unsupported", f"fanotify cannot be used here: {exc.strerror}") from exc
        server.start()
        if not server.inherited:
            tell_systemd(f"FDSTORE=1\nFDNAME={GROUP_NAME}\nFDPOLL=0", [server.group])
        control = Control(config.run / SOCKET, server)
        signal.signal(signal.SIGTERM, lambda *_: _terminated(server, control))
        tell_systemd("READY=1")
        log.info("serving %s, group %s%s", config.cache, server.generation, " (inherited)" * server.inherited)
        control.serve()
        tell_systemd(f"STOPPING=1\nFDSTOREREMOVE=1\nFDNAME={GROUP_NAME}")
        tell_systemd(f"FDSTOREREMOVE=1\nFDNAME={DEVICE_NAME}")
        server.stop()
        logging.shutdown()
        os._exit(0)  # not waiting for threads that hang in a store


def _terminated(server: PageServer, control: Control) -> None:
    """With images in use: systemd keeps the group, so the next server goes on where this one stops, as if it had been
    killed. Without systemd only the daemon might keep it, and readers must not depend on that: we stay."""
    if server.idle():
        control.end()
    elif os.environ.get("NOTIFY_SOCKET"):
        os._exit(0)
    else:
        log.warning("images are in use: not ending; SIGKILL does, and the daemon starts the next one")


def inherited(wanted: str = GROUP_NAME) -> int | None:
    """The group, or the device, from systemd's FD store (sd_listen_fds(3))."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    found = None
    for number, name in enumerate(os.environ.get("LISTEN_FDNAMES", "").split(":"), 3):
        if name == wanted and found is None:
            found = number
            os.set_inheritable(number, False)
    return found


def tell_systemd(text: str, fds: list[int] | None = None) -> None:
    """sd_notify(3), with descriptors for the FD store."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            socket.send_fds(sock, [text.encode()], fds or [])


def _adapt_process() -> None:
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # a lease of ours that somebody's open breaks: see CacheFile.in_use
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(OSError):  # lowering it takes CAP_SYS_RESOURCE
        Path("/proc/self/oom_score_adj").write_text("-900")
    os.umask(0o077)


@contextlib.contextmanager
def _lock(path: Path):  # type: ignore[no-untyped-def]
    """One server for one run directory."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fd = fan.out_of_the_way(fd)
    until = time.monotonic() + LOCK_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() > until:
                    raise DsecError("conflict", f"another page server runs on {path.parent}") from exc
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
