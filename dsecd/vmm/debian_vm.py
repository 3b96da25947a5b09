"""A Debian for full VMs: systemd, a console, agents (ours and QEMU's), in one ext4 file system without a boot loader.

It boots with a kernel of the store that has virtio-blk and ext4 built in (`dsecctl kernel build`).
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from dsecd.erofs.fetch import apt_sources
from dsecd.erofs.sys import PR_SET_PDEATHSIG, prctl
from dsecd.errors import DsecError, Kind

BOOTSTRAP_S: Final = 1800.0
MKFS_S: Final = 600.0
PACKAGES: Final = (
    "systemd", "systemd-sysv", "libpam-systemd", "dbus", "udev", "kmod", "procps", "iproute2", "qemu-guest-agent",
)  # fmt: skip

# What would wait for devices or networks that such a machine may not have, or start work on its own.
_MASKED: Final = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
    "fstrim.timer", "systemd-networkd-wait-online.service",
)  # fmt: skip

_FILES: Final = {
    "etc/hostname": "debian-vm\n",
    "etc/hosts": "127.0.0.1 localhost debian-vm\n::1 localhost\n",
    "etc/fstab": "/dev/vda / ext4 defaults,discard,x-systemd.growfs 0 1\n",
    # Its address comes from dsecd, by DHCP (dsecd/net/dhcp.py). A machine without a card is spared the service.
    "etc/systemd/network/80-dsec.network": "[Match]\nDriver=virtio_net\n\n[Network]\nDHCP=ipv4\n"
    "LinkLocalAddressing=no\nIPv6AcceptRA=no\n",
    "etc/udev/rules.d/99-dsec-network.rules": 'SUBSYSTEM=="net", ACTION!="remove", KERNEL=="eth*|en*", '
    'ENV{SYSTEMD_WANTS}+="systemd-networkd.service"\n',
    # Whoever has the console has the machine: root without a password there, and on the screen, and nowhere else.
    "etc/systemd/system/serial-getty@ttyS0.service.d/dsec.conf": "[Service]\nExecStart=\n"
    "ExecStart=-/sbin/agetty --autologin root --noclear --keep-baud 115200,38400,9600 %I $TERM\n",
    "etc/systemd/system/getty@tty1.service.d/dsec.conf": "[Service]\nExecStart=\n"
    "ExecStart=-/sbin/agetty --autologin root --noclear %I $TERM\n",
}

_SAYS: Final[tuple[tuple[str, Kind], ...]] = (
    ("No space left on device", "disk_full"), ("Unable to locate package", "not_found"),
    ("Could not resolve", "network"), ("Could not connect", "network"), ("Failed to fetch", "network"),
    ("does not have a Release file", "not_found"),
)  # fmt: skip


AGENT_PATH: Final = "usr/lib/dsecd/dsec-agent"
AGENT_UNIT: Final = "dsec-agent.service"
_AGENT_PORT: Final = r"dev-virtio\x2dports-dsec.agent.device"
# Started when the port appears: a machine without one has nobody to talk to. When the agent ends, its commands do so,
# too, at once; when the kernel kills one of them for memory, the agent goes on.
AGENT_SERVICE: Final = rf"""[Unit]
Description=Agent of the sandbox daemon that runs this machine
BindsTo={_AGENT_PORT}
After={_AGENT_PORT}
StartLimitIntervalSec=0

[Service]
ExecStart=/{AGENT_PATH} --service
Delegate=yes
KillMode=mixed
Restart=always
RestartSec=200ms
OOMPolicy=continue
OOMScoreAdjust=-900
TasksMax=infinity

[Install]
WantedBy={_AGENT_PORT}
"""


class Recipe(Struct, frozen=True):
    """size: of the disk, bytes. agent: the program to put into it; None: no agent of ours."""

    suite: str
    packages: tuple[str, ...]
    size: int
    agent: Path | None


def make(work: Path, recipe: Recipe, report: Callable[[], None]) -> Path:
    """The raw image, sparse, below `work`."""
    tree = work / "tree"
    report()
    # Namespaces of its own, so that its mounts and children end with it.
    command = [
        "unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc",
        "mmdebstrap", "--mode=root", "--variant=minbase", "--dpkgopt=force-unsafe-io",
        "--include=" + ",".join((*PACKAGES, *recipe.packages)), recipe.suite, str(tree),
        *apt_sources(recipe.suite, work),
    ]  # fmt: skip
    _run(command, work / "mmdebstrap.log", BOOTSTRAP_S, "mmdebstrap")
    report()
    _furnish(tree)
    if recipe.agent is not None:
        _install_agent(tree, recipe.agent)
    raw = work / "raw"
    with raw.open("wb") as file:
        file.truncate(recipe.size)
    options = ["-q", "-F", "-L", "root", "-E", "lazy_itable_init=1,lazy_journal_init=1", "-d", str(tree)]
    _run(["mkfs.ext4", *options, str(raw)], work / "mkfs.log", MKFS_S, "mkfs.ext4")
    shutil.rmtree(tree)
    return raw


def _furnish(tree: Path) -> None:
    for name, text in _FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tree / "etc/resolv.conf").unlink(missing_ok=True)  # mmdebstrap's copy of this host's
    (tree / "etc/machine-id").write_text("")  # each machine makes its own
    (tree / "etc/dpkg/dpkg.cfg.d/99mmdebstrap").unlink(missing_ok=True)
    units = tree / "etc/systemd/system"
    for unit in _MASKED:
        (units / unit).unlink(missing_ok=True)
        (units / unit).symlink_to("/dev/null")
    shutil.rmtree(tree / "var/cache/apt", ignore_errors=True)


def _install_agent(tree: Path, program: Path) -> None:
    target, unit = tree / AGENT_PATH, tree / "etc/systemd/system" / AGENT_UNIT
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(program, target)
    target.chmod(0o755)
    unit.write_text(AGENT_SERVICE)
    wants = unit.parent / f"{_AGENT_PORT}.wants"
    wants.mkdir()
    (wants / AGENT_UNIT).symlink_to(f"../{AGENT_UNIT}")


def _run(command: list[str], log: Path, seconds: float, what: str) -> None:
    with log.open("wb") as sink:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, timeout=seconds, check=False, cwd="/",
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )  # fmt: skip
        except FileNotFoundError as exc:
            raise DsecError("unsupported", f"{exc.filename} is not installed on this host") from exc
        except subprocess.TimeoutExpired as exc:
            raise DsecError("timeout", f"{what} did not end within {seconds:g} s", infra=True) from exc
    if done.returncode:
        text = log.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        for sign, kind in _SAYS:
            if sign in text:
                said = next(line for line in lines if sign in line)
                raise DsecError(kind, f"{what}: {said[:400]}")
        raise DsecError("image", f"{what} failed: {(lines or ['it said nothing'])[-1][:400]}")
